"""scripts/show_status.py: pages, JSON, files, and watching in a terminal."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest

from aerie.watching import show
from support.paths import SCRIPTS


def test_the_page_ends_quietly_with_its_reader_and_fits_any_encoding(run):
    run.made("import_verifier")
    command = [sys.executable, str(SCRIPTS / "show_status.py"), str(run.folder)]
    for option in ((), ("--json",)):
        process = subprocess.Popen(
            [*command, *option], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdout.close()  # as `| head` does
        assert process.stderr.read() == ""
        process.wait()
    done = subprocess.run(
        command,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert b"import_verifier" in done.stdout
    assert b"\x1b" not in done.stdout


class Links(HTMLParser):
    """What a page would load, and its text."""

    def __init__(self):
        super().__init__()
        self.loads, self.metas, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        self.loads += [v for k, v in attributes if k in ("src", "href", "srcset", "data")]
        self.metas += [dict(attributes)] if tag == "meta" else []
        assert tag not in ("script", "link", "iframe", "img")

    def handle_data(self, data):
        self.text += data


def test_the_html_page_is_self_contained_and_reloads_itself(run, tmp_path):
    run.status_file(
        "train_drafter",
        "base",
        state="failed",
        reason="<script>alert(1)</script> [bold]{x}",
        ended=time.time(),
    )
    run.show("--html", str(tmp_path / "out/page.html"), "--prometheus", str(tmp_path / "a.prom"))
    page = (tmp_path / "out/page.html").read_text()
    links = Links()
    links.feed(page)
    assert links.loads == []
    assert "url(" not in page and "@import" not in page
    assert {"http-equiv": "refresh", "content": "3"} in links.metas
    assert "<script>alert(1)</script> [bold]{x}" in links.text
    assert os.listdir(tmp_path / "out") == ["page.html"]
    assert "aerie_job_state" in (tmp_path / "a.prom").read_text()


def test_json_has_stages_and_figures(run):
    run.made("import_verifier")
    found = json.loads(run.show("--json"))
    assert found["stages"][0] == {"stage": "import_verifier", "state": "done"}
    assert found["jobs"][0]["figures"] == {"layers": 30, "hidden_size": 576}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_watching_restores_the_terminal(run, tmp_path, how):
    run.made("import_verifier")
    reader, terminal = pty.openpty()
    command = [sys.executable, str(SCRIPTS / "show_status.py"), str(run.folder), "--watch"]
    process = subprocess.Popen(
        [*command, "--prometheus", str(tmp_path / "a.prom")],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
    )
    os.close(terminal)
    seen = b""
    while b"import_verifier" not in seen:
        seen += os.read(reader, 1 << 16)
    # Ctrl-Z, and `fg` after its next look was due: it continues.
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * show.WATCH_SECONDS)
    process.send_signal(signal.SIGCONT)
    drawn = len(seen)
    while b"import_verifier" not in seen[drawn:]:
        seen += os.read(reader, 1 << 16)
    assert b"\x1b[?1049l" not in seen
    process.send_signal(how)
    while True:
        try:
            data = os.read(reader, 1 << 16)
        except OSError:
            break
        seen += data
    assert process.wait(120) == 0
    entered, left = seen.rindex(b"\x1b[?1049h"), seen.rindex(b"\x1b[?1049l")
    assert entered < left
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")  # the cursor is shown again
    assert b"import_verifier" in seen[left:]  # and the last page stays
    assert b"Traceback" not in seen
    assert (tmp_path / "a.prom").is_file()


def test_watching_continues_when_its_file_cannot_be_written(run, tmp_path):
    out, obstacle = tmp_path / "out", tmp_path / "obstacle"
    (tmp_path / "folder").mkdir()
    out.symlink_to("folder")
    page = out / "page.html"
    command = [sys.executable, str(SCRIPTS / "show_status.py"), str(run.folder), "--json"]
    process = subprocess.Popen(
        [*command, "--watch", "--html", str(page)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline()
    assert page.is_file()
    obstacle.write_text("a file is in its place")
    os.replace(obstacle, out)  # atomically, or it could be created again in between
    assert all(process.stdout.readline() for _ in range(2))
    process.terminate()
    process.communicate()
    assert process.returncode == 0


def test_an_unknown_run_is_an_error_that_names_the_others(run):
    folder = run.folder.parent.parent
    run.write("logs/x/run.log")
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "show_status.py"), "other"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "results/other: no such folder; runs in results: demo" in done.stderr


def test_it_imports_no_engine_and_no_snakemake(run):
    code = (
        "import sys; sys.argv[1:] = [sys.argv[1]]; import runpy;"
        f"runpy.run_path({str(SCRIPTS / 'show_status.py')!r}, run_name='__main__');"
        "print({'torch', 'vllm', 'snakemake', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
    )
    assert done.stdout.splitlines()[-1] == "set()"
