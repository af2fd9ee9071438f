"""Processes, clocks and waiting."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from support.paths import SCRIPTS


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait for what comes in a moment, and on a busy machine some time later; `what`: said when it
    does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


class Clock:
    """Stands for the module `time` where a test says how much of it passes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run_python(code: str, timeout: float = 300, **variables: str) -> str:
    """Run code in a process of its own (an engine cannot be had twice in one); its output."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    said = done.stdout[-3000:] + done.stderr[-6000:]
    assert done.returncode == 0, f"exit status {done.returncode}\n{said}"
    return done.stdout


def marked_processes(mark: str) -> list[psutil.Process]:
    """Processes with this value of the environment variable MARK, wherever they went."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get("MARK") == mark
                and process.status() != psutil.STATUS_ZOMBIE
                and process.cmdline()
            ):
                found.append(process)
    return found


def end_marked(mark: str) -> None:
    """Kill what is left with this mark; some of it may be ending by itself."""
    for process in marked_processes(mark):
        with contextlib.suppress(psutil.Error):
            process.kill()
