"""The fingerprint of a verifier: what identifies its checkpoint, and the sizes others need."""

import importlib.metadata
import os
import re
from pathlib import Path
from typing import NamedTuple

from aerie.common.errors import InputError
from aerie.common.files import digest, digest_file
from aerie.common.records import Record
from aerie.verifier.checkpoint import WEIGHT_PATTERNS, text_config

FINGERPRINT = "verifier/fingerprint.json"
"""In a run's folder."""

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


class Sizes(NamedTuple):
    """What the configuration is checked against."""

    num_layers: int
    vocab_size: int
    """Of the model, padding included."""
    max_length: int
    """Tokens."""


class Fingerprint(Record):
    """`verifier/fingerprint.json`: a verifier's checkpoint."""

    source: str
    """`verifier.source` of the configuration."""
    path: str
    """Folder of the checkpoint; relative when it lies under the working folder."""
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    """Of the model, padding included."""
    tokenizer_size: int
    """Tokens that the tokenizer knows."""
    max_length: int
    """Longest sequence, tokens."""
    dtype: str
    """Of the weights, such as `bfloat16`."""
    tied_embeddings: bool
    licence: str | None
    """Null when unknown."""
    weights: str
    """Hash of the weights."""
    tokenizer: str
    """Hash of the tokenizer's files."""
    chat_template: str
    """Hash of the chat template and of how it is read."""
    config: str
    """Hash of `config.json`."""
    fingerprint: str
    """Hash of the four hashes above."""

    @property
    def folder(self) -> Path:
        return Path(self.path)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.num_layers, self.vocab_size, self.max_length)

    @property
    def name(self) -> str:
        """The Hugging Face id, or the name of the checkpoint's folder."""
        is_id = not self.source.startswith("package:") and not Path(self.source).is_dir()
        return self.source if is_id else self.folder.name


def read_fingerprint(path: Path) -> Fingerprint:
    """The fingerprint in `path`; `InputError` when the checkpoint it names is gone."""
    fingerprint = Fingerprint.read(path)
    if not fingerprint.folder.is_dir():
        raise InputError(
            f"{path}: the verifier's folder {fingerprint.path} is gone; delete this file and "
            "run again"
        )
    return fingerprint


def find_fingerprint(source: str, results: Path, run: str) -> Fingerprint | None:
    """The fingerprint that a run made of this source, from this run if it has one."""
    for path in (results / run / FINGERPRINT, *sorted(results.glob(f"*/{FINGERPRINT}"))):
        try:
            found = Fingerprint.read(path)
        except InputError:
            continue
        if found.source == source:
            return found
    return None


def describe_verifier(folder: Path, source: str, trust_remote_code: bool = False) -> Fingerprint:
    """Fingerprint of a checkpoint folder; `InputError` when it holds no weights."""
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
    return Fingerprint(
        source=source,
        path=os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder),
        architecture=(config.architectures or [type(config).__name__])[0],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        tokenizer_size=len(template.tokenizer),
        max_length=config.max_position_embeddings,
        dtype=str(config.dtype).removeprefix("torch."),
        tied_embeddings=bool(config.tie_word_embeddings),
        licence=_licence(source, folder),
        **hashes,
        fingerprint=digest(hashes),
    )


def _weights_hash(path: Path) -> str:
    """Hash of a weights file. The Hugging Face cache names the file it links to by its hash, which
    saves reading a terabyte."""
    target = path.resolve().name
    return target if re.fullmatch(r"[0-9a-f]{64}", target) else digest_file(path)


def _licence(source: str, folder: Path) -> str | None:
    if source.startswith("package:"):
        meta = importlib.metadata.metadata(source.removeprefix("package:"))
        return next((meta[key] for key in ("License-Expression", "License") if key in meta), None)
    card = folder / "README.md"
    if card.is_file():
        for line in card.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("license:"):
                return line.removeprefix("license:").strip()
    return None
