# What all rules share: the checked configuration, the folders, how a job is described.

sys.path.insert(0, os.path.join(workflow.basedir, "scripts"))
# The scripts run with the Python that Snakemake runs with (a conda environment comes before it).
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# So that a supervised job ends when this process is killed.
os.environ["AERIE_SNAKEMAKE"] = str(os.getpid())
# So that an attempt knows those before it, also where a job has a Snakemake of its own.
if workflow.is_main_process:
    os.environ["AERIE_SESSION"] = f"{platform.node()} {os.getpid()} {time.time():.0f}"

from snakemake.logging import logger

from aerie.config import check_paths, load_config
from aerie.config.loading import sections_json
from aerie.common.errors import AerieError
from aerie.common import jobs, versions
from aerie.common.files import write_json
from aerie.common.leases import Leases
from aerie.verifier.checkpoint import checkpoint_state
from aerie.verifier.compatibility import check_config, find_sizes


def checked(function, *arguments):
    """What the function returns; an `AerieError` of it ends the run with its message and nothing
    else. (Snakemake shows every other exception with lines of the Snakefile.)"""
    try:
        return function(*arguments)
    except AerieError as error:
        sys.exit(f"error: {error}")


CONFIG = checked(load_config, config)

RUN = f"results/{CONFIG.run}"
# For the supervisors, on whatever machine; not in their commands, which are printed.
os.environ["AERIE_RUN"] = CONFIG.run
if CONFIG.notify.command or CONFIG.notify.webhook_env:
    os.environ["AERIE_NOTIFY"] = CONFIG.notify.model_dump_json()
else:
    os.environ.pop("AERIE_NOTIFY", None)
STORE = CONFIG.store
SCRIPTS = os.path.relpath(os.path.join(workflow.basedir, "scripts"))
# On one machine an engine or a training takes all cores, so two never run side by side by accident.
# A cluster has no number of cores: there the profile says how many a job gets (set-threads).
ALL_CORES = workflow.resource_settings.cores or 1
ENVIRONMENT = "../envs/gpu.yaml" if CONFIG.engine_gpus else "../envs/cpu.yaml"
# What a long job may take of a cluster, at its first attempt. A job that exceeds it goes on from
# what it kept, with more (`scale_with_attempt`).
ENGINE_MB = 32_000 * CONFIG.engine_gpus or 8_000 + 1_000 * CONFIG.engine.cpu_cache_gib
LONG = 480


wildcard_constraints:
    name=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    size=r"\d+",
    lane=r"\d+",


def as_json(section):
    """A section of the configuration as one of the params."""
    return json.dumps(section.model_dump())


def scale_with_attempt(amount):
    """A resource that grows with each attempt: more memory (MB) after a job was killed for want of
    it, more time (minutes) after it ran out."""
    return lambda wildcards, attempt: amount * attempt


def log_of(stage, part="run"):
    return f"{RUN}/logs/{stage}/{part}.log"


def progress_of(stage, part="run"):
    return f"{RUN}/logs/{stage}/{part}.progress.jsonl"


def benchmark_of(stage, part="run"):
    return f"{RUN}/benchmarks/{stage}/{part}.tsv"


def add_param_names():
    """Snakemake compares the values of params without their names, so of two that are exchanged
    it would notice nothing. Give each rule its values with their names as one more."""
    for each in workflow.rules:
        named = [f"{k}={v}" for k, v in each.params.items() if not callable(v)]
        each.set_params(told_apart=named)


def write_job_list():
    """Write all jobs of this start, whether they have to run or not, for `make status`."""
    part = lambda job: next(iter(job.wildcards), "run")
    within = lambda path: str(path).removeprefix(f"{RUN}/")
    found = [
        jobs.Job(
            stage=job.name,
            part=part(job),
            outputs=[within(path) for path in job.output],
            needs=sorted(jobs.job_name(n.name, part(n)) for n in workflow.dag.dependencies[job]),
            log=within(job.log[0]),
        )
        for job in workflow.dag.jobs
        if job.name != "all"
    ]
    jobs.JobList.sort(found).write(jobs.job_list_path(Path(RUN)))


def write_missing_job_list():
    """A complete run of an earlier version of Aerie has no list, and starts no job any more."""
    old = Path(RUN, "config.json").exists() and not jobs.job_list_path(Path(RUN)).exists()
    if old and workflow.dag is not None and not workflow.dryrun:
        write_job_list()


if workflow.is_main_process:
    atexit.register(write_missing_job_list)


def hold_run():
    """Have this run's results to ourselves: Snakemake's lock covers its working folder only, but
    another checkout may have the same results through a link."""
    leases, run = Leases(), Path(RUN) / "run"
    while not leases.take(run):
        logger.info(f"{RUN}: checking whether {leases.holder(run)} is working on it ...")
        if who := leases.alive(run):
            sys.exit(
                f"error: {RUN}: another run is at work on these results ({who}); wait for it, or"
                " stop it first. Nothing was started"
            )
    atexit.register(leases.close)


def end_jobs_when_interrupted():
    """Forward a SIGINT to the supervisors. Sent to Snakemake alone, not to its terminal's whole
    group, it reaches no job: Snakemake says that it ends its processes, and waits for them."""

    def interrupt(*_):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:2] == [f"{SCRIPTS}/supervise.py"]:
                    process.send_signal(signal.SIGUSR1)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


FINGERPRINT = f"{RUN}/verifier/fingerprint.json"
# Once the verifier is on this machine, a configuration that does not fit it starts nothing.
if workflow.is_main_process:
    checked(check_paths, CONFIG)
    sizes = checked(find_sizes, CONFIG.verifier.source, Path("results"), CONFIG.run, Path(STORE))
    if sizes:
        checked(check_config, CONFIG, sizes)
TRUST = "--trust-remote-code" if CONFIG.verifier.trust_remote_code else ""
# Of the engine only the number format is among the params of the stages whose results are the
# verifier's words and states: how many sequences it computes at a time changes their speed.
DTYPE = CONFIG.engine.dtype
# Stands before the command of a long job. Not among the params: other limits rerun nothing.
SUPERVISE = f"python {SCRIPTS}/supervise.py --disk {STORE}"
if CONFIG.watch.model_dump(exclude_defaults=True):
    SUPERVISE += f" --settings {shlex.quote(sections_json(CONFIG, 'watch'))}"
