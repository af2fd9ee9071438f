"""Disk, memory, open files, and servers that answer."""

import os
import resource
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aerie.common.formatting import GIB
from aerie.planning.preflight.result import CheckResult


def check_disk_room(
    folder: Path,
    gpus: bool,
    cache_gib: int,
    usage: Callable[[Path], Any] = shutil.disk_usage,
) -> list[CheckResult]:
    """Disk under `folder`, /dev/shm, main memory and the limit of open files."""
    results = []
    while not folder.is_dir():
        folder = folder.parent
    free = usage(folder).free
    severity = "error" if free < GIB else "warning" if free < 20 * GIB else "ok"
    results.append(
        CheckResult(
            "disk",
            severity,
            f"{free / GIB:.1f} GiB free for results",
            "" if severity == "ok" else "hidden states, checkpoints and models are kept there",
            "" if severity == "ok" else "make room, or move results/ to a larger disk (a link)",
        )
    )
    if not os.access(folder, os.W_OK):
        results.append(
            CheckResult("disk", "error", f"{folder} cannot be written", "", "check its owner")
        )
    memory = Path("/dev/shm")
    if memory.is_dir():
        free = usage(memory).free
        small = free < 2 * GIB
        results.append(
            CheckResult(
                "/dev/shm",
                ("warning" if gpus else "note") if small else "ok",
                f"{free / GIB:.1f} GiB free",
                "captured states go through a disk instead; NCCL needs it for several GPUs"
                if small
                else "",
                "in a container: --ipc=host or --shm-size=32g" if small else "",
            )
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < 1024 or (gpus and 0 <= soft < 8192)
    results.append(
        CheckResult(
            "open files",
            "warning" if few else "ok",
            f"ulimit -n {soft}",
            "an engine with several processes and loaders may need more" if few else "",
            f"ulimit -n {hard if hard > soft else 65536}" if few else "",
        )
    )
    if not gpus:
        import psutil

        free = psutil.virtual_memory().available
        needs = (cache_gib + 2) * GIB
        results.append(
            CheckResult(
                "memory",
                "warning" if free < needs else "ok",
                f"{free / GIB:.1f} GiB available",
                f"the engine takes {cache_gib} GiB for its cache, besides the weights"
                if free < needs
                else "",
                "lower engine.cpu_cache_gib, or end other programs" if free < needs else "",
            )
        )
    return results


def check_endpoints(urls: list[str], seconds: float = 3.0) -> list[CheckResult]:
    """Whether a server listens at each endpoint; all are tried at the same time."""

    def check(url: str) -> CheckResult:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname, port), timeout=seconds).close()
        except OSError as error:
            return CheckResult(
                "endpoint",
                "error",
                f"{url}: {error.strerror or error}",
                "the answers come from there",
                "start the server, or correct generation.endpoints",
            )
        return CheckResult("endpoint", "ok", f"{url} listens")

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(check, urls))
