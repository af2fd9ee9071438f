# What all rules share: the checked configuration, the folders, how a job is described.

sys.path.insert(0, os.path.join(workflow.basedir, "scripts"))
# The scripts run with the Python that Snakemake runs with (a conda environment comes before it).
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# So that a supervised job ends when this process is killed.
os.environ["AERIE_SNAKEMAKE"] = str(os.getpid())

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

from aerie.config import load_config
from aerie.files import InputError, read_json, write_json
from aerie.leases import Leases
from aerie.verifier import check_config, checkpoint_state

try:
    CONFIG = load_config(config)
except InputError as error:
    raise WorkflowError(str(error)) from None

RUN = f"results/{CONFIG.run}"
STORE = CONFIG.store
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


def hold_run():
    """Have this run's results to ourselves: Snakemake's lock is that of its working folder, but
    another checkout may have the same results by a link."""
    leases, run = Leases(), Path(RUN) / "run"
    while not leases.take(run):
        logger.info(f"{RUN}: looking whether {leases.holder(run)} is at work on it ...")
        if who := leases.alive(run):
            raise WorkflowError(
                f"{RUN}: another run is at work on these results ({who}); wait for it, or stop it"
                " first. Nothing was started"
            )
    atexit.register(leases.close)


def end_jobs_when_interrupted():
    """A SIGINT to Snakemake alone, not to its terminal's whole group, reaches no job: it says that
    it ends its processes, and waits for them. So tell their supervisors."""

    def tell(*_):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:2] == [f"{SCRIPTS}/supervise.py"]:
                    process.send_signal(signal.SIGUSR1)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, tell)


FINGERPRINT = f"{RUN}/verifier/fingerprint.json"
# Named in a shell line and not in `params`: the import checks the configuration against the
# verifier, but a changed configuration is no reason to import it again. (A rule of its own with
# `ancient` output would not do: Snakemake 9.27.1 then overlooks changed params further down.)
CHECKED = as_json(CONFIG)
if os.path.exists(FINGERPRINT):
    found = read_json(FINGERPRINT)
    if found["source"] == CONFIG.verifier.source:
        try:
            check_config(CONFIG, found)
        except InputError as error:
            raise WorkflowError(str(error)) from None
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
