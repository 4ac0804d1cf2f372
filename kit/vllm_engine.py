"""vLLM inside a replica: continuous batching by its own scheduler, or whole batches through it.

vLLM runs its scheduler and the model in processes of their own. The instants of a request are those
that the scheduler stamps, on the monotonic clock that all processes of a Linux machine share: queued
(the scheduler has it), scheduled, first token, last token. What passes before `queued` is the
tokenizer, the way to that process, and the model step that runs there. This module imports nothing
of vLLM before an engine is made: the environment must be set first.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kit.engine import Done, EngineDead, Job
from kit.guard import watch_over_this_process
from kit.models import is_path, resolve
from kit.vllm_host import (
    CPU_BLOCK_TOKENS,
    KV_CACHE_BYTES,
    is_cpu_build,
    set_environment,
    size_cache,
)
from kit.vllm_meter import Meter

_DEAD = "the vLLM engine is dead: this replica must be replaced"


class VllmError(RuntimeError):
    """vLLM cannot start, or gave a request up; the text says why as far as it is known."""


class VllmEngine:
    """One vLLM engine. Making one blocks until the model is loaded, best inside an event loop.

    Args:
        model: see `kit.models.resolve`.
        max_model_len: most tokens of prompt + output (the window); None is the model's own.
        max_num_seqs: most sequences in one model step.
        max_num_batched_tokens: most tokens computed in one model step.
        kv_cache_tokens: KV cache in tokens, rounded up to whole blocks; None is 1 GiB on a CPU, and
            what vLLM finds free on a GPU.
        enable_prefix_caching: whether prompts reuse the cache of equal beginnings.
        cpus: threads of the model on a CPU machine.

    Raises:
        ModelError: the model is not there.
        VllmError: the sizes cannot work, or vLLM did not start.
    """

    def __init__(
        self,
        model: str = "",
        max_model_len: int | None = None,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 8192,
        kv_cache_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        cpus: float = 1.0,
    ) -> None:
        found = resolve(model)
        on_cpu = is_cpu_build()
        set_environment(int(max(1, cpus)), offline=is_path(found), on_cpu=on_cpu)
        self._guard = watch_over_this_process()
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.model_name = model or os.path.basename(found)
        self._meter = Meter()
        try:
            config = AsyncEngineArgs(
                model=found,
                served_model_name=self.model_name,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                # Compiled, the CPU build takes 80 s longer to start, and SmolLM2 answers nonsense.
                enforce_eager=on_cpu,
                max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
                enable_prefix_caching=enable_prefix_caching,
                kv_cache_memory_bytes=KV_CACHE_BYTES if on_cpu else None,
                block_size=CPU_BLOCK_TOKENS if on_cpu else None,
            ).create_engine_config()
            size_cache(config, kv_cache_tokens, on_cpu)
            self._llm = AsyncLLM.from_vllm_config(
                config, stat_loggers=[lambda *_: self._meter], disable_log_stats=True
            )
        except (RuntimeError, ValueError) as error:
            raise VllmError(f"vLLM did not start with {found}: {error}") from error
        cache = config.cache_config
        self.window_tokens: int = config.model_config.max_model_len
        self.room_of = f"the window of {self.model_name}"
        # vLLM keeps one block back.
        self.kv_cache_tokens: int = (cache.num_gpu_blocks - 1) * cache.block_size
        self._tokenizer: Any = self._llm.get_tokenizer()
        self._vocabulary: int = config.model_config.get_vocab_size()
        self._ids = itertools.count()
        self._free = asyncio.Lock()
        self._batches = self._batch_size = 0  # static: so far, and requests in the running one
        self._in_flight = 0
        self._busy_s = 0.0
        self._since_s = 0.0

    async def submit(self, job: Job) -> Done:
        """Have one request served; when the caller leaves, its slot and cache are free at once.

        Raises:
            ValueError: vLLM refuses the request; the text says why.
            EngineDead: the engine is dead.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        text: list[str] = []
        tokens = 0
        output: Any = None
        try:
            with self._working():
                async for output in self._llm.generate(
                    _prompt(job), _sampling(job), f"kit-{next(self._ids)}"
                ):
                    part = output.outputs[0]
                    tokens += len(part.token_ids)
                    text.append(part.text)
                    if job.sink:
                        job.sink.push(part.text, len(part.token_ids))
        except EngineDeadError:
            raise EngineDead(_DEAD) from None
        except VLLMClientError as error:
            raise ValueError(str(error)) from None
        finally:
            if job.sink:
                job.sink.close()
        reason, times = output.outputs[0].finish_reason, output.metrics
        if reason not in ("length", "stop"):
            raise VllmError(f"vLLM gave the request up: {reason}")
        return Done(
            text="".join(text),
            batch_id=self._meter.steps - 1,
            batch_size=self._meter.sequences,
            queued_s=times.queued_ts,
            started_s=times.scheduled_ts,
            first_token_s=times.first_token_ts,
            done_s=times.last_token_ts,
            output_tokens=tokens,
            finish_reason=reason,
        )

    async def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Run one static batch: all start together and come back with the last; one at a time.

        Check jobs before (`check`): an error of one is raised for the batch, after all have ended.
        """
        async with self._free:
            batch_id, self._batch_size = self._batches, len(jobs)
            self._batches += 1
            tasks = [asyncio.create_task(self.submit(job)) for job in jobs]
            try:
                await asyncio.wait(tasks)
            finally:
                for task in tasks:
                    task.cancel()  # does nothing to what has ended
                self._batch_size = 0
        alone = [task.result() for task in tasks]
        queued_s, started_s = (
            min(d.queued_s for d in alone), min(d.started_s for d in alone),
        )  # fmt: skip
        done_s = max(d.done_s for d in alone)
        return [
            Done(
                d.text, batch_id, len(jobs), queued_s, started_s, d.first_token_s, done_s,
                d.output_tokens, d.finish_reason,
            )
            for d in alone
        ]  # fmt: skip

    def check(self, job: Job) -> None:
        """Refuse what vLLM would refuse, before it is in a batch with others.

        Raises:
            ValueError: sampling parameters that vLLM does not take, or more tokens than fit.
        """
        _sampling(job)
        strange = [t for t in job.prompt_token_ids or () if t >= self._vocabulary]
        if strange:
            raise ValueError(
                f"prompt holds the token id {strange[0]}: {self.model_name} knows 0 to "
                f"{self._vocabulary - 1}"
            )
        room, what = min(
            (self.window_tokens, "window"), (self.kv_cache_tokens, "KV cache of the engine")
        )
        if job.prompt_tokens + job.output_tokens > room:
            raise ValueError(
                f"prompt of {job.prompt_tokens} tokens + max_tokens of {job.output_tokens} exceed "
                f"the {what} of {room} tokens"
            )

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids that `text` becomes as the prompt of a completion."""
        return tuple(self._tokenizer(text).input_ids)

    def count_tokens(self, text: str) -> int:
        """How many tokens `text` has as the prompt of a completion."""
        return len(self.tokenize(text))

    def chat_prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """One prompt for a conversation, by the model's chat template, ready for the answer.

        Raises:
            ValueError: the model has no template, or it refuses the messages.
        """
        from jinja2 import TemplateError

        try:
            prompt: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template of {self.model_name} refuses: {error}") from None
        return prompt

    def stats(self) -> dict[str, float]:
        """Figures of the engine at its last model step, by the names they are sampled under."""
        return self._meter.figures()

    @property
    def executing(self) -> int:
        """Requests being executed, those of a static batch that wait for its last one included."""
        return self._batch_size or self._meter.running

    @property
    def batches(self) -> int:
        """Static batches so far, or model steps when there was none."""
        return self._batches or self._meter.steps

    @property
    def busy_s(self) -> float:
        """Seconds with a request in the engine since the start."""
        return self._busy_s + (time.monotonic() - self._since_s if self._in_flight else 0.0)

    async def check_health(self) -> None:
        """Raises `EngineDead` when a process of the engine has died."""
        if self._llm.errored:
            raise EngineDead(_DEAD)

    def shutdown(self) -> None:
        """End the engine's processes; more than once does no harm."""
        if hasattr(self, "_llm"):
            self._llm.shutdown()
        if hasattr(self, "_guard") and self._guard.stdin:
            self._guard.stdin.close()
            self._guard.wait()

    def __del__(self) -> None:
        self.shutdown()

    @contextmanager
    def _working(self) -> Iterator[None]:
        if not self._in_flight:
            self._since_s = time.monotonic()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._busy_s += time.monotonic() - self._since_s


def _prompt(job: Job) -> Any:
    if job.prompt_token_ids is None:
        return job.prompt
    return {"prompt_token_ids": list(job.prompt_token_ids)}


def _sampling(job: Job) -> Any:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    try:
        return SamplingParams(
            max_tokens=job.output_tokens,
            min_tokens=job.min_tokens,
            temperature=job.temperature,
            ignore_eos=job.ignore_eos,
            stop=list(job.stop),
            output_kind=RequestOutputKind.DELTA,
        )
    except VLLMClientError as error:
        raise ValueError(str(error)) from None
