"""Events reported by a command and by a webhook to a local server, which neither fail, delay nor
betray anything."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from aerie.common.errors import InputError
from aerie.config import load_config
from aerie.watching import notify
from aerie.watching.notify import Event
from support.paths import SCRIPTS
from support.processes import marked_processes, wait_until
from support.supervised import watch_settings

SECRET = "T0K3N-that-nobody-sees"
EVENT = Event(event="stall", run="demo", text="train_drafter base stalled", exit=75)


@pytest.fixture
def server():
    """A server that keeps what is posted; `answer` is its status, None: it never answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
            if self.server.answer is None:
                self.server.release.wait(60)
                return
            self.send_response(self.server.answer)
            self.end_headers()
            self.wfile.write(SECRET.encode())

        def log_message(self, *_):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.got, made.answer, made.release = [], 200, threading.Event()
    made.address = f"http://127.0.0.1:{made.server_port}/{SECRET}"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.release.set()
    made.shutdown()
    made.server_close()


def told(**section):
    return load_config({"notify": section}).notify


def test_a_webhook_gets_the_event(server, monkeypatch):
    monkeypatch.setenv("HOOK", server.address)
    before = time.time()
    assert notify.send(told(webhook_env="HOOK"), EVENT) == []
    ((path, kind, body),) = server.got
    assert path == f"/{SECRET}"
    assert kind == "application/json"
    assert before - 1 < body.pop("time") < time.time() + 1
    assert body == EVENT.model_dump(exclude_unset=True)


def test_a_command_gets_the_event_on_its_input_and_in_its_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "a\nb \" ' $(touch injected) \0"
    command = 'cat > in.json; printf "%s|%s|%s" "$AERIE_EVENT" "$AERIE_EXIT" "$AERIE_TEXT" > out'
    assert notify.send(told(command=command), EVENT.model_copy(update={"text": text})) == []
    assert json.loads((tmp_path / "in.json").read_text())["text"] == text
    assert (tmp_path / "out").read_text() == f"stall|75|{text.replace(chr(0), ' ')}"
    assert not (tmp_path / "injected").exists()


def test_a_command_can_be_ended_though_its_sender_blocks_signals():
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        (problem,) = notify.send(told(command="kill -TERM $$; sleep 30"), EVENT)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert f"status -{signal.SIGTERM:d}" in problem


def test_only_configured_events_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    to = told(command="touch $AERIE_EVENT", events=["failure"])
    for event in ("stall", "end", "failure"):
        assert notify.send(to, EVENT.model_copy(update={"event": event})) == []
    assert os.listdir(tmp_path) == ["failure"]


def test_hanging_receivers_are_abandoned_in_time_and_ended(server, monkeypatch):
    monkeypatch.setattr(notify, "TIMEOUT", 6.0)
    monkeypatch.setenv("HOOK", server.address)
    mark = f"notify-{os.getpid()}"
    monkeypatch.setenv("MARK", mark)
    server.answer = None
    start = time.monotonic()
    wrong = notify.send(told(webhook_env="HOOK", command="sleep 1000 & sleep 1000"), EVENT)
    assert time.monotonic() - start < 10  # both at the same time, and each ended after 5 s
    assert len(wrong) == 2
    assert "notify.command: no end within" in wrong[0]
    wait_until(lambda: not marked_processes(mark), "processes are left")


ADDRESSES = [
    f"http://127.0.0.1:1/{SECRET}",
    f"http://no-such-host.invalid/{SECRET}",
    f"http://127.0.0.1:{SECRET}/",
    f"http://[{SECRET}/",
    f"http://127.0.0.1/{SECRET}\n\x01",
    f"file:///{SECRET}",
    SECRET,
    "",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_secret_is_in_the_message_about_a_failure(address, monkeypatch):
    monkeypatch.setattr(notify, "TIMEOUT", 5.0)
    monkeypatch.setenv("HOOK", address)
    (wrong,) = notify.send(told(webhook_env="HOOK"), EVENT)
    assert wrong.startswith("this stall was not reported by notify.webhook_env: ")
    assert SECRET not in wrong


@pytest.mark.parametrize("answer", [404, 500])
def test_a_server_that_refuses_is_a_problem_without_its_words(server, monkeypatch, answer):
    monkeypatch.setenv("HOOK", server.address)
    server.answer = answer
    (wrong,) = notify.send(told(webhook_env="HOOK"), EVENT)
    assert f"status {answer}" in wrong
    assert SECRET not in wrong


def test_a_failing_command_is_a_problem_without_its_words():
    (wrong,) = notify.send(told(command=f"echo {SECRET} >&2; exit 22"), EVENT)
    assert wrong.endswith("notify.command: it ended with status 22")


def test_an_address_in_the_configuration_is_refused_and_not_shown():
    with pytest.raises(InputError) as error:
        told(webhook_env=f"https://hooks.example.com/{SECRET}")
    assert "notify.webhook_env: expected the name of an environment variable" in str(error.value)
    assert SECRET not in str(error.value)


def supervise(folder, code, **variables):
    (folder / "job.py").write_text(code)
    command = [sys.executable, str(SCRIPTS / "supervise.py"), "--stage", "train_drafter"]
    limits = {"stall_seconds": 2, "load_seconds": 60, "grace_seconds": 1}
    command += ["--log", "base.log", "--settings", watch_settings(**limits), "--"]
    done = subprocess.run(
        [*command, sys.executable, "job.py"],
        cwd=folder,
        env={**os.environ, "AERIE_RUN": "demo", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stderr + (folder / "base.log").read_text()


NAN = """
import json, time
line = {"time": time.time(), "phase": "working", "done": 1, "total": 9, "loss": float("nan")}
open("base.progress.jsonl", "a").write(json.dumps(line) + "\\n")
time.sleep(1000)
"""


def test_the_supervisor_reports_a_job_that_it_stopped(server, tmp_path):
    section = told(webhook_env="HOOK").model_dump_json()
    status, text = supervise(tmp_path, NAN, HOOK=server.address, AERIE_NOTIFY=section)
    assert status == 76
    ((_, _, body),) = server.got
    assert (body["event"], body["run"], body["part"], body["state"]) == (
        "stall",
        "demo",
        "base",
        "stopped",
    )
    assert body["text"] == "demo: train_drafter base stopped: the loss is nan"
    assert SECRET not in text


def test_a_job_that_failed_by_itself_is_not_reported_by_its_supervisor(server, tmp_path):
    section = told(webhook_env="HOOK").model_dump_json()
    status, _ = supervise(tmp_path, "1/0", HOOK=server.address, AERIE_NOTIFY=section)
    assert status == 1
    assert server.got == []


@pytest.mark.parametrize("section", ['{"command": "exit 3"}', '{"webhook_env": "HOOK"}', "{"])
def test_the_status_of_a_job_is_the_same_when_reporting_fails(tmp_path, section):
    address = f"http://127.0.0.1:1/{SECRET}"
    status, text = supervise(tmp_path, NAN, HOOK=address, AERIE_NOTIFY=section)
    assert status == 76
    assert SECRET not in text
    assert ("WARNING: this stall was not reported" in text) == (len(section) > 1)
