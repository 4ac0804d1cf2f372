"""Dynamic batching by `@serve.batch` and `kit.gate`, for any deployment and any kind of request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ray import serve

from kit.gate import Gate, Turn

Item = TypeVar("Item")
Result = TypeVar("Result")


SERVED: ContextVar[tuple[float, float] | None] = ContextVar("served", default=None)
"""Of the batch that served this request: how long it filled, from its first request on, and how long
it ran, in seconds; what Serve's own batch metrics tell of, measured where it measures."""


@dataclass
class Entry:
    """One request on its way into a batch, with its size in tokens (0 where tokens do not count)."""

    item: Any
    turn: Turn
    tokens: int
    gate: Gate
    looks_s: list[float] = field(default_factory=list)
    served: tuple[float, float] | None = None


def batch_size(entries: Sequence[Entry]) -> int:
    """How full a batch of these is, in requests; one too many when it holds too many tokens.

    A batch of one is never too large: Serve would answer its caller with an error. Serve looks when
    it takes the first request, each time that more have come, and once more before it runs the batch.
    """
    if entries:
        entries[0].looks_s.append(time.monotonic())
    limit = entries[0].gate.limit_tokens if entries else None
    if limit is None or len(entries) < 2 or sum(e.tokens for e in entries) <= limit:
        return len(entries)
    return entries[0].gate.limit + 1


class DynamicBatching(Generic[Item, Result]):
    """Mixed into a deployment class, it forms batches of what `in_batch` is given, one at a time.

    The class says how a batch is executed (`run_batch`), and calls `set_batching` before the first
    request, which is when it is reconfigured.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gate = Gate()

    async def run_batch(self, items: list[Item]) -> list[Result]:
        """Execute one batch; a result for each item, in their order."""
        raise NotImplementedError

    def set_batching(
        self,
        max_batch_size: int,
        batch_wait_timeout_s: float,
        hold_while_busy: bool,
        max_batch_tokens: int | None = None,
    ) -> None:
        """Put the knobs into effect, from the next batch on."""
        self._gate.limit, self._gate.limit_tokens = max_batch_size, max_batch_tokens
        self._gate.open = not hold_while_busy
        self._gate.release()
        self._batch.set_max_batch_size(max_batch_size)
        self._batch.set_batch_wait_timeout_s(float(batch_wait_timeout_s))

    async def in_batch(self, item: Item, tokens: int = 0) -> Result:
        """The result of one item, which waits for its batch; leaving gives its place back."""
        async with self._gate.turn(tokens) as turn:
            entry = Entry(item, turn, tokens, self._gate)
            result: Result = await self._batch(entry)
        SERVED.set(entry.served)
        return result

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0.0, batch_size_fn=batch_size)
    async def _batch(self, entries: list[Entry]) -> list[Result]:
        begun_s = time.monotonic()
        with self._gate.batch([e.turn for e in entries]):
            results = await self.run_batch([e.item for e in entries])
        looks_s = entries[0].looks_s
        if (
            len(looks_s) > 2
        ):  # else its first request left, and with it what was seen of the filling
            served = looks_s[-2] - looks_s[0], time.monotonic() - begun_s
            for entry in entries:
                entry.served = served
        return results

    async def check_batching(self) -> None:
        """Raises when the task that forms batches has died: requests would hang for ever."""
        if not await self._batch._is_batching_task_alive():
            raise RuntimeError("the @serve.batch task is dead; this replica must be replaced")
