"""How long an accelerator has worked, for engines that run one thing at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Busy:
    """Counts `batches`, how many requests are `executing` now, and `busy_s` (seconds)."""

    def __init__(self) -> None:
        self.batches = 0
        self.executing = 0
        self._busy_s = 0.0
        self._since_s: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds of work since the start, the running batch included."""
        since = self._since_s
        return self._busy_s + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def working(self, requests: int) -> Iterator[int]:
        """Around the execution of one batch of `requests`; gives the batch's number, from 1 on."""
        self._since_s = time.monotonic()
        self.batches += 1
        self.executing = requests
        try:
            yield self.batches
        finally:
            self._busy_s += time.monotonic() - self._since_s
            self._since_s = None
            self.executing = 0
