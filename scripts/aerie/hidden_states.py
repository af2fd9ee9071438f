"""Shards of hidden states: their format, the checks before a shard has its name, the store.

A shard is one safetensors file with the states of many samples, described in docs/formats.md.
It lies under a name made of everything that determines it, so it exists or it does not: it is
never stale. It is written to a temporary name, checked, synced and renamed.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from aerie.files import InputError, digest, whole_file

FORMAT_VERSION = 1
"""Raised when the same samples would be stored differently or must be extracted again."""

ZSTD_LEVEL = 1
QUARANTINE = "damaged"


class BadStates(InputError):
    """States that must not be stored or trained on; the message says what is wrong with them."""


@dataclass(frozen=True)
class Convention:
    """What determines the states of given tokens, and how they are stored.

    `layer_ids`: sorted, the number of layers last (the last layer's output before the final
    norm). `fingerprint`: of the verifier. `format`: `lossless` or `raw`.
    """

    fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    format: str = "lossless"

    @property
    def key(self) -> str:
        return digest(
            FORMAT_VERSION, self.fingerprint, list(self.layer_ids), self.hidden_size, self.format
        )[:16]

    def bytes_per_token(self) -> int:
        """Uncompressed bytes of one token's states."""
        return len(self.layer_ids) * self.hidden_size * 2


@dataclass
class Sample:
    """One sample of a shard: `tokens` int64 [T], `states` bf16 [T, ids, hidden]."""

    id: str
    tokens: torch.Tensor
    states: torch.Tensor


def sample_key(tokens: Iterable[int]) -> str:
    """Hash of a sample's tokens: the name of its states within one convention."""
    return xxhash.xxh3_128_hexdigest(np.asarray(list(tokens), dtype="<i4").tobytes())


def shard_id(sample_keys: Iterable[str]) -> str:
    """Name of the shard that holds these samples in this order, in any convention's folder."""
    return digest(list(sample_keys))


def _bits(states: torch.Tensor) -> np.ndarray:
    return states.contiguous().view(torch.uint16).numpy()


def checksum(states: torch.Tensor) -> str:
    """xxh3 of the bf16 bytes of [T, ids, hidden] states in C order, little endian."""
    return xxhash.xxh3_64_hexdigest(_bits(states).tobytes())


def pack(states: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Split bf16 states [T, ids, hidden] into two zstandard frames (uint8 vectors).

    First the exponents (bits 14 to 7), channel by channel [ids x hidden, T]: neighbours in time
    of one channel have like exponents. Then sign and mantissa (bits 15 and 6 to 0) in the order
    of the states, nearly incompressible.
    """
    bits = _bits(states).reshape(states.shape[0], -1)
    exponents = ((bits >> 7) & 0xFF).astype(np.uint8)
    rest = ((bits >> 8) & 0x80 | bits & 0x7F).astype(np.uint8)
    packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    return (
        np.frombuffer(packer.compress(np.ascontiguousarray(exponents.T)), np.uint8),
        np.frombuffer(packer.compress(rest), np.uint8),
    )


def unpack(exponents: np.ndarray, rest: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `pack`: bf16 [T, ids, hidden] = `shape`."""
    unpacker = zstandard.ZstdDecompressor()
    tokens, width = shape[0], int(np.prod(shape[1:]))
    high = np.frombuffer(unpacker.decompress(exponents.data), np.uint8).reshape(width, tokens)
    low = np.frombuffer(unpacker.decompress(rest.data), np.uint8).reshape(tokens, width)
    bits = np.ascontiguousarray(high.T).astype(np.uint16)
    bits <<= 7
    bits |= low & np.uint8(0x7F)
    bits |= (low & np.uint8(0x80)).astype(np.uint16) << np.uint16(8)
    return torch.from_numpy(bits.reshape(shape)).view(torch.bfloat16)


class Teacher:
    """The verifier's output head: logits = lm_head(final_norm(h[n])), in float32.

    Proves that captured states are what they are said to be: they must lead to the tokens that
    the verifier itself chose. Source of the convention: transformers' `LlamaForCausalLM`.
    """

    def __init__(self, model: Path):
        from speculators.utils.loading import load_model_layers

        from aerie.verifier import text_config

        names = ["model.norm.weight", "lm_head.weight", "embed_tokens.weight"]
        weights = load_model_layers(names, str(model))
        config = text_config(model)
        head = weights.get("lm_head.weight", weights.get("embed_tokens.weight"))
        if head is None or "model.norm.weight" not in weights:
            raise InputError(f"{model}: found no output head or final norm among its weights")
        self.head = head.float()
        self.norm = weights["model.norm.weight"].float()
        self.eps = getattr(config, "rms_norm_eps", 1e-6)

    def ranks(self, last_states: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        """How many tokens the head prefers to the chosen one: int64 [T], 0 for the best.

        `last_states` [T, hidden], `next_tokens` [T].
        """
        x = last_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm
        logits = x @ self.head.T
        chosen = logits.gather(1, next_tokens.long()[:, None])
        return (logits > chosen).sum(1)

    def check(self, states: torch.Tensor, next_tokens: list[int], greedy: bool) -> None:
        """Raise `BadStates` when the last states of the final `len(next_tokens)` positions do
        not lead to the tokens that the verifier chose after them.

        A near tie may fall either way in bf16, so of many positions four fifths must agree, and
        a chosen token must be among the best five; sampled tokens only have to be likely.
        """
        if not next_tokens:
            return
        last = states[-len(next_tokens) :, -1]
        ranks = self.ranks(last[-64:], torch.tensor(next_tokens[-64:]))
        limit = 5 if greedy else 1000
        agree = (ranks == 0).float().mean().item()
        if (ranks < limit).float().mean().item() < 0.9 or (
            greedy and len(ranks) >= 8 and agree < 0.8
        ):
            raise BadStates(
                "lm_head(final_norm(last states)) does not lead to the tokens that the verifier "
                f"chose: {agree:.0%} agree, worst rank {int(ranks.max())}; the layer ids or the "
                "final-norm convention are shifted, or this is another model"
            )


def check_states(states: torch.Tensor, tokens: torch.Tensor, convention: Convention) -> None:
    """Raise `BadStates` for states that cannot be those of `tokens`.

    Wrong shape or dtype, NaN or infinity, or no variation between positions or channels.
    """
    wanted = (len(tokens), len(convention.layer_ids), convention.hidden_size)
    if tuple(states.shape) != wanted or states.dtype != torch.bfloat16:
        raise BadStates(
            f"states are {states.dtype} {list(states.shape)}, expected torch.bfloat16 "
            f"{list(wanted)} for {len(tokens)} tokens"
        )
    if not torch.isfinite(states).all():
        raise BadStates("states hold NaN or infinity")
    if len(tokens) > 1:
        flat = (states == states[:1]).flatten(1).all(1)[1:]
        if flat.any() and bool((tokens[1:][flat] != tokens[0]).any()):
            raise BadStates("states are the same at different tokens")
    if (states == states[..., :1]).all(-1).any():
        raise BadStates("states are the same in all channels of a layer")


class Store:
    """The folder of one convention's shards."""

    def __init__(self, root: Path, convention: Convention):
        self.convention = convention
        self.folder = Path(root) / "hidden_states" / convention.key

    def path(self, shard: str) -> Path:
        return self.folder / f"{shard}.safetensors"

    def has(self, shard: str) -> bool:
        return self.path(shard).is_file()

    def write(self, shard: str, samples: list[Sample]) -> Path:
        """Check and write a shard; nothing bears its name before it was read back whole."""
        c = self.convention
        tensors: dict[str, np.ndarray] = {}
        index = []
        for number, sample in enumerate(samples):
            check_states(sample.states, sample.tokens, c)
            tensors[f"{number:06d}.tokens"] = sample.tokens.numpy().astype(np.int32)
            if c.format == "raw":
                tensors[f"{number:06d}.states"] = _bits(sample.states)
            else:
                exponents, rest = pack(sample.states)
                tensors[f"{number:06d}.exponents"] = exponents
                tensors[f"{number:06d}.rest"] = rest
            index.append(
                {
                    "id": sample.id,
                    "key": sample_key(sample.tokens.tolist()),
                    "tokens": len(sample.tokens),
                    "checksum": checksum(sample.states),
                }
            )
        metadata = {
            "aerie": str(FORMAT_VERSION),
            "shard": shard,
            "format": c.format,
            "layer_ids": json.dumps(list(c.layer_ids)),
            "last_state": "before the final norm",
            "hidden_size": str(c.hidden_size),
            "verifier": c.fingerprint,
            "samples": json.dumps(index),
        }
        path = self.path(shard)
        with whole_file(path) as temporary:
            save_file(tensors, temporary, metadata)
            with Shard(temporary) as written:
                for number in range(len(samples)):
                    written.read(number)
        return path

    def find_samples(self, keys: set[str]) -> dict[str, tuple[Path, int]]:
        """Where samples with these keys lie in any shard of the folder: file and position."""
        found: dict[str, tuple[Path, int]] = {}
        if not keys or not self.folder.is_dir():
            return found
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with Shard(path) as shard:
                    for number, entry in enumerate(shard.samples):
                        if entry["key"] in keys:
                            found[entry["key"]] = (path, number)
            except InputError:
                continue
        return found

    def set_aside(self, path: Path) -> Path:
        """Move a damaged file out of the way, so that it is made again."""
        target = self.folder / QUARANTINE / path.name
        target.parent.mkdir(exist_ok=True)
        path.replace(target)
        return target


class Shard:
    """An open shard file. `samples`: one entry each with `id`, `key`, `tokens`, `checksum`."""

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            self._file = safe_open(str(self.path), framework="numpy")
            meta = self._file.metadata() or {}
            if int(meta["aerie"]) > FORMAT_VERSION:
                raise InputError(f"{path}: written by a newer Aerie (format {meta['aerie']})")
            self.format = meta["format"]
            self.layer_ids = tuple(json.loads(meta["layer_ids"]))
            self.hidden_size = int(meta["hidden_size"])
            self.fingerprint = meta["verifier"]
            self.samples: list[dict[str, Any]] = json.loads(meta["samples"])
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise BadStates(f"{path}: not a whole shard ({error})") from error

    @property
    def convention(self) -> Convention:
        return Convention(self.fingerprint, self.layer_ids, self.hidden_size, self.format)

    def read(self, number: int) -> Sample:
        """Sample at this position, decoded and compared with its checksum."""
        entry = self.samples[number]
        shape = (entry["tokens"], len(self.layer_ids), self.hidden_size)
        name = f"{number:06d}"
        try:
            tokens = torch.from_numpy(self._file.get_tensor(f"{name}.tokens").astype(np.int64))
            if self.format == "raw":
                bits = self._file.get_tensor(f"{name}.states").reshape(shape)
                states = torch.from_numpy(bits).view(torch.bfloat16)
            else:
                states = unpack(
                    self._file.get_tensor(f"{name}.exponents"),
                    self._file.get_tensor(f"{name}.rest"),
                    shape,
                )
        except (SafetensorError, zstandard.ZstdError, ValueError, OSError) as error:
            raise BadStates(f"{self.path}: sample {entry['id']} cannot be read: {error}") from error
        if checksum(states) != entry["checksum"] or sample_key(tokens.tolist()) != entry["key"]:
            raise BadStates(f"{self.path}: sample {entry['id']} does not match its checksum")
        return Sample(entry["id"], tokens, states)

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)


def file_checksum(path: Path) -> str:
    """xxh3 of a whole file."""
    state = xxhash.xxh3_64()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def group_records(ids: list[str], mean: int) -> list[list[int]]:
    """Cut records into groups by their own ids: lists of positions, in order.

    A cut falls after a record whose id's hash is a multiple of `mean`, within a quarter and four
    times `mean` records, so an edit moves only the cuts around it (content-defined chunking;
    Muthitacharoen et al., SOSP 2001).
    """
    groups: list[list[int]] = []
    current: list[int] = []
    for position, record in enumerate(ids):
        current.append(position)
        cut = int(digest(record, size=8), 16) % mean == 0
        if (cut and len(current) >= max(1, mean // 4)) or len(current) >= 4 * mean:
            groups.append(current)
            current = []
    if current:
        groups.append(current)
    return groups
