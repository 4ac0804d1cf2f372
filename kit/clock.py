"""What the two ends of a request share: the machine's monotonic clock, and the header that uses it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SERVED_BY = "X-Served-By"
"""Header of an answer: replica id, batch id, batch size, clock id, arrived (s), done (s)."""


def clock_id() -> str:
    """Names this boot of this machine: two processes with the same id read the same clock."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"process {os.getpid()}"
