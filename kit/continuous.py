"""Continuous batching on an emulated accelerator: one scheduling decision for each model step.

As vLLM schedules: every running sequence computes its next tokens, those that decode (one token)
first, then prefills in chunks within the token budget; waiting sequences are admitted in order of
arrival while slots and KV cache allow. When the cache runs out, the newest sequence is preempted:
its cache is given up and computed again later. A step takes, with n decoding sequences that hold K
tokens of context, and chunks of p tokens on top of `cached` ones,

    with prefill:   max(floor, a + b·(Σp + n)) + c·Σ(p² + 2·p·cached) + f·K + h
    decodes only:   d + e·n + f·K + h
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from kit.accelerator import Profile
from kit.engine import FINEST_S, Done, Emulated, Job, Text, text_for


@dataclass(eq=False)
class Sequence:
    """One request in the scheduler; all counts in tokens."""

    prompt_tokens: int
    output_tokens: int
    generated: int = 0
    cached: int = 0

    @property
    def todo(self) -> int:
        """Tokens to compute before the next one comes out: 1 for a sequence that decodes."""
        return self.prompt_tokens + self.generated - self.cached

    @property
    def decodes(self) -> bool:
        return self.generated > 0 and self.todo == 1


@dataclass
class Step:
    """What one model step does: how long it takes, and whom it starts, brings a token, ends."""

    duration_s: float = 0.0
    sequences: int = 0
    started: list[Sequence] = field(default_factory=list)
    first: list[Sequence] = field(default_factory=list)
    advanced: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Pure state: sequences that wait and run, and the KV cache they share. Knows no clock."""

    def __init__(
        self, profile: Profile, max_num_seqs: int, max_num_batched_tokens: int, kv_cache_tokens: int
    ) -> None:
        self.profile = profile
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_cache_tokens = kv_cache_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # an ordered set: oldest first
        self.kv_used_tokens = 0
        self.preemptions = 0

    def step(self) -> Step:
        """Schedule and account one step; call only while there is work."""
        step = Step()
        budget, before = self.max_num_batched_tokens, self.preemptions
        chunks: dict[Sequence, int] = {}
        for s in sorted(self.running, key=lambda s: not s.decodes):
            tokens = min(s.todo, budget)
            if s in self.running and tokens > 0 and self._make_room(s, tokens, chunks):
                chunks[s] = tokens
                budget -= tokens
                self.kv_used_tokens += tokens
        full = self.preemptions > before  # who was just put out would come straight back in
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs and not full:
            s = self.waiting[0]
            if self.kv_used_tokens + s.todo > self.kv_cache_tokens:
                break
            self.running[self.waiting.popleft()] = None
            if s.generated == 0:
                step.started.append(s)
            chunks[s] = min(s.todo, budget)
            budget -= chunks[s]
            self.kv_used_tokens += chunks[s]
        step.duration_s = self._duration_s(chunks)
        step.sequences = len(chunks)
        for s, tokens in chunks.items():
            s.cached += tokens
            if s.todo == 0:
                s.generated += 1
                step.advanced.append(s)
                if s.generated == 1:
                    step.first.append(s)
                if s.generated == s.output_tokens:
                    self.drop(s)
                    step.finished.append(s)
        return step

    def drop(self, s: Sequence) -> None:
        """Take a sequence out, finished or not, and free its cache."""
        if s in self.running:
            del self.running[s]
            self.kv_used_tokens -= s.cached
        elif s in self.waiting:
            self.waiting.remove(s)

    def _make_room(self, s: Sequence, tokens: int, chunks: dict[Sequence, int]) -> bool:
        while self.kv_used_tokens + tokens > self.kv_cache_tokens:
            newest = next(reversed(self.running))
            self.drop(newest)
            self.kv_used_tokens -= chunks.pop(newest, 0)
            newest.cached = 0
            self.waiting.appendleft(newest)
            self.preemptions += 1
            if newest is s:
                return False
        return True

    def _duration_s(self, chunks: dict[Sequence, int]) -> float:
        p = self.profile
        decoding = [s for s in chunks if s.decodes]
        prefills = [(tokens, s.cached) for s, tokens in chunks.items() if not s.decodes]
        n = len(decoding)
        context = sum(s.cached + 1 for s in decoding)
        common_s = p.f_s_per_context_token * context + p.host_overhead_s_per_step
        if not prefills:
            return p.d_s + p.e_s_per_sequence * n + common_s
        tokens = sum(t for t, _ in prefills) + n
        squares = sum(t * t + 2 * t * cached for t, cached in prefills)
        linear_s = max(p.floor_s, p.a_s + p.b_s_per_token * tokens)
        return linear_s + p.c_s_per_token2 * squares + common_s


class ContinuousEngine(Emulated):
    """The scheduler in real time, paced by absolute deadlines."""

    def __init__(
        self,
        accelerator: str,
        time_scale: float,
        load_time_s: float,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        kv_cache_tokens: int | None,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(accelerator, time_scale, load_time_s, kv_cache_tokens, max_model_len)
        self.scheduler = Scheduler(
            self.profile, max_num_seqs, max_num_batched_tokens, self.kv_cache_tokens
        )
        self._tracked: dict[Sequence, _Tracked] = {}
        self._loop: asyncio.Task[None] | None = None

    async def submit(self, job: Job) -> Done:
        """Have one request served; when the caller leaves, its slot and cache are free at once."""
        text = text_for(job)
        sequence = Sequence(job.prompt_tokens, text.tokens)
        tracked = _Tracked(job, text, asyncio.get_running_loop().create_future(), time.monotonic())
        self._tracked[sequence] = tracked
        self.scheduler.waiting.append(sequence)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        try:
            return await tracked.done
        finally:
            self.scheduler.drop(sequence)
            self._tracked.pop(sequence, None)
            if job.sink:
                job.sink.close()

    async def _run(self) -> None:
        scheduler = self.scheduler
        with self.working(0):
            deadline_s = time.monotonic()
            while scheduler.waiting or scheduler.running:
                begun_s = time.monotonic()
                step = scheduler.step()
                self.batches += 1
                self.executing = step.sequences
                deadline_s += step.duration_s * self.time_scale
                ahead_s = deadline_s - begun_s
                await asyncio.sleep(ahead_s if ahead_s > FINEST_S else 0)
                self._tell(step, begun_s, time.monotonic())

    def _tell(self, step: Step, begun_s: float, ended_s: float) -> None:
        for s in step.started:
            if s in self._tracked:
                self._tracked[s].started_s = begun_s
        for s in step.first:
            if s in self._tracked:
                self._tracked[s].first_s = ended_s
        for s in step.advanced:
            t = self._tracked.get(s)
            if t and t.job.sink:
                t.job.sink.push(*t.text.piece(s.generated - 1, s.generated))
        for s in step.finished:
            t = self._tracked.get(s)
            if t and not t.done.done():
                t.done.set_result(
                    Done(
                        text=t.text.text,
                        batch_id=self.batches,
                        batch_size=step.sequences,
                        queued_s=t.submitted_s,
                        started_s=t.started_s,
                        first_token_s=t.first_s,
                        done_s=ended_s,
                        output_tokens=t.text.tokens,
                        finish_reason=t.text.finish_reason,
                    )
                )

    def stats(self) -> dict[str, float]:
        return {
            "running_sequences": len(self.scheduler.running),
            "waiting_sequences": len(self.scheduler.waiting),
            "kv_cache_share": self.scheduler.kv_used_tokens / self.kv_cache_tokens,
            "preemptions": self.scheduler.preemptions,
        }


@dataclass
class _Tracked:
    job: Job
    text: Text
    done: asyncio.Future[Done]
    submitted_s: float
    started_s: float = 0.0
    first_s: float = 0.0
