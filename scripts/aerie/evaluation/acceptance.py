"""Acceptance in the server: how many drafted tokens the verifier accepts, as vLLM counts them."""

from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.common.progress import JobProgress
from aerie.common.versions import EVALUATION_VERSION
from aerie.config import Config
from aerie.corpus.prompt_sets import read_heldout, read_prompt_file
from aerie.engine.in_process import InProcessEngine
from aerie.engine.protocol import Request
from aerie.evaluation.results import Acceptance, AcceptanceSettings, PromptSetAcceptance
from aerie.evaluation.served import ServedDrafter
from aerie.verifier.fingerprint import Fingerprint


def count_acceptance(
    before: dict[str, Any],
    after: dict[str, Any],
    positions: int,
    prompts: int,
    generated_tokens: int,
) -> PromptSetAcceptance:
    """Acceptance between two readings of vLLM's counters (`InProcessEngine.counters`).

    Source: vLLM's `SpecDecodingMetrics`. Raises `InputError` when nothing was drafted.
    """
    drafts = after["num_drafts"] - before["num_drafts"]
    accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
    if drafts == 0:
        raise InputError(
            "vLLM drafted nothing: every answer ended with its first token; measure with prompts "
            "that get longer answers"
        )
    # The first reading of an engine may be empty.
    earlier = before["per_position"] or [0] * positions
    return PromptSetAcceptance(
        acceptance_length=1 + accepted / drafts,
        acceptance_per_position=[
            (a - b) / drafts for a, b in zip(after["per_position"], earlier, strict=True)
        ],
        num_drafts=int(drafts),
        num_accepted_tokens=int(accepted),
        prompts=prompts,
        generated_tokens=generated_tokens,
    )


def acceptance_key(
    fingerprint: str,
    drafter: list[str],
    settings: AcceptanceSettings,
    prompt_sets: dict[str, list[list[int]]],
) -> str:
    """Hash of everything that determines the acceptance.

    `fingerprint`: the verifier's; `drafter`: hashes of the draft model; `prompt_sets`: token ids.
    """
    return digest(EVALUATION_VERSION, fingerprint, drafter, settings.as_json(), prompt_sets)


def measure_acceptance(
    config: Config,
    *,
    drafter: Path,
    verifier: Fingerprint,
    heldout: Path,
    store: Path,
    progress_log: Path | None,
) -> Acceptance:
    """Acceptance on the held-out prompts and on `evaluation.prompt_sets`, from the store if there.

    `drafter`: folder of the draft model; `heldout`: heldout.jsonl.zst. Prompts are answered
    greedily. Raises `InputError` when no prompt of a set leaves room for an answer.
    """
    evaluation = config.evaluation
    served = ServedDrafter(drafter, verifier, config)
    records = {"heldout": read_heldout(heldout)}
    records |= {name: read_prompt_file(Path(p)) for name, p in evaluation.prompt_sets.items()}
    prompt_sets = {
        name: served.encode(f"prompt set {name}", found, evaluation.max_prompts)
        for name, found in records.items()
    }
    settings = AcceptanceSettings(
        num_speculative_tokens=evaluation.num_speculative_tokens,
        max_prompts=evaluation.max_prompts,
        max_tokens=evaluation.max_tokens,
        max_length=config.samples.max_length,
        temperature=0.0,
        engine=config.engine.model_dump(),
    )
    key = acceptance_key(verifier.fingerprint, served.hashes(), settings, prompt_sets)
    kept = store / "acceptance" / f"{key}.json"
    if not kept.is_file():
        found = _measure(served, prompt_sets, progress_log)
        heldout_counts = found["heldout"].as_json()
        Acceptance(**heldout_counts, prompt_sets=found, settings=settings).write(kept)
    return Acceptance.read(kept)


def _measure(
    served: ServedDrafter, prompt_sets: dict[str, list[list[int]]], progress_log: Path | None
) -> dict[str, PromptSetAcceptance]:
    evaluation = served.config.evaluation
    total = sum(len(prompts) for prompts in prompt_sets.values())
    found = {}
    with (
        JobProgress("measure_acceptance", total, "prompts", progress_log) as progress,
        InProcessEngine(**served.engine_arguments(True), count=True, progress=progress) as engine,
    ):
        for name, prompts in prompt_sets.items():
            before = engine.counters()
            tokens = 0
            requests = (
                Request(f"{name}/{i}", p, evaluation.max_tokens) for i, p in enumerate(prompts)
            )
            for answer in engine.run(requests):
                tokens += len(answer.tokens)
                progress.update(progress.done + 1)
            found[name] = count_acceptance(
                before,
                engine.counters(),
                evaluation.num_speculative_tokens,
                len(prompts),
                tokens,
            )
    return found
