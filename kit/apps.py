"""The Serve deployments, built from a declarative config: `kit.apps:build`, `kit.apps:monitor`.

An app answers `POST /` with `{"prompt": str, "max_tokens": int}`.
"""

from __future__ import annotations

import json
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kit.clock import clock_id
from kit.continuous import ContinuousEngine
from kit.engine import Done, Engine, Job, StaticEngine
from kit.gate import Gate, Turn
from kit.knobs import describe, explain
from kit.replica import Replica
from kit.settings import DEPLOYMENT_NAME

MAX_BODY_BYTES = 4_000_000


class CompletionRequest(BaseModel):
    """The body of `POST /`."""

    model_config = ConfigDict(strict=True)

    prompt: str = Field(min_length=1, description="The text to continue")
    max_tokens: int = Field(16, ge=1, le=131_072, json_schema_extra={"unit": "tokens"})


class BadRequest(ValueError):
    """A request that is refused before it can reach a batch."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class _Model(Replica):
    """What every app does around its engine: read, refuse, time, answer."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self._max_new_tokens = 1

    def apply(self, values: dict[str, Any]) -> None:
        self._max_new_tokens = values["max_new_tokens"]

    async def execute(self, job: Job) -> Done:
        """Have one job executed; subclasses differ here."""
        raise NotImplementedError

    async def __call__(self, request: Request) -> Response:
        arrived_s = time.monotonic()
        self.ongoing += 1
        try:
            job = self._job(await _body(request), arrived_s)
            done = await self.execute(job)
        except BadRequest as error:
            body = {"error": {"message": str(error), "type": "invalid_request_error"}}
            return JSONResponse(body, error.status)
        finally:
            self.ongoing -= 1
        usage = {"prompt_tokens": job.prompt_tokens, "completion_tokens": job.output_tokens}
        return JSONResponse(
            {"text": done.text, "usage": usage}, headers=self.timing(arrived_s, done, done.done_s)
        )

    def _job(self, body: bytes, arrived_s: float) -> Job:
        try:
            request = CompletionRequest.model_validate(json.loads(body))
        except ValidationError as error:
            raise BadRequest(explain(error, _REQUEST_FIELDS)) from None
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        job = Job(
            prompt_tokens=len(request.prompt.split()),
            output_tokens=min(request.max_tokens, self._max_new_tokens),
            arrived_s=arrived_s,
        )
        room = self.engine.kv_cache_tokens
        if job.prompt_tokens + job.output_tokens > room:
            raise BadRequest(
                f"prompt of {job.prompt_tokens} tokens + max_tokens of {job.output_tokens} exceed "
                f"the {room} tokens that the KV cache of {self.engine.profile.accelerator} holds"
            )
        if job.prompt_tokens == 0:
            raise BadRequest("prompt holds only white space: must have at least one word")
        return job

    def work(self) -> dict[str, Any]:
        return {
            "executing": self.engine.executing,
            "batches": self.engine.batches,
            "busy_s": self.engine.busy_s,
            "engine": self.engine.stats(),
        }


class Unbatched(_Model):
    """One request at a time; the others wait for the accelerator inside the replica."""

    engine: StaticEngine

    def __init__(self, **args: Any) -> None:
        super().__init__()
        self.engine = StaticEngine(**_shared(args))

    async def execute(self, job: Job) -> Done:
        return (await self.engine.run([job]))[0]


class Batched(_Model):
    """Dynamic batching by `@serve.batch`, one batch at a time."""

    engine: StaticEngine

    def __init__(self, **args: Any) -> None:
        super().__init__()
        self.engine = StaticEngine(**_shared(args))
        self._gate = Gate()

    def apply(self, values: dict[str, Any]) -> None:
        super().apply(values)
        self._gate.limit, self._gate.open = values["max_batch_size"], not values["hold_while_busy"]
        self._gate.release()
        self._batch.set_max_batch_size(values["max_batch_size"])
        self._batch.set_batch_wait_timeout_s(float(values["batch_wait_timeout_s"]))

    async def execute(self, job: Job) -> Done:
        async with self._gate.turn() as turn:
            done: Done = await self._batch(job, turn)
        return done

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0.0)
    async def _batch(self, jobs: list[Job], turns: list[Turn]) -> list[Done]:
        with self._gate.batch(turns):
            return await self.engine.run(jobs)

    async def check_health(self) -> None:
        """Unhealthy when the task that forms batches has died: requests would hang for ever."""
        if not await self._batch._is_batching_task_alive():
            raise RuntimeError("the @serve.batch task is dead; this replica must be replaced")


class Continuous(_Model):
    """Continuous batching: requests join and leave the running batch at every model step."""

    engine: ContinuousEngine

    def __init__(self, **args: Any) -> None:
        super().__init__()
        self.engine = ContinuousEngine(**args)

    async def execute(self, job: Job) -> Done:
        return await self.engine.submit(job)


def _shared(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments that engines without continuous batching take too."""
    return {k: v for k, v in args.items() if not k.startswith("max_num_")}


async def _body(request: Request) -> bytes:
    """The request's body; refused while it arrives once it is too large."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise BadRequest(
                    f"the body has over {MAX_BODY_BYTES // 1_000_000} MB, more than any prompt "
                    "that fits the model", 413,
                )  # fmt: skip
            parts.append(part)
    except ClientDisconnect:
        raise BadRequest("the client left", 499) from None
    return b"".join(parts)


class Monitor:
    """Collects what replicas report, so that a client anywhere can read it over HTTP."""

    def __init__(self) -> None:
        self._replicas: dict[str, dict[str, Any]] = {}

    async def report(self, state: dict[str, Any]) -> None:
        """Keep the newest state of one replica; forget those silent for a minute."""
        self._replicas[state["replica_id"]] = state
        for name, known in list(self._replicas.items()):
            if known["t_s"] < state["t_s"] - 60:
                del self._replicas[name]

    async def __call__(self, request: Request) -> Response:
        return JSONResponse({"clock": clock_id(), "replicas": list(self._replicas.values())})


_REQUEST_FIELDS = {
    name: describe(CompletionRequest, name) for name in CompletionRequest.model_fields
}
_APPS = {"unbatched": Unbatched, "batched": Batched, "continuous": Continuous}


def build(args: dict[str, Any]) -> serve.Application:
    """The app that `args` names; what it takes are the knobs of level `app`."""
    app = _APPS[args["app"]]
    rest = {k: v for k, v in args.items() if k != "app"}
    return serve.deployment(app, name=DEPLOYMENT_NAME).bind(**rest)


def monitor(args: dict[str, Any]) -> serve.Application:
    """The app that gathers the replicas' reports."""
    return serve.deployment(Monitor, ray_actor_options={"num_cpus": 0}).bind()
