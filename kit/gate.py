"""Holds requests back while the accelerator is busy, so that batches fill from the backlog.

`@serve.batch` of Ray Serve 2.60 closes a batch `batch_wait_timeout_s` after its first request even
while another batch runs: under load a backlog becomes a queue of small batches, whatever
`max_batch_size` allows. Letting requests in only while the accelerator is free, and no more than
fit one batch, gives what is usually meant by dynamic batching.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Admits at most `limit` at a time, in order of arrival, and none while `busy`."""

    def __init__(self) -> None:
        self.limit = 1
        self.open = False
        self._busy = False
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Wait for a turn; the place is given back at the end of the block, cancelled or not."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self.release()
        try:
            await turn
            yield
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
            else:
                self._inside -= 1
            self.release()

    def set_busy(self, busy: bool) -> None:
        """Tell whether a batch runs."""
        self._busy = busy
        self.release()

    def release(self) -> None:
        """Admit who may be admitted now; to be called after `limit` or `open` were changed."""
        while self._waiting and (self.open or (not self._busy and self._inside < self.limit)):
            turn = self._waiting.popleft()
            self._inside += 1
            if not turn.done():
                turn.set_result(None)
