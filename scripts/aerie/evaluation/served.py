"""A drafter served by vLLM beside its verifier, and the prompts it is measured with."""

from pathlib import Path
from typing import Any

from aerie.chat.template import ChatTemplate
from aerie.common.errors import InputError
from aerie.common.files import digest_file
from aerie.config import Config
from aerie.corpus.prompt_sets import encode_prompts
from aerie.verifier.fingerprint import Fingerprint


class ServedDrafter:
    """`folder`: the draft model. Of the configuration `evaluation`, `samples` (for the length of
    prompt and answer), `engine` and `verifier` are used."""

    def __init__(self, folder: Path, verifier: Fingerprint, config: Config):
        self.folder = folder
        self.verifier = verifier
        self.config = config
        self.template = ChatTemplate.load(verifier.folder, config.verifier.trust_remote_code)

    def hashes(self) -> list[str]:
        """Hashes of the drafter's configuration and weights."""
        return [digest_file(self.folder / f) for f in ("config.json", "model.safetensors")]

    def encode(self, where: str, records: list[dict[str, Any]], limit: int) -> list[list[int]]:
        """Token ids of at most `limit` prompts that leave room for an answer.

        Raises `InputError`, which names `where` they come from, when none does.
        """
        evaluation, length = self.config.evaluation, self.config.samples.max_length
        room = length - evaluation.max_tokens - evaluation.num_speculative_tokens
        prompts = encode_prompts(records, self.template, limit, room)
        if not prompts:
            raise InputError(
                f"{where}: no prompt leaves room for an answer of {evaluation.max_tokens} tokens "
                f"within {length}; lower evaluation.max_tokens or raise samples.max_length"
            )
        return prompts

    def engine_arguments(self, speculating: bool) -> dict[str, Any]:
        """Arguments of `Engine`, with or without the drafter."""
        arguments: dict[str, Any] = {
            "model": self.verifier.folder,
            "settings": self.config.engine,
            "max_model_len": self.config.samples.max_length,
            "trust_remote_code": self.config.verifier.trust_remote_code,
        }
        if speculating:
            arguments["drafter"] = self.folder
            arguments["num_speculative_tokens"] = self.config.evaluation.num_speculative_tokens
        return arguments
