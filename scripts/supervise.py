#!/usr/bin/env python3
"""Run a command with its output in a log and its state in a file; stop it when it stalls.

    supervise.py --stage train_drafter --log run.log -- python scripts/train_drafter.py ...

With --gpus it takes that many GPUs that no other job has, and shows the command only these
(CUDA_VISIBLE_DEVICES). Exits as the command does; 75 when it stalled, 76 when it was stopped for
its loss or a full disk.
"""

import sys
from pathlib import Path

from aerie.common import cli
from aerie.config import Config
from aerie.config.loading import settings_argument
from aerie.watching.front import supervise
from aerie.watching.supervisor import SupervisedJob


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--stage", required=True, help="the job's name; limits may depend on it")
    parser.add_argument("--log", type=Path, required=True, help="file for its output")
    parser.add_argument("--progress", type=Path, help="its JSON lines (default: beside the log)")
    parser.add_argument("--status", type=Path, help="status.json (default: beside the log)")
    parser.add_argument(
        "--settings", type=settings_argument("watch"), default=Config(), help="section `watch`"
    )
    parser.add_argument(
        "--disk", type=Path, action="append", default=[], help="folder whose free space is watched"
    )
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that the job needs")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args()
    job = SupervisedJob(
        args.command,
        args.stage,
        args.log,
        args.progress or args.log.with_suffix(".progress.jsonl"),
        args.status or args.log.with_suffix(".status.json"),
        args.disk,
    )
    sys.exit(supervise(job, args.settings.watch, args.gpus))


if __name__ == "__main__":
    cli.run(main)
