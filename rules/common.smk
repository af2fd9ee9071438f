# What all rules share: the checked configuration, the folders, how a job is described.

sys.path.insert(0, os.path.join(workflow.basedir, "scripts"))
# The scripts run with the Python that Snakemake runs with (a conda environment comes before it).
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# So that a supervised job ends when this process is killed.
os.environ["AERIE_SNAKEMAKE"] = str(os.getpid())

from aerie.config import check_paths, load_config
from aerie.files import InputError, write_json
from aerie.verifier import check_config, checkpoint_state, find_sizes


def checked(function, *arguments):
    """What the function returns; an `InputError` of it ends the run with its message and nothing
    else. (Snakemake shows every other exception with lines of the Snakefile.)"""
    try:
        return function(*arguments)
    except InputError as error:
        sys.exit(f"error: {error}")


CONFIG = checked(load_config, config)

RUN = f"results/{CONFIG.run}"
STORE = "results/store"
SCRIPTS = os.path.relpath(os.path.join(workflow.basedir, "scripts"))
# An engine or a training takes all cores of a machine, so two never run side by side by accident.
ALL_CORES = workflow.cores or 1
ENVIRONMENT = (
    "../envs/gpu.yaml" if any(d.gpus for d in CONFIG.drafters.values()) else "../envs/cpu.yaml"
)


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


def version_of(module):
    """Version constants of a library module: one of a rule's params, so that raising one makes
    the results anew. Read from the text, because some of the modules import torch."""
    path = os.path.join(workflow.basedir, "scripts", "aerie", f"{module}.py")
    with open(path, encoding="utf-8") as file:
        return re.findall(r"^[A-Z_]+_VERSION = .+$", file.read(), re.MULTILINE)


def tell_params_apart():
    """Snakemake compares the values of params without their names, so of two that are exchanged
    it would notice nothing. Give each rule its values with their names as one more."""
    for each in workflow.rules:
        named = [f"{k}={v}" for k, v in each.params.items() if not callable(v)]
        each.set_params(told_apart=named)


FINGERPRINT = f"{RUN}/verifier/fingerprint.json"
# Named in a shell line and not in `params`: the import checks the configuration against the
# verifier, but a changed configuration is no reason to import it again. (A rule of its own with
# `ancient` output would not do: Snakemake 9.27.1 then overlooks changed params further down.)
CHECKED = as_json(CONFIG)
# As soon as the verifier is on this machine, the same is found before anything runs.
if workflow.is_main_process:
    checked(check_paths, CONFIG)
    verifier = checked(find_sizes, CONFIG.verifier.source, Path("results"), CONFIG.run, Path(STORE))
    if verifier:
        checked(check_config, CONFIG, verifier)
ENGINE = as_json(CONFIG.engine)
# Not among the params: another budget is no reason to run again.
MAX_GIB = (
    "" if CONFIG.hidden_states.max_gib is None else f"--max-gib {CONFIG.hidden_states.max_gib}"
)
# Of the engine only the number format is among the params of the stages whose results are the
# verifier's words and states: how many sequences it computes at a time changes their speed.
DTYPE = CONFIG.engine.dtype
# What stands before the command of a long job. Not among the params: other limits rerun nothing.
SUPERVISE = f"python {SCRIPTS}/supervise.py --disk {STORE}"
if limits := CONFIG.watch.model_dump(exclude_defaults=True):
    SUPERVISE += f" --limits {shlex.quote(json.dumps(limits))}"
