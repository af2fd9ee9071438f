"""Aerie: prompts in, an EAGLE-3 draft model out that vLLM serves, with the evidence."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

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


rule all:
    default_target: True
    input:
        f"{RUN}/report.html",
        expand(f"{RUN}/drafters/{{name}}/model", name=CONFIG.drafters),
