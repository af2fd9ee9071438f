"""A supervised job in a folder of its own."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time

import psutil

from aerie.watching import supervisor
from support.paths import SCRIPTS
from support.processes import marked_processes, wait_until

# Generous where a busy machine could be slow, short where a test waits for it.
LIMITS = {"stall_seconds": 120, "load_seconds": 120, "grace_seconds": 1}
QUICK = {"stall_seconds": 2}


# Progress as real jobs write it, ten lines a second. `told` waits until the status shows a step.
STEPS = """
import json, os, signal, subprocess, sys, time
def step(i, **values):
    line = {"time": time.time(), "stage": "s", "phase": "working", "done": i, "total": 1000}
    with open("run.progress.jsonl", "a") as file:
        file.write(json.dumps({**line, "unit": "steps", "rate": 1, **values}) + "\\n")
def steps(count=15, pause=0.1, **values):
    for i in range(count):
        step(i, **values)
        time.sleep(pause)
def told(i):
    while not os.path.exists("run.status.json") or json.load(open("run.status.json"))["done"] != i:
        time.sleep(0.1)
"""


def watch_settings(**watch) -> str:
    """The argument `--settings` of scripts/supervise.py."""
    return json.dumps({"watch": watch})


class Supervised:
    """A supervised job in a folder; `mark` finds its processes wherever they went."""

    def __init__(self, folder, code, stage="train_drafter", limits=None, **variables):
        self.folder = folder
        self.mark = f"aerie-test-{os.getpid()}-{time.monotonic_ns()}"
        (folder / "job.py").write_text(STEPS + code)
        settings = watch_settings(**{**LIMITS, **(limits or {})})
        self.process = subprocess.Popen(
            [
                *(sys.executable, str(SCRIPTS / "supervise.py"), "--stage", stage),
                *(
                    "--log",
                    "run.log",
                    "--settings",
                    settings,
                    "--",
                ),
                *(sys.executable, "job.py"),
            ],
            cwd=folder,
            env={**os.environ, "MARK": self.mark, **variables},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout=240) -> int:
        self.stderr = self.process.communicate(timeout=timeout)[1]
        return self.process.returncode

    def log(self) -> str:
        return (self.folder / "run.log").read_text(errors="replace")

    def status(self) -> dict:
        return json.loads((self.folder / "run.status.json").read_text())

    def processes(self) -> list[psutil.Process]:
        """Processes that are left, of the job and the supervisor."""
        return marked_processes(self.mark)

    def find(self, word: str) -> psutil.Process:
        """The process whose command line has this word; waits for it."""
        found = []

        def there() -> bool:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    if word in process.cmdline() and "--stage" not in process.cmdline():
                        found.append(process)
            return bool(found)

        wait_until(there, f"no process {word}")
        return found[0]

    def supervisors(self) -> tuple[psutil.Process, psutil.Process]:
        """The front and the supervisor behind it."""
        front = psutil.Process(self.process.pid)
        (behind,) = front.children()
        return front, behind

    def until(self, text: str) -> None:
        log = self.folder / "run.log"
        wait_until(lambda: log.is_file() and text in self.log(), f"{text} did not appear", 240)

    def nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), "processes are left")

    def reported_in_time(self) -> None:
        """A stall was reported at the limit of the job's own pace, or once the supervisor ran."""
        found = self.status()
        idle = float(re.search(r"no progress for (\d+) s", found["reason"])[1])
        late = 10 * supervisor.TICK_SECONDS  # more than this does not count as the job's
        assert 2 <= idle <= found["stall_after_seconds"] + late
