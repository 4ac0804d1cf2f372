"""The engine inside a replica: takes requests, keeps the accelerator's time.

The emulated engines stand in for the GPU's time only. Each is one accelerator: this module's runs
static batches one after the other, each for as long as the closed form of `kit.accelerator` says,
times `time_scale`; `kit.continuous` runs continuous batching.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from kit.accelerator import profile

_TEXT = "lorem ipsum dolor magna "  # words of five letters, one emulated token each


class Sink:
    """Takes a streamed output as it comes, and gives it to one reader.

    What the reader has not taken yet is merged, so a slow one costs no more than the text itself.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._tokens = 0
        self._news = asyncio.Event()
        self._closed = False

    def push(self, text: str, tokens: int) -> None:
        """Add `tokens` more tokens that read `text`."""
        self._parts.append(text)
        self._tokens += tokens
        self._news.set()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[tuple[str, int]]:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._tokens or self._parts:
                text, tokens = "".join(self._parts), self._tokens
                self._parts, self._tokens = [], 0
                yield text, tokens
            elif self._closed:
                return
            if self._closed:
                self._news.set()


@dataclass(frozen=True)
class Job:
    """One request as an engine sees it, sampling parameters by vLLM's names.

    Lengths in tokens, `arrived_s` on the monotonic clock. With a `sink` the output is streamed.
    """

    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    prompt: str = ""
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    sink: Sink | None = None


@dataclass(frozen=True)
class Done:
    """What became of a job: its text, the batch that served it, and its instants (monotonic s).

    `queued_s` is when the engine got it, `started_s` when its execution began. With continuous
    batching the batch is the model step in which the request ended.
    """

    text: str
    batch_id: int
    batch_size: int
    queued_s: float
    started_s: float
    first_token_s: float
    done_s: float
    output_tokens: int = 0
    finish_reason: Literal["length", "stop"] = "length"


class Engine:
    """What all emulated engines share. Loading blocks for `load_time_s`, as reading weights does."""

    def __init__(
        self,
        accelerator: str,
        time_scale: float,
        load_time_s: float,
        kv_cache_tokens: int | None = None,
    ) -> None:
        self.profile = profile(accelerator)
        self.time_scale = time_scale
        self.kv_cache_tokens = kv_cache_tokens or self.profile.kv_capacity_tokens
        self.batches = 0
        self.executing = 0
        self._busy_s = 0.0
        self._since_s: float | None = None
        time.sleep(load_time_s)

    @property
    def busy_s(self) -> float:
        """Seconds of work since the start, the running batch included."""
        since = self._since_s
        return self._busy_s + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around work of the accelerator: counts as busy time."""
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._busy_s += time.monotonic() - self._since_s
            self._since_s = None

    def stats(self) -> dict[str, float]:
        """Figures of the engine now, by the names they are sampled under."""
        raise NotImplementedError


class StaticEngine(Engine):
    """Static batches: all of a batch start together and come back together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._free = asyncio.Lock()
        self._held_tokens = 0

    async def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Run one batch; it waits for the one before it."""
        prompts, outputs = [j.prompt_tokens for j in jobs], [j.output_tokens for j in jobs]
        async with self._free:
            with self.working():
                started_s = time.monotonic()
                self.batches += 1
                batch_id, self.executing = self.batches, len(jobs)
                self._held_tokens = len(jobs) * (max(prompts) + max(outputs))
                try:
                    prefill_s = self.profile.prefill_s(prompts) * self.time_scale
                    decode_s = self.profile.decode_s(prompts, outputs) * self.time_scale
                    first_token_s = await _until(started_s + prefill_s)
                    done_s = await _until(started_s + prefill_s + decode_s)
                finally:
                    self.executing = self._held_tokens = 0
        return [
            Done(text_of(o), batch_id, len(jobs), started_s, started_s, first_token_s, done_s)
            for o in outputs
        ]

    def stats(self) -> dict[str, float]:
        return {"kv_cache_share": self._held_tokens / self.kv_cache_tokens}


async def _until(deadline_s: float) -> float:
    """Sleep until a deadline, so that being woken late does not add up; returns the time then."""
    wait_s = deadline_s - time.monotonic()
    if wait_s > 0:
        await asyncio.sleep(wait_s)
    return time.monotonic()


def text_of(tokens: int) -> str:
    """A text of that many words."""
    return (_TEXT * (tokens // 4 + 1))[: tokens * 6 - 1].rstrip()
