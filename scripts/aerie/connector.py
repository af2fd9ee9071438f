"""vLLM's hidden-states connector for CPU and GPU, loaded out of tree by the engine.

vLLM 0.32.0's ExampleHiddenStatesConnector copies with CUDA streams, so it fails where there is
no GPU, and it lets a reader see a half-written file unless both sides take a file lock. Here a
file has its name only when it is whole, and a failed write leaves `<name>.error` with the reason.
"""

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
    """Writes one file a request: `hidden_states` [tokens, ids, hidden], `token_ids` [tokens]."""

    @staticmethod
    def _write_tensors(tensors, event, filename, lock_fd):
        try:
            event.synchronize()
            os.makedirs(os.path.dirname(filename), exist_ok=True)
            save_file(tensors, filename + ".part")
            os.replace(filename + ".part", filename)
        except BaseException as error:
            with open(filename + ".error", "w", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {error}")
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache is None or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = blocks[:, None] * self._block_size + torch.arange(self._block_size)
        # Fancy indexing copies, so the blocks can be freed as soon as this returns.
        states = extract_from_kv_cache(self._kv_cache, slots.flatten(), len(pending.token_ids))
        tensors = {
            "hidden_states": states.to(torch.bfloat16).contiguous(),
            "token_ids": pending.token_ids.clone(),
        }
        done = _Done()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, None)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda f: self._on_write_done(pending.req_id, f))
