"""Preparing torch and speculators: device, number format, seeds, the trainer's arguments."""

import argparse
import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.optim._muon as muon
from speculators.train import checkpointer
from speculators.train.distributed import maybe_setup_distributed

from aerie.common.machine import computes_bf16
from aerie.config import Drafter
from aerie.drafter.muon import orthogonalize


def prepare(drafter: Drafter) -> tuple[bool, torch.dtype]:
    """Set torch and speculators up for this machine and seed.

    Returns whether there are GPUs, and the format of the computation as speculators' autocast
    takes it (the weights are float32).
    """
    gpu = torch.cuda.is_available() and drafter.gpus > 0
    if gpu:
        follow_hints()
        maybe_setup_distributed()
    else:
        # speculators times its steps with this, which fails where there is no accelerator.
        torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
        checkpointer.get_current_device = lambda: "cpu"
        if not computes_bf16():
            muon._zeropower_via_newtonschulz = orthogonalize  # type: ignore[assignment]
    random.seed(drafter.seed)
    np.random.seed(drafter.seed)
    torch.manual_seed(drafter.seed)
    return gpu, torch.bfloat16 if computes_bf16() else torch.float32


def follow_hints() -> None:
    """Set for training on a GPU what torch and tokenizers ask for in their hints; log it once.

    What the user set in the environment stays. Nothing is set on a CPU, where another number of
    threads would give other rounding errors, or in the engine, whose states TF32 would change.
    """
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_float32_matmul_precision("high")
    # torchrun gives each of several processes one thread unless told otherwise.
    if os.environ.get("OMP_NUM_THREADS") == "1" and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("aerie").info(
            "set by Aerie: TF32 for float32 products, PYTORCH_ALLOC_CONF=%s, "
            "TOKENIZERS_PARALLELISM=%s, %d threads",
            os.environ["PYTORCH_ALLOC_CONF"],
            os.environ["TOKENIZERS_PARALLELISM"],
            torch.get_num_threads(),
        )


class Arguments(argparse.Namespace):
    """speculators' training arguments as attributes; one that is not set is None."""

    def __init__(self, values: dict[str, Any]):
        super().__init__(**values)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def speculators_arguments(
    drafter: Drafter,
    verifier: Path,
    aux_layer_ids: list[int],
    gpu: bool,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """The arguments of `speculators train` for an EAGLE-3 drafter."""
    return {
        "speculator_type": "eagle3",
        "verifier_name_or_path": str(verifier),
        "trust_remote_code": trust_remote_code,
        "from_pretrained": drafter.from_checkpoint,
        "draft_config": None,
        "num_layers": drafter.num_layers,
        "draft_arch": "llama",
        "draft_hidden_act": None,
        "draft_attn_impl": "simple_flex_attention" if gpu else "sdpa",
        "draft_mrope_full_head_hack": True,
        "sliding_window": drafter.sliding_window,
        "full_attention_indices": [],
        "mask_token_id": None,
        "target_layer_ids": aux_layer_ids,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": True,
        "embed_requires_grad": False,
        "ttt_steps": drafter.ttt_steps,
        "ttt_step_loss_decay": drafter.ttt_step_loss_decay,
        "loss_fn": "kl_div",
        "loss_implementation": "fused" if gpu else "eager",
    }
