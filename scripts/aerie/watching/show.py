"""Showing the status of a run once or until a signal: terminal, JSON, HTML and Prometheus files."""

import contextlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from aerie.common.errors import InputError
from aerie.common.files import write_bytes
from aerie.common.processes import next_signal
from aerie.config import load_config, read_config
from aerie.watching.page import as_html, draw
from aerie.watching.prometheus import as_prometheus
from aerie.watching.run_status import RunStatus
from aerie.watching.status import gather

RESULTS = Path("results")
WATCH_SECONDS = 3.0


@dataclass
class Show:
    """What is shown of the run in `folder`: a page or JSON, and files. None: no such file."""

    folder: Path
    json: bool = False
    html: Path | None = None
    prometheus: Path | None = None

    def once(self) -> None:
        status = gather(self.folder)
        self._write(status)
        self._print(status)

    def until_signal(self) -> None:
        """Renew it until a signal; then the last page stays in the terminal."""
        # Signals are blocked and waited for: one that arrived while the page is set up would leave
        # the terminal without a cursor, and one while a file is written would leave a part of it.
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        console = Console(highlight=False)
        status = gather(self.folder)
        self._write(status)
        live = None
        if console.is_terminal and not self.json:
            live = Live(draw(status, short=True), console=console, screen=True, auto_refresh=False)
        with live or contextlib.nullcontext():
            while next_signal(ends, WATCH_SECONDS) is None:
                status = gather(self.folder)
                # A full disk is temporary; the page's own time shows how old it is.
                with contextlib.suppress(OSError):
                    self._write(status)
                if live is not None:
                    live.update(draw(status, short=True), refresh=True)
                elif self.json:
                    print(json.dumps(status.as_json(), ensure_ascii=False), flush=True)
        self._print(status)

    def _write(self, status: RunStatus) -> None:
        if self.html:
            write_bytes(self.html, as_html(status, WATCH_SECONDS).encode())
        if self.prometheus:
            write_bytes(self.prometheus, as_prometheus(status).encode())

    def _print(self, status: RunStatus) -> None:
        if self.json:
            print(json.dumps(status.as_json(), indent=1, ensure_ascii=False))
        else:
            Console(highlight=False).print(draw(status))


def find_run(name: str | None, files: list[Path]) -> Path:
    """The folder of the run with this name or in this folder; None: of the configuration's run.

    Raises `InputError` when there is none and it is not the configuration's.
    """
    run = load_config(read_config(files)).run
    if name is None:
        return RESULTS / run
    folder = Path(name) if Path(name).is_dir() or os.sep in name else RESULTS / name
    if folder.name != run and not folder.is_dir():
        runs = sorted(p.parent.name for p in RESULTS.glob("*/logs"))
        raise InputError(
            f"{folder}: no such folder; runs in {RESULTS}: {', '.join(runs) or 'none yet'}"
        )
    return folder
