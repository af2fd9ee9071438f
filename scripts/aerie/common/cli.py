"""What every script does around its work: one-line errors, common arguments."""

import argparse
import json
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aerie.common.errors import AerieError, InputError
from aerie.common.files import is_disk_full, read_json


def run(main: Callable[[], None]) -> None:
    """Call `main`; an `AerieError` becomes its message and its exit status."""
    try:
        main()
    except AerieError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except PermissionError as error:
        traceback.print_exc()
        print(f"error: {error}; this user may not do that", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not is_disk_full(error):
            raise
        traceback.print_exc()
        print(
            f"error: the disk is full ({error}); nothing half-written bears a final name. Make "
            "room and run again: it goes on where it stopped",
            file=sys.stderr,
        )
        sys.exit(1)


def prepare_to_show() -> None:
    """For a script that shows and computes nothing: it ends without a word when its reader does
    (`| head`), and what a terminal's encoding lacks is replaced."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")


def json_argument(text: str) -> Any:
    """An argument given as JSON, such as a section of the configuration."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None


def parser(description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, allow_abbrev=False)


def add_engine_arguments(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--engine", type=json_argument, required=True, help="the `engine` section, as JSON"
    )
    arguments.add_argument("--trust-remote-code", action="store_true")
    arguments.add_argument("--progress-log", type=Path, help="file for progress as JSON lines")


def read_fingerprint(path: Path) -> dict[str, Any]:
    """`verifier/fingerprint.json`; `InputError` when the checkpoint it names is gone."""
    fingerprint = read_json(path)
    if not Path(fingerprint["path"]).is_dir():
        raise InputError(
            f"{path}: the verifier's folder {fingerprint['path']} is gone; delete this file and "
            "run again"
        )
    return fingerprint
