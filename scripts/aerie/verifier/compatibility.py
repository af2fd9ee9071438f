"""Whether the configuration fits the verifier: layers, vocabulary, lengths. Loads no model."""

from pathlib import Path

from aerie.common.errors import InputError
from aerie.common.files import read_json
from aerie.config import Config
from aerie.verifier.checkpoint import find_verifier
from aerie.verifier.fingerprint import Sizes, find_fingerprint

SIZE_KEYS = ("num_hidden_layers", "vocab_size", "max_position_embeddings")
"""Keys of a `config.json`, in the order of `Sizes`."""


class Misfit(InputError):
    """The configuration does not fit the verifier; `faults` has one line each."""

    def __init__(self, faults: list[str]):
        super().__init__("the configuration does not fit the verifier:\n  " + "\n  ".join(faults))
        self.faults = faults


def find_sizes(source: str, results: Path, run: str, store: Path) -> Sizes | None:
    """The sizes of a verifier that is on this machine; nothing is loaded, made or fetched.

    None when it is not here yet or its config.json uses other names; `InputError` when the source
    can never be found.
    """
    # A folder's own config.json comes first: it may have changed since a run read it.
    known = None if Path(source).is_dir() else find_fingerprint(source, results, run)
    if known:
        return known.sizes
    try:
        folder = find_verifier(source, store)
    except (InputError, ImportError):
        if Path(source).is_absolute() or source.startswith(".") or Path(source).is_dir():
            raise
        return None  # the package may be installed only where the jobs run (--sdm conda)
    if folder is None:
        return None
    config = read_json(folder / "config.json")
    config |= config.get("text_config") or {}
    sizes = [config.get(key) for key in SIZE_KEYS]
    return Sizes(*sizes) if all(isinstance(size, int) for size in sizes) else None


def resolve_layer_ids(layer_ids: list[int] | None, num_layers: int) -> list[int]:
    """The ids of all captured layers: those that feed the drafter, sorted, then `num_layers`.

    `layer_ids`: those that feed the drafter. Id k is transformers' `hidden_states[k]`, the
    residual stream entering layer k; id `num_layers` is the last layer's output before the final
    norm. None: 2, n//2, n-3, the default of vLLM and speculators.
    """
    ids = layer_ids or sorted({2, num_layers // 2, num_layers - 3})
    if any(not 0 <= i < num_layers for i in ids) or (layer_ids is None and len(ids) < 3):
        raise InputError(
            f"hidden_states.aux_layer_ids: found {ids}; the verifier has {num_layers} layers: "
            f"expected distinct ids from 0 to {num_layers - 1} (the last output, {num_layers}, "
            "is added automatically)"
        )
    return [*ids, num_layers]


def check_config(config: Config, sizes: Sizes) -> None:
    """Raise `Misfit` when the configuration does not fit the verifier."""
    faults = []
    try:
        resolve_layer_ids(config.hidden_states.aux_layer_ids, sizes.num_layers)
    except InputError as error:
        faults.append(str(error))
    for name, drafter in config.drafters.items():
        if drafter.vocabulary != "full" and drafter.vocabulary > sizes.vocab_size:
            faults.append(
                f"drafters.{name}.vocabulary: found {drafter.vocabulary}; the verifier's own is "
                f"{sizes.vocab_size}: choose a smaller one or `full`"
            )
    max_length = config.samples.max_length
    if max_length >= sizes.max_length:
        faults.append(
            f"samples.max_length: found {max_length}; the verifier handles {sizes.max_length} "
            "tokens, and extraction generates one token after each sample: expected "
            f"{sizes.max_length - 1} at most"
        )
    if config.self_prompts.number and config.self_prompts.max_tokens >= max_length:
        faults.append(
            f"self_prompts.max_tokens: found {config.self_prompts.max_tokens}; it must leave room "
            f"for an answer within samples.max_length = {max_length}"
        )
    if config.generation.max_tokens >= max_length:
        faults.append(
            f"generation.max_tokens: found {config.generation.max_tokens}; it must leave room for "
            f"a prompt within samples.max_length = {max_length}"
        )
    if faults:
        raise Misfit(faults)
