"""Whether the libraries can be imported, and what they print then."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, cast

from aerie.planning.preflight.result import CheckResult
from aerie.watching.catalogue import Catalogue
from aerie.watching.log_file import triage

IMPORTS = ("torch", "transformers", "speculators", "hs_connectors.transfer", "vllm.LLM")

_IMPORT = """
import importlib, json, sys, traceback
facts = {}
for name in sys.argv[1:]:
    try:
        module, _, attribute = name.partition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            getattr(importlib.import_module(module), attribute)
    except BaseException:
        traceback.print_exc()
        facts[name] = False
    else:
        facts[name] = True
try:
    import torch
    facts["cuda"] = torch.version.cuda
    facts["devices"] = torch.cuda.device_count() if torch.version.cuda else 0
except Exception:
    pass
print("\\nFACTS " + json.dumps(facts))
"""


def start_imports(modules: tuple[str, ...] = IMPORTS) -> subprocess.Popen[bytes]:
    """Start a process that imports the modules while the other checks run."""
    variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _IMPORT, *modules],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
    )


def check_imports(
    process: subprocess.Popen[bytes], catalogue: Catalogue, seconds: float
) -> tuple[list[CheckResult], dict[str, Any]]:
    """Judge what the imports printed. The facts: `cuda` (version torch is built for), `devices`
    (number of GPUs); empty when the process did not end within `seconds`."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return [
            CheckResult(
                "imports",
                "note",
                f"not finished after {seconds:.0f} s",
                "the disk or the processor is slow or busy; every job repeats these imports",
                "move the environment to a local disk, or wait until the machine is idle",
            )
        ], {}
    log, _, line = output.rpartition(b"\nFACTS ")
    # Libraries may print more when the process ends.
    line, _, rest = line.partition(b"\n")
    facts: dict[str, Any] = json.loads(line) if line.startswith(b"{") else {}
    log += b"\n" + rest if facts else line
    severities = {"fatal": "error", "degraded": "warning", "unknown": "note", "hint": "note"}
    modules = [str(a) for a in cast(Sequence[str], process.args)[3:]]
    if all(facts.get(name) for name in modules):
        # All imports work, so whatever was printed is a warning at most.
        severities |= {"fatal": "warning"}
    results = [
        CheckResult("imports", severities[f.level], f.text, f.meaning, f.advice)
        for f in triage(io.BytesIO(log), "imports", catalogue)
        if f.level in severities
    ]
    failed = [name for name in modules if not facts.get(name)]
    if failed and not any(f.severity == "error" for f in results):
        results.append(
            CheckResult(
                "imports",
                "error",
                f"{', '.join(failed)}: not importable (exit status {process.returncode})",
                "no job that needs this can start",
                "run make env: it installs versions that fit together",
            )
        )
    if not failed:
        results.append(CheckResult("imports", "ok", ", ".join(modules)))
    return results, facts
