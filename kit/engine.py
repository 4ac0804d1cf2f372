"""The engine inside a replica: takes batches, keeps the accelerator's time.

The emulated engine stands in for the GPU's time only. It is one accelerator: batches run one after
the other, each for as long as the closed form of `kit.accelerator` says, times `time_scale`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kit.accelerator import NO_ACCELERATOR, profile

_TEXT = "lorem ipsum dolor magna "  # words of five letters, one emulated token each


@dataclass(frozen=True)
class Job:
    """One request as the engine sees it; lengths in tokens, `arrived_s` on the monotonic clock."""

    prompt_tokens: int
    output_tokens: int
    arrived_s: float


@dataclass(frozen=True)
class Done:
    """What became of a job: its text, and the batch that served it (monotonic seconds)."""

    text: str
    batch_id: int
    batch_size: int
    started_s: float
    done_s: float


class EmulatedEngine:
    """One emulated accelerator. Loading blocks for `load_time_s`, like reading weights does."""

    def __init__(self, accelerator: str, time_scale: float, load_time_s: float) -> None:
        self.profile = profile(accelerator)
        self.time_scale = time_scale
        self.batches = 0
        self.executing = 0
        self._free = asyncio.Lock()
        self._busy_s = 0.0
        self._running_since_s: float | None = None
        time.sleep(load_time_s)

    @property
    def busy_s(self) -> float:
        """Seconds of work since the start, the running batch included."""
        since = self._running_since_s
        return self._busy_s + (0.0 if since is None else time.monotonic() - since)

    def batch_s(self, jobs: Sequence[Job]) -> float:
        """Seconds this batch will take here."""
        if self.profile.name == NO_ACCELERATOR:
            return 0.0
        prompts, outputs = [j.prompt_tokens for j in jobs], [j.output_tokens for j in jobs]
        return self.profile.static_batch_s(prompts, outputs) * self.time_scale

    async def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Run one static batch; every job of it comes back at the same time."""
        async with self._free:
            started_s = self._running_since_s = time.monotonic()
            self.batches += 1
            batch_id, self.executing = self.batches, len(jobs)
            try:
                # Against an absolute deadline, so that being woken late does not add up.
                wait_s = started_s + self.batch_s(jobs) - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
            finally:
                done_s = time.monotonic()
                self._busy_s += done_s - started_s
                self._running_since_s, self.executing = None, 0
        return [
            Done(
                text=(_TEXT * (j.output_tokens // 4 + 1))[: j.output_tokens * 6 - 1].rstrip(),
                batch_id=batch_id,
                batch_size=len(jobs),
                started_s=started_s,
                done_s=done_s,
            )
            for j in jobs
        ]
