"""Records as the stages write them; a test names the values that it is about."""

from aerie.config import load_config
from aerie.corpus.report import PromptsReport
from aerie.evaluation.results import (
    Acceptance,
    AcceptanceSettings,
    PromptSetAcceptance,
    Speed,
    SpeedSettings,
    Speedup,
    Timing,
)
from aerie.generation.answers import Sampling
from aerie.generation.manifest import Captured, ResponsesManifest
from aerie.states.manifest import LaneManifest, ManifestConvention
from aerie.verifier.fingerprint import Fingerprint
from support.models import make_fingerprint

ENGINE = load_config({}).engine.model_dump()
MEASURED = {
    "num_speculative_tokens": 3,
    "max_tokens": 128,
    "max_length": 512,
    "temperature": 0.0,
    "engine": ENGINE,
}


def fingerprint(**values) -> Fingerprint:
    demo = {"path": "verifiers/SmolLM2-135M-Instruct-e4797d590ac0", "licence": "Apache-2.0"}
    return make_fingerprint(**{**demo, **values})


def prompts_report(**values) -> PromptsReport:
    counts = {"dropped": {}, "changed": {}, "evaluation_sets": {}, "warnings": []}
    shares = {"kept_share": 1.0, "heldout_share": 0.08}
    return PromptsReport(**{"mode": "generate", **counts, **shares, **values})


def responses_manifest(**values) -> ResponsesManifest:
    return ResponsesManifest(
        **{
            "key": "0123456789abcdef",
            "verifier": "e" * 32,
            "sampling": Sampling(0.0, 1.0, 128, 512, 0),
            "records": 100,
            "answers": 100,
            "truncated": 0,
            "generated_tokens": 8000,
            "not_answered": 0,
            "ended_early": 0,
            "reused": 0,
            "generated": 100,
            "captured": Captured(),
            "load_seconds": 0.0,
            "seconds": 0.0,
            **values,
        }
    )


def lane_manifest(**values) -> LaneManifest:
    convention = ManifestConvention(
        key="11223344",
        verifier="e" * 32,
        layer_ids=[2, 15, 27, 30],
        hidden_size=576,
        format="lossless",
        last_state="supervised",
    )
    counts = dict.fromkeys(("samples", "tokens", "raw_bytes", "bytes"), 0)
    return LaneManifest(**{"convention": convention, "shards": [], **counts, **values})


def prompt_set(served: list[float], prompts: int = 40) -> PromptSetAcceptance:
    """`served`: cumulative acceptance by position."""
    return PromptSetAcceptance(
        acceptance_length=1 + sum(served),
        acceptance_per_position=served,
        num_drafts=2000,
        num_accepted_tokens=round(2000 * sum(served)),
        prompts=prompts,
        generated_tokens=3600,
    )


def acceptance(prompt_sets: dict[str, PromptSetAcceptance]) -> Acceptance:
    settings = AcceptanceSettings(**MEASURED, max_prompts=40)
    heldout = prompt_sets["heldout"].as_json()
    return Acceptance(**heldout, prompt_sets=prompt_sets, settings=settings)


def speed(rates: dict[int, tuple[float, float]], machine: dict | None = None) -> Speed:
    """`rates`: concurrency → tokens a second without and with the drafter."""
    without, found = (
        [
            Timing(
                concurrency=concurrency,
                prompts=8,
                generated_tokens=700,
                seconds=700 / both[side],
                tokens_per_second=both[side],
                time_per_output_token_s=concurrency / both[side],
            )
            for concurrency, both in rates.items()
        ]
        for side in (0, 1)
    )
    return Speed(
        without=without,
        with_=found,
        speedup=[Speedup(concurrency=c, ratio=b / a) for c, (a, b) in rates.items()],
        settings=SpeedSettings(**MEASURED, prompts=8, concurrency=list(rates)),
        machine=machine or {},
    )
