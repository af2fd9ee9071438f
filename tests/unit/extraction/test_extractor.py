"""Faults of samples, states and engines, forced with stand-ins for the engine and the teacher."""

import contextlib

import pytest
import torch

from aerie.common.errors import InputError, UnusableStates
from aerie.engine.protocol import EngineDied
from aerie.states.room import check_room
from aerie.states.store import is_done
from support.lanes import WIDTH, Lane, make_samples, nearly, refusing, true_states


def test_a_second_run_finds_the_shards_of_the_first(lane):
    manifest = lane.run()
    assert manifest["samples"] == 60 == manifest["extracted_samples"]
    assert lane.states_are_right()
    assert not list(lane.folder.iterdir())
    again = lane.run()
    assert lane.engine.started == 0
    assert {**again, "extracted_samples": 60} | {"extracted_tokens": 0} == {
        **manifest,
        "extracted_tokens": 0,
    }


FAULTS = {
    "engine error": lambda s: "the engine refuses it",
    "zeros": torch.zeros_like,
    "half of it zeros": lambda s: torch.cat([s[..., : WIDTH // 2], 0 * s[..., WIDTH // 2 :]], -1),
    "constant": lambda s: torch.full_like(s, 0.5),
    "nan": lambda s: s * float("nan"),
    "infinity": lambda s: s * float("inf"),
    "short": lambda s: s[:-1],
    "shifted": lambda s: s.roll(1, 0),
    "another's": lambda s: true_states(list(range(len(s)))),
    "repeated": lambda s: s[:1].expand_as(s),
    "of other layers": lambda s: s.roll(1, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_fails_once_is_tried_again_alone(lane, fault):
    spoil = FAULTS[fault]
    manifest = lane.run(lambda n, key, s: spoil(s) if key == "s30" else s)
    assert manifest["quarantined"] == {}
    assert lane.engine.alone[-1] == "s30-again" or "s30-again" in lane.engine.alone
    assert len(lane.read()) == 60
    assert lane.states_are_right()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_always_fails_is_left_out_with_its_reason(lane, fault):
    spoil = FAULTS[fault]

    def always(n, key, states):
        return spoil(states) if key.split("-")[0] in ("s0", "s30") else states

    manifest = lane.run(always)
    assert set(manifest["quarantined"]) == {"s0", "s30"}
    assert all(manifest["quarantined"].values())
    assert manifest["samples"] == 58 == len(lane.read())
    assert lane.states_are_right()
    # The next run knows the reason and does not try the sample again.
    again = lane.run(always)
    assert again["quarantined"] == manifest["quarantined"]
    assert lane.engine.started == 0


def test_a_shard_without_usable_samples_is_not_tried_again(lane):
    manifest = lane.run(refusing(lane.shards[1]), floor=0.8)
    assert manifest["quarantined"] == dict.fromkeys(lane.shards[1].samples, "no")
    assert manifest["samples"] == 48
    assert not list(lane.store.folder.glob(".*.lease"))
    again = lane.run(refusing(lane.shards[1]), floor=0.8)
    assert lane.engine.started == 0
    assert again["quarantined"] == manifest["quarantined"]
    assert again["samples"] == 48
    check_room(lane.store, 0, 0.0)
    assert all(is_done(lane.store, s.id) for s in lane.shards)


def test_a_lane_that_kept_too_few_samples_tries_all_of_them_in_the_next_run(lane):
    with pytest.raises(InputError, match="min_kept_share"):
        lane.run(refusing(*lane.shards), floor=0.7)
    assert lane.run()["samples"] == 60


def test_no_engine_starts_when_too_many_samples_are_left_out_already(lane):
    lane.run(refusing(lane.shards[1]), floor=0.8)
    lane.store.path(lane.shards[3].id).unlink()
    with pytest.raises(InputError, match=r"12 of 60 .*Samples that were left out"):
        lane.run(floor=0.9)
    assert lane.engine.started == 0


def test_a_sample_longer_than_the_engine_takes_is_left_out(tmp_path):
    samples = make_samples(20)
    samples[3].input_ids = list(range(1, 60)) * 2
    lane = Lane(tmp_path, samples)
    manifest = lane.run()
    assert manifest["quarantined"] == {"s3": "118 tokens; the engine takes 99"}
    assert manifest["samples"] == 19


def test_a_lane_that_loses_too_many_samples_fails_at_once_and_keeps_complete_shards(lane):
    def late(n, key, states):
        return "no" if int(key[1:].split("-")[0]) >= 36 else states

    with pytest.raises(InputError, match="min_kept_share") as error:
        lane.run(late)
    assert "s3" in str(error.value)
    assert len(lane.read()) == 36
    assert len(lane.engine.asked) < 60 + 8
    assert lane.run()["samples"] == 60
    assert not any(key in ("s0", "s20") for key in lane.engine.asked)


def test_states_that_are_wrong_throughout_stop_the_lane_after_its_first_shard(lane):
    with pytest.raises(UnusableStates, match="aux_layer_ids"):
        lane.run(lambda n, key, s: s.roll(1, 1), limit=lane.two_shards)  # shifted by one layer
    assert lane.read() == {}
    assert len(lane.engine.asked) <= 36
    assert not any(key.endswith("-again") for key in lane.engine.asked)


@pytest.mark.parametrize("size", [1, 4, 12])
def test_last_states_that_are_often_right_are_detected_in_small_shards_too(tmp_path, size):
    """The state of an earlier layer: in every other sample it leads to the second best token."""
    lane = Lane(tmp_path, make_samples(60), size)

    def near(n, key, states):
        if int(key.removesuffix("-again")[1:]) % 2:
            return states
        changed = states.clone()
        changed[-1, -1] = nearly(states[-1, -1])
        return changed

    with pytest.raises(UnusableStates, match="aux_layer_ids"):
        lane.run(near)
    assert lane.read() == {}
    assert lane.run()["samples"] == 60


def test_another_model_stops_the_lane(lane):
    other = torch.Generator().manual_seed(77)
    with pytest.raises(UnusableStates):
        lane.run(lambda n, key, s: torch.randn(s.shape, generator=other).to(torch.bfloat16))


def test_two_swapped_samples_are_detected(lane):
    one, two = [s for s in lane.samples.values() if len(s.input_ids) == 8][:2]
    other = {one.id: two, two.id: one}

    def swap(n, key, states):
        return true_states(other[key].input_ids) if key in other else states

    lane.run(swap)
    assert lane.states_are_right()


def test_a_dead_engine_is_restarted_and_the_sample_that_kills_it_is_left_out(lane):
    def poison(n, key, states):
        if key.startswith("s17"):
            raise EngineDied("segmentation fault")
        return states

    manifest = lane.run(poison)
    assert lane.engine.started == 3
    assert list(manifest["quarantined"]) == ["s17"]
    assert "segmentation fault" in manifest["quarantined"]["s17"]
    assert len(lane.read()) == 59
    assert lane.states_are_right()


def test_an_engine_that_always_dies_fails_the_lane(lane):
    def dies(n, key, states):
        raise EngineDied("no memory")

    with pytest.raises(EngineDied, match="3 engines died"):
        lane.run(dies, floor=0.0)


def test_staged_states_stay_within_their_limit(lane):
    most = 0

    def watch(n, key, states):
        nonlocal most
        size = 0
        for path in list(lane.folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # a writer reads and removes them
                size += path.stat().st_size - 400
        most = max(most, size)
        return states

    assert lane.run(watch, limit=lane.two_shards)["samples"] == 60
    assert 0 < most <= lane.two_shards


def test_the_engine_never_computes_samples_of_two_shards_together(lane):
    """In bf16 a state's last bits depend on the batch; a killed lane would write other shards."""
    shard_of = {i: shard.id for shard in lane.shards for i in shard.samples}
    batches = []

    def watch(n, key, states):
        batches.append({shard_of[key], *(shard_of[r.key] for r in lane.engine.flying)})
        return states

    lane.run(watch)
    assert len(batches) == 60
    assert all(len(batch) == 1 for batch in batches)
