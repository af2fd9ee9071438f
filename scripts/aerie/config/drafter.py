"""One entry of `drafters`."""

from typing import Annotated, Literal

from pydantic import (
    Field,
)

from aerie.config.section import Section


class Drafter(Section):
    """One drafter to train. Several appear side by side in the report."""

    vocabulary: Annotated[int, Field(ge=16)] | Literal["full"] = 32000
    """Tokens the drafter can propose, the most frequent ones; `full`: all of the verifier's."""
    num_layers: Annotated[int, Field(ge=1)] = 1
    """Decoder layers."""
    epochs: Annotated[int, Field(ge=1)] = 3
    """Passes over the training samples."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """`muon`: matrices with Muon, the rest with AdamW."""
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the steps in which the learning rate rises; it falls linearly afterwards."""
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 3
    """Training-time-test steps: tokens drafted in a row during training."""
    ttt_step_loss_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of each further TTT step's loss, relative to the one before."""
    sequence_length: Annotated[int, Field(ge=32)] = 2048
    """Tokens per training step, packed from several samples; a longer sample is cut into pieces."""
    sliding_window: Annotated[int, Field(ge=16)] = 2048
    """Attention window of the drafter's layers, tokens."""
    seed: int = 0
    """Seed of the weights and of the order of samples."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs to train on (torchrun above 1); 0: CPU."""
    loader_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that read and unpack shards ahead of the training step; 0: a thread of the trainer,
    enough on a CPU. Raise it when the report shows steps that wait for data."""
    checkpoint_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A checkpoint is written after this share of an epoch."""
    from_checkpoint: str | None = None
    """Folder of a drafter to continue from; its own vocabulary map is kept."""
