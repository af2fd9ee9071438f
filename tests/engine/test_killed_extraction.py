"""Faults forced on the real engine, and lanes killed at random."""

import json
import sys

import pytest

from support.models import TINY_ENGINE, make_verifier
from support.paths import ROOT
from support.processes import run_python

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FAULTS = """
import contextlib, json, sys, time
from pathlib import Path

if __name__ == "__main__":
    import torch
    import vllm
    from aerie.engine import connector
    from aerie.common.errors import InputError, UnusableStates
    from aerie.common.progress import JobProgress
    from aerie import config
    from aerie.engine.in_process import InProcessEngine
    from aerie.engine.protocol import Failure, Request
    from aerie.extraction.run import describe_lane, extract
    from aerie.extraction.work import LaneWork
    from aerie.states.convention import Convention
    from aerie.states.shard import Shard
    from aerie.states.store import Store
    from aerie.states.teacher import Teacher
    from aerie.samples.file import TokenizedSample
    from aerie.samples.shards import plan_shard
    from aerie.engine.staging import Staging

    model, other, root = Path({model!r}), Path({other!r}), Path({root!r})
    ids, found = [0, 1, 3, 6], {{}}
    torch.manual_seed(1)
    rows = []
    for number in range(36):
        tokens = torch.randint(3, 400, (5 + 3 * number,)).tolist()
        name = f"s{{number}}"
        rows.append(TokenizedSample(name, name, "x", "train", tokens, [], 1, -1))
    shards = [plan_shard("train", rows[i : i + 12]) for i in range(0, 36, 12)]

    @contextlib.contextmanager
    def engine(capture=ids):
        with (
            Staging() as staging,
            InProcessEngine(
                model,
                config.Engine(**{settings!r}),
                max_model_len=160,
                capture_ids=capture,
                staging=staging.folder,
            ) as started,
        ):
            yield started

    def lane(name, start, teacher=model):
        store = Store(root / name, Convention("f" * 32, tuple(ids), 128))
        work = LaneWork(store, {{r.id: r for r in rows}}, shards)
        with JobProgress("test", len(rows), "samples") as progress:
            counts = extract(
                work,
                start,
                lambda: Teacher(teacher),
                progress,
                staging_bytes=1 << 30,
                min_kept_share=0.9,
            )
        return describe_lane(work, counts, 0.9).as_json()

    def refused(name, *arguments, **more):
        try:
            lane(name, *arguments, **more)
        except (InputError, UnusableStates) as error:
            assert not list((root / name).rglob("*.safetensors"))
            return str(error)
        raise AssertionError(f"{{name}} was taken")

    real = vllm.LLM
    vllm.LLM = lambda **options: real(**{{**options, "enable_prefix_caching": True}})
    found["prefix"] = refused("prefix", engine)
    vllm.LLM = real
    found["layers"] = refused("layers", lambda: engine([0, 1, 3, 5]))
    started = []

    @contextlib.contextmanager
    def again():
        with engine() as e:
            started.append(e)
            yield e

    found["model"] = refused("model", again, teacher=other)
    with engine() as e:
        answers = list(
            e.run(iter([Request("a", [5000], 1), Request("b", [5] * 500, 1), Request("c", [7], 1)]))
        )
        found["refused"] = {{a.key: isinstance(a, Failure) for a in answers}}

        copy, failures = connector.HiddenStatesConnector._copy_on_cpu, []

        def failing(self, pending):
            if len(pending.token_ids) == len(rows[5].input_ids) or (
                len(pending.token_ids) == len(rows[20].input_ids) and not failures
            ):
                failures.append(len(pending.token_ids))
                raise RuntimeError("the copy failed")
            copy(self, pending)

        connector.HiddenStatesConnector._copy_on_cpu = failing
        manifest = lane("connector", lambda: contextlib.nullcontext(e))
        connector.HiddenStatesConnector._copy_on_cpu = copy
        found["connector"] = manifest["quarantined"]
        found["kept"] = manifest["samples"]
    deaths = []

    @contextlib.contextmanager
    def dying():
        with engine() as e:
            step, deadline = e.llm.llm_engine.step, time.monotonic() + 60

            def stumble():
                # In the second shard, when the first is there.
                if e.llm.llm_engine.asked > len(shards[0].samples) and not deaths:
                    while not list((root / "dying").rglob("*.safetensors")):
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                    deaths.append(1)
                    raise RuntimeError("out of memory")
                return step()

            add = e.llm.llm_engine.add_request
            e.llm.llm_engine.asked = 0

            def count(*arguments):
                e.llm.llm_engine.asked += 1
                add(*arguments)

            e.llm.llm_engine.add_request = count
            e.llm.llm_engine.step = stumble
            yield e

    manifest = lane("dying", dying)
    found["after death"] = [manifest["samples"], len(manifest["quarantined"]), len(deaths)]
    print("FOUND", json.dumps(found))
"""


def test_engine_faults_are_detected_and_lose_only_what_they_affect(tmp_path, tiny_verifier):
    other = make_verifier(tmp_path / "other", seed=5)
    output = run_python(
        FAULTS.format(
            model=str(tiny_verifier),
            other=str(other),
            root=str(tmp_path / "root"),
            settings=TINY_ENGINE,
        ),
        timeout=600,
    )
    found = json.loads(output.split("FOUND", 1)[1])
    assert "prefix caching" in found["prefix"]
    assert "layer ids" in found["layers"]
    assert "does not lead to the token" in found["model"]
    assert found["refused"] == {"a": True, "b": True, "c": False}
    assert list(found["connector"]) == ["s5"]
    assert "the copy failed" in found["connector"]["s5"]
    assert found["kept"] == 35
    assert found["after death"] == [36, 0, 1]


def test_a_lane_killed_at_random_leaves_the_store_of_an_undisturbed_run(tiny_verifier):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from kill_extraction import kill_and_compare

    counts = kill_and_compare(tiny_verifier, kills=3, samples=320, seed=1)
    assert counts["killed"] == 3
    assert counts["files"] > 10
    assert counts["different"] == 0
