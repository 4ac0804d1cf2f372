"""The Serve deployments, built from a declarative config: `kit.apps:build`, `kit.apps:monitor`.

An app answers `POST /` with `{"prompt": str, "max_tokens": int}`. Each answer carries its own
durations in a `Server-Timing` header (batch wait, engine queue, prefill, decode); a second one,
`X-Served-By`, says which replica and batch (id, size) served it, and the instants of arrival and
completion on the machine's monotonic clock, so that a client on the same machine measures the way
in and the way back instead of inferring them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kit.clock import SERVED_BY, clock_id
from kit.continuous import ContinuousEngine
from kit.engine import Done, Engine, Job, StaticEngine
from kit.gate import Gate, Turn
from kit.knobs import describe, explain
from kit.settings import DEPLOYMENT_NAME, MONITOR_NAME, Settings, SettingsError

MAX_BODY_BYTES = 4_000_000
HEARTBEAT_S = 0.5


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


class _Model:
    """What every app does around its engine: read, refuse, time, answer, report."""

    engine: Engine

    def __init__(self) -> None:
        self.user_config: dict[str, Any] = {}
        self.refused: dict[str, Any] | None = None
        self.ongoing = 0
        self._max_new_tokens = 1
        self._clock = clock_id()
        self._replica_id = serve.get_replica_context().replica_tag
        self._heart: asyncio.Task[None] | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new batching values: all of them, or none.

        It never raises: Serve answers a raising reconfigure by stopping the replica and starting
        others with the same bad values. What was refused, and why, is reported instead.
        """
        try:
            checked = Settings(**user_config).user_config()
        except (SettingsError, TypeError) as error:
            self.refused = {"user_config": user_config, "why": str(error)}
        else:
            self.apply(checked)
            self.user_config, self.refused = user_config, None
        await self._report()
        if self._heart is None:
            self._heart = asyncio.create_task(self._beat())

    def apply(self, values: dict[str, Any]) -> None:
        """Put checked batching values into effect."""
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
            {"text": done.text, "usage": usage},
            headers={
                "Server-Timing": (
                    f"batch_wait;dur={(done.queued_s - arrived_s) * 1e3:.4f}, "
                    f"engine_queue;dur={(done.started_s - done.queued_s) * 1e3:.4f}, "
                    f"prefill;dur={(done.first_token_s - done.started_s) * 1e3:.4f}, "
                    f"decode;dur={(done.done_s - done.first_token_s) * 1e3:.4f}"
                ),
                SERVED_BY: f"{self._replica_id} {done.batch_id} {done.batch_size} {self._clock} "
                f"{arrived_s:.6f} {done.done_s:.6f}",
            },
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

    def state(self) -> dict[str, Any]:
        """This replica now; `t_s` and `busy_s` in seconds, the rest counts."""
        return {
            "replica_id": self._replica_id,
            "pid": os.getpid(),
            "t_s": time.monotonic(),
            "user_config": self.user_config,
            "refused": self.refused,
            "ongoing": self.ongoing,
            "executing": self.engine.executing,
            "batches": self.engine.batches,
            "busy_s": self.engine.busy_s,
            "engine": self.engine.stats(),
        }

    async def _report(self) -> None:
        # Without a monitor (a config deployed elsewhere) the app serves all the same.
        with contextlib.suppress(Exception):
            handle = serve.get_app_handle(MONITOR_NAME)
            await asyncio.wait_for(handle.report.remote(self.state()), 2)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._report()


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
