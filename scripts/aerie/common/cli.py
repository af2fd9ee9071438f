"""What every script does around its work: one-line errors, common arguments."""

import argparse
import io
import json
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from aerie.common.errors import EXIT_CRASH, EXIT_INPUT, AerieError
from aerie.common.files import is_disk_full


def run(main: Callable[[], None]) -> None:
    """Call `main`. An `AerieError` becomes its message and its exit status, any other exception a
    traceback and `EXIT_CRASH`."""
    try:
        main()
    except AerieError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, PermissionError):
            print(f"error: {error}; this user lacks the permission", file=sys.stderr)
            sys.exit(EXIT_INPUT)
        if is_disk_full(error):
            print(
                f"error: the disk is full ({error}); no half-written file has its final name. Make "
                "room and run again: the job continues where it stopped",
                file=sys.stderr,
            )
            sys.exit(EXIT_INPUT)
        sys.exit(EXIT_CRASH)


def prepare_to_show() -> None:
    """For a script that only shows something: it ends quietly when its reader does (`| head`), and
    characters that the terminal's encoding lacks are replaced."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def json_argument(text: str) -> Any:
    """An argument given as JSON, such as a section of the configuration."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None


def parser(description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, allow_abbrev=False)
