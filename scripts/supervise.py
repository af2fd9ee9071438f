#!/usr/bin/env python3
"""Run a command with its output in a log and its state in a file; stop it when it stalls.

    supervise.py --stage train_drafter --log run.log -- python scripts/train_drafter.py ...

With --gpus it takes as many that no other job has, and shows the command these only
(CUDA_VISIBLE_DEVICES). Exits as the command does; 75 when it stalled, 76 when it was stopped for
its loss or a full disk.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from aerie.common import cli, devices
from aerie.common.errors import InputError
from aerie.config import load_config
from aerie.watching.supervisor import Job, has_ended, starter, supervise


def take_gpus(args: argparse.Namespace) -> None:
    """Wait for as many free GPUs as were asked for, and show the job these only.

    They stay ours as long as this process, or the supervisor that it forks, lives.
    """
    snakemake, told = starter(), False
    while True:
        try:
            found = devices.take_devices(args.gpus)
        except InputError as error:
            args.log.parent.mkdir(parents=True, exist_ok=True)
            args.log.write_text(f"error: {error}\n")
            raise
        if found is not None:
            os.environ[devices.VISIBLE] = ",".join(found[0])
            return
        if not told:
            told = True
            print(f"{args.stage}: waits for {args.gpus} free GPU(s)", file=sys.stderr)
        if snakemake is not None and has_ended(snakemake):
            sys.exit(128 + signal.SIGTERM)
        time.sleep(1)


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--stage", required=True, help="the job's name; limits may depend on it")
    parser.add_argument("--log", type=Path, required=True, help="file for its output")
    parser.add_argument("--progress", type=Path, help="its JSON lines; none: beside the log")
    parser.add_argument("--status", type=Path, help="status.json; none: beside the log")
    parser.add_argument("--limits", type=cli.json_argument, default={}, help="section `watch`")
    parser.add_argument(
        "--disk", type=Path, action="append", default=[], help="folder whose free space is watched"
    )
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that the job asks for")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args()
    if args.gpus:
        take_gpus(args)
    job = Job(
        args.command,
        args.stage,
        args.log,
        args.progress or args.log.with_suffix(".progress.jsonl"),
        args.status or args.log.with_suffix(".status.json"),
        args.disk,
    )
    sys.exit(supervise(job, load_config({"watch": args.limits}).watch))


if __name__ == "__main__":
    cli.run(main)
