"""The report in words: the result, the gap to validation and its causes, losses and oddities."""

from dataclasses import dataclass

from aerie.common.text import shorten
from aerie.report.drafter import TrainedDrafter, speed_words
from aerie.report.run import EXAMPLES, Run

LARGE_GAP = 0.3
"""Tokens a step by which validation may exceed what is served before it is called a mismatch."""


def answer(drafter: TrainedDrafter) -> str:
    """The result in one sentence that follows the drafter's name."""
    first = drafter.speeds[0]
    text = (
        f"each verifier step yields {drafter.acceptance.acceptance_length:.2f} tokens on "
        f"held-out prompts, and vLLM generates {speed_words(first.ratio)} "
        f"(concurrency {first.concurrency})"
    )
    if first.ratio < 0.995:
        text += (
            f": a step with the drafter takes {first.step_cost:.2f} times as long, so it "
            f"would pay from an acceptance length of {first.step_cost:.2f}"
        )
    return text + "."


def explain_gap(run: Run) -> str:
    """Why validation expects more than is served."""
    reasons = [
        "it averages over every position of the answers, while the server starts a draft only "
        "where the one before it ended"
    ]
    if run.coverage:
        reasons.insert(
            0,
            "it compares the draft with the verifier's best token within the draft vocabulary, so "
            "a token outside it never counts as a miss",
        )
    return (
        "Served is what counts. Validation asks a slightly easier question: "
        + "; and ".join(reasons)
        + f". A little more than what is served is normal; more than {LARGE_GAP} tokens a step "
        "means that serving probably does not match training."
    )


def likely_causes(run: Run, drafter: TrainedDrafter) -> list[str]:
    """What to look at when validation expects far more than is served, likeliest first."""
    causes = []
    generation = run.config.generation
    if generation.mode == "keep":
        causes.append(
            "The drafter learned from the corpus's own answers (generation.mode: keep), which the "
            "verifier would not give; the server drafts the verifier's own. Set it to generate."
        )
    elif generation.temperature > 0:
        causes.append(
            f"The answers were sampled at temperature {generation.temperature}, but "
            "acceptance is measured greedily."
        )
    covered = run.covered(drafter)
    if covered is not None and covered < 0.95:
        causes.append(
            f"The draft vocabulary covers {covered:.1%} of the target tokens; validation does "
            "not see the others, each of which ends a draft. Use a larger vocabulary."
        )
    return [
        *causes,
        "The served verifier is not the one that computed the hidden states: different weights, "
        "number format or quantisation. Compare the fingerprints below.",
        "The layer ids in the drafter's config.json are not those of the extraction, or are "
        "counted differently (a shift by one).",
        "The server gets other prompts than training: another chat template, a date in it, a "
        "second beginning-of-sequence token.",
        "The drafter's d2t map belongs to another vocabulary or tokenizer.",
    ]


@dataclass(frozen=True)
class Loss:
    """Records that a stage left out for one `reason`; `examples` are texts."""

    stage: str
    reason: str
    count: int
    examples: list[str]


def losses(run: Run) -> list[Loss]:
    """Why records were left out, stage by stage."""
    found = []
    for name, source in run.prompts.sources.items():
        for reason, count in source.dropped.items():
            examples = [_example(e) for e in source.examples.get(reason, [])]
            found.append(_loss(f"cleaning, {name}", reason, count, examples))
    for reason, count in run.samples.dropped.items():
        examples = [run.describe_sample(i) for i in run.samples.examples.get(reason, [])]
        found.append(_loss("samples", reason, count, examples))
    for reason, ids in run.quarantined().items():
        examples = [run.describe_sample(i) for i in ids[:EXAMPLES]]
        found.append(_loss("hidden states", reason, len(ids), examples))
    return found


def _loss(stage: str, reason: str, count: int, examples: list[str]) -> Loss:
    return Loss(stage, reason, count, [shorten(e) for e in examples[:EXAMPLES]])


def _example(example: dict[str, str]) -> str:
    """Where a dropped record is and what is wrong with it; its id where neither is known."""
    where = " ".join(example[k] for k in ("file", "place") if example.get(k))
    return ": ".join(filter(None, (where, example.get("detail")))) or example.get("id", "")


def remarks(run: Run) -> list[str]:
    """Oddities of what was kept."""
    found = list(run.prompts.warnings)
    for name, source in run.prompts.sources.items():
        for note, count in source.changed.items():
            found.append(f"{name}: {note}: {count:,} records, kept.")
    responses = run.responses
    if responses and responses.truncated:
        share = responses.truncated / max(1, responses.answers)
        found.append(
            f"{responses.truncated:,} of {responses.answers:,} answers ({share:.0%}) "
            "were cut at generation.max_tokens or the window, and kept."
        )
    for part, count in run.samples.lost_by_template.items():
        examples = run.samples.examples.get(f"the template loses: {part}", [])
        found.append(
            f"The chat template loses {part} of {count:,} records, kept: "
            + "; ".join(run.describe_sample(i) for i in examples)
        )
    if responses and (failed := responses.captured.failed):
        found.append(
            f"{len(failed):,} shards could not be captured during generation and were extracted "
            f"afterwards; the first: {shorten(failed[0])}"
        )
    return found
