"""vLLM's hidden-states connector for CPU and GPU, loaded out of tree by the engine.

vLLM 0.32.0's ExampleHiddenStatesConnector copies with CUDA streams, so it fails where there is
no GPU, and it lets a reader see a half-written file unless both sides take a file lock. Here a
file has its name only when it is whole, and states that could not be saved leave `<name>.error`
with the reason: one request fails, the engine goes on.
"""

import contextlib
import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Done:
    """Stands for a CUDA event of a copy that is already complete."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes a file a request: `hidden_states` bf16 [tokens, ids, hidden], `token_ids` [tokens]."""

    @staticmethod
    def _write_tensors(tensors, event, filename, lock_fd):
        try:
            event.synchronize()
            # A verifier in float16 or float32 has its states in that; shards are bf16.
            states = tensors["hidden_states"].to(torch.bfloat16)
            save_file({**tensors, "hidden_states": states}, filename + ".part")
            os.replace(filename + ".part", filename)
        except BaseException as error:
            _explain(filename, error)
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
            _explain(pending.filename, error)
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


def _explain(filename: str, error: BaseException) -> None:
    """Leave the reason under the name at which the engine's owner waits for the states."""
    temporary = filename + ".why"
    with (
        contextlib.suppress(OSError),  # a full folder still takes an empty file
        open(temporary, "w", encoding="utf-8") as file,
    ):
        file.write(f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):  # its owner waits a while, and says then what is missing
        os.replace(temporary, filename + ".error")
