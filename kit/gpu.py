"""NVML readings of the GPUs that this process may use; a gap where there is no driver.

Which GPUs those are is `CUDA_VISIBLE_DEVICES`' say, as it is CUDA's. A field that a GPU does not
support is named in its `Device` and has no reading, never a zero. Of a GPU cut by MIG the driver tells
memory of each instance, and no utilisation of any.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

with warnings.catch_warnings():
    # `pynvml` is an alias of nvidia-ml-py and says so at import; this one text only.
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
    import pynvml

# Older drivers and bindings know the call by its older name.
_reasons = (
    getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    or pynvml.nvmlDeviceGetCurrentClocksThrottleReasons
)
_THROTTLES = {
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSyncBoost: "another GPU's clock",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat (driver)",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat (hardware)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}
"""What slows a GPU that has work; idling and clocks that somebody set are no throttling."""

_FIELDS: dict[str, Callable[[Any], float]] = {
    "sm_percent": lambda h: pynvml.nvmlDeviceGetUtilizationRates(h).gpu,
    "memory_bandwidth_percent": lambda h: pynvml.nvmlDeviceGetUtilizationRates(h).memory,
    "memory_used_bytes": lambda h: pynvml.nvmlDeviceGetMemoryInfo(h).used,
    "memory_total_bytes": lambda h: pynvml.nvmlDeviceGetMemoryInfo(h).total,
    "power_w": lambda h: pynvml.nvmlDeviceGetPowerUsage(h) / 1e3,
    "energy_j": lambda h: pynvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3,
    "temperature_c": lambda h: pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda h: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),
    "throttle_reasons": lambda h: _reasons(h),
}
_ABSENT = float(2**64 - 1)  # how NVML says of a memory figure that there is none


@dataclass(frozen=True)
class Device:
    """A GPU, or an instance that MIG cut from one. Bytes; what NVML does not tell is None."""

    uuid: str
    name: str
    memory_total_bytes: float | None
    instance_of: str | None
    """UUID of the GPU that a MIG instance is a part of."""
    unsupported: tuple[str, ...]
    """Fields of `readings` that it has not."""

    @property
    def label(self) -> str:
        """`NVIDIA H100 80GB HBM3 (80 GiB)`: what makes hardware comparable, whichever card it was."""
        if self.memory_total_bytes is None:
            return self.name
        return f"{self.name} ({self.memory_total_bytes / 2**30:.0f} GiB)"


_seen_us: dict[str, int] = {}
_why_none = ""


def devices() -> list[Device]:
    """The devices that this process may use; empty without a driver or a GPU, see `why_none`."""
    found = []
    for handle, uuid, parent in _visible():
        fields, unsupported = _read(handle)
        found.append(
            Device(
                uuid, _text(pynvml.nvmlDeviceGetName(handle)), fields.get("memory_total_bytes"), parent,
                unsupported,
            )
        )  # fmt: skip
    return found


def readings() -> dict[str, dict[str, float]]:
    """UUID → field → value, only fields the device supports; empty without a driver or a GPU.

    `driver_sm_percent` is the mean of what the driver itself has sampled since the last call, several
    times as often as anybody polls: by it `sm_percent` can be judged.
    """
    found: dict[str, dict[str, float]] = {}
    for handle, uuid, _ in _visible():
        fields, _unsupported = _read(handle)
        own = _driver_percent(handle, uuid)
        found[uuid] = fields if own is None else fields | {"driver_sm_percent": own}
    return found


def why_none() -> str:
    """Why there are no devices, in a sentence; empty where there are some."""
    return "" if _visible() else _why_none


def visible(entries: str | None, gpus: list[tuple[str, list[str]]]) -> list[str]:
    """UUIDs that `CUDA_VISIBLE_DEVICES` lets a process use, as CUDA reads it.

    Args:
        entries: its value, None when it is not set: indices, UUIDs or beginnings of them, with commas
            between; from the first that fits nothing on, all are hidden.
        gpus: (UUID, UUIDs of its MIG instances) of every GPU, in order.
    """
    every = [uuid for gpu, parts in gpus for uuid in (parts or [gpu])]
    if entries is None:
        return every
    found: list[str] = []
    for entry in (e.strip() for e in entries.split(",")):
        if entry.isdigit():
            fit = [gpus[int(entry)]] if int(entry) < len(gpus) else []
            fits = [uuid for gpu, parts in fit for uuid in (parts or [gpu])]
        else:
            known = [*every, *(gpu for gpu, parts in gpus if parts)]
            fits = [uuid for uuid in known if entry and uuid.startswith(entry)]
        if len(fits) != 1 and not entry.isdigit():
            break
        if not fits:
            break
        found += [uuid for uuid in fits if uuid not in found]
    return found


def _visible() -> list[tuple[Any, str, str | None]]:
    """(handle, UUID, UUID of the GPU it was cut from) of each device that may be used.

    Of a GPU that is cut, the whole is there as well: power and clocks are the whole's.
    """
    global _why_none
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        named = [(h, _text(pynvml.nvmlDeviceGetUUID(h)), _instances(h)) for h in handles]
    except pynvml.NVMLError as error:
        _why_none = f"no GPU readings: NVIDIA's driver does not answer ({error})"
        return []
    entries = os.environ.get("CUDA_VISIBLE_DEVICES")
    allowed = visible(entries, [(uuid, [u for _, u in parts]) for _, uuid, parts in named])
    found: list[tuple[Any, str, str | None]] = []
    for handle, uuid, parts in named:
        mine = [(h, u, uuid) for h, u in parts if u in allowed]
        if uuid in allowed or mine:
            found += [(handle, uuid, None), *mine]
    if not found:
        _why_none = (
            f"no GPU readings: of {len(named)} GPUs CUDA_VISIBLE_DEVICES = {entries!r} shows none"
        )
    return found


def _instances(handle: Any) -> list[tuple[Any, str]]:
    """The MIG instances of a GPU; none where MIG is off, or unknown to the driver."""
    found = []
    with contextlib.suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetMigMode(handle)[0]:
            for i in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with contextlib.suppress(pynvml.NVMLError):
                    part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
                    found.append((part, _text(pynvml.nvmlDeviceGetUUID(part))))
    return found


def _read(handle: Any) -> tuple[dict[str, float], tuple[str, ...]]:
    """What a device supports, and the names of what it does not."""
    fields: dict[str, float] = {}
    for name, read in _FIELDS.items():
        with contextlib.suppress(pynvml.NVMLError):
            value = float(read(handle))
            if value < _ABSENT or name == "throttle_reasons":
                fields[name] = value
    return fields, tuple(n for n in _FIELDS if n not in fields)


def _driver_percent(handle: Any, uuid: str) -> float | None:
    try:
        _, samples = pynvml.nvmlDeviceGetSamples(
            handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, _seen_us.get(uuid, 0)
        )
    except pynvml.NVMLError:
        return None
    fresh = [s for s in samples if s.timeStamp > _seen_us.get(uuid, 0)]
    if not fresh:
        return None
    _seen_us[uuid] = max(s.timeStamp for s in fresh)
    return float(sum(s.sampleValue.uiVal for s in fresh)) / len(fresh)


def _text(value: str | bytes) -> str:
    """Older bindings tell bytes."""
    return value.decode() if isinstance(value, bytes) else value


def throttling(reasons: float) -> tuple[str, ...]:
    """Why a GPU runs slower than it could, in words, from a reading of `throttle_reasons`.

    Empty for one that idles, runs freely, or whose clocks were set.
    """
    return tuple(word for bit, word in _THROTTLES.items() if int(reasons) & bit)
