"""A run's folder, filled as rules and supervisor fill it."""

import io
import json
import os
import subprocess
import sys
import time

import psutil
from rich.console import Console

from aerie.config import load_config
from aerie.watching.job_status import JobStatus
from aerie.watching.page import draw
from aerie.watching.status import gather
from support.job_list import job_list
from support.paths import SCRIPTS
from support.records import fingerprint

GONE = 2**22 + 1  # above the highest number that a process of Linux can have
ME = psutil.Process().create_time()
VERIFIER = json.dumps(fingerprint(path="verifiers/SmolLM2").as_json())


class RunFolder:
    """A run's folder with the files that its jobs write."""

    def __init__(self, folder, **jobs):
        self.folder = folder
        folder.mkdir(parents=True)
        self.write("config.json", load_config({"run": folder.name}).model_dump(), age=1000)
        self.jobs = job_list(**jobs)
        self.write("jobs.json", self.jobs.as_json(), age=1000)  # when the run was started

    def write(self, name, value="", age=0.0):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        os.utime(path, (time.time() - age,) * 2)
        return path

    def made(self, *stages, age=0.0):
        """The outputs of these stages."""
        for job in self.jobs.jobs:
            for name in job.outputs if job.stage in stages else []:
                self.write(name, VERIFIER if name.startswith("verifier") else "{}", age)

    def status_file(self, stage, part="run", age=0.0, **values):
        now = time.time() - age
        found = JobStatus.model_validate(
            {
                "stage": stage,
                "state": "running",
                "phase": "working",
                "done": 30,
                "total": 120,
                "unit": "steps",
                "rate": 1.5,
                "remaining_seconds": 60.0,
                "host": os.uname().nodename,
                "pid": os.getpid(),
                "started": ME,
                "updated": now,
                "last_progress": now - 2,
                "stall_after_seconds": 60.0,
                "gpus": [],
                "gpus_missing": "NVML: Driver Not Loaded",
                "warnings": {"degraded": 2, "loss spike": 1},
                "cores_busy": 1.9,
                "memory_gib": 3.2,
                "disk_free_gib": 68.7,
                **values,
            }
        )
        self.write(f"logs/{stage}/{part}.status.json", found.as_json(), age)

    def look(self):
        return gather(self.folder)

    def job(self, name):
        return next(j for j in self.look().jobs if j.name == name)

    def states(self):
        return {j.name: j.state for j in self.look().jobs}

    def page(self, width=100, short=False):
        console = Console(file=io.StringIO(), width=width, highlight=False)
        console.print(draw(self.look(), short))
        return console.file.getvalue()

    def show(self, *arguments):
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "show_status.py"), str(self.folder), *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
