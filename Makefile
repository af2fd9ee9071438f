# `make` alone lists the targets.
#
#   make env GPU=1              the environment for GPUs (remembered; GPU=0 for CPUs again)
#   make env PYTHON=/opt/py     a Python that is not on the PATH
#   make plan CONFIG=my.yaml    a configuration merged into config/config.yaml (several: in "")
#   make run CONFIG=my.yaml PROFILE=profiles/slurm   on a cluster (docs/slurm.md); or profiles/gpu8
#   make status STATUS_ARGS=--watch
#   make plan PLAN_ARGS="--hardware h200-8"   another machine of config/hardware.yaml
#   make test PYTEST_ARGS="-k shards -x"     (-n 0: in one process, for a debugger)

CONFIG ?=
PYTEST_ARGS ?=
SNAKEMAKE_ARGS ?=
LOCKS ?=
PLAN_ARGS ?=
STORE ?= results/store
STATUS_ARGS ?=
RUN ?=
PYTHON ?=
PROFILE ?=

export PYTHON
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export DO_NOT_TRACK := 1
export VLLM_NO_USAGE_STATS := 1
export PYTHONUNBUFFERED := 1

SHELL := bash
# cpu or gpu: as given, else the kind of .venv, else cpu.
KIND := $(if $(GPU),$(if $(filter 0 no,$(GPU)),cpu,gpu),$(or $(shell cat .venv/kind 2>/dev/null),cpu))
ENV_READY := .venv/$(KIND).stamp
DEV_READY := .venv/dev.stamp

WHERE := $(if $(PROFILE),--workflow-profile $(PROFILE),--cores all)
snakemake := .venv/bin/snakemake $(if $(CONFIG),--configfile $(CONFIG)) $(SNAKEMAKE_ARGS)

.PHONY: help env demo run resume check inspect plan status test test-slurm lint docs bench lock
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

env: $(ENV_READY) ## install .venv from the lock (GPU=1: for NVIDIA GPUs)
	@:

told = @echo 'To follow the run: make status$(if $(CONFIG), CONFIG="$(CONFIG)"), in another terminal'

demo: $(ENV_READY) ## train a drafter for a small model on two CPU cores
	$(told)
	@scripts/run_workflow.sh $(snakemake) $(WHERE)
	@.venv/bin/python scripts/show_summary.py results/demo

run: $(ENV_READY) ## run your configuration, or continue it (CONFIG=my.yaml)
	@for file in $(CONFIG); do test -r $$file || { echo "make run: CONFIG: $$file: no such file" >&2; exit 1; }; done
	$(told)
	@scripts/run_workflow.sh $(snakemake) $(WHERE)
	@.venv/bin/python scripts/show_summary.py $(if $(CONFIG),--configfile $(CONFIG))

resume: run ## the same as run: continue after any stop

check: $(ENV_READY) ## check versions, machine and verifier before a run (CONFIG=my.yaml)
	@.venv/bin/python scripts/check_run.py $(if $(CONFIG),--configfile $(CONFIG)) || [ $$? = 3 ]

plan: $(ENV_READY) ## show what would run, why, and what it takes: bytes, memory, hours
	@.venv/bin/python scripts/plan_run.py $(CONFIG) $(PLAN_ARGS)

status: ## show the progress and results of a run (RUN=mine, STATUS_ARGS=--watch)
	@test -e $(ENV_READY) || { echo "make status: .venv is missing or being installed (make env)." >&2; exit 1; }
	@.venv/bin/python scripts/show_status.py $(RUN) $(if $(CONFIG),--configfile $(CONFIG)) $(STATUS_ARGS)

inspect: $(ENV_READY) ## show samples in colour (RECORDS=file VERIFIER=folder; MODE=keep: with the file's answers)
	@.venv/bin/python scripts/inspect_samples.py --mode $(or $(MODE),generate) --records $(or $(RECORDS),results/demo/prompts/train.jsonl.zst) \
		--verifier $(or $(VERIFIER),$(firstword $(wildcard $(STORE)/verifiers/*)))

test: $(DEV_READY) ## run the tests (PYTEST_ARGS="-m 'not engine'": the quick ones)
	@.venv/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

test-slurm: $(DEV_READY) ## run only the Slurm tests, on a cluster of one node (as root: installs slurm-wlm and munge)
	@.venv/bin/python -m pytest -m slurm tests/slurm $(PYTEST_ARGS)

lint: $(DEV_READY) ## check style, types, imports and spelling
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/snakefmt --check Snakefile rules
	.venv/bin/mypy
	PYTHONPATH=scripts .venv/bin/lint-imports
	.venv/bin/codespell
	@# Ignored on purpose: constants in shell lines (one script for each rule, the same folders
	@# everywhere), helpers next to their rules, a folder param next to the files in it, PATH.
	@! $(snakemake) --lint 2>&1 | grep '^    \* ' | grep -vE \
		'variable ([A-Z_]*SETTINGS|SCRIPTS|STORE|CONFIG|SUPERVISE|rule) |variable (PATH|HF_HUB|AERIE_)|Mixed rules|is a prefix of'

docs: $(DEV_READY) ## build the documentation as a website in site/, and check its links
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# Each prints a table and writes results/benchmarks/<name>.json. Rows that miss a target are listed at
# the end.
BENCHMARKS := matmul pack_states write_states read_states pack_samples load_samples extract_states \
	one_pass resume_states collect_prompts dry_run_scale plan_against_run supervisor_overhead
bench: $(ENV_READY) ## run the benchmarks (BENCHMARKS="matmul pack_states": some of them)
	@.venv/bin/python benchmarks/run_all.py $(BENCHMARKS)

# Resolves with the Python that each lock is for; takes minutes. LOCKS="cpu dev" for some of them.
PYTHON311 ?= python3.11
PYTHON312 ?= python3.12
lock: ## resolve envs/dependencies.toml and write the locks
	$(PYTHON311) envs/lock.py $(LOCKS) --python 3.11=$(PYTHON311) --python 3.12=$(PYTHON312)

$(ENV_READY): envs/$(KIND).lock
	@envs/install.sh $(KIND)

$(DEV_READY): $(ENV_READY) envs/dev.lock
	@envs/install.sh $(KIND) dev
