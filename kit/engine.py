"""The engine inside a replica: takes requests, keeps the accelerator's time.

The emulated engines stand in for the GPU's time only. Each is one accelerator: this module's runs
static batches one after the other, each for as long as the closed form of `kit.accelerator` says,
times `time_scale`; `kit.continuous` runs continuous batching.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kit.accelerator import profile
from kit.busy import Busy
from kit.tokens import Words

FINEST_S = 0.002
"""Steps shorter than this are paced in groups: a timer of the event loop is no finer."""

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

    Lengths in tokens, `arrived_s` on the monotonic clock. With a `sink` the output is streamed. With
    `prompt_token_ids` the prompt need not be tokenized again, and `prompt` is not read.
    """

    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    prompt: str = ""
    prompt_token_ids: tuple[int, ...] | None = None
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


class EngineDead(RuntimeError):
    """The engine has died under its requests: the replica must be replaced."""


class Engine(Protocol):
    """What an app needs of its engine, emulated or real. Lengths in tokens."""

    model_name: str
    window_tokens: int
    """Longest prompt and output together."""
    room_of: str
    """What sets that bound, in words."""

    @property
    def executing(self) -> int:
        """Requests being executed now."""

    @property
    def batches(self) -> int:
        """Static batches, or model steps, so far."""

    @property
    def busy_s(self) -> float:
        """Seconds of work since the start, the running batch included."""

    def count_tokens(self, text: str) -> int:
        """Length of a text."""

    def chat_prompt(self, messages: tuple[dict[str, str], ...]) -> str:
        """A conversation as the prompt that makes the model answer it."""

    def check(self, job: Job) -> None:
        """Refuse by a `ValueError` what the engine would refuse, before it has batch mates."""

    def stats(self) -> dict[str, float]:
        """Figures of the engine now, by the names they are sampled under."""

    async def check_health(self) -> None:
        """Raises `EngineDead` when it is."""

    def shutdown(self) -> None:
        """Stop what the engine started."""


class Batching(Engine, Protocol):
    """An engine that runs static batches."""

    async def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Run one batch; it waits for the one before it."""


class Continuing(Engine, Protocol):
    """An engine whose requests join and leave its running batch."""

    async def submit(self, job: Job) -> Done:
        """Have one request served; when the caller leaves, its slot and cache are free at once."""


class Emulated(Busy, Words):
    """What all emulated engines share. Loading blocks for `load_time_s`, as reading weights does."""

    def __init__(
        self,
        accelerator: str,
        time_scale: float,
        load_time_s: float,
        kv_cache_tokens: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        self.profile = profile(accelerator)
        self.time_scale = time_scale
        self.kv_cache_tokens = kv_cache_tokens or self.profile.kv_capacity_tokens
        self.window_tokens = min(self.kv_cache_tokens, max_model_len or self.kv_cache_tokens)
        self.room_of = (
            "the window max_model_len"
            if self.window_tokens < self.kv_cache_tokens
            else f"the KV cache of {self.profile.accelerator}"
        )
        self.model_name = self.profile.model
        time.sleep(load_time_s)

    def check(self, job: Job) -> None:
        """An emulated engine takes whatever fits its window."""

    async def check_health(self) -> None:
        """An emulated engine does not die."""

    def shutdown(self) -> None:
        """Nothing to stop."""


class StaticEngine(Emulated):
    """Static batches: all of a batch start together and come back together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._free = asyncio.Lock()
        self._held_tokens = 0

    async def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Run one batch; it waits for the one before it."""
        texts = [text_for(j) for j in jobs]
        prompts, outputs = [j.prompt_tokens for j in jobs], [t.tokens for t in texts]
        async with self._free:
            with self.working(len(jobs)) as batch_id:
                started_s = time.monotonic()
                self._held_tokens = len(jobs) * (max(prompts) + max(outputs))
                try:
                    prefill_s = self.profile.prefill_s(prompts) * self.time_scale
                    first_token_s = await _until(started_s + prefill_s)
                    if any(j.sink for j in jobs):
                        await self._stream(jobs, texts, prompts, started_s + prefill_s)
                    decode_s = self.profile.decode_s(prompts, outputs) * self.time_scale
                    done_s = await _until(started_s + prefill_s + decode_s)
                finally:
                    self._held_tokens = 0
                    for job in jobs:
                        if job.sink:
                            job.sink.close()
        return [
            Done(
                t.text, batch_id, len(jobs), started_s, started_s, first_token_s, done_s, t.tokens,
                t.finish_reason,
            )
            for t in texts
        ]  # fmt: skip

    async def _stream(
        self, jobs: Sequence[Job], texts: Sequence[Text], prompts: list[int], from_s: float
    ) -> None:
        """Hand tokens to the sinks as the batch decodes them."""
        longest = max(t.tokens for t in texts)
        sent = 0
        while sent < longest:
            now_s = time.monotonic()
            upto = sent + 1
            while upto < longest and self._decoded_s(prompts, upto, from_s) < now_s + FINEST_S:
                upto += 1
            await _until(self._decoded_s(prompts, upto, from_s))
            for job, text in zip(jobs, texts, strict=True):
                if job.sink:
                    job.sink.push(*text.piece(sent, upto))
            sent = upto

    def _decoded_s(self, prompts: list[int], tokens: int, from_s: float) -> float:
        return from_s + self.profile.decode_s(prompts, [tokens]) * self.time_scale

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


@dataclass(frozen=True)
class Text:
    """What the emulated model says: a word a token, cut before the first stop string."""

    text: str
    tokens: int
    finish_reason: Literal["length", "stop"]

    def piece(self, start: int, end: int) -> tuple[str, int]:
        """Tokens from `start` to before `end`, as text and count; empty beyond the last."""
        end = min(end, self.tokens)
        # Words have five letters: token k ends at character 6k − 1, the blank before it included.
        return self.text[max(0, start * 6 - 1) : max(0, end * 6 - 1)], max(0, end - start)


def text_for(job: Job) -> Text:
    """The text that answers a job. It never ends by itself: the emulated model has no last word."""
    text = text_of(job.output_tokens)
    from_char = max(0, job.min_tokens * 6 - 1)
    cuts = [at for at in (text.find(s, from_char) for s in job.stop) if at >= 0]
    if not cuts:
        return Text(text, job.output_tokens, "length")
    cut = text[: min(cuts)]
    return Text(cut, max(1, len(cut.split())), "stop")
