"""What every script does around its work: one-line errors, common arguments."""

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from aerie.files import InputError, is_disk_full, read_json


def run(main: Callable[[], None]) -> None:
    """Call `main`; an `InputError` becomes its message and exit status 1."""
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
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


def json_argument(text: str) -> Any:
    """An argument given as JSON, such as a section of the configuration."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None


def read_config(files: list[Path]) -> dict[str, Any]:
    """config/config.yaml with the files laid over it key by key, as Snakemake does; unchecked."""
    values: dict[str, Any] = {}
    for path in [Path("config/config.yaml"), *files]:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except FileNotFoundError:
            raise InputError(f"{path}: no such configuration file") from None
        except (OSError, yaml.YAMLError) as error:
            raise InputError(f"{path}: not YAML: {error}") from None
        values = _lay_over(values, found)
    return values


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _lay_over(merged[key], value) if both else value
    return merged


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
