"""What a drafter is worth in the server: accepted tokens and speed, as vLLM counts them."""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from aerie.common.errors import InputError
from aerie.common.progress import JobProgress
from aerie.engine.in_process import Engine
from aerie.engine.protocol import Request


def acceptance(before: dict[str, Any], after: dict[str, Any], positions: int) -> dict[str, Any]:
    """Acceptance between two readings of vLLM's counters (`Engine.counters`).

    `acceptance_length` = 1 + accepted / drafts: mean tokens per verifier step, its own token
    included. `acceptance_per_position[k]`: share of drafts of which the tokens up to k were all
    accepted. Source: vLLM's `SpecDecodingMetrics`. Raises `InputError` when nothing was drafted.
    """
    drafts = after["num_drafts"] - before["num_drafts"]
    accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
    if drafts == 0:
        raise InputError("vLLM drafted nothing: every answer ended with its first token")
    zeros = [0] * positions
    per_position = [
        (a - b) / drafts
        for a, b in zip(after["per_position"], before["per_position"] or zeros, strict=True)
    ]
    return {
        "acceptance_length": 1 + accepted / drafts,
        "acceptance_per_position": per_position,
        "num_drafts": int(drafts),
        "num_accepted_tokens": int(accepted),
    }


def measure_acceptance(
    engine: Engine,
    prompt_sets: dict[str, list[list[int]]],
    max_tokens: int,
    positions: int,
    progress: Callable[[int], None],
) -> dict[str, dict[str, Any]]:
    """Acceptance by prompt set; prompts are token ids, answered greedily."""
    found = {}
    done = 0
    for name, prompts in prompt_sets.items():
        before = engine.counters()
        tokens = 0
        requests = (Request(f"{name}/{i}", p, max_tokens) for i, p in enumerate(prompts))
        for answer in engine.run(requests):
            tokens += len(answer.tokens)
            done += 1
            progress(done)
        counts = acceptance(before, engine.counters(), positions)
        found[name] = {**counts, "prompts": len(prompts), "generated_tokens": tokens}
    return found


def time_prompts(
    engine_arguments: dict[str, Any],
    prompts: list[list[int]],
    max_tokens: int,
    runs: list[int],
    progress_log: Path | None = None,
    before: int = 0,
) -> list[dict[str, Any]]:
    """Tokens per second and seconds per output token, for each concurrency in `runs`.

    One untimed prompt comes first. `time_per_output_token_s` is the mean over requests of a
    request's share of the engine's time: concurrency x seconds / tokens. Progress counts on from
    `before` prompts, of two such timings.
    """
    total = 2 * len(runs) * len(prompts)
    with (
        JobProgress("measure_speed", total, "prompts", progress_log, phase="loading") as progress,
        Engine(**engine_arguments, progress=progress) as engine,
    ):
        progress.begin(before, total)
        for _ in engine.run(iter([Request("warm-up", prompts[0], 8)])):
            pass
        found = []
        for concurrency in runs:
            start = time.perf_counter()
            requests = (Request(f"{concurrency}/{i}", p, max_tokens) for i, p in enumerate(prompts))
            answers = []
            for answer in engine.run(requests, concurrency=concurrency):
                answers.append(answer)
                progress.update(progress.done + 1)
            seconds = time.perf_counter() - start
            tokens = sum(len(a.tokens) for a in answers)
            found.append(
                {
                    "concurrency": concurrency,
                    "prompts": len(prompts),
                    "generated_tokens": tokens,
                    "seconds": seconds,
                    "tokens_per_second": tokens / seconds,
                    "time_per_output_token_s": min(concurrency, len(prompts)) * seconds / tokens,
                }
            )
        return found


def measure_speed(
    common: dict[str, Any],
    drafter: Path,
    num_speculative_tokens: int,
    prompts: list[list[int]],
    max_tokens: int,
    concurrencies: list[int],
    progress_log: Path | None = None,
) -> dict[str, Any]:
    """Speed without and with the drafter: same prompts, same engine settings, one after the other.

    Each engine has a process of its own, so neither finds the other's memory.
    """
    sides = {
        "without": common,
        "with": {
            **common,
            "drafter": drafter,
            "num_speculative_tokens": num_speculative_tokens,
        },
    }
    found: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    for side, (name, arguments) in enumerate(sides.items()):
        before = side * len(concurrencies) * len(prompts)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            timed = pool.submit(
                time_prompts, arguments, prompts, max_tokens, concurrencies, progress_log, before
            )
            found[name] = timed.result()
    found["speedup"] = [
        {
            "concurrency": a["concurrency"],
            "ratio": b["tokens_per_second"] / a["tokens_per_second"],
        }
        for a, b in zip(found["without"], found["with"], strict=True)
    ]
    return found
