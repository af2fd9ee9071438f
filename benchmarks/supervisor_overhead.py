#!/usr/bin/env python3
"""What the supervisor costs: a job that prints and tells its progress as the trainer does, without
and with it, in turns.

`steps_per_second`: of the job; each step draws a progress bar, prints a line and tells
its progress.
`supervisor_cpu_s_per_minute`: processor time of both supervising processes, after their start.
`share_of_a_core`: the same as a share. `step_ms`: processor time of a step in the job.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from common import ROOT, record

JOB = """
import sys, time
from pathlib import Path
from aerie.common.progress import JobProgress

seconds, pause = float(sys.argv[1]), float(sys.argv[2])
start, steps = time.monotonic(), 0
with JobProgress("train_drafter", 10**6, "steps", Path("run.progress.jsonl")) as progress:
    while time.monotonic() - start < seconds:
        steps += 1
        print(f"\\rEpoch 0: {steps % 100}%|#####     | {steps}/1000000 [00:10<01:00]", end="",
              file=sys.stderr)
        print(f"2026-01-01 00:00:00 speculators.metrics: step {steps} loss 2.345 accuracy 0.5")
        progress.update(steps, loss=2.345, accuracy=[0.5, 0.2, 0.1])
        time.sleep(pause)
Path("steps").write_text(f"{steps} {time.process_time()}")
"""


def job(folder: Path, seconds: float, pause: float, supervised: bool) -> dict[str, float]:
    command = [sys.executable, "job.py", str(seconds), str(pause)]
    if supervised:
        supervise = [sys.executable, str(ROOT / "scripts/supervise.py"), "--stage", "train_drafter"]
        command = [*supervise, "--log", "run.log", "--", *command]
    (folder / "job.py").write_text(JOB)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT / "scripts"), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    spent = 0.0
    if supervised:
        front = psutil.Process(process.pid)
        while not (folder / "run.status.json").is_file():
            time.sleep(0.05)
        watchers = [front, *front.children()]
        before, start = _cpu(watchers), time.monotonic()
        time.sleep(0.8 * seconds)
        spent = (_cpu(watchers) - before) / (time.monotonic() - start)
    process.wait()
    steps, cpu = (folder / "steps").read_text().split()
    return {"steps": int(steps), "step_ms": 1000 * float(cpu) / int(steps), "share": spent}


def _cpu(processes: list[psutil.Process]) -> float:
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="each side")
    parser.add_argument("--steps-per-second", type=float, nargs="+", default=[1, 10])
    args = parser.parse_args()
    rows = []
    for rate in args.steps_per_second:
        with tempfile.TemporaryDirectory() as folder:
            alone = job(Path(folder), args.seconds, 1 / rate, supervised=False)
            watched = job(Path(folder), args.seconds, 1 / rate, supervised=True)
        rows.append(
            {
                "steps_per_second": watched["steps"] / args.seconds,
                "supervisor_cpu_s_per_minute": 60 * watched["share"],
                "share_of_a_core": watched["share"],
                "step_ms_without": alone["step_ms"],
                "step_ms_with": watched["step_ms"],
            }
        )
    record("supervisor_overhead", rows, processes=len(psutil.pids()), load=psutil.getloadavg()[0])


if __name__ == "__main__":
    main()
