"""The stage `generate_responses`: the verifier answers the prompts that have no answer yet."""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aerie.chat.template import ChatTemplate
from aerie.common.leases import Leases
from aerie.common.progress import JobProgress
from aerie.config import Config
from aerie.engine.client import first_model
from aerie.engine.endpoints import Endpoints
from aerie.engine.in_process import InProcessEngine
from aerie.engine.protocol import Failure, VerifierEngine
from aerie.engine.servers import EndpointError
from aerie.engine.staging import Staging
from aerie.generation.answers import AnswerStore, Sampling
from aerie.generation.capture import Capture
from aerie.generation.conversation import converse, never
from aerie.generation.groups import Groups
from aerie.generation.manifest import Captured, ResponsesManifest, count_answers
from aerie.samples.shards import Splits, group_splits
from aerie.samples.stored_answer import StoredAnswer
from aerie.states.convention import Convention
from aerie.states.store import Store
from aerie.states.teacher import Teacher
from aerie.verifier.fingerprint import Fingerprint

GROUP = 64
"""Mean number of records that a run answers under one lease, if it makes no shards of them."""


@dataclass
class Outcome:
    """What a job did. `adopted`: answers that another run gave meanwhile."""

    adopted: int = 0
    captured: Captured = field(default_factory=Captured)
    load_seconds: float = 0.0


def generate_responses(
    splits: Splits,
    verifier: Fingerprint,
    settings: Config,
    store: Path,
    progress_log: Path | None = None,
) -> ResponsesManifest:
    """Answer all records that have no answer in the store, and save the hidden states with them.

    `settings`: the sections generation, samples,
    hidden_states, engine and verifier are used. Raises `EndpointError` when no server is left to
    ask and records are still without an answer.
    """
    start = time.monotonic()
    generation = settings.generation
    served = None
    if generation.endpoints and not generation.endpoint_model:
        served = first_model(generation.endpoints)
    sampling = Sampling.of(generation, settings.samples, served)
    answers = AnswerStore(store, sampling.key(verifier.fingerprint))
    wanted = [record["id"] for records in splits.values() for record in records]
    stored = answers.load(set(wanted))
    known = {identity: answer for identity, answer in stored.items() if not answer.again}
    missing = len(wanted) - len(known)
    outcome = Outcome()
    if missing:
        try:
            with contextlib.ExitStack() as stack:
                # The servers' time to answer is limited by `Endpoints`.
                phase = "waiting" if generation.endpoints else "loading"
                bar = JobProgress("generate_responses", missing, "records", progress_log, phase)
                progress = stack.enter_context(bar)
                template = ChatTemplate.load(verifier.folder, settings.verifier.trust_remote_code)
                capture: Capture | None = None
                options: dict[str, Any] = {}
                if generation.capture and not generation.endpoints:
                    capture, options = _open_capture(
                        stack, splits, verifier, settings, store, progress
                    )
                engine = _open_engine(settings, sampling, template, verifier, progress, options)
                stack.enter_context(engine)
                outcome.load_seconds = time.monotonic() - start
                outcome.adopted = generate(
                    engine,
                    splits,
                    template,
                    sampling,
                    answers,
                    known,
                    capture,
                    lambda done, tokens: progress.update(done, f"{tokens} tokens", tokens=tokens),
                    _report_once(progress),
                )
                if capture:
                    outcome.captured = Captured(
                        shards=capture.shards, tokens=capture.tokens, failed=capture.failed
                    )
        except EndpointError as error:
            if not stored.keys() >= set(wanted):
                raise
            print(f"records that had no answer before still have none: {error}", file=sys.stderr)
            known = {**stored, **known}
    return ResponsesManifest(
        **count_answers(known[identity] for identity in wanted).as_json(),
        key=answers.folder.name,
        verifier=verifier.fingerprint,
        sampling=sampling,
        reused=len(wanted) - missing + outcome.adopted,
        generated=missing - outcome.adopted,
        captured=outcome.captured,
        load_seconds=round(outcome.load_seconds, 1),
        seconds=round(time.monotonic() - start, 1),
    )


def _open_capture(
    stack: contextlib.ExitStack,
    splits: Splits,
    verifier: Fingerprint,
    settings: Config,
    store: Path,
    progress: JobProgress,
) -> tuple[Capture, dict[str, Any]]:
    """The capture, and the arguments with which the engine saves states for it."""
    hidden_states, samples = settings.hidden_states, settings.samples
    convention = Convention.of(verifier, hidden_states)
    # Room for two groups that are not complete yet and one that is being written, all of the
    # longest samples.
    tokens = hidden_states.samples_per_shard * samples.max_length
    staging = stack.enter_context(Staging(3 * tokens * convention.bytes_per_token()))
    capture = Capture(
        Store(store, convention),
        Teacher(verifier.folder),
        splits,
        samples,
        hidden_states,
        greedy=settings.generation.temperature == 0,
        staging_bytes=staging.limit,
        beat=progress.beat,
    )
    return capture, {"capture_ids": list(convention.layer_ids), "staging": staging.folder}


def _open_engine(
    settings: Config,
    sampling: Sampling,
    template: ChatTemplate,
    verifier: Fingerprint,
    progress: JobProgress,
    capture_options: dict[str, Any],
) -> VerifierEngine:
    """The servers that the configuration names, or else an engine of this job."""
    generation = settings.generation
    if generation.endpoints:
        assert sampling.model is not None
        return Endpoints(
            generation.endpoints,
            sampling.model,
            template,
            concurrency=generation.endpoint_concurrency,
            max_model_len=sampling.max_length,
        )
    return InProcessEngine(
        verifier.folder,
        settings.engine,
        max_model_len=sampling.max_length,
        trust_remote_code=settings.verifier.trust_remote_code,
        seed=sampling.seed,
        progress=progress,
        **capture_options,
    )


def _report_once(progress: JobProgress) -> Callable[[str], None]:
    """Print each message once, and show every time that the job is alive."""
    shown = set()

    def report(message: str) -> None:
        if message not in shown:
            shown.add(message)
            print(message, flush=True)
        progress.beat()

    return report


def generate(
    engine: VerifierEngine,
    splits: Splits,
    template: ChatTemplate,
    sampling: Sampling,
    answers: AnswerStore,
    known: dict[str, StoredAnswer],
    capture: Capture | None,
    progress: Callable[[int, int], None],
    idle: Callable[[str], None] = lambda _: None,
) -> int:
    """Answer the records of all splits that are not `known`; keep each answer as it arrives.

    Adds the answers to `known` and returns how many of them another run gave meanwhile.
    `progress(records, tokens)` is called with what is done so far, `idle(message)` while there is
    nothing to do but wait for another run that answers the same records. Raises `EndpointError`,
    with the number of answers that were kept, when no endpoint works any more.
    """
    groups = capture.groups if capture is not None else group_splits(splits, GROUP)
    done = tokens = asked = 0

    def finish(answer: StoredAnswer, states: Path | None) -> None:
        nonlocal done
        known[answer.id] = answer
        done += 1
        complete = work.finish(answer.id)
        if complete is not None:
            answers.flush()
        if capture is not None:
            capture.take(answer, states)
        elif complete is not None:
            work.release(complete)
        progress(done, tokens)

    with Leases() as leases:
        records = [group for _, group in groups]
        work = Groups(records, known, answers, leases, lambda answer: finish(answer, None), idle)
        if capture is not None:
            capture.written = work.release
            for identity in list(known):
                if identity in capture.group_of:
                    capture.take(known[identity], None)
        try:
            while work.left():
                for dialogue, last in converse(
                    engine, work, template, sampling, capture.full if capture else never
                ):
                    answer = dialogue.stored()
                    asked += 1
                    answers.add(answer)
                    if capture is not None and isinstance(last, Failure) and last.tokens:
                        capture.failed.append(last.reason)
                    tokens += answer.generated_tokens
                    finish(answer, last.states if last else None)
        except EndpointError as error:
            wanted = sum(map(len, splits.values()))
            raise EndpointError(
                error.problem,
                error.faults,
                f"{len(known)} of {wanted} records have their answers, and these are kept. Check "
                "that the servers run, then run again to answer the others",
            ) from None
        finally:
            answers.flush()
        if capture is not None:
            capture.close()
    return done - asked
