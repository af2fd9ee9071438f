"""The machines of config/hardware.yaml, and how long they take."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from aerie.common.errors import InputError
from aerie.config import Config


@dataclass(frozen=True)
class Hardware:
    """A machine of config/hardware.yaml. `tflops`: 10¹² operations a second of one device in the
    format used; the shares say how much of it a stage reaches. `gpu_memory_gib` 0: no GPU. Rates of
    the disk are GB (10⁹ bytes) a second."""

    name: str
    gpus: int
    gpu_memory_gib: float
    tflops: float
    prefill_share: float
    decode_share: float
    training_share: float
    disk_write_gbps: float
    disk_read_gbps: float
    start_seconds: float
    note: str = ""


def choose_hardware(path: Path, name: str | None, config: Config) -> Hardware:
    """The machine called `name`; None: the first with or without GPUs, as the configuration asks.

    Raises `InputError` for an unknown machine or a damaged entry.
    """
    machines = yaml.safe_load(path.read_text(encoding="utf-8"))
    if name is None:
        gpus = config.engine_gpus > 0
        name = next(n for n, m in machines.items() if bool(m["gpus"]) == gpus)
    if name not in machines:
        raise InputError(f"{path}: no machine {name!r}; expected one of {', '.join(machines)}")
    try:
        return Hardware(name, **machines[name])
    except TypeError as error:
        raise InputError(f"{path}: {name}: {error}") from None


def engine_seconds(
    hardware: Hardware, devices: int, operations: tuple[float, float], written: float
) -> float:
    """Time of an engine job after its start: computing, or writing the states if that is longer.

    `operations`: of the prompts and of the new tokens; `written`: bytes of states.
    """
    rate = hardware.tflops * 1e12 * devices
    prompts, new = operations
    computing = prompts / (rate * hardware.prefill_share) + new / (rate * hardware.decode_share)
    return max(computing, written / (hardware.disk_write_gbps * 1e9))


def start_seconds(hardware: Hardware, weights: float) -> float:
    """Time until an engine takes its first request: start-up, and reading the weights (bytes)."""
    return hardware.start_seconds + weights / (hardware.disk_read_gbps * 1e9)


def training_seconds(
    hardware: Hardware, devices: int, operations: float, read_bytes: float
) -> float:
    """Time of training: computing, or reading the shards (once an epoch) if that is longer."""
    rate = hardware.tflops * 1e12 * devices * hardware.training_share
    return max(operations / rate, read_bytes / (hardware.disk_read_gbps * 1e9))
