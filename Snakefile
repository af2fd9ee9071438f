"""Aerie: prompts in, an EAGLE-3 draft model out that vLLM serves, with the evidence."""

import atexit
import contextlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from snakemake.utils import min_version

min_version("9.0")


report: "report/workflow.rst"


configfile: "config/config.yaml"


include: "rules/common.smk"
include: "rules/verifier.smk"
include: "rules/self_prompts.smk"
include: "rules/prompts.smk"
include: "rules/responses.smk"
include: "rules/samples.smk"
include: "rules/vocabulary.smk"
include: "rules/hidden_states.smk"
include: "rules/training.smk"
include: "rules/evaluation.smk"
include: "rules/report.smk"


add_param_names()


onstart:
    # Not a rule: everything below a rule that always runs would always run, and an `ancient` input
    # hides changed params from Snakemake 9.27.1. This runs when there are jobs to do, and never in
    # a dry run. The check takes time, so it is made for an engine, a training or a new verifier.
    heavy = [j for j in workflow.dag.needrun_jobs() if j.resources.get("engine")]
    asked = max(CONFIG.engine_gpus, *(d.gpus for d in CONFIG.drafters.values()))
    limit = workflow.global_resources.get("gpu").value
    if heavy and limit is not None and limit < asked:
        # Snakemake would silently lower what the jobs ask for.
        sys.exit(
            f"error: a job of this run takes {asked} GPU(s) (engine.tensor_parallel_size,"
            f" drafters.<name>.gpus), and the profile or --resources allows {limit}; lower the one,"
            f" or raise the other where the machine has more: --resources gpu={asked}"
        )
    hold_run()
    end_jobs_when_interrupted()
    if heavy and not os.environ.get("AERIE_UNCHECKED"):
        command = [sys.executable, f"{SCRIPTS}/check_run.py", "--brief", "--store", STORE]
        command += ["--config", as_json(CONFIG)]
        command += [] if workflow.local_exec else ["--elsewhere"]
        if subprocess.run(command).returncode not in (0, 3):  # 3: warnings
            sys.exit(
                "error: the check before the run found errors, see above; nothing was started"
                " (AERIE_UNCHECKED=1 runs without the check)"
            )
    # For `make status`, which runs without Snakemake; the time of config.json is the run's start.
    write_json(f"{RUN}/config.json", CONFIG.model_dump(exclude={"notify"}))
    write_job_list()


def report_event(event):
    """Report an event of the run; must neither fail nor delay what comes after it for long."""
    if "AERIE_NOTIFY" in os.environ:
        try:
            subprocess.run([sys.executable, f"{SCRIPTS}/notify.py", event, RUN], timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"warning: this {event} was not reported: {error}", file=sys.stderr)


onsuccess:
    report_event("end")


onerror:
    report_event("failure")


rule all:
    default_target: True
    input:
        f"{RUN}/report.html",
        expand(f"{RUN}/drafters/{{name}}/model", name=CONFIG.drafters),
