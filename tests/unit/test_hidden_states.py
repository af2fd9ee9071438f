import json
import struct

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie import hidden_states as hs
from aerie.hidden_states import BadStates, Convention, Sample, Shard, Store

CONVENTION = Convention("f" * 32, (1, 2, 4), 16)


def sample(name: str, tokens: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, 3, 16, generator=generator).to(torch.bfloat16)
    return Sample(name, torch.arange(tokens, dtype=torch.int64) + seed, states)


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=400), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_every_bit_pattern_survives_packing(bits, tokens):
    width = max(1, len(bits) // tokens)
    array = np.resize(np.array(bits, np.uint16), (tokens, 1, width))
    states = torch.from_numpy(array).view(torch.bfloat16)
    exponents, rest = hs.pack(states)
    back = hs.unpack(exponents, rest, (tokens, 1, width))
    assert np.array_equal(back.view(torch.uint16).numpy(), array)


@pytest.mark.parametrize("form", ["lossless", "raw"])
def test_a_shard_gives_back_each_sample_bit_for_bit(tmp_path, form):
    store = Store(tmp_path, Convention("f" * 32, (1, 2, 4), 16, form))
    samples = [sample("a", 5), sample("b", 1, 3), sample("c", 30, 7)]
    path = store.write("0" * 32, samples)
    with Shard(path) as shard:
        assert [s["id"] for s in shard.samples] == ["a", "b", "c"]
        assert shard.layer_ids == (1, 2, 4)
        for number in (2, 0, 1):
            got = shard.read(number)
            assert torch.equal(got.tokens, samples[number].tokens)
            assert torch.equal(
                got.states.view(torch.uint16), samples[number].states.view(torch.uint16)
            )


def test_a_reader_of_somebody_else_reads_it(tmp_path):
    """Written from docs/formats.md alone: safetensors by hand, zstandard, bits."""
    path = Store(tmp_path, CONVENTION).write("0" * 32, [sample("a", 4), sample("b", 9, 5)])
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    meta = header["__metadata__"]
    entry = json.loads(meta["samples"])[1]
    width = len(json.loads(meta["layer_ids"])) * int(meta["hidden_size"])

    def blob(name):
        start, end = header[f"000001.{name}"]["data_offsets"]
        return raw[8 + length + start : 8 + length + end]

    tokens = np.frombuffer(blob("tokens"), "<i4")
    unpack = zstandard.ZstdDecompressor().decompress
    exponents = np.frombuffer(unpack(blob("exponents")), np.uint8).reshape(width, entry["tokens"])
    rest = np.frombuffer(unpack(blob("rest")), np.uint8).reshape(entry["tokens"], width)
    bits = (
        ((rest.astype(np.uint32) & 0x80) << 8)
        | (exponents.T.astype(np.uint32) << 7)
        | (rest & 0x7F)
    )
    values = (bits << 16).view(np.float32)
    expected = sample("b", 9, 5)
    assert entry["id"] == "b"
    assert tokens.tolist() == expected.tokens.tolist()
    assert np.array_equal(values, expected.states.float().numpy().reshape(9, width))


def spoil(kind: str, s: Sample) -> Sample:
    states = s.states.clone()
    if kind == "zeros":
        states.zero_()
    elif kind == "constant":
        states.fill_(0.5)
    elif kind == "nan":
        states[2, 1, 3] = float("nan")
    elif kind == "infinity":
        states[0, 0, 0] = float("inf")
    elif kind == "short":
        states = states[:-1]
    elif kind == "repeated":
        states[:] = states[:1].clone()
    elif kind == "layer missing":
        states = states[:, :-1]
    elif kind == "float32":
        states = states.float()
    return Sample(s.id, s.tokens, states)


@pytest.mark.parametrize(
    "kind",
    ["zeros", "constant", "nan", "infinity", "short", "repeated", "layer missing", "float32"],
)
def test_wrong_states_never_get_a_name(tmp_path, kind):
    store = Store(tmp_path, CONVENTION)
    with pytest.raises(BadStates):
        store.write("0" * 32, [sample("a", 5), spoil(kind, sample("b", 8, 1))])
    assert not store.has("0" * 32)
    assert not list(store.folder.glob("*")) if store.folder.exists() else True


def test_any_flipped_byte_or_cut_is_found_when_read(tmp_path):
    path = Store(tmp_path, CONVENTION).write("0" * 32, [sample("a", 20), sample("b", 20, 2)])
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    random = np.random.default_rng(0)
    damaged = [whole[: int(n)] for n in random.integers(0, len(whole), 20)]
    for position in random.integers(8 + header, len(whole), 60):
        copy = bytearray(whole)
        copy[position] ^= 1 << int(random.integers(8))
        damaged.append(bytes(copy))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(BadStates), Shard(path) as shard:
            for number in range(len(shard.samples)):
                shard.read(number)


def test_a_foreign_file_is_named_in_the_error(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"PK\x03\x04 not ours")
    with pytest.raises(BadStates, match=r"x\.safetensors"):
        Shard(path)


def test_samples_are_found_in_any_shard_of_the_convention(tmp_path):
    store = Store(tmp_path, CONVENTION)
    store.write("0" * 32, [sample("a", 5), sample("b", 6, 1)])
    key = hs.sample_key(sample("b", 6, 1).tokens.tolist())
    assert store.find_samples({key, "nothing"}) == {key: (store.path("0" * 32), 1)}
    other = Store(tmp_path, Convention("e" * 32, (1, 2, 4), 16))
    assert other.find_samples({key}) == {}


def groups(ids, mean=16):
    return [tuple(ids[i] for i in g) for g in hs.group_records(ids, mean)]


def test_groups_hold_every_record_once_within_their_bounds():
    ids = [f"record-{i}" for i in range(3000)]
    found = groups(ids)
    assert [i for g in found for i in g] == ids
    assert all(4 <= len(g) <= 64 for g in found[:-1])
    assert 10 < np.mean([len(g) for g in found]) < 30


@pytest.mark.parametrize("edit", ["change", "remove", "insert"])
def test_an_edit_in_the_middle_touches_at_most_two_groups(edit):
    ids = [f"record-{i}" for i in range(5000)]
    before = set(groups(ids))
    for position in (17, 1234, 2500, 4990):
        edited = list(ids)
        if edit == "change":
            edited[position] = "another"
        elif edit == "remove":
            del edited[position]
        else:
            edited.insert(position, "another")
        assert len(set(groups(edited)) - before) <= 2


def test_appending_touches_only_the_last_group():
    ids = [f"record-{i}" for i in range(1400)]
    lost = set(groups(ids[:1000])) - set(groups(ids))
    assert len(lost) <= 1
