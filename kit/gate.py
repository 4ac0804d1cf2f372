"""Holds requests back while the accelerator is busy, so that batches fill from the backlog.

`@serve.batch` of Ray Serve 2.60 closes a batch `batch_wait_timeout_s` after its first request even
while another batch runs: under load a backlog becomes a queue of small batches, whatever
`max_batch_size` allows. Letting requests in only while the accelerator is free, and no more than
fit one batch, gives what is usually meant by dynamic batching.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager

Turn = asyncio.Future[None]


class Gate:
    """Lets at most `limit` wait for their batch at a time, in order of arrival; none while one runs.

    Nor more than `limit_tokens` tokens together, unless it is one request alone. The limits and
    `open` (everybody may pass) may be changed at any time; then call `release`.
    """

    def __init__(self) -> None:
        self.limit = 1
        self.limit_tokens: int | None = None
        self.open = False
        self._running = 0
        self._waiting: deque[Turn] = deque()
        self._tokens: dict[Turn, int] = {}
        self._inside: set[Turn] = set()  # admitted, their batch not yet begun
        self._leftover = False

    @asynccontextmanager
    async def turn(self, tokens: int = 0) -> AsyncIterator[Turn]:
        """Wait to be let in; leaving the block gives the place back, cancelled or not."""
        turn: Turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._tokens[turn] = tokens
        self.release()
        try:
            await turn
            yield turn
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
            self._inside.discard(turn)
            del self._tokens[turn]
            self._settle()

    @contextmanager
    def batch(self, turns: Collection[Turn]) -> Iterator[None]:
        """Around the execution of a batch of those inside."""
        self._inside.difference_update(turns)
        # Who missed this batch is in one that closed already: filling up behind it would split
        # every batch from now on, so the gate stays shut until that one has begun.
        self._leftover = bool(self._inside)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._settle()

    def _settle(self) -> None:
        if not self._inside:
            self._leftover = False
        self.release()

    def release(self) -> None:
        """Let in whoever may be let in now."""
        while self._waiting and (self.open or self._room(self._waiting[0])):
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside.add(turn)
                turn.set_result(None)

    def _room(self, turn: Turn) -> bool:
        if self._running or self._leftover:
            return False
        if not self._inside or self.limit_tokens is None:
            return len(self._inside) < self.limit
        tokens = self._tokens[turn] + sum(self._tokens[t] for t in self._inside)
        return len(self._inside) < self.limit and tokens <= self.limit_tokens
