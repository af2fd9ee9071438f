"""Reading the progress of a job."""

from aerie.common.progress import ProgressLine
from aerie.watching.progress_reader import ProgressReader


def test_the_rate_starts_at_the_last_line_of_the_first_look(tmp_path):
    reader = ProgressReader(tmp_path / "run.progress.jsonl")
    # Two lines read at once at the first look, then one at each tick.
    for done, now in ((0, 50.0), (1, 50.0), (9, 50.0), (15, 51.0), (29, 52.0)):
        reader.take(ProgressLine(done=done, total=129), now)
    assert reader.rate() == (10.0, 10.0)
