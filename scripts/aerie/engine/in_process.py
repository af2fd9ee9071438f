"""vLLM's engine, owned by the job that uses it."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aerie.common.errors import EngineError, InputError
from aerie.common.machine import computes_bf16, keep_freed_memory
from aerie.common.paths import SCRIPTS
from aerie.common.progress import JobProgress
from aerie.config import Engine
from aerie.engine.captured import with_states
from aerie.engine.protocol import Answer, EngineDied, Failure, Request

WRITE_SECONDS = 300.0
"""Longest time the connector may take to write the states of the last requests."""


class InProcessEngine:
    """A vLLM engine fed with token ids: on a GPU in a process of its own, on a CPU in this one.

    `capture_ids`: save the states of these layers (sorted; the last id may be the number of
    layers) for every request, as files in the folder `staging`. `drafter`: folder of a drafter
    that speculates `num_speculative_tokens` tokens a step. `count`: collect the statistics that
    `counters` returns. `progress` hears of the load and of every step, which may come long before
    an answer.
    """

    def __init__(
        self,
        model: Path,
        settings: Engine,
        *,
        max_model_len: int,
        trust_remote_code: bool = False,
        seed: int = 0,
        capture_ids: list[int] | None = None,
        staging: Path | None = None,
        drafter: Path | None = None,
        num_speculative_tokens: int = 0,
        count: bool = False,
        progress: JobProgress | None = None,
    ):
        self.progress = progress
        if progress is not None:
            progress.enter("loading")
        _prepare_environment(settings)
        from vllm import LLM

        self.in_process = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        self.max_num_seqs = settings.max_num_seqs
        self.max_model_len = max_model_len
        self.capturing = capture_ids is not None
        options: dict[str, Any] = {}
        if capture_ids is not None:
            options |= _capture_options(capture_ids, staging)
        if drafter is not None:
            options["speculative_config"] = {
                "method": "eagle3",
                "model": str(drafter),
                "num_speculative_tokens": num_speculative_tokens,
            }
        if self.in_process and settings.enforce_eager:
            # A compiler would fuse the norm with the operations around it.
            from aerie.engine.cpu_kernels import PRIORITY

            options["ir_op_priority"] = PRIORITY
        self.llm = LLM(
            model=str(model),
            dtype=_dtype(settings.dtype),
            max_model_len=max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=max(settings.max_num_batched_tokens, max_model_len),
            enforce_eager=settings.enforce_eager,
            tensor_parallel_size=settings.tensor_parallel_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            trust_remote_code=trust_remote_code,
            seed=seed,
            # With the cache on, captured states can be shorter than the tokens (vllm#44485),
            # and a repeated prompt would make the second of two timed runs look faster.
            enable_prefix_caching=False,
            disable_log_stats=not count,
            distributed_executor_backend="uni" if self.in_process else None,
            **options,
        )
        if self.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
            self.close()
            raise InputError(
                "vLLM enabled prefix caching although it was told not to; captured states would be "
                "shorter than their tokens. Find what enables it (a vLLM plugin, a patched vLLM) "
                "and remove it"
            )
        if not self.in_process:
            threading.Thread(target=_report_death, args=[self.llm.llm_engine], daemon=True).start()
        if capture_ids is not None and self.in_process:
            # vLLM's extraction method proposes every sampled token once more as a draft, so each
            # step would compute two tokens for one that is kept, which a CPU pays for.
            self.llm.llm_engine.engine_core.engine_core.check_for_draft_tokens = False
        if progress is not None:
            progress.enter("working")

    def run(
        self,
        requests: Iterator[Request | None],
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: Callable[[str], int] | None = None,
        concurrency: int | None = None,
    ) -> Iterator[Answer]:
        """Answer requests as `VerifierEngine.run` describes.

        `concurrency` defaults to twice the sequences that the engine computes at once. A request
        that vLLM refuses, or whose states it could not save, yields a `Failure`. Raises
        `EngineDied` when the engine fails.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.exceptions import VLLMClientError

        engine = self.llm.llm_engine
        extra = {"kv_transfer_params": {"include_output_tokens": True}} if self.capturing else None
        room = concurrency or 2 * self.max_num_seqs
        flying: dict[str, Request] = {}
        unwritten: list[Answer] = []
        last = time.monotonic()
        while True:
            ready: list[Answer] = []
            while len(flying) < room and (request := next(requests, None)) is not None:
                try:
                    engine.add_request(
                        request.key,
                        TokensPrompt(prompt_token_ids=request.prompt),
                        SamplingParams(
                            temperature=temperature,
                            top_p=top_p,
                            seed=seed(request.key) if seed and temperature > 0 else None,
                            max_tokens=request.max_tokens,
                            stop_token_ids=list(request.end_ids),
                            detokenize=False,
                            extra_args=extra,
                        ),
                    )
                except (ValueError, VLLMClientError) as error:
                    ready.append(_failed(request, f"the engine refuses it: {error}"))
                except Exception as error:
                    raise _died(error) from error
                else:
                    flying[request.key] = request
            if not flying and not unwritten and not ready:
                return
            if flying or self.in_process:
                for output in self._step():
                    if output.finished:
                        unwritten.append(_answer(flying.pop(output.request_id), output))
            elif not ready:
                time.sleep(0.002)
            # The states of a finished request are written during the engine's next steps.
            waiting = []
            for answer in unwritten:
                found = with_states(answer)
                if found is None:
                    waiting.append(answer)
                else:
                    ready.append(found)
            unwritten = waiting
            if ready or flying:
                last = time.monotonic()
            elif time.monotonic() - last > WRITE_SECONDS:
                raise EngineError(
                    f"{unwritten[0].states}: captured states did not appear within "
                    f"{WRITE_SECONDS:.0f} s after their request had finished; see the engine's log "
                    "above, then run again"
                )
            yield from ready

    def _step(self) -> list[Any]:
        """One step of the engine: outputs of requests that made progress."""
        try:
            outputs = self.llm.llm_engine.step()
        except Exception as error:
            raise _died(error) from error
        if outputs and self.progress is not None:
            self.progress.beat(len(outputs))
        return outputs

    def counters(self) -> dict[str, Any]:
        """vLLM's running counts: drafts, accepted tokens, accepted tokens per position."""
        found: dict[str, Any] = {"num_drafts": 0, "num_accepted_tokens": 0, "per_position": []}
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_drafts":
                found["num_drafts"] = metric.value
            elif metric.name == "vllm:spec_decode_num_accepted_tokens":
                found["num_accepted_tokens"] = metric.value
            elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                found["per_position"] = list(metric.values)
        return found

    def close(self) -> None:
        """End the engine's processes."""
        with contextlib.suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _capture_options(layer_ids: list[int], staging: Path | None) -> dict[str, Any]:
    """vLLM's options that save the states of these layers in the folder `staging`."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
            },
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "aerie.engine.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": str(staging),
                "use_synchronization_lock": False,
            },
        },
    }


def _report_death(engine: Any) -> None:
    """Wake the thread that waits for the engine's outputs when the engine's process has died.

    vLLM 0.32.0's client notices the death and ends the thread that receives outputs, but a caller
    that is already waiting for them would wait forever.
    """
    client = engine.engine_core
    client.output_queue_thread.join()
    client.outputs_queue.put_nowait(RuntimeError("the engine's process has ended"))


def _died(error: Exception) -> EngineDied:
    return EngineDied(f"{type(error).__name__}: {error}")


def _failed(request: Request, reason: str) -> Failure:
    return Failure(request.key, request.prompt, [], "error", None, reason)


def _answer(request: Request, output: Any) -> Answer:
    completion = output.outputs[0]
    if completion.finish_reason in ("abort", "error"):
        return _failed(request, f"the engine ended it with {completion.finish_reason!r}")
    states = (output.kv_transfer_params or {}).get("hidden_states_path")
    return Answer(
        output.request_id,
        list(output.prompt_token_ids),
        list(completion.token_ids),
        completion.finish_reason,
        Path(states) if states else None,
    )


def _dtype(wanted: str) -> str:
    """vLLM's `dtype`. `auto`: the checkpoint's own, but float32 without bf16 arithmetic."""
    return "float32" if wanted == "auto" and not computes_bf16() else wanted


def _prepare_environment(settings: Engine) -> None:
    """Set what vLLM reads from the environment; call this before importing vLLM."""
    import torch

    if not torch.cuda.is_available():
        # One process instead of three: each would import vLLM (25 s of CPU time), and the
        # scheduler's would spin on a core that the model needs.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        keep_freed_memory()
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_cache_gib),
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    print("engine environment:", *(f"{name}={os.environ[name]}" for name in wanted), flush=True)
    # The engine's worker is a spawned process and has to find aerie.engine.connector.
    paths = os.environ.get("PYTHONPATH", "")
    if str(SCRIPTS) not in paths.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(SCRIPTS), paths) if p)
