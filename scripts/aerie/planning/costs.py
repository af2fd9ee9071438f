"""What the stages cost: bytes, memory and operations by a model's shape, seconds by a machine's
table or the rates of earlier runs.

Everything here is arithmetic on numbers that are given; nothing is run and no model is loaded.
Bytes are bytes, times are seconds, rates are per second, unless a name says otherwise. Memory is
an estimate by the sums in the docstrings; allocators take some more.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.files import read_optional
from aerie.common.stages import benchmark_seconds

GIB = 2**30
LOSSLESS_SHARE = 0.664
"""Stored by raw bytes of `lossless` shards: SmolLM2-135M (benchmarks/pack_states.py)."""
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
        raise InputError(f"config.json: holds no {error}; sizes cannot be estimated") from None


def _weight_bytes(config: dict[str, Any]) -> float:
    quantized = config.get("quantization_config") or {}
    bits = quantized.get("bits") or quantized.get("num_bits")
    for group in (quantized.get("config_groups") or {}).values():
        bits = bits or (group.get("weights") or {}).get("num_bits")
    if quantized.get("quant_method") == "fp8":
        bits = 8
    stored = config.get("dtype") or config.get("torch_dtype")
    return bits / 8 if bits else DTYPE_BYTES.get(stored, 2)


def _attention(s: Shape, inputs: int) -> int:
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
    """Parameters of the verifier, and those that compute a token (of the experts the active ones).

    Norms and biases are left out; the input embedding computes nothing.
    """
    dense = 3 * s.hidden * s.intermediate
    expert = 3 * s.hidden * s.expert_size
    head = s.vocab * s.hidden
    with_experts = s.layers - s.dense_layers
    common = s.layers * _attention(s, s.hidden) + s.dense_layers * dense + head
    common += with_experts * (s.shared_experts * expert + s.hidden * s.experts)
    total = common + with_experts * s.experts * expert + (0 if s.tied else head)
    return total, common + with_experts * s.active_experts * expert


def state_bytes(tokens: int, ids: int, hidden: int) -> int:
    """Raw bytes of `ids` bf16 states a token."""
    return tokens * ids * hidden * 2


def cache_bytes(s: Shape, captured: int = 0, gpus: int = 1) -> float:
    """Bytes of an engine's cache for one token on one GPU, 2 a value.

    Keys and values of all layers (MLA: the compressed vector, which every GPU holds; else the heads
    are divided among the GPUs), and the `captured` states, which every GPU holds.
    """
    if s.kv_rank:
        keys = s.layers * (s.kv_rank + s.rope_dim)
    else:
        keys = s.layers * 2 * s.kv_heads / min(gpus, s.kv_heads) * s.head_dim
    return 2 * (keys + captured * s.hidden)


def engine_memory(
    s: Shape, weights: float, gpus: int, captured: int, length: int, seqs: int, batched: int
) -> dict[str, float]:
    """Memory of the verifier in the engine, bytes on each of `gpus` GPUs.

    `weights`: all its weights' bytes. `cache_one`: cache of one sequence of `length` tokens, the
    least that must fit; `cache_all`: of `seqs` of them. `activations`: the residual stream, the
    widest MLP and the logits of a step of `batched` tokens and `seqs` sequences.
    """
    token = cache_bytes(s, captured, gpus)
    width = 4 * s.hidden + 3 * max(s.intermediate, s.expert_size * s.active_experts) / gpus
    found = {
        "weights": weights / gpus,
        "activations": batched * width * 2 + seqs * s.vocab * 4 / gpus,
        "cache_one": token * length,
        "cache_all": token * length * seqs,
    }
    return {**found, "least": found["weights"] + found["activations"] + found["cache_one"]}


def drafter_parameters(s: Shape, settings: dict[str, Any], aux: int) -> dict[str, int]:
    """Parameters of an EAGLE-3 drafter as speculators builds it from the verifier's shape.

    `settings`: a drafter of the configuration. `aux`: states fed to it. Keys: `trained` (fc and
    layers; the first layer's q, k, v take twice the width), `embedding`, `head` (the draft
    vocabulary's rows of lm_head; the teacher has them once more), `vocabulary`.
    """
    size = s.vocab if settings["vocabulary"] == "full" else settings["vocabulary"]
    mlp = 3 * s.hidden * s.intermediate
    layers = _attention(s, 2 * s.hidden) + mlp
    layers += (settings["num_layers"] - 1) * (_attention(s, s.hidden) + mlp)
    norms = (aux + 4 + 2 * (settings["num_layers"] - 1)) * s.hidden
    return {
        "trained": aux * s.hidden * s.hidden + layers + norms,
        "embedding": s.vocab * s.hidden,
        "head": size * s.hidden,
        "vocabulary": size,
    }


def drafter_bytes(p: dict[str, int]) -> int:
    """Size of the finished drafter: bf16 weights, embedding and head among them."""
    return 2 * (p["trained"] + p["embedding"] + p["head"])


def checkpoint_bytes(p: dict[str, int], optimizer: str) -> int:
    """Size of one checkpoint: float32 weights, and one value of Muon or two of AdamW for each
    trained one."""
    moments = 1 if optimizer == "muon" else 2
    return 4 * (p["trained"] + p["embedding"] + p["head"]) + 4 * moments * p["trained"]


def training_memory(
    s: Shape, settings: dict[str, Any], aux: int, compute_bytes: int
) -> dict[str, float]:
    """Memory of training, bytes on each device (no share of it is taken off for several).

    float32 weights (the frozen embedding and both heads too), gradients and optimizer of the
    trained ones, the logits of every TTT step (sequence_length × vocabulary, with their float32
    softmax) and the teacher's, activations kept for the way back. `compute_bytes`: 2 for bf16, 4
    on a CPU.
    """
    p = drafter_parameters(s, settings, aux)
    tokens, steps = settings["sequence_length"], settings["ttt_steps"]
    moments = 1 if settings["optimizer"] == "muon" else 2
    kept = 14 * s.hidden + 3 * s.intermediate + (s.heads + 2 * s.kv_heads) * s.head_dim
    found = {
        "weights": 4 * (p["trained"] + p["embedding"] + 2 * p["head"]),
        "gradients": 4 * p["trained"],
        "optimizer": 4 * moments * p["trained"],
        "logits": (steps + 1) * tokens * p["vocabulary"] * (compute_bytes + 4),
        "activations": steps * settings["num_layers"] * tokens * kept * compute_bytes,
        "batch": tokens * (aux + 1) * s.hidden * compute_bytes,
    }
    return {**found, "peak": sum(found.values())}


# Operations and time


def generation_operations(active: int, prompt_tokens: int, new_tokens: int) -> tuple[float, float]:
    """Floating-point operations of the prompts and of the new tokens: 2 a parameter and token."""
    return 2.0 * active * prompt_tokens, 2.0 * active * new_tokens


def training_operations(p: dict[str, int], ttt_steps: int, tokens: int) -> float:
    """Operations of training on `tokens`: per TTT step 6 a trained parameter (forward, gradients of
    inputs and weights), 4 a row of the frozen head; 2 once for the teacher's head."""
    return tokens * (ttt_steps * (6.0 * p["trained"] + 4.0 * p["head"]) + 2.0 * p["head"])


@dataclass(frozen=True)
class Hardware:
    """A machine of config/hardware.yaml. `tflops`: 10¹² operations a second of one device in the
    format used; the shares say how much of it a stage reaches. `gpu_memory_gib` 0: no GPU. Rates of
    the disk are GB (10⁹ bytes) a second."""

    name: str
    gpus: int
    gpu_memory_gib: float
    tflops: float
    prefill_share: float
    decode_share: float
    training_share: float
    disk_write_gbps: float
    disk_read_gbps: float
    start_seconds: float
    note: str = ""


def engine_seconds(
    hardware: Hardware, devices: int, operations: tuple[float, float], written: float
) -> float:
    """Time of an engine job after its start: computing, or writing the states if that is longer."""
    rate = hardware.tflops * 1e12 * devices
    prompts, new = operations
    computing = prompts / (rate * hardware.prefill_share) + new / (rate * hardware.decode_share)
    return max(computing, written / (hardware.disk_write_gbps * 1e9))


def start_seconds(hardware: Hardware, weights: float) -> float:
    """Time until an engine takes its first request: start-up, and reading the weights."""
    return hardware.start_seconds + weights / (hardware.disk_read_gbps * 1e9)


def training_seconds(
    hardware: Hardware, devices: int, operations: float, read_bytes: float
) -> float:
    """Time of training: computing, or reading the shards (once an epoch) if that is longer."""
    rate = hardware.tflops * 1e12 * devices * hardware.training_share
    return max(operations / rate, read_bytes / (hardware.disk_read_gbps * 1e9))


# Rates of earlier runs


@dataclass(frozen=True)
class Rate:
    """Seconds a unit and seconds that every job takes besides, with the run they come from."""

    seconds_each: float
    fixed: float
    source: str

    def seconds(self, units: float) -> float:
        return self.fixed + units * self.seconds_each if units else 0.0


def measured_rates(run: Path, shape: Shape | None) -> dict[str, Rate]:
    """Rates by stage (of training `train_drafter`, a second per 10⁹ operations) that the finished
    run in `run` shows; a stage that found its work in the store shows none.

    Units: generated tokens, extracted tokens, 10⁹ operations of training, prompts measured times
    tokens an answer, records for the others.
    """
    rates: dict[str, Rate] = {}
    seconds = {p.parent.name: benchmark_seconds(p) for p in run.glob("benchmarks/*/run.tsv")}
    made = read_optional(run / "responses/manifest.json")
    if made.get("generated") and made.get("generated_tokens"):
        tokens = made["generated_tokens"] * made["generated"] / made["records"]
        working = made["seconds"] - made["load_seconds"]
        before = max(0.0, seconds.get("generate_responses", 0) - working)
        rates["generate_responses"] = Rate(working / tokens, before, run.name)
    for path in sorted(run.glob("hidden_states/lane-*.json")):
        lane = read_optional(path)
        if lane.get("extracted_tokens"):
            rates["extract_hidden_states"] = Rate(
                lane["seconds"] / lane["extracted_tokens"], 0.0, run.name
            )
    for stage, unit in (("collect_prompts", "prompts"), ("tokenize_samples", "samples")):
        records = read_optional(run / unit / "report.json").get("records_in")
        if records and seconds.get(stage):
            rates[stage] = Rate(seconds[stage] / records, 0.0, run.name)
    for stage in ("import_verifier", "render_report"):
        if seconds.get(stage):
            rates[stage] = Rate(0.0, seconds[stage], run.name)
    maps = [benchmark_seconds(p) for p in run.glob("benchmarks/map_vocabulary/*.tsv")]
    if maps:
        rates["map_vocabulary"] = Rate(0.0, max(maps), run.name)
    for folder in sorted(run.glob("drafters/*")):
        name = folder.name
        if shape and (rate := _training_rate(run, folder, shape)):
            rates["train_drafter"] = rate
        found = read_optional(run / "evaluation" / name / "acceptance.json")
        took = benchmark_seconds(run / "benchmarks/measure_acceptance" / f"{name}.tsv")
        tokens = sum(s.get("generated_tokens", 0) for s in found.get("prompt_sets", {}).values())
        # An answer of the engine within seconds of its start was found in the store.
        if tokens and took > 10:
            rates["measure_acceptance"] = Rate(took / tokens, 0.0, run.name)
        speed = read_optional(run / "evaluation" / name / "speed.json")
        timed = [x for side in ("without", "with") for x in speed.get(side, [])]
        took = benchmark_seconds(run / "benchmarks/measure_speed" / f"{name}.tsv")
        working = sum(x["seconds"] for x in timed)
        if timed and took > working:
            tokens = sum(x["generated_tokens"] for x in timed)
            rates["measure_speed"] = Rate(working / tokens, took - working, run.name)
    return rates


def _training_rate(run: Path, folder: Path, shape: Shape) -> Rate | None:
    """Seconds per 10⁹ operations, from the benchmark of a training that was not found in the store:
    it took at least as long as the steps in its metrics."""
    took = benchmark_seconds(run / "benchmarks/train_drafter" / f"{folder.name}.tsv")
    config = read_optional(folder / "model/config.json")
    samples = read_optional(run / "samples/report.json").get("train", {})
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [x for x in map(json.loads, lines) if not x.get("validation")]
        epochs = steps[-1]["epoch"] + 1
        ttt_steps = len(steps[-1]["accuracy"])
        speed = sorted(x["tokens_per_second"] for x in steps)[len(steps) // 2]
        tokens = samples["tokens"] * epochs
        settings = {
            "vocabulary": config["draft_vocab_size"],
            "num_layers": config["transformer_layer_config"]["num_hidden_layers"],
        }
        aux = len(config.get("eagle_aux_hidden_state_layer_ids") or [1, 1, 1])
    except (OSError, ValueError, KeyError, IndexError):
        return None
    if took < 0.7 * tokens / speed:
        return None
    operations = training_operations(drafter_parameters(shape, settings, aux), ttt_steps, tokens)
    return Rate(took / (operations / 1e9), 0.0, run.name)
