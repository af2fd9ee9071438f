"""Training data: samples of shards, their alignment, cuts and order."""

from dataclasses import replace

import pytest
import torch
from speculators.models.eagle3.data import shift_batch

from aerie.common.errors import InputError
from aerie.drafter.data import (
    PackSampler,
    PlacedSample,
    ShardDataset,
    describe_packing,
    place_samples,
)
from aerie.drafter.errors import TrainingFailed
from aerie.samples.file import TokenizedSample
from aerie.states.convention import Convention
from aerie.states.facts import file_checksum
from aerie.states.manifest import LaneManifest, LaneShard, ManifestConvention
from aerie.states.shard import Sample
from aerie.states.store import Store

CONVENTION = Convention("f" * 32, (1, 2, 6), 8)


def entry_of(path, sample):
    return LaneShard(
        id=path.stem,
        file=path.name,
        samples=[sample],
        tokens=5,
        bytes=path.stat().st_size,
        checksum=file_checksum(path),
        split="train",
    )


def manifest_of(entries, convention=CONVENTION, left_out=()):
    tokens = sum(entry.tokens for entry in entries)
    return LaneManifest(
        convention=ManifestConvention.of(convention),
        shards=entries,
        samples=len(entries),
        tokens=tokens,
        raw_bytes=tokens * convention.bytes_per_token(),
        bytes=sum(entry.bytes for entry in entries),
        quarantined=dict.fromkeys(left_out, "no"),
    )


@pytest.fixture
def shard(tmp_path):
    """One sample of five tokens; the state of position i in layer k is 10 i + k + less than one."""
    tokens = torch.tensor([5, 6, 7, 8, 9])
    states = torch.stack([torch.full((3, 8), 10.0 * i) for i in range(5)])
    states += torch.arange(3)[None, :, None] + torch.arange(8)[None, None, :] / 8
    store = Store(tmp_path, CONVENTION)
    path = store.write("0" * 32, [Sample("r", tokens, states.to(torch.bfloat16))])
    return path


def make_dataset(shard, max_len=16, sample=None):
    return ShardDataset([PlacedSample(sample or row(), shard, 0)], max_len, torch.float32)


def row(tokens=(5, 6, 7, 8, 9), mask=(False, False, True, True, True)):
    return TokenizedSample("r", "r", "s", "train", list(tokens), list(mask), 2, 2)


def test_slots_follow_the_alignment_convention(shard):
    dataset = make_dataset(shard)
    batch = shift_batch(dataset[0])
    # Slot i: embed(x[i+1]), states of position i, teacher after x[i+1], mask of x[i+1].
    assert batch["input_ids"].tolist() == [6, 7, 8, 9]
    assert batch["loss_mask"].tolist() == [False, True, True, True]
    assert [int(x) // 10 for x in batch["hidden_states"][:, 0]] == [0, 1, 2, 3]
    assert [int(x) // 10 for x in batch["verifier_last_hidden_states"][:, 0]] == [1, 2, 3, 4]
    # Layers 1 and 2 are fed side by side, layer 6 is the teacher's.
    assert [int(x) % 10 for x in batch["hidden_states"][0, [0, 8]]] == [0, 1]
    assert int(batch["verifier_last_hidden_states"][0, 0]) % 10 == 2
    assert dataset.approx_lengths == [4]


def test_states_of_other_tokens_stop_the_training(shard):
    dataset = make_dataset(shard, sample=row(tokens=(5, 6, 7, 8, 1)))
    with pytest.raises(TrainingFailed, match=r"belong to other tokens.*moved.*Start the run again"):
        dataset[0]
    assert not shard.exists()  # so that the next run extracts it


def test_states_stored_for_another_loss_mask_stop_the_training(tmp_path):
    """They are zeros where this mask takes a loss; training would learn from the zeros."""
    tokens, mask = torch.arange(5, 10), [False, False, True, True, True]
    convention = Convention("f" * 32, (1, 2, 6), 8, last_state="supervised")
    store = Store(tmp_path, convention)
    states = torch.randn(5, 3, 8).bfloat16()
    path = store.write("0" * 32, [Sample("r", tokens, states, mask)])
    make_dataset(path, sample=row(mask=mask))[0]
    wrong = make_dataset(path, sample=row(mask=[False, True, *mask[2:]]))
    with pytest.raises(TrainingFailed, match=r"another loss mask.*Start the run again"):
        wrong[0]


@pytest.mark.parametrize("what", ["a lane too few", "another corpus", "another convention"])
def test_manifests_of_other_samples_are_refused(tmp_path, shard, what):
    manifest = manifest_of([entry_of(shard, "r")])
    rows, other = {"r": row()}, manifest_of([], left_out=["q"])
    if what == "a lane too few":
        rows["q"] = row()
        (placed,) = place_samples(rows, [manifest, other], tmp_path)["train"]
        assert (placed.sample.id, placed.shard, placed.number) == ("r", shard, 0)
        manifests = [manifest]
    elif what == "another corpus":
        manifests = [manifest, other]
    else:
        rows["q"] = row()
        manifests = [manifest, manifest_of([], replace(CONVENTION, format="raw"), ["q"])]
    with pytest.raises(InputError, match=r"lane-\*\.json"):
        place_samples(rows, manifests, tmp_path)


def test_a_damaged_shard_is_named_and_moved_aside(shard):
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    dataset = make_dataset(shard)
    with pytest.raises(TrainingFailed, match=rf"{shard}.*moved.*Start the run again"):
        dataset[0]
    assert not shard.exists()
    assert (shard.parent / "damaged" / shard.name).read_bytes() == bytes(damaged)
    # Another worker that reads it later fails in the same way.
    with pytest.raises(TrainingFailed, match="Start the run again"):
        make_dataset(shard)[0]


def test_pieces_of_a_long_sample_keep_their_positions(shard):
    sample = row(mask=(False, False, True, False, True))
    dataset = make_dataset(shard, 2, sample)
    first, second = (shift_batch(dataset[i]) for i in range(len(dataset)))
    assert dataset.approx_lengths == [2, 1]
    assert first["input_ids"].tolist() == [6, 7]
    assert second["input_ids"].tolist() == [9]
    assert second["loss_mask"].tolist() == [True]
    assert second["position_ids"].tolist() == [4]
    assert int(second["hidden_states"][0, 0]) // 10 == 3
    assert int(second["verifier_last_hidden_states"][0, 0]) // 10 == 4


def test_an_answer_longer_than_a_sequence_is_learned_once(shard):
    sample = row(mask=(False, True, True, True, True))
    dataset = make_dataset(shard, 2, sample)
    parts = [shift_batch(dataset[i]) for i in range(len(dataset))]
    learned = [int(x) for p in parts for x in p["input_ids"][p["loss_mask"]]]
    assert learned == [6, 7, 8, 9]
    assert all(len(p["input_ids"]) <= 2 for p in parts)
    sampler = PackSampler(dataset, 2, seed=0, shuffle=True)
    assert describe_packing(dataset, sampler).cut_samples == 1


@pytest.mark.parametrize("storage", ["lossless", "fp8", "raw"])
@pytest.mark.parametrize("last_state", ["all", "supervised"])
def test_the_order_does_not_depend_on_lanes_or_storage(tmp_path, storage, last_state):
    store = Store(tmp_path, Convention("f" * 32, (1, 2, 6), 8, storage, last_state))
    entries, rows = [], {}
    for name in "cab":
        tokens, mask = torch.arange(ord(name), ord(name) + 5), [False, True, True, False, True]
        sample = Sample(name, tokens, torch.randn(5, 3, 8).bfloat16(), mask)
        key = store.key(tokens.tolist(), mask)  # a shard's name comes from keys such as this
        path = store.write(key, [sample])
        entries.append(entry_of(path, name))
        rows[name] = TokenizedSample(name, name, "s", "train", tokens.tolist(), mask, 2, 2)

    def order(*lanes):
        manifests = [manifest_of(shards, store.convention) for shards in lanes]
        return [p.sample.id for p in place_samples(rows, manifests, tmp_path)["train"]]

    assert order(entries) == order(entries[1:], entries[:1]) == ["a", "b", "c"]


def test_ranks_share_an_epoch_and_resume_in_its_middle(shard, monkeypatch):
    count = 50
    placed = [PlacedSample(row(tokens=range(9), mask=[True] * 9), shard, 0)] * count
    dataset = ShardDataset(placed, 16, torch.float32)
    monkeypatch.setattr("aerie.drafter.data.get_dp_size", lambda: 2)
    batches = []
    for rank in range(2):
        monkeypatch.setattr("aerie.drafter.data.get_dp_rank", lambda rank=rank: rank)
        sampler = PackSampler(dataset, 16, seed=3, shuffle=True)
        sampler.set_epoch(1)
        batches.append(list(sampler))
        # What speculators' trainer does to resume after five steps.
        sampler._cached_generated_batches = (1, sampler._generate_batches(1)[5:])
        assert list(sampler) == batches[-1][5:]
        sampler.set_epoch(2)
        assert len(sampler) == len(batches[-1])
    assert len(batches[0]) == len(batches[1]) == 13
    assert sorted(i for rank in batches for batch in rank for i in batch) == list(range(count))


def test_a_shard_of_another_size_than_its_manifest_is_named(tmp_path, shard):
    manifest = manifest_of([entry_of(shard, "r")])
    found = place_samples({"r": row()}, [manifest], tmp_path)
    assert found["train"] == [PlacedSample(row(), shard, 0)]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(Exception, match="missing or cut short"):
        place_samples({"r": row()}, [manifest], tmp_path)
