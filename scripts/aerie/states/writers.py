"""Threads that check, pack and write states while an engine computes."""

import concurrent.futures
import os
import threading

from torch import set_num_threads  # vLLM later replaces torch's attribute with a no-op


def writers(most: int) -> concurrent.futures.ThreadPoolExecutor:
    """At most `most` writer threads; create them before the engine, which binds the process to
    fewer cores."""
    cores = os.sched_getaffinity(0)

    def prepare() -> None:
        # vLLM's CPU worker binds the main thread to a core, and threads inherit that.
        os.sched_setaffinity(0, cores)
        # With more OpenMP threads than cores, libgomp puts all of them to sleep at every barrier,
        # and the engine would slow down by a tenth as soon as a writer uses torch.
        set_num_threads(1)
        thread = threading.get_native_id()
        # The engine's threads go first.
        os.setpriority(
            os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 10)
        )

    return concurrent.futures.ThreadPoolExecutor(min(most, len(cores)), initializer=prepare)
