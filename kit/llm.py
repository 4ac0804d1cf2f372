"""The model deployments of LLM apps: unbatched, batched, continuous.

Each answers calls (`kit.contract`): whole by `answer`, piece by piece by `stream`. Where it is the
app's entrance, `kit.api` puts HTTP in front of it; behind a `Router` it is called by its handle.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator
from typing import Any

from ray.serve.handle import DeploymentHandle

from kit.api import complete, make_api
from kit.batching import SERVED, DynamicBatching
from kit.contract import Answer, Call
from kit.engine import Batching, Continuing, Done, Engine, EngineDead, Job, Sink
from kit.postprocess import Policy, StreamCleaner, compile_schema, policy
from kit.refusal import BadRequest, Overloaded
from kit.replica import Replica

RETRY_DEAD_S = 30.0
"""When to come again after an engine has died: about what it takes to replace the replica."""


class Model(Replica):
    """What every app does around its engine: count tokens, refuse, execute, postprocess, time."""

    engine: Engine

    def __init__(self, engine: Engine, route: str, postprocess: DeploymentHandle | None) -> None:
        super().__init__()
        self.engine = engine
        self.route = route
        self.model_name = engine.model_name
        self._postprocess = postprocess
        self._policy = Policy()
        self._max_new_tokens = 1
        self._capped = 0

    def __serve_build_asgi_app__(self) -> Any:
        return make_api(self)

    def apply(self, values: dict[str, Any]) -> None:
        self._max_new_tokens = values["max_new_tokens"]
        self._policy = policy(values)

    async def execute(self, job: Job) -> Done:
        """Have one job executed; subclasses differ here."""
        raise NotImplementedError

    async def _executed(self, job: Job) -> Done:
        try:
            return await self.execute(job)
        except EngineDead as error:
            raise Overloaded(str(error), 503, RETRY_DEAD_S) from None
        except ValueError as error:
            raise BadRequest(str(error)) from None

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """`POST /` for callers with a handle."""
        return await complete(self, body)

    async def answer(self, call: Call, arrived_s: float | None = None) -> Answer:
        """The whole answer.

        Raises:
            BadRequest: when it cannot be served as it is.
        """
        arrived_s = arrived_s or time.monotonic()
        with self.counted(arrived_s):
            job = self._admit(call, arrived_s)
            done = await self._executed(job)
            text, returned_s = done.text, done.done_s
            if self._postprocess is not None:
                finished = await self._postprocess.finish.remote(text, call.schema)
                if isinstance(finished, BadRequest):
                    raise finished
                text, returned_s = finished, time.monotonic()
        return self._answer(job, call, done, text, returned_s)

    async def stream(
        self, call: Call, arrived_s: float | None = None
    ) -> AsyncIterator[str | Answer]:
        """Pieces of the output as they come, then the answer with what is left of the text.

        Raises:
            BadRequest: as `answer` does, before the first piece.
        """
        arrived_s = arrived_s or time.monotonic()
        if call.schema is not None:
            raise BadRequest("structured output is checked as a whole: it cannot be streamed")
        sink = Sink()
        clean = StreamCleaner(self._policy) if self._postprocess is not None else None
        with self.counted(arrived_s):
            job = self._admit(call, arrived_s, sink)
            context = contextvars.copy_context()
            task = asyncio.create_task(self._executed(job), context=context)
            task.add_done_callback(lambda _: sink.close())
            try:
                async for text, _ in sink:
                    piece = clean.feed(text) if clean else text
                    if piece:
                        yield piece
                done = await task
            finally:
                # Also when the client left: its slot and its KV cache are free at once.
                task.cancel()
        SERVED.set(context.get(SERVED))  # a task keeps what it was told to itself
        # The last token may be on its way before this is: it went back when it was done.
        rest = clean.feed("", last=True) if clean else ""
        yield self._answer(job, call, done, rest, done.done_s)

    def _answer(self, job: Job, call: Call, done: Done, text: str, returned_s: float) -> Answer:
        asked = call.max_tokens or self.engine.window_tokens - job.prompt_tokens
        cut = done.finish_reason == "length" and asked > job.output_tokens
        self._capped += cut
        return Answer(
            text=text,
            finish_reason=done.finish_reason,
            prompt_tokens=job.prompt_tokens,
            output_tokens=done.output_tokens,
            cap_tokens=job.output_tokens if cut else None,
            headers=self.timing(job.arrived_s, done, returned_s),
        )

    def _admit(self, call: Call, arrived_s: float, sink: Sink | None = None) -> Job:
        """A call as a job: counted, capped, and refused here if it could not be served."""
        if call.schema is not None:
            if self._postprocess is None:
                raise BadRequest(
                    "response_format needs an app with postprocess = True", param="response_format"
                )
            compile_schema(call.schema)
        prompt, ids = call.prompt, call.prompt_token_ids
        if call.messages is not None:
            prompt = self._chat_prompt(call)
        tokens = self.engine.count_tokens(prompt) if ids is None else len(ids)
        if tokens == 0:
            raise BadRequest(
                "prompt is empty or only white space: must have a word", param="prompt"
            )
        room = self.engine.window_tokens
        wanted = min(call.max_tokens or max(1, room - tokens), self._max_new_tokens)
        if tokens + wanted > room:
            raise BadRequest(
                f"prompt of {tokens} tokens + max_tokens of {wanted} exceed the {room} tokens that "
                f"{self.engine.room_of} holds", param="prompt",
            )  # fmt: skip
        job = Job(
            prompt_tokens=tokens,
            output_tokens=wanted,
            arrived_s=arrived_s,
            prompt=prompt,
            prompt_token_ids=ids,
            min_tokens=min(call.min_tokens, wanted),
            ignore_eos=call.ignore_eos,
            temperature=call.temperature,
            stop=call.stop,
            sink=sink,
        )
        try:
            self.engine.check(job)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return job

    def _chat_prompt(self, call: Call) -> str:
        assert call.messages
        try:
            return self.engine.chat_prompt(call.messages)
        except ValueError as error:
            raise BadRequest(str(error), param="messages") from None

    def work(self) -> dict[str, Any]:
        return {
            "executing": self.engine.executing,
            "batches": self.engine.batches,
            "busy_s": self.engine.busy_s,
            "engine": self.engine.stats() | {"capped_requests": float(self._capped)},
        }

    async def check_health(self) -> None:
        """Unhealthy, so replaced, when the engine has died."""
        await self.engine.check_health()

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.shutdown()


class Unbatched(Model):
    """One request at a time; the others wait for the accelerator inside the replica."""

    engine: Batching

    async def execute(self, job: Job) -> Done:
        return (await self.engine.run([job]))[0]


class Batched(DynamicBatching[Job, Done], Model):
    """Dynamic batching by `@serve.batch`, one batch at a time, bounded by requests and by tokens."""

    engine: Batching

    def apply(self, values: dict[str, Any]) -> None:
        super().apply(values)
        side = "long_" if self.route == "long" else ""
        self.set_batching(
            values[f"{side}max_batch_size"],
            values[f"{side}batch_wait_timeout_s"],
            values["hold_while_busy"],
            values["max_batch_tokens"],
        )

    async def run_batch(self, items: list[Job]) -> list[Done]:
        return await self.engine.run(items)

    async def execute(self, job: Job) -> Done:
        return await self.in_batch(job, job.prompt_tokens + job.output_tokens)

    async def check_health(self) -> None:
        await self.check_batching()
        await super().check_health()


class Continuous(Model):
    """Continuous batching: requests join and leave the running batch at every model step."""

    engine: Continuing

    async def execute(self, job: Job) -> Done:
        return await self.engine.submit(job)
