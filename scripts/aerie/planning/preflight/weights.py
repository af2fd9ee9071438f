"""The verifier's weights: whole files, and the tensors that training needs, from their headers."""

import json
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.formatting import GIB
from aerie.planning.preflight.result import CheckResult
from aerie.verifier.checkpoint import WEIGHT_PATTERNS


def tensor_types(folder: Path) -> dict[str, str]:
    """Names and types of all tensors in a folder's safetensors files, from their headers."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= path.stat().st_size - 8:
                raise InputError(f"{path}: not a safetensors file, or cut short; fetch it again")
            header = json.loads(file.read(size))
        last = max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"),
                   default=0)  # fmt: skip
        if path.stat().st_size != 8 + size + last:
            raise InputError(
                f"{path}: has {path.stat().st_size:,} bytes, its header says {8 + size + last:,}; "
                "fetch it again"
            )
        found.update({k: v["dtype"] for k, v in header.items() if k != "__metadata__"})
    return found


def check_weights(folder: Path, raw: dict[str, Any], text: Any) -> list[CheckResult]:
    """Whether the weights are whole and hold a usable lm_head and embedding.

    `raw`: the parsed config.json; `text`: the language model's configuration.
    """
    files = [p for pattern in WEIGHT_PATTERNS for p in folder.glob(pattern)]
    if not files:
        return [CheckResult("weights", "error", f"{folder}: contains no weights")]
    try:
        types = tensor_types(folder)
    except (InputError, ValueError, KeyError) as error:
        return [CheckResult("weights", "error", str(error), "the verifier does not load")]
    size = sum(p.stat().st_size for p in files)
    results = [CheckResult("weights", "ok", f"{size / GIB:.2f} GiB in {len(files)} file(s)")]
    quantised = raw.get("quantization_config") or getattr(text, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        results.append(CheckResult("weights", "note", f"quantised: {method}"))
    if not types:
        return results  # tensors in other formats have no names until loaded
    heads = {n: t for n, t in types.items() if "lm_head." in n or n.endswith("output.weight")}
    plain = {
        n: t for n, t in heads.items() if n.endswith(".weight") and t in ("BF16", "F16", "F32")
    }
    tied = bool(text.tie_word_embeddings)
    if plain:
        results.append(
            CheckResult("lm_head", "ok", f"{next(iter(plain))} {next(iter(plain.values()))}")
        )
    elif tied and not heads:
        results.append(CheckResult("lm_head", "ok", "tied to the embedding"))
    else:
        results.append(
            CheckResult(
                "lm_head",
                "error",
                f"quantised ({', '.join(sorted(heads))})" if heads else "not in the weights",
                "speculators would silently use the embedding instead: the drafter "
                "would learn from a wrong teacher",
                "use a checkpoint of the same model whose lm_head is not quantised",
            )
        )
    if not any(n.endswith(("embed_tokens.weight", "embeddings.weight", "tok_embeddings.weight",
                           "embed.weight")) for n in types):  # fmt: skip
        results.append(
            CheckResult(
                "embedding",
                "warning",
                "no tensor has a name that speculators knows",
                "training may not find the embedding",
                "compare the tensor names with speculators/utils/loading.py",
            )
        )
    return results
