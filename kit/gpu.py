"""NVML readings of the GPUs that this process may use; a gap where there is no driver."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
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
    "sm_clock_mhz": lambda h: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),
    "throttle_reasons": lambda h: _reasons(h),
}


def throttling(reasons: float) -> tuple[str, ...]:
    """Why a GPU runs slower than it could, in words, from a reading of `throttle_reasons`.

    Empty for one that idles, runs freely, or whose clocks were set.
    """
    return tuple(word for bit, word in _THROTTLES.items() if int(reasons) & bit)


def readings() -> dict[str, dict[str, float]]:
    """UUID → field → value, only fields the GPU supports; empty without a driver or a GPU."""
    found: dict[str, dict[str, float]] = {}
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return found
    for handle in handles:
        fields: dict[str, float] = {}
        for name, read in _FIELDS.items():
            with contextlib.suppress(pynvml.NVMLError):
                fields[name] = float(read(handle))
        found[str(pynvml.nvmlDeviceGetUUID(handle))] = fields
    return found
