"""Conventions: what determines the states of given tokens, and how the store keeps them."""

from dataclasses import dataclass
from typing import Self

from aerie.common import versions
from aerie.common.files import digest
from aerie.config import HiddenStates
from aerie.verifier.compatibility import resolve_layer_ids
from aerie.verifier.fingerprint import Fingerprint

FORMATS = ("lossless", "raw", "fp8")
LAST_STATES = ("all", "supervised")


@dataclass(frozen=True)
class Convention:
    """What determines the states of given tokens, and how they are stored.

    `fingerprint`: the verifier's; it covers the tokenizer's, `tokenizer`. `layer_ids`: all
    captured ids, sorted; the last one is the number of layers (the last layer's output before
    the final norm). `format`: one of `FORMATS`. `last_state`: `all`, or `supervised` to keep the
    last layer's states at supervised tokens only.
    """

    fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    format: str = "lossless"
    last_state: str = "all"
    tokenizer: str = ""

    @classmethod
    def of(cls, verifier: Fingerprint, settings: HiddenStates) -> Self:
        """The convention that the configuration asks for with this verifier."""
        return cls(
            verifier.fingerprint,
            tuple(resolve_layer_ids(settings.aux_layer_ids, verifier.num_layers)),
            verifier.hidden_size,
            settings.format,
            settings.last_state,
            verifier.tokenizer,
        )

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The layers that feed the drafter: all but the last."""
        return self.layer_ids[:-1]

    @property
    def key(self) -> str:
        """Name of the convention's folder in the store."""
        return digest(
            versions.SHARD_VERSION,
            self.fingerprint,
            list(self.layer_ids),
            self.hidden_size,
            self.format,
            self.last_state,
        )[:16]

    def bytes_per_token(self) -> int:
        """Uncompressed bytes of one token's states."""
        return len(self.layer_ids) * self.hidden_size * 2
