#!/usr/bin/env python3
"""Look after the store of hidden states: verify, list, show, collect garbage, export and import.

Run it from the workflow's folder. Exit status 1: something is wrong; the output says what.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from aerie.common import cli
from aerie.common.errors import InputError, UnusableStates
from aerie.maintenance.exporting import export_states
from aerie.maintenance.garbage import collect_garbage
from aerie.maintenance.importing import import_states
from aerie.maintenance.listing import list_store, show_shard
from aerie.maintenance.references import results_folders
from aerie.maintenance.verify import verify_store


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--store", type=Path, default=Path("results/store"), help="%(default)s")
    parser.add_argument(
        "--results",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder of runs that use it, may be given several times (default: the folder that "
        "holds the store, else results)",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, text: str, call: Callable[[argparse.Namespace], bool | None]
    ) -> argparse.ArgumentParser:
        """A subcommand; `call` returns False when something is wrong."""
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(call=call)
        return added

    verify = command(
        "verify",
        "read shards whole and say what is wrong with them",
        lambda a: verify_store(a.store, a.folders, a.shards, a.sample, a.set_aside),
    )
    verify.add_argument("shards", nargs="*", metavar="SHARD", help="ids or files (default: all)")
    verify.add_argument(
        "--sample", type=sample_size, metavar="N|SHARE", help="only so many, chosen at random"
    )
    verify.add_argument("--set-aside", action="store_true", help="repair: move damaged files aside")

    listing = command(
        "list", "conventions and their shards", lambda a: list_store(a.store, a.folders, a.json)
    )
    listing.add_argument("--json", action="store_true")

    show = command(
        "show",
        "metadata and samples of one shard",
        lambda a: show_shard(a.store, a.folders, a.shard, a.json),
    )
    show.add_argument("shard", metavar="SHARD", help="id, the beginning of one, or a file")
    show.add_argument("--json", action="store_true")

    collect = command(
        "gc",
        "list what no run needs, and delete it if asked to",
        lambda a: collect_garbage(a.store, a.folders, bool(a.results), a.delete),
    )
    collect.add_argument("--delete", action="store_true", help="delete it; default: only list it")

    export = command(
        "export",
        "write a run's states as another trainer reads them",
        lambda a: export_states(a.store, a.run, a.to, a.folder),
    )
    export.add_argument("--to", choices=["speculators", "specforge"], required=True)
    export.add_argument("--run", type=Path, required=True, help="such as results/demo")
    export.add_argument("folder", type=Path, metavar="DIR", help="new folder")

    imports = command(
        "import",
        "import states that another tool extracted",
        lambda a: import_states(
            a.store,
            a.run,
            a.folder,
            a.layer_ids,
            a.counting,
            a.last_state,
            a.answers,
            a.format,
        ),
    )
    imports.add_argument("--run", type=Path, required=True, help="whose verifier it is")
    imports.add_argument(
        "--layer-ids", type=int, nargs="+", required=True, help="that feed the drafter; in order"
    )
    imports.add_argument(
        "--counting",
        choices=["entering", "output"],
        required=True,
        help="id k is the state entering layer k (vLLM, speculators) or its output (SGLang)",
    )
    imports.add_argument(
        "--last-state",
        choices=["before", "after-norm"],
        required=True,
        help="the last state is before (vLLM, speculators) or after the final norm (SGLang)",
    )
    imports.add_argument(
        "--answers",
        choices=["greedy", "other"],
        required=True,
        help="the supervised tokens are the verifier's greedy answers, or sampled or foreign",
    )
    imports.add_argument("--format", default="lossless", help="hidden_states.format of the run")
    imports.add_argument("folder", type=Path, metavar="DIR")

    args = parser.parse_args()
    if not args.store.is_dir():
        raise InputError(f"{args.store}: no such folder; run from the workflow's, or give --store")
    try:
        args.folders = results_folders(args.store, args.results)
        status = 1 if args.call(args) is False else 0
        sys.stdout.flush()
    except BrokenPipeError:  # `… | head`: discard the rest of the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except UnusableStates as error:
        raise UnusableStates(
            f"{error}. `store.py verify --set-aside` moves damaged files aside; the next run makes "
            "them again"
        ) from error
    sys.exit(status)


def sample_size(text: str) -> float:
    """A number of shards, or a share of them below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 < value < math.inf or (value >= 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"{text}: expected a number of shards, or a share below 1")
    return value


if __name__ == "__main__":
    cli.run(main)
