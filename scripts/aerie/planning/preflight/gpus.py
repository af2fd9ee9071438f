"""GPUs, their driver, and what else uses them."""

import os
import re
import shutil
import subprocess
from typing import Any

from aerie.common.devices import visible_handles
from aerie.common.formatting import GIB
from aerie.config import Config
from aerie.planning.preflight.result import CheckResult


def check_gpus(config: Config, facts: dict[str, Any]) -> list[CheckResult]:
    """GPUs, the driver against torch's CUDA, free memory and what else uses it."""
    wanted = max(config.engine.tensor_parallel_size, *(d.gpus for d in config.drafters.values()))
    needs = config.engine_gpus > 0
    try:
        import pynvml
    except ImportError:
        pynvml = None
    if pynvml is None or not facts.get("cuda"):
        if not needs:
            return [CheckResult("gpu", "ok", "torch is a CPU build; everything runs on the CPU")]
        return [
            CheckResult(
                "gpu",
                "error",
                f"torch is a CPU build; the configuration asks for {wanted} GPU(s)",
                "engine and training cannot start as configured",
                "run make env GPU=1 on the machine with GPUs, or set drafters.<name>.gpus: 0 and "
                "engine.tensor_parallel_size: 1",
            )
        ]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [
            CheckResult(
                "gpu",
                "error" if needs else "warning",
                f"no NVIDIA driver answers ({error})",
                "torch is a CUDA build and finds no GPU",
                "check nvidia-smi; start a container with --gpus all",
            )
        ]
    try:
        return _check_devices(pynvml, config, facts, wanted)
    finally:
        pynvml.nvmlShutdown()


def _check_devices(
    pynvml: Any, config: Config, facts: dict[str, Any], wanted: int
) -> list[CheckResult]:
    results = []
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    number = pynvml.nvmlSystemGetCudaDriverVersion()
    serves = (number // 1000, number % 1000 // 10)
    needs = tuple(int(x) for x in facts["cuda"].split(".")[:2])
    found = f"driver {driver} serves CUDA {serves[0]}.{serves[1]}; torch is for {facts['cuda']}"
    if serves[0] < needs[0]:
        results.append(
            CheckResult(
                "gpu driver",
                "error",
                found,
                "the driver is too old for this torch: CUDA does not start",
                "update the driver, or install a torch and vLLM for an older CUDA",
            )
        )
    elif serves < needs:
        results.append(
            CheckResult(
                "gpu driver",
                "warning",
                found,
                "works within a major version, except for kernels compiled at run time",
                "update the driver",
            )
        )
    else:
        results.append(CheckResult("gpu driver", "ok", found))
    toolkit = _toolkit()
    if toolkit and toolkit[0] != needs[0]:
        results.append(
            CheckResult(
                "cuda toolkit",
                "note",
                f"nvcc on the PATH is CUDA {toolkit[0]}.{toolkit[1]}; torch is for {facts['cuda']}",
                "kernels that are compiled at run time with nvcc (FlashInfer) may fail",
                "remove it from the PATH, or install the toolkit that matches torch",
            )
        )
    count = facts.get("devices", 0)
    if count < wanted:
        results.append(
            CheckResult(
                "gpu",
                "error",
                f"torch sees {count} GPU(s), the configuration asks for {wanted}",
                "engine or training cannot start",
                "check CUDA_VISIBLE_DEVICES, engine.tensor_parallel_size, drafters.<name>.gpus",
            )
        )
    lanes, size = config.hidden_states.lanes, config.engine.tensor_parallel_size
    if wanted <= count < lanes * size:
        results.append(
            CheckResult(
                "gpu",
                "note",
                f"{lanes} lanes of {size} GPU(s) (hidden_states.lanes, "
                f"engine.tensor_parallel_size) take {lanes * size}; torch sees {count}",
                f"at most {count // size} lane(s) run at a time, the rest afterwards; each loads "
                "the verifier",
                f"hidden_states.lanes: {count // size} loads it less often",
            )
        )
    share = config.engine.gpu_memory_utilization
    try:
        handles = visible_handles(pynvml)
    except pynvml.NVMLError as error:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = f"CUDA_VISIBLE_DEVICES is {given!r}, and NVML knows no such GPU ({error})"
        return [*results, CheckResult("gpu", "warning", found, "free memory is unknown")]
    for index, handle in handles:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            others = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except pynvml.NVMLError:
            others = []
        name = f"GPU {index} {_text(pynvml.nvmlDeviceGetName(handle))}"
        found = f"{name}: {memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
        if others:
            found += f", used by process {', '.join(str(p.pid) for p in others)}"
        if memory.free < share * memory.total:
            results.append(
                CheckResult(
                    "gpu",
                    "warning",
                    found,
                    f"the engine takes {share:.0%} of the memory and does not start with less free",
                    "end the other processes, choose others with CUDA_VISIBLE_DEVICES, or lower "
                    "engine.gpu_memory_utilization",
                )
            )
        else:
            results.append(CheckResult("gpu", "note" if others else "ok", found))
    return results


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _toolkit() -> tuple[int, int] | None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None
