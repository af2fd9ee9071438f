# What all rules share: the checked configuration, the folders, how a job is described.

sys.path.insert(0, os.path.join(workflow.basedir, "scripts"))
# The scripts run with the Python that Snakemake runs with (a conda environment comes before it).
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

from snakemake.exceptions import WorkflowError

from aerie.config import load_config
from aerie.files import InputError

try:
    CONFIG = load_config(config)
except InputError as error:
    raise WorkflowError(str(error)) from None

RUN = f"results/{CONFIG.run}"
STORE = "results/store"
SCRIPTS = os.path.relpath(os.path.join(workflow.basedir, "scripts"))
# An engine or a training takes all cores of a machine, so two never run side by side by accident.
ALL_CORES = workflow.cores or 1
ENVIRONMENT = "../envs/gpu.yaml" if any(d.gpus for d in CONFIG.drafters.values()) else "../envs/cpu.yaml"


wildcard_constraints:
    name=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    size=r"\d+",
    lane=r"\d+",


def as_json(section):
    """A section of the configuration as an argument for a script."""
    return json.dumps(section.model_dump() if hasattr(section, "model_dump") else section)


def flag(name, value):
    return name if value else ""


def log_of(stage, part="run"):
    return f"{RUN}/logs/{stage}/{part}.log"


def progress_of(stage, part="run"):
    return f"{RUN}/logs/{stage}/{part}.progress.jsonl"


def benchmark_of(stage, part="run"):
    return f"{RUN}/benchmarks/{stage}/{part}.tsv"


def trust():
    return flag("--trust-remote-code", CONFIG.verifier.trust_remote_code)


FINGERPRINT = f"{RUN}/verifier/fingerprint.json"
# A change of the settings checks them again, but is no reason to run what was checked.
CHECKED = ancient(f"{RUN}/checks.json")
ENGINE = as_json(CONFIG.engine)
