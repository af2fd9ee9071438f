"""How a run gets on, read from the files in its folder and from nothing else.

So it works from any machine that sees the folder, while the jobs run on others. Files may be half
written, damaged or of another version: what cannot be read is named in `RunStatus.unreadable` and
the rest is shown.
"""

import functools
import json
import math
import platform
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.files import read_json
from aerie.common.formatting import as_count, as_share
from aerie.common.paths import LOG_PATTERNS
from aerie.common.stages import OUTPUTS, STAGES, read_benchmark

SILENT_SECONDS = 60.0  # of a supervisor, which writes every few seconds
AHEAD_SECONDS = 5.0  # a time so far in the future is of a clock that is wrong
GONE_SECONDS = 10.0  # from the end of a job's process until its supervisor has told of it
QUIET_SECONDS = 300.0  # of a log, from which on its silence is told; many stages log little
LOST_SECONDS = 3600.0  # of a log, from which on its job counts as lost
TAIL = 1 << 18  # bytes read at the end of a progress file: about twenty minutes
LOG_TAIL = 1 << 20  # bytes of a log that are triaged
SNAKEMAKE_LOGS = 50  # that are looked at, the newest

STATES = (
    "not started",
    "waiting",
    "running",
    "done",
    "failed",
    "stalled",
    "stopped",
    "dead",
    "no sign",
    "out of reach",
)
"""`waiting`: all it needs is there. `stalled`, `stopped`: by its supervisor. `dead`: its process on
this machine is gone and nobody told how. `no sign`: nothing was heard of it for a while. `out of
reach`: something it needs has failed."""
BROKEN = ("failed", "stalled", "stopped", "dead")


@dataclass
class Job:
    """One job of a run: what it makes and needs, and how it is.

    Times are Unix seconds, memory and disks GiB. `outputs`: files within the run's folder.
    `earlier`: its result is there, but something that it is made of is being made again. `note`:
    what is odd. `reason`: why it failed, over several lines. `result`: what came out, in words;
    `figures`: the same as numbers. `losses`, `accuracies`: the last ones of a training, oldest
    first, the latter summed over the TTT steps. `warnings`: messages of its log by class.
    """

    stage: str
    part: str
    outputs: list[str]
    needs: list[str]
    state: str = "not started"
    earlier: bool = False
    note: str = ""
    reason: str = ""
    result: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    phase: str = ""
    done: float | None = None
    total: float | None = None
    unit: str = ""
    rate: float | None = None
    remaining_seconds: float | None = None
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    alerts: list[str] = field(default_factory=list)
    host: str = ""
    pid: int | None = None
    cores_busy: float | None = None
    memory_gib: float | None = None
    disk_free_gib: float | None = None
    gpus: list[dict[str, Any]] = field(default_factory=list)
    gpus_missing: str = ""
    last_progress: float | None = None
    stall_after_seconds: float | None = None
    started: float | None = None
    updated: float | None = None
    ended: float | None = None
    seconds: float | None = None
    exit: int | None = None
    log: str = ""

    @property
    def name(self) -> str:
        return name_of(self.stage, self.part)


def name_of(stage: str, part: str) -> str:
    return stage if part == "run" else f"{stage} {part}"


@dataclass
class RunStatus:
    """A run at the time `time`. `began`: when Snakemake was started last, None when unknown.

    `known_from`: where its jobs are known from. `disks`: `path`, `free_gib`, `total_gib`.
    """

    run: str
    folder: str
    time: float
    state: str = "not started"
    began: float | None = None
    known_from: str = ""
    jobs: list[Job] = field(default_factory=list)
    disks: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def stages(self) -> list[tuple[str, list[Job]]]:
        """The stages that this run has, in the order of the data, with their jobs."""
        found = [(s, [j for j in self.jobs if j.stage == s]) for s in STAGES]
        return [(stage, jobs) for stage, jobs in found if jobs]

    def warnings(self) -> dict[str, int]:
        """Messages of all logs by class."""
        counts: Counter[str] = Counter()
        for job in self.jobs:
            counts.update(job.warnings)
        return dict(counts)

    def as_json(self) -> dict[str, Any]:
        stages = [{"stage": s, "state": state_of(jobs)} for s, jobs in self.stages()]
        return {**asdict(self), "stages": stages, "warnings": self.warnings()}


def gather(folder: Path, config: dict[str, Any] | None = None) -> RunStatus:
    """Read how the run in this folder is.

    Its jobs are known from its `config.json`; before that is written from `config`, the whole
    configuration, and without either from what lies in the folder.
    """
    status = RunStatus(folder.absolute().name, str(folder), time.time())
    reader = _Reader(status)
    path = folder / "config.json"
    status.began = _mtime(path)
    kept = reader.object(path)
    for known_from, known in ((str(path), kept), ("the configuration", config)):
        if known is None:
            continue
        try:
            status.jobs = jobs_of(_shape(known))
            status.known_from = known_from
            break
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reader.cannot(path, f"not a configuration of Aerie's ({error!r})")
    else:
        status.jobs = jobs_of(_found_shape(folder))
        status.known_from = "the files in its folder"
    failed = failed_logs(folder, status.began)
    for job in status.jobs:
        reader.look(job, failed)
    _settle(status.jobs)
    for job in status.jobs:
        if job.state == "done":
            reader.result(job)
    status.state = state_of(status.jobs)
    store = text((kept or config or {}).get("store") or "results/store")
    status.disks = _disks(folder, folder.absolute().parent.parent / store)
    return status


# Which jobs a run has


@dataclass
class _Shape:
    """What decides which jobs a run has. `drafters`: size of each one's map, None without one."""

    writes_prompts: bool
    generates: bool
    lanes: int
    sizes: list[int]
    drafters: dict[str, int | None]


def _shape(config: dict[str, Any]) -> _Shape:
    drafters = config["drafters"]
    sizes = {d["vocabulary"] for d in drafters.values()} - {"full"}
    return _Shape(
        writes_prompts=config["self_prompts"]["number"] > 0,
        generates=config["generation"]["mode"] == "generate",
        lanes=config["hidden_states"]["lanes"],
        sizes=sorted(sizes),
        drafters={
            name: None if d["vocabulary"] == "full" or d["from_checkpoint"] else d["vocabulary"]
            for name, d in drafters.items()
        },
    )


def _found_shape(folder: Path) -> _Shape:
    """The same from what lies in a folder; less when its jobs have not begun."""

    def parts(stage: str, *patterns: str) -> set[str]:
        logs = (p.name for p in folder.glob(f"logs/{stage}/*"))
        ends = re.compile(r"(.+?)(\.failed)?(\.log|\.status\.json|\.progress\.jsonl)")
        found = {m[1] for n in logs if not n.startswith(".") and (m := ends.fullmatch(n))}
        return found | {p.name for pattern in patterns for p in folder.glob(pattern)}

    def numbers(names: set[str]) -> list[int]:
        return sorted(int(n) for n in names if n.isdigit())

    lanes = [p.stem.removeprefix("lane-") for p in folder.glob("hidden_states/lane-*.json")]
    lanes = numbers({*lanes, *parts("extract_hidden_states")})
    sizes = numbers(parts("map_vocabulary", "vocabulary/*"))
    names = parts("train_drafter", "drafters/*", "evaluation/*")
    return _Shape(
        writes_prompts=bool(parts("write_prompts")),
        generates=bool(parts("generate_responses", "responses/manifest.json")),
        lanes=lanes[-1] + 1 if lanes else 1,
        sizes=sizes,
        drafters=dict.fromkeys(sorted(names)),
    )


def jobs_of(shape: _Shape) -> list[Job]:
    """The jobs in the order of the data, as the rules have them."""
    jobs: list[Job] = []

    def add(stage: str, part: str, outputs: list[str], *needs: str) -> None:
        jobs.append(Job(stage, part, outputs, list(needs)))

    verifier, prompts, samples = "import_verifier", "collect_prompts", "tokenize_samples"
    lanes = [f"extract_hidden_states {i}" for i in range(shape.lanes)]
    written = ["write_prompts"] if shape.writes_prompts else []
    answers = ["generate_responses"] if shape.generates else []
    texts = ["prompts/train.jsonl.zst", "prompts/heldout.jsonl.zst"]
    add(verifier, "run", ["verifier/fingerprint.json"])
    if written:
        add("write_prompts", "run", ["prompts/self.jsonl.zst", "prompts/self.json"], verifier)
    add(prompts, "run", [*texts, "prompts/report.json"], *written)
    if answers:
        add("generate_responses", "run", ["responses/manifest.json"], prompts, verifier)
    made = ["samples/samples.parquet", "samples/shards.json", "samples/report.json"]
    add(samples, "run", made, prompts, verifier, *answers)
    for size in shape.sizes:
        made = [f"vocabulary/{size}/{n}" for n in ("t2d.npy", "d2t.npy", "coverage.json")]
        add("map_vocabulary", str(size), made, samples, verifier)
    for i in range(shape.lanes):
        made = [f"hidden_states/lane-{i}.json"]
        add("extract_hidden_states", str(i), made, samples, verifier)
    for name, size in shape.drafters.items():
        made = [f"drafters/{name}/model", f"drafters/{name}/metrics.jsonl"]
        maps = [] if size is None else [f"map_vocabulary {size}"]
        add("train_drafter", name, made, samples, verifier, *lanes, *maps)
    trained = [name_of("train_drafter", name) for name in shape.drafters]
    measured = []
    for stage, file in (("measure_acceptance", "acceptance"), ("measure_speed", "speed")):
        for name in shape.drafters:
            made = [f"evaluation/{name}/{file}.json"]
            add(stage, name, made, name_of("train_drafter", name), prompts, verifier)
            measured.append(name_of(stage, name))
    maps = [f"map_vocabulary {size}" for size in shape.sizes]
    above = [verifier, prompts, *answers, samples, *maps, *lanes, *trained, *measured]
    add("render_report", "run", ["report.html"], *above)
    return jobs


def state_of(jobs: list[Job]) -> str:
    """One state for several jobs: what needs attention first."""
    states = {j.state for j in jobs}
    order = ("running", *BROKEN, "no sign", "out of reach")
    for state in order:
        if state in states:
            return state
    if states == {"done"}:
        return "done"
    return "waiting" if "waiting" in states else "not started"


# What the files say


class _Reader:
    """Reads a run's files and notes in its status which could not be read."""

    def __init__(self, status: RunStatus):
        self.status = status
        self.folder = Path(status.folder)

    def cannot(self, path: Path, why: str) -> None:
        self.status.unreadable.append(f"{path}: {why}")

    def object(self, path: Path) -> dict[str, Any] | None:
        """A JSON object; None when it is absent, or cannot be read, which is noted."""
        if not _there(path):
            return None
        try:
            value = read_json(path)
        except InputError as error:
            # It may have gone since, which is nothing to report.
            if _there(path):
                self.status.unreadable.append(str(error))
            return None
        if not isinstance(value, dict):
            self.cannot(path, "not a JSON object")
            return None
        return value

    def look(self, job: Job, failed: set[str]) -> None:
        """Find out a job's state from its own files; `not started` when they say nothing."""
        stem = self.folder / "logs" / job.stage / job.part
        log = stem.with_name(f"{job.part}.log")
        job.log = str(log)
        made = [_mtime(self.folder / name) for name in job.outputs]
        finished = max(t for t in made if t is not None) if all(made) else None
        found = self.object(stem.with_name(f"{job.part}.status.json"))
        progress = stem.with_name(f"{job.part}.progress.jsonl")
        if found is not None:
            self._take_status(job, found, stem.with_name(f"{job.part}.status.json"), finished)
        elif finished is not None:
            job.state, job.ended = "done", finished
        else:
            self._take_log(job, log, progress, failed)
        benchmark = stem.parents[2] / "benchmarks" / job.stage / f"{job.part}.tsv"
        if job.state == "done" and job.seconds is None:
            job.seconds = number(read_benchmark(benchmark).get("s"))
        if job.state in ("running", "no sign", *BROKEN):
            self._take_lines(job, self.lines(progress))
        self._look_at_attempts(job, log)

    def _take_status(
        self, job: Job, found: dict[str, Any], path: Path, finished: float | None
    ) -> None:
        """What the supervisor wrote of it. `finished`: when its outputs were written."""
        for key in ("rate", "remaining_seconds", "last_progress", "stall_after_seconds"):
            setattr(job, key, number(found.get(key)))
        for key in ("done", "total", "cores_busy", "memory_gib", "disk_free_gib"):
            setattr(job, key, number(found.get(key)))
        job.started, job.ended = number(found.get("started")), number(found.get("ended"))
        for key in ("phase", "unit", "host", "reason", "gpus_missing"):
            setattr(job, key, text(found.get(key)))
        for key in ("pid", "exit"):
            value = number(found.get(key))
            setattr(job, key, None if value is None else int(value))
        warnings, gpus, alerts = (found.get(k) for k in ("warnings", "gpus", "alerts"))
        if isinstance(warnings, dict):
            counts = {text(k): number(v) for k, v in warnings.items()}
            job.warnings = {k: int(v) for k, v in counts.items() if v is not None}
        job.gpus = [
            {text(k): _scalar(v) for k, v in gpu.items()}
            for gpu in (gpus if isinstance(gpus, list) else [])
            if isinstance(gpu, dict)
        ]
        job.alerts = [text(a) for a in alerts] if isinstance(alerts, list) else []
        # Clocks of other machines may be off; the file's time is the file server's. One that is
        # ahead is not believed: a job that is gone would live until our clock is there.
        told = number(found.get("updated")) or 0
        signs = (told, _mtime(path) or 0)
        past = [t for t in signs if t <= self.status.time + AHEAD_SECONDS]
        job.updated = max(past) if past else min(signs)
        state = found.get("state")
        if job.started and job.ended:
            job.seconds = job.ended - job.started
        elif job.started and state in ("running", "ending"):
            job.seconds = max((told or job.updated) - job.started, 0)
        if state in ("running", "ending"):
            self._judge_signs(job)
        elif state == "done":
            if finished is None:
                job.note = "it was done, but what it made is gone"
            else:
                job.state = "done"
        elif state in BROKEN:
            job.state = state
            if finished is not None and finished > (job.ended or 0):
                job.state, job.reason = "done", ""
        else:
            self.cannot(path, f"unknown state {state!r}")
        began = self.status.began
        if began and job.state in (*BROKEN, "no sign") and job.updated < began:
            job.note, job.reason = f"{job.state} in an earlier run", ""
            job.state = "not started"

    def _judge_signs(self, job: Job) -> None:
        """Whether a job that is said to run still does."""
        job.state = "running"
        age = self.status.time - (job.updated or 0)
        if job.host != platform.node():
            if age > SILENT_SECONDS:
                job.state = "no sign"
                job.note = f"no sign from {job.host or 'its host'} since {clock(job.updated)}"
        elif age > GONE_SECONDS and not _alive(job.pid, job.started):
            job.state = "dead"
            job.note = f"process {job.pid} is gone, its last sign was at {clock(job.updated)}"
        elif age > SILENT_SECONDS:
            job.state = "no sign"
            job.note = (
                f"its process {job.pid} lives, but its supervisor gave no sign since "
                f"{clock(job.updated)}"
            )

    def _take_log(self, job: Job, log: Path, progress: Path, failed: set[str]) -> None:
        """A job without supervisor and results: its log begins with it, and is all it has."""
        written = _mtime(log)
        measured = _mtime(self.folder / "benchmarks" / job.stage / f"{job.part}.tsv")
        if written is None:
            return
        if measured is not None and measured >= written:
            job.note = "it was done, but what it made is gone"
            return
        if self.status.began and written < self.status.began - 1:
            return
        job.updated = max(written, _mtime(progress) or 0)
        tail = _tail(log, LOG_TAIL)
        last = tail.rstrip().rsplit("\n", 1)[-1]
        ended_badly = last.startswith("error: ")
        if ended_badly or f"{job.stage}/{job.part}.log" in failed:
            job.state, job.ended = "failed", written
            job.reason = "\n".join(x for x in (last, _reading(tail)) if x)
            return
        job.state = "running"
        age = self.status.time - job.updated
        if age > LOST_SECONDS:
            job.state = "no sign"
        if age > QUIET_SECONDS:
            job.note = f"nothing new in its log since {clock(job.updated)}"

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """The last lines of progress, of the last attempt only."""
        found: list[dict[str, Any]] = []
        bad = 0
        for raw in _tail(path, TAIL).split("\n")[:-1]:
            try:
                line = json.loads(raw)
                moment = number(line["time"])
            except (ValueError, KeyError, TypeError):
                moment = None
            if moment is None:
                bad += 1
                continue
            line["time"] = moment
            before, after = (number(x.get("done")) for x in (found[-1] if found else {}, line))
            if before is not None and after is not None and after < before:
                found = []
            found.append(line)
        if bad:
            self.cannot(path, f"{bad} of its last lines")
        return found

    def _take_lines(self, job: Job, lines: list[dict[str, Any]]) -> None:
        """Last losses; and, of a job without supervisor, how far it is."""
        lines = [x for x in lines if not job.started or x["time"] > job.started - 1]
        for line in lines:
            loss, steps = number(line.get("loss")), line.get("accuracy")
            accuracy = [number(a) for a in steps] if isinstance(steps, list) else [None]
            if loss is not None:
                job.losses.append(loss)
            if None not in accuracy:
                job.accuracies.append(sum(accuracy))
        if not lines or job.host or job.state not in ("running", "no sign"):
            return
        last = lines[-1]
        job.started = job.started or lines[0]["time"]
        job.last_progress = last["time"]
        job.phase, job.unit = text(last.get("phase")), text(last.get("unit"))
        job.done, job.total, job.rate = (number(last.get(k)) for k in ("done", "total", "rate"))
        if job.total and job.rate and job.done is not None:
            job.remaining_seconds = max(job.total - job.done, 0) / job.rate

    def _look_at_attempts(self, job: Job, log: Path) -> None:
        """The log of an attempt that failed, where there is one."""
        kept = log.with_name(f"{job.part}.failed.log")
        written = _mtime(kept)
        if written is None or job.state == "not started":
            return
        if job.state in BROKEN:
            job.log = str(kept) if not _there(log) else job.log
        elif written > (self.status.began or 0) and job.started and written <= job.started + 1:
            job.note = job.note or f"an attempt before this one failed: {kept}"

    def result(self, job: Job) -> None:
        """What came out of a finished job."""
        read = RESULTS.get(job.stage)
        if read is None:
            return
        path = self.folder / OUTPUTS[job.stage].format(part=job.part)
        try:
            info = path.stat()
            words, figures = _remembered(read, path, info.st_mtime_ns, info.st_size)
            job.result = text(words)
            job.figures = {k: v for k, v in figures.items() if number(v) is not None}
        except FileNotFoundError:
            return
        except InputError as error:
            self.status.unreadable.append(str(error))
        except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self.cannot(path, f"not what Aerie writes ({error!r})")


def _settle(jobs: list[Job]) -> None:
    """Give the jobs that have not begun the state that follows from those they need."""
    states = {}
    for job in jobs:
        needed = [states.get(n, "done") for n in job.needs]
        open_ = [n for n in job.needs if states.get(n, "done") != "done"]
        if job.state == "done":
            job.earlier = bool(open_)
        elif job.state == "not started":
            broken = [n for n in open_ if states[n] in (*BROKEN, "out of reach")]
            if broken:
                job.state = "out of reach"
                job.note = job.note or f"needs {broken[0]}"
            elif all(s == "done" for s in needed):
                job.state = "waiting"
        # An old result is no ground for what comes after it to begin.
        states[job.name] = "not started" if job.earlier else job.state


def failed_logs(folder: Path, began: float | None) -> set[str]:
    """Logs, as `<rule>/<part>.log`, of the jobs that failed in Snakemake's last run of this folder
    and were not started again since; from its own logs since it `began`, where there are any: that
    of another run in the same working folder may be the newest."""
    try:
        project = folder.absolute().parents[1]
        logs = [(_mtime(p) or 0, p) for p in (project / ".snakemake/log").glob("*.log")]
    except (OSError, IndexError):
        return set()
    found: set[str] = set()
    since = [path for written, path in sorted(logs) if written >= (began or 0)]
    for line in (x for p in since[-SNAKEMAKE_LOGS:] for x in _tail(p, 16 << 20).splitlines()):
        match = re.match(r"    log: (.*?)( \(check log file.*)?$", line)
        for name in match[1].split(", ") if match else []:
            path = Path(name)
            if path.parts[-4:-2] == (folder.absolute().name, "logs"):
                key = f"{path.parts[-2]}/{path.name}"
                (found.add if match[2] else found.discard)(key)
    return found


# What came out, by stage


def _of_verifier(path: Path) -> tuple[str, dict[str, float]]:
    found = read_json(path)
    layers, hidden = found["num_layers"], found["hidden_size"]
    words = f"{Path(found['path']).name}, {layers} layers of {as_count(hidden)}"
    return words, {"layers": layers, "hidden_size": hidden}


def _of_prompts(path: Path) -> tuple[str, dict[str, float]]:
    found = read_json(path)
    kept, taken = found["records_kept"], found["records_in"]
    words = f"{as_count(kept)} of {as_count(taken)} records, {as_count(found['heldout'])} held out"
    return words, {"records": kept, "records_in": taken, "heldout": found["heldout"]}


def _of_self_prompts(path: Path) -> tuple[str, dict[str, float]]:
    found = read_json(path)
    words = f"{as_count(found['kept'])} of {as_count(found['attempted'])} attempts kept"
    return words, {"prompts": found["kept"], "attempts": found["attempted"]}


def _of_responses(path: Path) -> tuple[str, dict[str, float]]:
    found = read_json(path)
    answers, tokens = found["answers"], found["generated_tokens"]
    words = f"{as_count(answers)} answers, {as_count(tokens)} tokens"
    words += f", {as_count(found['truncated'])} cut" if found["truncated"] else ""
    words += f", {as_count(found['reused'])} from the store" if found["reused"] else ""
    return words, {"answers": answers, "tokens": tokens, "truncated": found["truncated"]}


def _of_samples(path: Path) -> tuple[str, dict[str, float]]:
    found = read_json(path)
    kept, tokens = found["records_kept"], sum(found[s]["tokens"] for s in ("train", "heldout"))
    words = (
        f"{as_count(kept)} of {as_count(found['records_in'])} records, {as_count(tokens)} tokens"
    )
    return words, {"records": kept, "records_in": found["records_in"], "tokens": tokens}


def _of_map(path: Path) -> tuple[str, dict[str, float]]:
    covered = float(read_json(path)["covered"])
    return f"{as_share(covered)} of the target tokens", {"covered_share": covered}


def _of_lane(path: Path) -> tuple[str, dict[str, float]]:
    found = read_json(path)
    shards, tokens, size = len(found["shards"]), found["tokens"], found["bytes"]
    words = f"{as_count(shards)} shards, {as_count(tokens)} tokens, {size / 2**30:,.2f} GiB"
    lost = len(found.get("quarantined") or ())
    words += f", {as_count(lost)} samples left out" if lost else ""
    return words, {"shards": shards, "tokens": tokens, "bytes": size, "left_out": lost}


def _of_training(path: Path) -> tuple[str, dict[str, float]]:
    lines = [json.loads(x) for x in _tail(path, TAIL).splitlines()]
    steps = [x for x in lines if not x.get("validation")]
    checked = [x for x in lines if x.get("validation")]
    last = (checked or steps)[-1]
    figures = {"steps": steps[-1]["step"] + 1, "loss": last["loss"]}
    figures["expected_acceptance_length"] = 1 + sum(last["accuracy"])
    words = f"{as_count(figures['steps'])} steps, {'validation ' * bool(checked)}loss "
    words += f"{last['loss']:.3f}"
    if (count := len(last["accuracy"])) > 1:
        words += f" (sum of {count} TTT steps)"
    words += f", {figures['expected_acceptance_length']:.2f} tokens a step expected"
    return words, figures


def _of_acceptance(path: Path) -> tuple[str, dict[str, float]]:
    found = read_json(path)
    figures = {"heldout": float(found["acceptance_length"])}
    for name, values in found["prompt_sets"].items():
        figures[name] = float(values["acceptance_length"])
    positions = " ".join(f"{p:.3f}" for p in found["acceptance_per_position"])
    words = ", ".join(f"{name} {length:.2f}" for name, length in figures.items())
    return f"tokens a step {words}; by position {positions}", figures


def _of_speed(path: Path) -> tuple[str, dict[str, float]]:
    figures = {str(x["concurrency"]): float(x["ratio"]) for x in read_json(path)["speedup"]}
    words = ", ".join(f"{ratio:.2f} times at concurrency {n}" for n, ratio in figures.items())
    return f"speed {words}", figures


RESULTS: dict[str, Callable[[Path], tuple[str, dict[str, float]]]] = {
    "import_verifier": _of_verifier,
    "write_prompts": _of_self_prompts,
    "collect_prompts": _of_prompts,
    "generate_responses": _of_responses,
    "tokenize_samples": _of_samples,
    "map_vocabulary": _of_map,
    "extract_hidden_states": _of_lane,
    "train_drafter": _of_training,
    "measure_acceptance": _of_acceptance,
    "measure_speed": _of_speed,
}
"""Stage → what reads its `OUTPUTS`."""


@functools.lru_cache(maxsize=4096)
def _remembered(read: Callable[[Path], Any], path: Path, changed: int, size: int) -> Any:
    """A lane's manifest may have megabytes; while it is watched it is read once."""
    return read(path)


# Small things


def number(value: Any) -> float | None:
    """A finite number, also from text; None for anything else."""
    try:
        found = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def text(value: Any) -> str:
    """Text without characters that would steer a terminal; line breaks stay."""
    value = "" if value is None else str(value)
    return "".join(c if c.isprintable() or c == "\n" else " " for c in value)


def _scalar(value: Any) -> Any:
    """A value as JSON can hold it: numbers and null as they are, all else as text."""
    if value is None or isinstance(value, int):
        return value
    return number(value) if isinstance(value, float) else text(value)


def clock(moment: float | None) -> str:
    """A time of today as 12:34:56, another with its date."""
    unknown = "an unknown time"
    if not moment:
        return unknown
    try:
        then = time.localtime(moment)
    except (OverflowError, ValueError, OSError):
        return unknown
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def _there(path: Path) -> bool:
    return _mtime(path) is not None


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):
        return None


def _tail(path: Path, size: int) -> str:
    """The last bytes of a file as text, from the beginning of a line; empty when there are none."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - size))
            data = file.read(size)
    except OSError:
        return ""
    if end > size:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")


def _alive(pid: int | None, started: float | None) -> bool:
    """Whether this process of this machine lives; another one may have its number by now."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and (
            started is None or process.create_time() < started + 60
        )
    except (psutil.Error, ValueError, TypeError):
        return False


def _reading(log: str) -> str:
    """What the triage makes of a failed job's log: message, meaning, advice."""
    from aerie.watching.triage import Catalogue, Triage

    try:
        judge = Triage(Catalogue.load(LOG_PATTERNS))
    except InputError:
        return ""
    judge.feed(log)
    worst = next(iter(judge.finish()), None)
    if worst is None or worst.level != "fatal":
        return ""
    return "\n".join(text(x) for x in (worst.meaning, worst.advice))


def _disks(folder: Path, store: Path) -> list[dict[str, Any]]:
    """Free and total space of the run's disk and the store's, each disk once."""
    found: dict[int, dict[str, Any]] = {}
    here = next((p for p in (folder, *folder.absolute().parents) if _there(p)), folder)
    for path in (here, store):
        try:
            usage = shutil.disk_usage(path)
            device = path.stat().st_dev
        except OSError:
            continue
        figures = {"free_gib": usage.free / 2**30, "total_gib": usage.total / 2**30}
        found.setdefault(device, {"path": str(path)} | {k: round(v, 2) for k, v in figures.items()})
    return list(found.values())
