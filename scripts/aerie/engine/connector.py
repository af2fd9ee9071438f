"""vLLM's hidden-states connector for CPU and GPU; the engine loads it by its module path.

ExampleHiddenStatesConnector of vLLM 0.32.0 copies with CUDA streams, so it fails without a GPU,
and a reader sees half-written files unless both sides take a file lock. Here a file gets its name
when it is complete. If states cannot be saved, `<name>.error` holds the reason: one request fails
and the engine continues.
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

from aerie.engine.captured import explain


class _Done:
    """A CUDA event of a copy that is already complete."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes one file per request: `hidden_states` bf16 [tokens, ids, hidden] and `token_ids`
    int64 [tokens]."""

    @staticmethod
    def _write_tensors(
        tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        try:
            event.synchronize()
            # A verifier in float16 or float32 has its states in that format; shards are bf16.
            states = tensors["hidden_states"].to(torch.bfloat16)
            save_file({**tensors, "hidden_states": states}, filename + ".part")
            os.replace(filename + ".part", filename)
        except BaseException as error:
            explain(filename, error)
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        try:
            if self._kv_cache is not None and self._kv_cache.device.type == "cpu":
                self._copy_on_cpu(pending)
            else:
                super()._submit_async_write(pending)
        except Exception as error:
            explain(pending.filename, error)
            # Reported as sent, so that the request's blocks are freed.
            self._req_copy_events[pending.req_id] = _Done()

    def _copy_on_cpu(self, pending: PendingSave) -> None:
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = blocks[:, None] * self._block_size + torch.arange(self._block_size)
        # Fancy indexing copies, so the blocks can be freed as soon as this returns.
        states = extract_from_kv_cache(self._kv_cache, slots.flatten(), len(pending.token_ids))
        tensors = {
            "hidden_states": states.to(torch.bfloat16).contiguous(),
            "token_ids": pending.token_ids.clone(),
        }
        done = _Done()
        lock = self._lock_fds.pop(pending.req_id, None)
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda f: self._on_write_done(pending.req_id, f))
