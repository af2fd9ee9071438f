"""Which shards the store holds, and what is in them."""

import json
from pathlib import Path
from typing import Any

from aerie.common.errors import AerieError, InputError
from aerie.common.formatting import as_bytes
from aerie.maintenance.references import References, read_references, without_path
from aerie.states.shard import Shard


def shard_files(store: Path) -> list[Path]:
    """All shards of all conventions, without damaged ones that were set aside."""
    return sorted((store / "hidden_states").glob("*/*.safetensors"))


def find_shard(store: Path, name: str) -> Path:
    """The shard of this id, or whose id begins so, or this file; `InputError` unless just one."""
    if Path(name).is_file():
        return Path(name)
    found = [p for p in shard_files(store) if p.stem.startswith(name)]
    if len(found) != 1:
        text = ", ".join(f"{p.parent.name}/{p.name}" for p in found[:5]) or "none"
        raise InputError(
            f"{name}: expected the id of one shard in {store / 'hidden_states'}, or the beginning "
            f"of one, or a file; found {text}"
        )
    return found[0]


def file_bytes(path: Path) -> int:
    """Size of a file or folder; 0 for a missing file or a broken link."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size if path.exists() else 0


def summarize_shard(path: Path, references: References) -> dict[str, Any]:
    """Counts of a shard: `id`, `samples`, `tokens`, `bytes`, `raw_bytes`, `ratio`, `runs`.

    Reads only the header. A shard that does not open has `error` instead of the counts.
    """
    about: dict[str, Any] = {
        "id": path.stem,
        "bytes": file_bytes(path),
        "runs": references.runs(path.parent.name, path.stem),
    }
    try:
        with Shard(path) as shard:
            tokens = sum(entry["tokens"] for entry in shard.samples)
            about["samples"] = len(shard.samples)
            convention = shard.convention
    except AerieError as error:
        return {**about, "error": without_path(error, path)}
    raw = tokens * convention.bytes_per_token()
    return {
        **about,
        "tokens": tokens,
        "raw_bytes": raw,
        "ratio": about["bytes"] / max(1, raw),
        "verifier": convention.fingerprint,
        "layer_ids": list(convention.layer_ids),
        "hidden_size": convention.hidden_size,
        "format": convention.format,
    }


def list_store(store: Path, results: list[Path], as_json: bool) -> None:
    """Print the conventions with their shards and the runs that refer to them."""
    references = read_references(store, results)
    conventions: dict[str, list[dict[str, Any]]] = {}
    for path in shard_files(store):
        conventions.setdefault(path.parent.name, []).append(summarize_shard(path, references))
    if as_json:
        print(json.dumps(conventions, indent=1))
        return
    for key, shards in conventions.items():
        whole = [s for s in shards if "error" not in s]
        print(f"\n{key}")
        if whole:
            first = whole[0]
            total, raw = sum(s["bytes"] for s in whole), sum(s["raw_bytes"] for s in whole)
            print(
                f"  verifier {first['verifier'][:12]}, layers {first['layer_ids']}, width "
                f"{first['hidden_size']}, {first['format']}\n"
                f"  {len(whole)} shards, {sum(s['samples'] for s in whole)} samples, "
                f"{sum(s['tokens'] for s in whole)} tokens, {as_bytes(total)}, "
                f"{total / max(1, raw):.3f} of raw"
            )
        for shard in shards:
            runs = ", ".join(shard["runs"]) or "no run"
            if "error" in shard:
                print(f"  {shard['id']}  {as_bytes(shard['bytes'])}  {shard['error']}  ({runs})")
            else:
                print(
                    f"  {shard['id']}  {shard['samples']:4} samples {shard['tokens']:8} tokens "
                    f"{as_bytes(shard['bytes']):>11}  {shard['ratio']:.3f}  {runs}"
                )
    if not conventions:
        print(f"{store}: no shards")


def show_shard(store: Path, results: list[Path], name: str, as_json: bool) -> None:
    """Print one shard's metadata and, of each sample, the mean norm of its states by layer."""
    path = find_shard(store, name)
    about = summarize_shard(path, read_references(store, results))
    with Shard(path) as shard:
        about["samples"] = []
        for number, entry in enumerate(shard.samples):
            norms = shard.read(number).states.float().norm(dim=-1).mean(0)
            about["samples"].append(
                {
                    "id": entry["id"],
                    "tokens": entry["tokens"],
                    "mean_norm": {
                        str(layer): round(norm, 4)
                        for layer, norm in zip(shard.layer_ids, norms.tolist(), strict=True)
                    },
                }
            )
    if as_json:
        print(json.dumps({"file": str(path), **about}, indent=1))
        return
    print(path)
    for key in ("verifier", "layer_ids", "hidden_size", "format", "tokens", "runs"):
        print(f"  {key:<12} {about[key]}")
    print(f"  {'bytes':<12} {about['bytes']}, {about['ratio']:.3f} of raw")
    print("  samples: tokens, mean norm by layer, id")
    for sample in about["samples"]:
        norms = "  ".join(f"h[{k}] {v:.4g}" for k, v in sample["mean_norm"].items())
        print(f"  {sample['tokens']:6}  {norms}  {sample['id']}")
