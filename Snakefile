"""Aerie: prompts in, an EAGLE-3 draft model out that vLLM serves, with the evidence."""

import atexit
import contextlib
import json
import os
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


tell_params_apart()


onstart:
    hold_run()
    end_jobs_when_interrupted()
    # Not a rule: what depends on a rule that always runs would always run, and an `ancient` input
    # hides changed params from Snakemake 9.27.1. This runs when jobs are to be done, in a dry run
    # never; only an engine, a training or a new verifier is worth the time.
    heavy = [j for j in workflow.dag.needrun_jobs() if j.resources.get("engine")]
    if heavy and not os.environ.get("AERIE_UNCHECKED"):
        command = [sys.executable, f"{SCRIPTS}/check_run.py", "--brief", "--store", STORE]
        command += ["--config", as_json(CONFIG)]
        command += [] if workflow.local_exec else ["--elsewhere"]
        if subprocess.run(command).returncode == 1:
            raise WorkflowError(
                "the check before the run found errors, see above; nothing was started"
                " (AERIE_UNCHECKED=1 runs all the same)"
            )


rule all:
    default_target: True
    input:
        f"{RUN}/report.html",
        expand(f"{RUN}/drafters/{{name}}/model", name=CONFIG.drafters),
