"""The sizes of a verifier that decide what it costs, read from its config.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.files import read_json
from aerie.verifier.checkpoint import gguf_config
from aerie.verifier.fingerprint import Fingerprint

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Shape:
    """The sizes in a verifier's config.json that decide what it costs.

    `experts`, `active_experts`, `shared_experts`, `expert_size`: 0 for a dense model;
    `dense_layers`: layers with a plain MLP in front of those with experts. `kv_rank`: 0, or the
    width of MLA's compressed cache (`rope_dim` comes with it). `weight_bytes_each`: per parameter.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    weight_bytes_each: float
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    expert_size: int = 0
    dense_layers: int = 0
    kv_rank: int = 0
    q_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0


def read_shape(config: dict[str, Any]) -> Shape:
    """The shape in a parsed config.json (a multimodal wrapper's `text_config`).

    Raises `InputError` for a configuration without the sizes of a decoder.
    """
    c = {**config, **config.get("text_config", {})}
    try:
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        layers = c["num_hidden_layers"]
        experts = c.get("n_routed_experts") or c.get("num_experts") or c.get("num_local_experts")
        return Shape(
            layers=layers,
            hidden=hidden,
            intermediate=c["intermediate_size"],
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=c.get("head_dim") or hidden // heads,
            vocab=c["vocab_size"],
            tied=bool(c.get("tie_word_embeddings", False)),
            weight_bytes_each=_weight_bytes(c),
            experts=experts or 0,
            active_experts=c.get("num_experts_per_tok") or 0 if experts else 0,
            shared_experts=c.get("n_shared_experts") or 0 if experts else 0,
            expert_size=c.get("moe_intermediate_size") or c["intermediate_size"] if experts else 0,
            dense_layers=c.get("first_k_dense_replace") or 0 if experts else layers,
            kv_rank=c.get("kv_lora_rank") or 0,
            q_rank=c.get("q_lora_rank") or 0,
            rope_dim=c.get("qk_rope_head_dim") or 0,
            nope_dim=c.get("qk_nope_head_dim") or 0,
            value_dim=c.get("v_head_dim") or 0,
        )
    except KeyError as error:
        raise InputError(f"config.json: {error} is missing; sizes cannot be estimated") from None


def _weight_bytes(config: dict[str, Any]) -> float:
    quantized = config.get("quantization_config") or {}
    bits = quantized.get("bits") or quantized.get("num_bits")
    for group in (quantized.get("config_groups") or {}).values():
        bits = bits or (group.get("weights") or {}).get("num_bits")
    if quantized.get("quant_method") == "fp8":
        bits = 8
    stored = config.get("dtype") or config.get("torch_dtype")
    return bits / 8 if bits else DTYPE_BYTES.get(stored or "", 2)


def attention_parameters(s: Shape, inputs: int) -> int:
    """Parameters of one attention block whose q, k, v take `inputs` values."""
    if s.kv_rank and inputs == s.hidden:
        q = s.heads * (s.nope_dim + s.rope_dim)
        query = s.hidden * s.q_rank + s.q_rank * q if s.q_rank else s.hidden * q
        keys = s.hidden * (s.kv_rank + s.rope_dim) + s.kv_rank * s.heads * (
            s.nope_dim + s.value_dim
        )
        return query + keys + s.heads * s.value_dim * s.hidden
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    return inputs * (q + 2 * kv) + q * s.hidden


def parameters(s: Shape) -> tuple[int, int]:
    """Parameters of the verifier, and of these the ones that compute a token.

    Of the experts only the active ones compute. Norms and biases are left out; the input embedding
    computes nothing.
    """
    dense = 3 * s.hidden * s.intermediate
    expert = 3 * s.hidden * s.expert_size
    head = s.vocab * s.hidden
    with_experts = s.layers - s.dense_layers
    common = s.layers * attention_parameters(s, s.hidden) + s.dense_layers * dense + head
    common += with_experts * (s.shared_experts * expert + s.hidden * s.experts)
    total = common + with_experts * s.experts * expert + (0 if s.tied else head)
    return total, common + with_experts * s.active_experts * expert


@dataclass(frozen=True)
class VerifierSize:
    """`weights`: bytes of all weights."""

    shape: Shape
    weights: float


def find_verifier_size(source: str, fingerprint: Fingerprint | None) -> VerifierSize | None:
    """Shape and weights of a verifier on this machine, without loading it.

    The shape is read from its config.json, or from the GGUF file that it will be made from. None
    for a Hugging Face id that is not in the hub's cache.
    """
    folder = fingerprint.folder if fingerprint else Path(source)
    if (folder / "config.json").is_file():
        values = read_json(folder / "config.json")
    elif source.startswith("package:"):
        values = gguf_config(source.removeprefix("package:"))
    else:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(source, "config.json") if "/" in source else None
        if not isinstance(path, str):
            return None
        folder = Path(path).parent
        values = read_json(path)
    shape = read_shape(values)
    weights = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    return VerifierSize(shape, weights or parameters(shape)[0] * shape.weight_bytes_each)
