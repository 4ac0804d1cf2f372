"""NVML readings of the GPUs that this process may use; a gap where there is no driver.

Which GPUs those are is `CUDA_VISIBLE_DEVICES`' say, as it is CUDA's. A field that a GPU does not
support is named in its `Device` and has no reading, never a zero; one that failed this once is a gap.
Of a GPU cut by MIG the driver tells the memory of each instance, and no utilisation of any.

`sm_percent` and `memory_bandwidth_percent` are NVML's: the share of its last period (1/6 to 1 s) in which
any kernel ran, or memory was read or written at all. A single block that keeps one SM busy reads 100 %.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

with warnings.catch_warnings():
    # `pynvml` is an alias of nvidia-ml-py and says so at import; this one text only.
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
    import pynvml

from kit.cuda_visible import uncertain, visible

NVML = pynvml  # its constants and errors, whatever driver a test puts in its place
_UNSUPPORTED = (
    NVML.NVML_ERROR_NOT_SUPPORTED, NVML.NVML_ERROR_NO_PERMISSION,
    NVML.NVML_ERROR_FUNCTION_NOT_FOUND, NVML.NVML_ERROR_INVALID_ARGUMENT,
    NVML.NVML_ERROR_NOT_FOUND, NVML.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)  # fmt: skip
"""Errors that are an answer; after any other the driver is asked for its devices anew."""
_THROTTLES = {
    NVML.nvmlClocksThrottleReasonSwPowerCap: "power cap",
    NVML.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    NVML.nvmlClocksThrottleReasonSyncBoost: "another GPU's clock",
    NVML.nvmlClocksThrottleReasonSwThermalSlowdown: "heat (driver)",
    NVML.nvmlClocksThrottleReasonHwThermalSlowdown: "heat (hardware)",
    NVML.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}
"""What slows a GPU that has work; idling and clocks that somebody set are no throttling."""
_VALUES = dict(enumerate(("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")))
_ABSENT = float(2**64 - 1)  # how NVML says of a memory figure that there is none


def _either(first: Callable[[], Any], older: Callable[[], Any]) -> Any:
    """The first; where the binding or the driver has it not, the older."""
    try:
        return first()
    except AttributeError:
        return older()
    except NVML.NVMLError as error:
        if error.value not in _UNSUPPORTED:
            raise
        return older()


def _memory(h: Any) -> Any:
    # As nvidia-smi: without what the driver keeps for itself, which the older call counts as used.
    return _either(
        lambda: pynvml.nvmlDeviceGetMemoryInfo(h, NVML.nvmlMemory_v2),
        lambda: pynvml.nvmlDeviceGetMemoryInfo(h),
    )


_CALLS: dict[tuple[str, ...], Callable[[Any], tuple[float, ...]]] = {
    ("sm_percent", "memory_bandwidth_percent"): lambda h: attrgetter("gpu", "memory")(
        pynvml.nvmlDeviceGetUtilizationRates(h)
    ),
    ("memory_used_bytes", "memory_total_bytes"): lambda h: attrgetter("used", "total")(_memory(h)),
    # A mean over the last second, from Ampere on (but not A100).
    ("power_w",): lambda h: (pynvml.nvmlDeviceGetPowerUsage(h) / 1e3,),
    ("energy_j",): lambda h: (pynvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3,),
    ("temperature_c",): lambda h: (pynvml.nvmlDeviceGetTemperature(h, NVML.NVML_TEMPERATURE_GPU),),
    ("sm_clock_mhz",): lambda h: (pynvml.nvmlDeviceGetClockInfo(h, NVML.NVML_CLOCK_SM),),
    ("throttle_reasons",): lambda h: (
        _either(
            lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(h),
            lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(h),
        ),
    ),
}
"""Fields → the call that tells them. `energy_j` counts up for ever."""


@dataclass(frozen=True)
class Device:
    """A GPU, or an instance that MIG cut from one. Bytes; what NVML does not tell is None."""

    uuid: str
    name: str
    memory_total_bytes: float | None
    mig: Literal["enabled", "instance"] | None
    """A GPU that is cut, or a part of one; None for a whole GPU, and where there is no MIG."""
    instance_of: str | None
    """UUID of the GPU that a MIG instance is a part of."""
    visible: bool
    """Whether `CUDA_VISIBLE_DEVICES` lets it be used; of a cut GPU, whether it does of any part."""
    unsupported: tuple[str, ...]
    """Fields of `readings` that it has not."""

    @property
    def label(self) -> str:
        """`NVIDIA H100 80GB HBM3 (80 GiB)`: what makes hardware comparable, whichever card it was."""
        if self.memory_total_bytes is None:
            return self.name
        return f"{self.name} ({self.memory_total_bytes / 2**30:.0f} GiB)"


@dataclass(frozen=True)
class _Handle:
    nvml: Any
    uuid: str
    name: str
    mig: Literal["enabled", "instance"] | None
    parent: str | None


RETRY_S = 5.0
"""How long a driver that failed is left alone: to begin with it anew can take a second."""
_lock = threading.RLock()
_known: list[_Handle] = []
_failed, _failure, _asked_s = False, "", -math.inf


def devices() -> list[Device]:
    """Every device of this machine, in NVML's order (by PCI bus), each GPU before its instances.

    Empty without a driver or a GPU, see `why_none`.
    """
    with _lock:
        found, shown = [], _shown()
        for h in _known:
            fields, unsupported = _read(h)
            total = fields.get("memory_total_bytes")
            found.append(
                Device(h.uuid, h.name, total, h.mig, h.parent, h.uuid in shown, unsupported)
            )
        return found


def readings(seen: dict[str, int] | None = None) -> dict[str, dict[str, float]]:
    """UUID → field → value of visible devices; empty without a driver or a GPU.

    Of a GPU cut by MIG the whole is there beside its instances: power and clocks are the whole's.

    Args:
        seen: a dict for the caller to keep. With it comes `driver_sm_percent`, see `driver_percent`.
    """
    with _lock:
        shown = _shown()
        own = {} if seen is None else driver_percent(seen)
        found = {h.uuid: _read(h)[0] for h in _known if h.uuid in shown}
        for uuid in own.keys() & found.keys():
            found[uuid]["driver_sm_percent"] = own[uuid]
        return {uuid: fields for uuid, fields in found.items() if fields}


def driver_percent(seen: dict[str, int]) -> dict[str, float]:
    """UUID → utilisation (%) as the driver sampled it itself since the last call with this `seen`.

    It samples several times as often as anybody polls: by it `sm_percent` can be judged. The first call
    begins the window. A GPU that idles for long may have no samples, one under MIG never has.

    Args:
        seen: a dict for the caller to keep: UUID → the driver's time (µs, since whenever) of what was
            seen last.
    """
    with _lock:
        found, shown = {}, _shown()
        for h in (h for h in _known if h.uuid in shown):
            begun, since_us = h.uuid in seen, seen.get(h.uuid, 0)
            fresh = _samples(h, since_us)
            seen[h.uuid] = max((t for t, _ in fresh), default=since_us)
            if begun and fresh:
                found[h.uuid] = sum(v for _, v in fresh) / len(fresh)
        return found


def why_none() -> str:
    """Why `readings` has none, in a sentence; empty where there are some."""
    with _lock:
        if not (known := _handles()):
            return f"no GPU readings: {_failure}"
        if not _shown():
            entries = os.environ.get("CUDA_VISIBLE_DEVICES")
            total = sum(h.parent is None for h in known)
            return f"no GPU readings: of {total} GPUs CUDA_VISIBLE_DEVICES = {entries!r} shows none"
        return ""


def doubt() -> str:
    """Why indices in `CUDA_VISIBLE_DEVICES` may mean others than are read; empty where they cannot."""
    with _lock:
        return uncertain(os.environ, [h.name for h in _handles() if h.parent is None])


def driver() -> str:
    """The driver's version, `570.86.15`; empty without a GPU."""
    with _lock:
        return str(pynvml.nvmlSystemGetDriverVersion()) if _handles() else ""


def throttling(reasons: float) -> tuple[str, ...]:
    """Why a GPU runs slower than it could, in words, from a reading of `throttle_reasons`.

    Empty for one that idles, runs freely, or whose clocks were set.
    """
    return tuple(word for bit, word in _THROTTLES.items() if int(reasons) & bit)


def _shown() -> set[str]:
    """UUIDs of what is read: the visible, and the GPUs that they were cut from."""
    known = _handles()
    gpus = [
        (h.uuid, [p.uuid for p in known if p.parent == h.uuid] if h.mig else None)
        for h in known
        if h.parent is None
    ]
    allowed = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    return {u for h in known if h.uuid in allowed for u in (h.uuid, h.parent) if u}


def _handles() -> list[_Handle]:
    """All devices, asked for once; anew, after a while, when there was none or one of them failed."""
    global _known, _failure, _failed, _asked_s
    if (_known and not _failed) or time.monotonic() < _asked_s + RETRY_S:
        return _known
    if _failed:
        with contextlib.suppress(NVML.NVMLError):
            pynvml.nvmlShutdown()
    _asked_s, _failed = time.monotonic(), False
    try:
        pynvml.nvmlInit()
        _known = [h for i in range(pynvml.nvmlDeviceGetCount()) for h in _handles_of(i)]
        _failure = "NVIDIA's driver knows of no GPU"
    except NVML.NVMLError as error:
        _known, _failure = [], f"NVIDIA's driver does not answer ({error})"
    return _known


def _handles_of(i: int) -> list[_Handle]:
    """GPU number i and its MIG instances. One that is lost keeps its place, since others are counted."""
    global _failed
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(i)
        uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    except NVML.NVMLError:
        _failed = True
        return [_Handle(None, f"GPU {i}", "a GPU that does not answer", None, None)]
    cut, parts = False, []
    with contextlib.suppress(NVML.NVMLError):
        cut = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    for k in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if cut else 0):
        with contextlib.suppress(NVML.NVMLError):  # a place that holds no instance
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, k)
            own, named = pynvml.nvmlDeviceGetUUID(part), pynvml.nvmlDeviceGetName(part)
            parts.append(_Handle(part, own, named, "instance", uuid))
    return [_Handle(handle, uuid, name, "enabled" if cut else None, None), *parts]


def _read(h: _Handle) -> tuple[dict[str, float], tuple[str, ...]]:
    """What a device tells, and the names of what it does not support."""
    global _failed
    fields: dict[str, float] = {}
    unsupported: list[str] = []
    for names, call in _CALLS.items() if h.nvml is not None else ():
        try:
            values = [float(v) for v in call(h.nvml)]
        except NVML.NVMLError as error:
            if error.value in _UNSUPPORTED:
                unsupported += names
            else:
                _failed = True
            continue
        told = {n: v for n, v in zip(names, values, strict=True) if v < _ABSENT}
        fields |= told
        unsupported += [n for n in names if n not in told]
    return fields, tuple(unsupported)


def _samples(h: _Handle, since_us: int) -> list[tuple[int, float]]:
    """(driver's time in µs, utilisation in %) of what the driver still holds since then."""
    if h.nvml is None:
        return []
    try:
        kind, samples = pynvml.nvmlDeviceGetSamples(
            h.nvml, NVML.NVML_GPU_UTILIZATION_SAMPLES, since_us
        )
    except NVML.NVMLError:
        return []
    member = _VALUES.get(kind, "uiVal")
    values = [(int(s.timeStamp), float(getattr(s.sampleValue, member))) for s in samples]
    # Places of its ring that were never written have no time, and some drivers leave rubbish in them.
    return [(t, v) for t, v in values if t > since_us and v <= 100]
