"""The log of a supervised job: times, folded progress bars, its limit."""

import os
import re

from aerie.watching import pump


def test_output_is_logged_with_times_and_bars_folded(supervised):
    job = supervised("""
print("first")
sys.stderr.write("\\r  0%|  | 0/3\\r 33%|# | 1/3")
sys.stderr.flush()
time.sleep(0.2)
sys.stderr.write("\\r100%|##| 3/3\\n")
print("half a line", end="")
""")
    assert job.wait() == 0
    lines = job.log().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    texts = [line[20:] for line in lines]
    assert texts[0] == "first"
    assert texts[-3:-1] == ["100%|##| 3/3", "half a line"]
    assert len(texts) <= 5  # at most one state of the bar before the last
    assert "done" in texts[-1]


def test_a_full_log_still_has_the_end_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(pump, "LONGEST_LOG", 1000)
    reading, writing = os.pipe()
    copying = pump.Pump(reading, tmp_path / "run.log")
    copying.start()
    os.write(writing, b"".join(b"line %d\n" % i for i in range(500)))
    os.write(writing, b"the last words\n")
    os.close(writing)
    copying.join()
    copying.say("failed")
    log = (tmp_path / "run.log").read_text()
    assert "line 0\n" in log
    assert "no more of it is kept" in log
    assert log.endswith("supervisor: failed\n")
    assert copying.last[-1] == "the last words"
    assert copying.take()[-1] == "the last words"
