"""Use, memory and power of a job's GPUs."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aerie.common.devices import visible_handles
from aerie.watching.job_status import GpuFigures

NVIDIA = Path("/dev/nvidiactl")  # exists wherever a driver is loaded


class Gpus:
    """The job's NVIDIA GPUs through NVML.

    `missing`: why there are no figures; None when there are, and where there is no GPU and none was
    assigned to the job.
    """

    def __init__(self) -> None:
        self._handles: list[tuple[int, Any]] = []
        why = self._open()
        expected = NVIDIA.exists() or os.environ.get("CUDA_VISIBLE_DEVICES")
        self.missing = why if expected else None

    def _open(self) -> str | None:
        try:
            import pynvml
        except ImportError:
            return "the package nvidia-ml-py is not installed"
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = visible_handles(pynvml)
        except pynvml.NVMLError as error:
            return f"NVML: {error}"
        return None if self._handles else "no GPU is visible"

    def read(self) -> list[GpuFigures]:
        return [self._read(index, handle) for index, handle in self._handles]

    def _read(self, index: int, handle: Any) -> GpuFigures:
        nvml = self._nvml

        def ask(function: Callable[[Any], Any]) -> Any:
            try:
                return function(handle)
            except nvml.NVMLError:
                return None

        name = ask(nvml.nvmlDeviceGetName)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo)
        use = ask(nvml.nvmlDeviceGetUtilizationRates)
        power, limit = ask(nvml.nvmlDeviceGetPowerUsage), ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        return GpuFigures(
            index=index,
            name=name.decode() if isinstance(name, bytes) else name,
            use_percent=use and use.gpu,
            memory_gib=memory and round(memory.used / 2**30, 2),
            memory_total_gib=memory and round(memory.total / 2**30, 2),
            power_w=power and round(power / 1000),
            power_limit_w=limit and round(limit / 1000),
        )
