"""Faults forced on the real jobs: each is noticed and explained, leaves no process, and the next
run continues.

A copy of the workflow is broken by adding code to the end of one of its modules.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from support.processes import end_marked, marked_processes, wait_until
from support.project import Project
from support.runs import configuration, logs, write_prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SLOW_ANSWERS = """
def _slowly(run):
    def slow(self, *arguments, **options):
        for answer in run(self, *arguments, **options):
            time.sleep(0.1)
            yield answer
    return slow

InProcessEngine.run = _slowly(InProcessEngine.run)
"""
BROKEN_CONNECTOR = """
_calls = []
_submit = HiddenStatesConnector._submit_async_write

def _broken(self, pending):
    _calls.append(pending)
    if len(_calls) > 60:
        raise RuntimeError("planted in the connector")
    _submit(self, pending)

HiddenStatesConnector._submit_async_write = _broken
"""
ENDLESS_LOOP = """
_emit = Recorder.emit

def endless_loop(self, record):
    _emit(self, record)
    if record.msg.get("global_step") == 25:
        while True:
            pass

Recorder.emit = endless_loop
"""


class Faulty:
    """A project with tokenized samples and three drafters to train: `nan`, `loop` and `stop`."""

    def __init__(self, folder: Path, verifier: Path):
        self.project = Project(folder)
        self.folder = self.project.folder
        write_prompts(self.folder / "prompts.jsonl", 160)
        write_prompts(self.folder / "other.jsonl", 5, seed=1)
        values = configuration(verifier, "f", generation={"capture": False})
        base = {**values["drafters"]["base"], "epochs": 1, "checkpoint_share": 0.1}
        values["drafters"] = {n: {**base, "seed": i} for i, n in enumerate(("nan", "loop", "stop"))}
        values["watch"] = {"stall_seconds": 12, "grace_seconds": 5}
        values["watch"]["min_free_gib"] = 0
        (self.folder / "config/config.yaml").write_text(yaml.safe_dump(values))
        self.mark = f"aerie-faults-{os.getpid()}"

    def run(self, *targets: str, **variables: str) -> subprocess.CompletedProcess:
        process = self.start(*targets, **variables)
        out, _ = process.communicate(timeout=600)
        return subprocess.CompletedProcess(targets, process.returncode, out, "")

    def start(self, *targets: str, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(*targets),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": "", "MARK": self.mark, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def command(self, *targets: str) -> list[str]:
        snakemake = [sys.executable, "-m", "snakemake", "--cores", "2", "--retries", "0"]
        return [*snakemake, "--nolock", "--rerun-incomplete", *targets]

    def succeed(self, *targets: str) -> None:
        done = self.run(*targets)
        assert done.returncode == 0, logs(self.project, done)

    def log(self, name: str) -> str:
        path = self.folder / f"results/f/logs/{name}.log"
        return path.read_text() if path.is_file() else ""

    def status(self, name: str) -> dict:
        return self.project.read(f"results/f/logs/{name}.status.json")

    def break_module(self, name: str, code: str) -> None:
        path = self.folder / f"scripts/aerie/{name}.py"
        shutil.copy2(path, path.with_suffix(".whole"))
        with path.open("a") as file:
            file.write(code)

    def mend(self) -> None:
        for path in (self.folder / "scripts/aerie").rglob("*.whole"):
            path.replace(path.with_suffix(".py"))

    def nothing_left(self) -> None:
        """No process outlives its run; those that are ending get a moment."""
        wait_until(lambda: not marked_processes(self.mark), "processes are left")

    # Extraction

    def shards(self) -> set[Path]:
        return set((self.folder / "results/store/hidden_states").glob("*/*.safetensors"))

    def forget_shards(self) -> None:
        """Leave two shards, so that there is something to resume from and something to do."""
        (self.folder / LANE).unlink(missing_ok=True)
        for path in sorted(self.shards())[2:]:
            path.unlink()

    def extract_the_rest(self) -> dict:
        """Run again and return the lane's manifest, after checking that nothing was done twice."""
        before = {path: path.stat().st_mtime_ns for path in self.shards()}
        assert before, "no shard was kept"
        self.succeed(LANE)
        assert all(path.stat().st_mtime_ns == when for path, when in before.items())
        lane = self.project.read(LANE)
        assert 0 < lane["extracted_samples"] < lane["samples"]
        return lane


LANE = "results/f/hidden_states/lane-0.json"
EXTRACTION = "extract_hidden_states/0"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, tiny_verifier):
    made = Faulty(tmp_path_factory.mktemp("faults") / "project", tiny_verifier)
    made.succeed(LANE)
    return made


@pytest.fixture(autouse=True)
def whole_afterwards(faulty):
    yield
    faulty.mend()
    end_marked(faulty.mark)


def test_an_exception_in_the_connector(faulty):
    faulty.forget_shards()
    faulty.break_module("engine/connector", BROKEN_CONNECTOR)
    done = faulty.run(LANE)
    assert done.returncode != 0
    assert faulty.status(EXTRACTION)["state"] == "failed"
    assert "planted in the connector" in faulty.log(EXTRACTION)
    faulty.nothing_left()
    faulty.mend()
    faulty.extract_the_rest()


def test_an_engine_killed_in_the_middle_of_extraction(faulty):
    faulty.forget_shards()
    faulty.break_module("engine/in_process", SLOW_ANSWERS)
    kept = len(faulty.shards())
    process = faulty.start(LANE, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    wait(process, lambda: len(faulty.shards()) > kept)
    family = psutil.Process(process.pid).children(recursive=True)
    (engine,) = [p for p in family if "EngineCore" in title(p)]
    engine.kill()
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out  # it went on with another engine
    assert "EngineCore" in faulty.log(EXTRACTION)
    assert faulty.status(EXTRACTION)["state"] == "done"
    faulty.nothing_left()
    assert not any(p.is_running() for p in family)
    lane = faulty.project.read(LANE)
    assert lane["quarantined"] == {}
    assert 0 < lane["extracted_samples"] < lane["samples"]


def test_a_disk_that_fills_up(faulty):
    may = subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True)
    if may.returncode:
        pytest.skip("a small file system cannot be mounted here without being root")
    faulty.forget_shards()
    faulty.break_module(
        "engine/in_process", SLOW_ANSWERS
    )  # the disk is full long before the last shard
    store = faulty.folder / "results/store/hidden_states"
    kept = faulty.folder / "kept"
    script = 'cp -r "$1" "$2" && mount -t tmpfs -o size=12m small "$1" && cp -r "$2"/. "$1"; shift'
    # There is room when the lane begins; another process takes it after the first shard.
    script += '; count() { find "$STORE" -name "*.safetensors" | wc -l; }; before=$(count)'
    script += '; (until [ "$(count)" -gt $before ]; do sleep 0.02; done'
    script += '; cat /dev/zero >"$STORE/other" 2>/dev/null) &'
    # What it wrote must outlast the mount, so that the next run can continue.
    script += ' "${@:2}"; status=$?; rm "$STORE/other"; cp -r "$STORE"/. "$1"; exit $status'
    done = subprocess.run(
        ["unshare", "-Urm", "bash", "-c", script, "-", store, kept, *faulty.command(LANE)],
        cwd=faulty.folder,
        env={**os.environ, "PYTHONPATH": "", "MARK": faulty.mark, "STORE": str(store)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "the disk is full" in faulty.log(EXTRACTION)
    assert "the disk is full" in done.stdout + done.stderr
    faulty.nothing_left()
    shutil.rmtree(store)
    kept.rename(store)
    assert not list(store.rglob(".*"))  # nothing half-written
    faulty.mend()
    faulty.extract_the_rest()


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:2])
    except psutil.Error:  # it has ended
        return ""


# Training


def wait(process: subprocess.Popen, condition, timeout: float = 240) -> None:
    end = time.time() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.time() < end, "the expected state was not reached in time"
        time.sleep(0.02)


def target(name: str) -> str:
    return f"results/f/drafters/{name}/metrics.jsonl"


def train_the_rest(faulty, name: str) -> None:
    """The next run continues from a checkpoint, and every step is there once."""
    faulty.succeed(target(name))
    assert "Resuming" in faulty.log(f"train_drafter/{name}")
    lines = [json.loads(x) for x in (faulty.folder / target(name)).read_text().splitlines()]
    steps = [line["step"] for line in lines if not line.get("validation")]
    assert steps == list(range(len(steps)))


def test_a_trainer_that_loops(faulty):
    faulty.break_module("drafter/recorder", ENDLESS_LOOP)
    done = faulty.run(target("loop"))
    assert done.returncode != 0
    status = faulty.status("train_drafter/loop")
    assert (status["state"], status["exit"]) == ("stalled", 75)
    assert "cores busy" in status["reason"]
    assert status["reason"] in done.stdout
    assert "endless_loop" in faulty.log("train_drafter/loop")  # in the stacks
    faulty.nothing_left()
    faulty.mend()
    train_the_rest(faulty, "loop")


def test_a_trainer_that_is_stopped(faulty):
    process = faulty.start(target("stop"))
    store = faulty.folder / "results/store/drafters"
    before = set(store.glob("*/checkpoints/step-*"))
    wait(process, lambda: set(store.glob("*/checkpoints/step-*")) - before)
    trainers = [p for p in marked_processes(faulty.mark) if "train_drafter.py" in title(p)]
    (trainer,) = trainers
    trainer.send_signal(signal.SIGSTOP)
    out, _ = process.communicate(timeout=180)
    status = faulty.status("train_drafter/stop")
    assert (status["state"], status["exit"]) == ("stalled", 75)
    assert f"{trainer.pid} (python" in status["reason"]
    assert "was stopped by a signal" in status["reason"]
    assert status["reason"] in out
    faulty.nothing_left()
    assert not psutil.pid_exists(trainer.pid)
    train_the_rest(faulty, "stop")


def test_nan_in_a_shard(faulty, monkeypatch):
    import torch

    from aerie.states.convention import Convention
    from aerie.states.shard import Sample, Shard
    from aerie.states.store import Store

    lane = faulty.project.read(LANE)
    found = lane["convention"]
    entry = next(s for s in lane["shards"] if s["split"] == "train")
    convention = Convention(
        found["verifier"],
        tuple(found["layer_ids"]),
        found["hidden_size"],
        found["format"],
        found["last_state"],
    )
    store = Store(faulty.folder / "results/store", convention)
    path = store.path(entry["id"])
    whole, manifest = path.read_bytes(), (faulty.folder / LANE).read_bytes()
    with Shard(path) as shard:
        read = [shard.read(i) for i in range(len(shard.samples))]
    samples = [
        Sample(i, s.tokens, s.states.clone()) for i, s in zip(entry["samples"], read, strict=True)
    ]
    samples[-1].states[:, -1, 3] = torch.nan
    path.unlink()
    monkeypatch.setattr("aerie.states.shard_writer.check_states", lambda *_: None)
    store.write(entry["id"], samples)
    entry["bytes"] = path.stat().st_size
    (faulty.folder / LANE).write_text(json.dumps(lane))

    done = faulty.run(target("nan"))
    assert done.returncode != 0
    reason = faulty.status("train_drafter/nan")["reason"]
    assert "the loss is nan" in reason
    assert reason in done.stdout
    faulty.nothing_left()
    path.write_bytes(whole)
    (faulty.folder / LANE).write_bytes(manifest)
    faulty.succeed(target("nan"))
