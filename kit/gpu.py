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

_FIELDS: dict[str, Callable[[Any], float]] = {
    "sm_percent": lambda h: pynvml.nvmlDeviceGetUtilizationRates(h).gpu,
    "memory_bandwidth_percent": lambda h: pynvml.nvmlDeviceGetUtilizationRates(h).memory,
    "memory_used_bytes": lambda h: pynvml.nvmlDeviceGetMemoryInfo(h).used,
    "power_w": lambda h: pynvml.nvmlDeviceGetPowerUsage(h) / 1e3,
    "sm_clock_mhz": lambda h: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),
}


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
