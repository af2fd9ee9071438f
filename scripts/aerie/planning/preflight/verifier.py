"""The verifier's configuration against the run's."""

from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.files import read_json
from aerie.config import Config
from aerie.planning.preflight.result import CheckResult
from aerie.planning.preflight.template import check_template
from aerie.planning.preflight.weights import check_weights
from aerie.verifier.checkpoint import find_verifier, text_config
from aerie.verifier.compatibility import check_config, resolve_layer_ids
from aerie.verifier.fingerprint import Sizes


def check_verifier(config: Config, store: Path) -> list[CheckResult]:
    """The verifier's configuration, weights' names and chat template against the configuration.

    Reads headers only. A verifier that is not on this machine yet is checked after its import.
    """
    source = config.verifier.source
    try:
        folder = find_verifier(source, store)
    except InputError as error:
        return [CheckResult("verifier", "error", str(error))]
    if folder is None:
        return [
            CheckResult(
                "verifier",
                "note",
                f"{source} is not on this machine yet",
                "the run fetches or makes it first and checks it then",
                "run make check again afterwards to see the rest",
            )
        ]
    results = []
    try:
        raw = read_json(folder / "config.json")
        results = _check_remote_code(raw, config.verifier.trust_remote_code)
        text = text_config(folder, config.verifier.trust_remote_code)
    except InputError as error:
        return [*results, CheckResult("verifier", "error", str(error))]
    name = (raw.get("architectures") or [type(text).__name__])[0]
    results.append(
        CheckResult(
            "verifier",
            "ok",
            f"{name}: {text.num_hidden_layers} layers of {text.hidden_size}, "
            f"{text.vocab_size:,} tokens, {text.max_position_embeddings:,} positions",
        )
    )
    results += _check_fit(config, text)
    results += _check_kind(raw, text, config)
    results += check_weights(folder, raw, text)
    results += check_template(folder, text, config.verifier.trust_remote_code)
    return results


def _check_remote_code(raw: dict[str, Any], trusted: bool) -> list[CheckResult]:
    if not raw.get("auto_map"):
        return [CheckResult("remote code", "ok", "the checkpoint has no code of its own")]
    names = ", ".join(sorted({str(v).split(".")[0] for v in raw["auto_map"].values()}))
    if trusted:
        return [CheckResult("remote code", "note", f"{names}: runs, as configured", "", "")]
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = raw.get("model_type") in CONFIG_MAPPING_NAMES
    return [
        CheckResult(
            "remote code",
            "note" if known else "error",
            f"the checkpoint has code of its own ({names})",
            "transformers knows this model without it" if known else "it needs this code",
            "" if known else "read it, then set verifier.trust_remote_code: true",
        )
    ]


def _check_fit(config: Config, text: Any) -> list[CheckResult]:
    sizes = Sizes(text.num_hidden_layers, text.vocab_size, text.max_position_embeddings)
    try:
        check_config(config, sizes)
    except InputError as error:
        lines = str(error).split("\n  ")
        return [CheckResult("configuration", "error", line) for line in lines[1:] or lines]
    ids = resolve_layer_ids(config.hidden_states.aux_layer_ids, text.num_hidden_layers)
    size = len(ids) * text.hidden_size * 2
    return [
        CheckResult(
            "layers",
            "ok",
            f"{ids[:-1]} and the last output, {ids[-1]}",
            f"{size / 1024:.1f} KiB of hidden states a token before compression",
        )
    ]


def _check_kind(raw: dict[str, Any], text: Any, config: Config) -> list[CheckResult]:
    results = []
    if isinstance(raw.get("text_config"), dict):
        results.append(
            CheckResult(
                "multimodal",
                "note",
                "the language model is part of a multimodal model (text_config)",
                "the drafter is trained on text only",
                "",
            )
        )
    if getattr(text, "kv_lora_rank", None):
        results.append(
            CheckResult(
                "attention",
                "note",
                f"MLA (kv_lora_rank {text.kv_lora_rank})",
                "hidden states roughly double a token's cache; extraction with MLA was "
                "tested on a CPU only, and vLLM's own connector calls it unsupported",
                "try a corpus.limit of 50 first",
            )
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if "rope_type" in rope else None
    nested = [v for v in rope.values() if isinstance(v, dict)]
    if nested:
        results.append(
            CheckResult(
                "rope",
                "note",
                "rope settings differ by kind of layer",
                "the drafter has one kind of layer and takes one plain setting",
                "check the acceptance on long prompts early",
            )
        )
    elif kind not in (None, "default"):
        results.append(
            CheckResult(
                "rope",
                "note",
                f"{kind}, factor {rope.get('factor')}",
                "passed on to the drafter unchanged; check prompts longer than the "
                "training samples",
                "",
            )
        )
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True):
        results.append(
            CheckResult(
                "sliding window",
                "note",
                f"the verifier's layers see {window} tokens",
                "states of these layers depend on no more than that",
                "",
            )
        )
    for name, drafter in config.drafters.items():
        if drafter.sliding_window < config.samples.max_length:
            results.append(
                CheckResult(
                    "sliding window",
                    "note",
                    f"drafters.{name} sees {drafter.sliding_window} tokens, samples have up to "
                    f"{config.samples.max_length}",
                    "cheap and common; the drafter sees distant context only through the states",
                    "",
                )
            )
    return results
