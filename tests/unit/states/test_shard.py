"""The format of a shard: what is written is read back, and damage is found."""

import errno
import json
import os

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from aerie.common.errors import AerieError, InputError, UnusableStates
from aerie.states import codec
from aerie.states.convention import FORMATS, Convention
from aerie.states.ids import sample_key
from aerie.states.shard import Sample, Shard
from aerie.states.store import Store

CONVENTION = Convention("f" * 32, (1, 2, 4), 16)


def sample(name: str, tokens: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, 3, 16, generator=generator).to(torch.bfloat16)
    return Sample(name, torch.arange(tokens, dtype=torch.int64) + seed, states)


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=400), st.integers(1, 5), st.data())
@settings(max_examples=200, deadline=None)
def test_packing_preserves_every_bit_pattern(values, tokens, data):
    width = 8 * max(1, len(values) // (8 * tokens))
    bits = np.resize(np.array(values, np.uint16), (tokens, 2, width))
    mask = data.draw(st.none() | st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    stored = codec.rows_by_layer(tokens, 2, mask)
    base, means = codec.exponent_base([(bits, stored)])
    packed = [np.frombuffer(p, np.uint8) for p in codec.pack(bits, stored, base, means)]
    back = np.zeros_like(bits)
    codec.unpack(packed, stored, base, back)
    expected = bits.copy()
    if mask is not None:
        expected[~np.array(mask), -1] = 0
    assert np.array_equal(back, expected)


@pytest.mark.parametrize("form", ["lossless", "raw"])
def test_a_shard_returns_each_sample_bit_for_bit(tmp_path, form):
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


MASK = [False, False, True, True, False, False, True, True, True]


@pytest.mark.parametrize("last_state", ["all", "supervised"])
def test_a_reader_written_from_the_documentation_reads_a_shard(tmp_path, last_state):
    """Written from docs/formats.md alone: the stock safetensors library, zstandard, bits."""
    convention = Convention("f" * 32, (1, 2, 4), 16, "lossless", last_state)
    samples = [sample("a", 4), sample("b", 9, 5)]
    samples[0].loss_mask, samples[1].loss_mask = [True] * 4, MASK
    path = Store(tmp_path, convention).write("0" * 32, samples)
    expected = samples[1].states.float().numpy()
    if last_state == "supervised":
        expected[~np.array(MASK), -1] = 0

    def unzstd(frame):
        return np.frombuffer(zstandard.decompress(frame.tobytes()), np.uint8)

    with safe_open(path, framework="numpy") as file:
        meta, name = file.metadata(), "000001"
        entry = json.loads(meta["samples"])[1]
        tokens = file.get_tensor(f"{name}.tokens")
        layers, width, length = len(json.loads(meta["layer_ids"])), int(meta["hidden_size"]), 9
        base = file.get_tensor("base")
        high, low = unzstd(file.get_tensor(f"{name}.exponents")), file.get_tensor(f"{name}.low")
        rest = file.get_tensor(f"{name}.rest")
    places = [range(length)] * layers
    if "last_rows" in entry:
        places[-1] = [i for start, end in entry["last_rows"] for i in range(start, end)]
    row = [(k, t) for k in range(layers) for t in places[k]]
    offset, exponent = high[: len(row), None], high[len(row) :].reshape(-1, width)
    exponent = exponent + offset + base[[k for k, _ in row]]
    part = np.arange(8)[:, None]
    low = unzstd(low).reshape(len(row), 1, width // 8) >> part & 1
    rest = rest.reshape(len(row), 7, width // 8)
    last = np.bitwise_or.reduce(rest >> 7 << part[:7], axis=1, keepdims=True)
    seven = np.concatenate([rest & 127, last], axis=1).astype(np.uint16)
    bits = ((seven & 64) << 9 | (seven & 63) << 1 | low).reshape(-1, width)
    bits = bits.astype(np.uint32) | exponent.astype(np.uint32) << 7
    values = np.zeros((length, layers, width), np.float32)
    for (k, t), found in zip(row, bits, strict=True):
        values[t, k] = (found << 16).view(np.float32)

    assert tokens.tolist() == samples[1].tokens.tolist()
    assert np.array_equal(values, expected)


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
    elif kind == "one position zero":
        states[3, 1] = 0
    elif kind == "half zero":
        states[3, 1, :8] = 0
    elif kind == "one position twice":
        states[6, 2] = states[2, 2]
    elif kind == "one layer twice":
        states[:, 2] = states[:, 1]
    elif kind == "another's":
        states = sample("a", 8).states
    return Sample(s.id, s.tokens, states)


@pytest.mark.parametrize(
    "kind",
    [
        "zeros",
        "constant",
        "nan",
        "infinity",
        "short",
        "repeated",
        "layer missing",
        "float32",
        "one position zero",
        "half zero",
        "one position twice",
        "one layer twice",
        "another's",
    ],
)
def test_wrong_states_are_refused_and_leave_no_file(tmp_path, kind):
    store = Store(tmp_path, CONVENTION)
    with pytest.raises(UnusableStates):
        store.write("0" * 32, [sample("a", 8), spoil(kind, sample("b", 8, 1))])
    assert not store.has("0" * 32)
    assert not list(store.folder.glob("*")) if store.folder.exists() else True


def test_a_flipped_bit_or_a_cut_is_found_when_reading(tmp_path):
    path = Store(tmp_path, CONVENTION).write("0" * 32, [sample("a", 20), sample("b", 20, 2)])
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    damaged = [whole[: int(n)] for n in random.integers(0, len(whole), 20)]
    for position in random.integers(0, len(whole), 200):
        copy = bytearray(whole)
        copy[position] ^= 1 << int(random.integers(8))
        damaged.append(bytes(copy))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(UnusableStates), Shard(path) as shard:
            for number in range(len(shard.samples)):
                shard.read(number)


@pytest.mark.parametrize("kind", ["zeros", "constant", "nan", "infinity", "swapped", "shifted"])
def test_states_replaced_inside_a_file_are_found_when_reading(tmp_path, kind):
    """The header is intact, but the states are not those that were checked."""
    store = Store(tmp_path, Convention("f" * 32, (1, 2, 4), 16, "raw"))
    samples = [sample("a", 8), sample("b", 8, 1)]
    path = store.write("0" * 32, samples)
    whole = bytearray(path.read_bytes())
    a, b = (s.states.transpose(0, 1).contiguous().view(torch.uint8).numpy() for s in samples)
    at_a, at_b = whole.index(a.tobytes()), whole.index(b.tobytes())
    if kind == "swapped":
        whole[at_a : at_a + a.nbytes], whole[at_b : at_b + b.nbytes] = b.tobytes(), a.tobytes()
    elif kind == "shifted":
        by_row = samples[0].states.roll(1, 0).transpose(0, 1).contiguous()
        whole[at_a : at_a + a.nbytes] = by_row.view(torch.uint8).numpy().tobytes()
    else:
        spoilt = {"zeros": 0, "constant": 0.5, "nan": float("nan"), "infinity": float("inf")}
        value = torch.full_like(samples[0].states, spoilt[kind]).view(torch.uint8).numpy()
        whole[at_a : at_a + a.nbytes] = value.tobytes()
    path.write_bytes(whole)
    with Shard(path) as shard, pytest.raises(UnusableStates, match="checksum"):
        shard.read(0)


@pytest.mark.parametrize("form", ["lossless", "raw", "fp8"])
def test_supervised_leaves_out_last_states_without_loss(tmp_path, form):
    states = sample("b", 9, 5)
    states.loss_mask = MASK
    sizes = {}
    for last_state in ("all", "supervised"):
        store = Store(tmp_path, Convention("f" * 32, (1, 2, 4), 16, form, last_state))
        path = store.write("0" * 32, [states])
        sizes[last_state] = path.stat().st_size
        with Shard(path) as shard:
            got, left_out = shard.read(0), shard.omitted_bytes()
            key = shard.samples[0]["key"]
    assert left_out == 4 * 16 * 2
    expected = states.states.clone()
    expected[~torch.tensor(MASK), -1] = 0
    assert torch.allclose(got.states.float(), expected.float(), rtol=0.07, atol=0.01)
    assert form == "fp8" or torch.equal(got.states, expected)
    # With another mask other rows are kept, so the key differs.
    assert key != store.key(states.tokens.tolist(), [True] * 9)
    again = Store(tmp_path / "copy", store.convention).write("1" * 32, [got])
    with Shard(again) as shard:
        assert torch.equal(shard.read(0).states, got.states)


def test_fp8_equals_upstreams_rounding(tmp_path):
    from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8

    original = sample("b", 30, 5)
    path = Store(tmp_path, Convention("f" * 32, (1, 2, 4), 16, "fp8")).write("0" * 32, [original])
    with Shard(path) as shard:
        got = shard.read(0)
    assert torch.equal(got.states, dequantize_fp8_tensor(*quantize_tensor_to_fp8(original.states)))


@pytest.mark.parametrize("last_state", ["all", "supervised"])
@pytest.mark.parametrize("form", ["lossless", "raw", "fp8"])
def test_damaged_bytes_are_refused_or_change_nothing(tmp_path, form, last_state):
    convention = Convention("f" * 32, (1, 2, 4), 16, form, last_state)
    samples = [sample("a", 20), sample("b", 9, 50), sample("c", 1, 90)]
    for s in samples:
        s.loss_mask = [i % 3 > 0 for i in range(len(s.tokens))]
    path = Store(tmp_path, convention).write("0" * 32, samples)
    whole = path.read_bytes()
    with Shard(path) as shard:
        right = [shard.read(number) for number in range(3)]
    random, refused = np.random.default_rng(1), 0
    for number in range(240):
        data, length = bytearray(whole), int(random.integers(1, 30))
        at, other = (int(random.integers(len(whole) - 30)) for _ in range(2))
        if number % 4 == 0:
            data[at : at + length] = bytes(length)
        elif number % 4 == 1:
            data[at:at] = random.bytes(length)
        elif number % 4 == 2:
            data[at : at + length] = data[other : other + length]
        else:
            data[at] = int(random.integers(256))
        path.write_bytes(data)
        try:
            with Shard(path) as shard:
                assert len(shard.samples) == 3
                for place, wanted in enumerate(right):
                    got = shard.read(place)
                    assert (got.id, got.loss_mask is None) == (wanted.id, last_state == "all")
                    assert torch.equal(got.tokens, wanted.tokens)
                    assert torch.equal(got.states, wanted.states)
        except UnusableStates:
            refused += 1
    assert refused > 200


def nested(path):
    text = b"[" * 100_000
    path.write_bytes(len(text).to_bytes(8, "little") + text)


NO_SHARDS = {
    "0 bytes, less than": lambda path: path.write_bytes(b""),
    "its header alone should have": lambda path: path.write_bytes(b"PK\x03\x04 not ours"),
    "recursion": nested,
    "another tool's safetensors file": lambda path: save_file({"a": torch.ones(3)}, path),
    "Is a directory": lambda path: path.mkdir(),
    "No such file": lambda path: path.symlink_to("nothing"),
    "symbolic links": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("found", NO_SHARDS)
def test_a_file_that_is_not_a_shard_is_named_with_the_reason(tmp_path, found):
    path = tmp_path / "x.safetensors"
    NO_SHARDS[found](path)
    with pytest.raises(UnusableStates, match=rf"x\.safetensors: not a whole shard: .*{found}"):
        Shard(path)


@pytest.mark.parametrize("version", [1, 3])
def test_a_shard_of_another_format_version_does_not_count_as_damaged(
    tmp_path, monkeypatch, version
):
    monkeypatch.setattr("aerie.common.versions.SHARD_VERSION", version)
    path = Store(tmp_path, CONVENTION).write("0" * 32, [sample("a", 5)])
    monkeypatch.undo()
    with pytest.raises(InputError, match=rf"format version {version}, and .* reads version 2 only"):
        Shard(path)
    try:
        Shard(path)
    except InputError as error:
        assert not isinstance(error, UnusableStates)  # those are moved aside
    # A flipped bit in the version is damage all the same.
    path.write_bytes(path.read_bytes().replace(b'"aerie":"%d"' % version, b'"aerie":"2"'))
    with pytest.raises(UnusableStates, match="checksum"):
        Shard(path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("call", ["open", "read"])
def test_a_shard_counts_as_damaged_only_when_its_file_is_at_fault(
    tmp_path, monkeypatch, number, call
):
    path = Store(tmp_path, CONVENTION).write("0" * 32, [sample("a", 5)])

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as broken, pytest.raises(AerieError) as error:
        if call == "open":
            broken.setattr("pathlib.Path.open", refuse)
            Shard(path)
        with Shard(path) as shard:
            broken.setattr(os, "preadv", refuse)
            shard.read(0)
    assert isinstance(error.value, UnusableStates) == (number == errno.EIO)
    assert str(path) in str(error.value)
    assert os.strerror(number) in str(error.value)


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """Linux reads at most 2 GiB a call; a long sample of a wide verifier is larger."""
    real = os.preadv
    original = sample("a", 30)
    path = Store(tmp_path, CONVENTION).write("0" * 32, [original])
    monkeypatch.setattr(os, "preadv", lambda file, into, at: real(file, [into[0][:100]], at))
    with Shard(path) as shard:
        assert torch.equal(shard.read(0).states, original.states)


def test_fp8_may_round_a_small_layer_to_zero(tmp_path):
    """Some tokens have values of 10,000 in their last layers, and 0.01 in the first."""
    convention = Convention("f" * 32, (1, 2, 4), 16, "fp8")
    original = sample("a", 8)
    original.states[0, 0] *= 0.001
    original.states[0, 2] *= 20_000
    path = Store(tmp_path, convention).write("0" * 32, [original])
    with Shard(path) as shard:
        got = shard.read(0)
    assert not got.states[0, 0].any()
    again = Store(tmp_path / "copy", convention).write("0" * 32, [got])
    assert again.read_bytes() == path.read_bytes()
    got.states[3, 1, 2] = float("nan")
    with pytest.raises(UnusableStates, match="NaN"):
        Store(tmp_path / "copy", convention).write("1" * 32, [got])


@pytest.mark.parametrize("asked", [("zip", "all"), ("raw", "some")])
def test_an_unknown_format_is_refused(tmp_path, asked):
    with pytest.raises(InputError, match="expected one of lossless, raw, fp8"):
        Store(tmp_path, Convention("f" * 32, (1, 2, 4), 16, *asked))


def test_samples_are_found_in_any_shard_of_the_convention(tmp_path):
    store = Store(tmp_path, CONVENTION)
    store.write("0" * 32, [sample("a", 5), sample("b", 6, 1)])
    key = sample_key(sample("b", 6, 1).tokens.tolist())
    assert store.find_samples({key, "nothing"}) == {key: (store.path("0" * 32), 1)}
    other = Store(tmp_path, Convention("e" * 32, (1, 2, 4), 16))
    assert other.find_samples({key}) == {}


def test_a_sample_without_stored_rows_is_kept(tmp_path):
    for form in FORMATS:
        store = Store(tmp_path, Convention("f" * 32, (6,), 16, form, "supervised"))
        states = torch.randn(5, 1, 16).bfloat16()
        path = store.write("0" * 32, [Sample("a", torch.arange(5), states, [False] * 5)])
        with Shard(path) as shard:
            assert not shard.read(0).states.any()
