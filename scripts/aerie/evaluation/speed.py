"""Speed in the server, without and with the drafter: same prompts, same engine settings."""

import multiprocessing
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from aerie.common.files import digest
from aerie.common.machine import describe_machine
from aerie.common.progress import JobProgress
from aerie.common.versions import EVALUATION_VERSION
from aerie.config import Config
from aerie.corpus.prompt_sets import read_heldout
from aerie.engine.in_process import InProcessEngine
from aerie.engine.protocol import Request
from aerie.evaluation.results import Speed, SpeedSettings, Speedup, Timing
from aerie.evaluation.served import ServedDrafter
from aerie.verifier.fingerprint import Fingerprint


def speed_key(
    node: str,
    fingerprint: str,
    drafter: list[str],
    settings: SpeedSettings,
    prompts: list[list[int]],
) -> str:
    """Hash of everything that determines the speed, the machine's name `node` included.

    `fingerprint`: the verifier's; `drafter`: hashes of the draft model; `prompts`: token ids.
    """
    return digest(EVALUATION_VERSION, node, fingerprint, drafter, settings.as_json(), prompts)


def measure_speed(
    config: Config,
    *,
    drafter: Path,
    verifier: Fingerprint,
    heldout: Path,
    store: Path,
    progress_log: Path | None,
) -> Speed:
    """Speed on held-out prompts without and with the drafter, from the store if there.

    `drafter`: folder of the draft model; `heldout`: heldout.jsonl.zst. Raises `InputError` when no
    prompt leaves room for an answer.
    """
    evaluation = config.evaluation
    served = ServedDrafter(drafter, verifier, config)
    prompts = served.encode(str(heldout), read_heldout(heldout), evaluation.speed_prompts)
    settings = SpeedSettings(
        num_speculative_tokens=evaluation.num_speculative_tokens,
        prompts=len(prompts),
        max_tokens=evaluation.max_tokens,
        max_length=config.samples.max_length,
        concurrency=evaluation.concurrencies,
        temperature=0.0,
        engine=config.engine.model_dump(),
    )
    key = speed_key(platform.node(), verifier.fingerprint, served.hashes(), settings, prompts)
    kept = store / "speed" / f"{key}.json"
    if not kept.is_file():
        without, found = (
            _time_side(served, speculating, prompts, progress_log) for speculating in (False, True)
        )
        Speed(
            without=without,
            with_=found,
            speedup=[
                Speedup(concurrency=a.concurrency, ratio=b.tokens_per_second / a.tokens_per_second)
                for a, b in zip(without, found, strict=True)
            ],
            settings=settings,
            machine=describe_machine(),
        ).write(kept)
    return Speed.read(kept)


def _time_side(
    served: ServedDrafter, speculating: bool, prompts: list[list[int]], progress_log: Path | None
) -> list[Timing]:
    """Timings without or with the drafter, in a process of its own: neither engine finds the
    other's memory."""
    evaluation = served.config.evaluation
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(
            _time_prompts,
            served.engine_arguments(speculating),
            prompts,
            evaluation.max_tokens,
            evaluation.concurrencies,
            progress_log,
            len(evaluation.concurrencies) * len(prompts) if speculating else 0,
        ).result()


def _time_prompts(
    engine_arguments: dict[str, Any],
    prompts: list[list[int]],
    max_tokens: int,
    concurrencies: list[int],
    progress_log: Path | None,
    done: int,
) -> list[Timing]:
    """A timing for each concurrency, after one untimed prompt.

    `done`: prompts of the other side, which count in the progress.
    """
    total = 2 * len(concurrencies) * len(prompts)
    with (
        JobProgress("measure_speed", total, "prompts", progress_log, phase="loading") as progress,
        InProcessEngine(**engine_arguments, progress=progress) as engine,
    ):
        progress.begin(done, total)
        for _ in engine.run(iter([Request("warm-up", prompts[0], 8)])):
            pass
        found = []
        for concurrency in concurrencies:
            start = time.perf_counter()
            requests = (Request(f"{concurrency}/{i}", p, max_tokens) for i, p in enumerate(prompts))
            tokens = 0
            for answer in engine.run(requests, concurrency=concurrency):
                tokens += len(answer.tokens)
                progress.update(progress.done + 1)
            seconds = time.perf_counter() - start
            found.append(
                Timing(
                    concurrency=concurrency,
                    prompts=len(prompts),
                    generated_tokens=tokens,
                    seconds=seconds,
                    tokens_per_second=tokens / seconds,
                    time_per_output_token_s=min(concurrency, len(prompts)) * seconds / tokens,
                )
            )
        return found
