#!/usr/bin/env python3
"""Show how a run gets on, and after its end what came out and what went wrong.

Reads the files in the run's folder only, so it works from any machine that sees them.
"""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from aerie.common import cli
from aerie.common.errors import InputError
from aerie.common.files import write_bytes
from aerie.common.signals import next_signal
from aerie.config import load_config, read_config
from aerie.watching.page import as_html, as_prometheus, draw
from aerie.watching.status import RunStatus, gather

RESULTS = Path("results")
WATCH_SECONDS = 3.0


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("run", nargs="?", help="a run's folder or name; none: the configuration's")
    parser.add_argument(
        "--configfile", type=Path, nargs="*", default=[], help="laid over config/config.yaml"
    )
    parser.add_argument("--watch", action="store_true", help="renew it until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="all that is known, as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page for browsers")
    parser.add_argument(
        "--prometheus", type=Path, metavar="FILE", help="write figures for node-exporter (….prom)"
    )
    args = parser.parse_args()
    cli.prepare_to_show()
    folder, config = find_run(args.run, args.configfile)
    if args.watch:
        watch(args, folder, config)
        return
    status = gather(folder, config)
    write(args, status)
    show(args, status)


def find_run(name: str | None, files: list[Path]) -> tuple[Path, dict[str, Any] | None]:
    """The folder of a run, and the configuration where it is this run's."""
    config = load_config(read_config(files)).model_dump()
    if name is None:
        return RESULTS / config["run"], config
    folder = Path(name) if Path(name).is_dir() or os.sep in name else RESULTS / name
    if folder.name == config["run"]:
        return folder, config
    if not folder.is_dir():
        runs = sorted(p.parent.name for p in RESULTS.glob("*/logs"))
        raise InputError(
            f"{folder}: no such folder; runs in {RESULTS}: {', '.join(runs) or 'none yet'}"
        )
    return folder, None


def write(args: Any, status: RunStatus) -> None:
    """Write the files that were asked for."""
    if args.html:
        write_bytes(args.html, as_html(status, WATCH_SECONDS).encode())
    if args.prometheus:
        write_bytes(args.prometheus, as_prometheus(status).encode())


def show(args: Any, status: RunStatus) -> None:
    if args.json:
        print(json.dumps(status.as_json(), indent=1, ensure_ascii=False))
    else:
        Console(highlight=False).print(draw(status))


def watch(args: Any, folder: Path, config: dict[str, Any] | None) -> None:
    """Renew it until a signal; then the last page stays in the terminal."""
    # Blocked and waited for: one that came while the page is set up would leave the
    # terminal without a cursor, and one that came while a file is written would leave a part of it.
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    console = Console(highlight=False)
    status = gather(folder, config)
    write(args, status)
    live = None
    if console.is_terminal and not args.json:
        live = Live(draw(status, short=True), console=console, screen=True, auto_refresh=False)
    with live or contextlib.nullcontext():
        while next_signal(ends, WATCH_SECONDS) is None:
            status = gather(folder, config)
            # A full disk passes; the page's own time tells how old it is.
            with contextlib.suppress(OSError):
                write(args, status)
            if live is not None:
                live.update(draw(status, short=True), refresh=True)
            elif args.json:
                print(json.dumps(status.as_json(), ensure_ascii=False), flush=True)
    show(args, status)


if __name__ == "__main__":
    cli.run(main)
