"""The asynchronous job queue: submit now, fetch the result later. `kit.jobs:build` is its Serve app.

    POST   /jobs        {"prompt", "max_tokens", …, "expires_s"?}  →  202 {"id", "status", …}
    GET    /jobs/{id}   status, and the result or the error once there is one
    DELETE /jobs/{id}   cancel
    GET    /jobs        how many jobs have which status
    GET    /jobs/dead   the dead letters: jobs that failed, and messages that are no jobs

A job that was accepted has, in the end, one result or one reason why not, whichever replica or
consumer dies meanwhile. It may be *begun* more than once: a killed one's work is done again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import redis
import requests
from fastapi import Request
from fastapi.responses import Response
from kombu.exceptions import OperationalError
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.task_consumer import instantiate_adapter_from_config, task_consumer
from tqdm import tqdm

from kit import broker, consumer
from kit.application import JOBS_NAME
from kit.contract import PlainRequest
from kit.door import new_api, overloaded
from kit.jobstore import Job, JobStore, Status
from kit.refusal import BadRequest, Overloaded


class JobRequest(PlainRequest):
    """The body of `POST /jobs`: what the app takes, and how long the job may wait."""

    expires_s: float | None = Field(
        None, gt=0, le=30 * 86_400, description="Within this it must begin, or it never runs",
        json_schema_extra={"unit": "s"},
    )  # fmt: skip


class JobsArgs(BaseModel):
    """What `build` takes. `concurrency` and `consumers` multiply to the jobs done at a time."""

    model_config = ConfigDict(extra="forbid")

    broker_url: str
    consumers: int = Field(1, ge=1, le=100)
    concurrency: int = Field(8, ge=1, le=1000)
    retries: int = Field(8, ge=0, le=1000, description="Of a job that failed, or whose runner died")
    job_timeout_s: float = Field(600.0, gt=0, description="Of one attempt")
    keep_s: float = Field(3600.0, gt=0, description="How long ended jobs are remembered")
    max_queued: int = Field(10_000, ge=1, description="More are refused with 503")


class _Slash:
    """Takes `/jobs` for `/jobs/`: the redirect between them is lost on clients that follow none."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == scope["root_path"]:
            scope = scope | {"path": f"{scope['path']}/"}
        await self._app(scope, receive, send)


async def _away(_: Request, error: Exception) -> Response:
    gone = Overloaded(f"the queue's broker does not answer: {type(error).__name__}", 503, 2.0)
    return await overloaded(_, gone)


api = new_api("Job queue", {"/": JobRequest})
api.add_middleware(_Slash)
api.add_exception_handler(redis.RedisError, _away)
api.add_exception_handler(OperationalError, _away)


@serve.ingress(api)
class Jobs:
    """The HTTP side of the queue."""

    def __init__(self, broker_url: str, keep_s: float, max_queued: int, consumers: Any) -> None:
        self._redis: Any = broker.connect(broker_url)
        self._store = JobStore(self._redis, keep_s)
        self._sender = instantiate_adapter_from_config(consumer.config(broker_url))
        self._max_queued = max_queued

    @api.post("/", status_code=202, response_model=Job)
    def submit(self, request: JobRequest) -> Job:
        waiting = self._store.counts()["queued"]
        if waiting >= self._max_queued:
            raise Overloaded(f"{waiting} jobs wait already, which is all it takes", 503, 2.0)
        if request.stream:
            raise BadRequest("stream = True: the result of a job is fetched whole", param="stream")
        request.call()  # refuses now what the app would refuse later
        body = request.model_dump(exclude={"expires_s"}, exclude_unset=True, by_alias=True)
        job = self._store.create(body, request.expires_s)
        try:
            consumer.send(self._sender, job.id)
        except Exception:
            self._store.discard(job.id)
            raise
        return job

    @api.get("/")
    def counts(self) -> dict[Status, int]:
        return self._store.counts()

    @api.get("/dead")
    def dead(self) -> dict[str, list[dict[str, Any]]]:
        letters = self._redis.lrange(consumer.UNPROCESSABLE, 0, 999)
        strange = [json.loads(letter)["headers"].get("argsrepr", "") for letter in letters]
        return {
            "failed": [
                {
                    "id": job.id,
                    "reason": job.error,
                    "attempts": job.attempts,
                    "ended_s": job.ended_s,
                }
                for job in self._store.dead()
            ],
            "unprocessable": [{"message": text} for text in strange],
        }

    @api.get("/{job_id}", response_model=Job)
    def job(self, job_id: str) -> Job:
        return self._found(self._store.get(job_id), job_id)

    @api.delete("/{job_id}")
    def cancel(self, job_id: str) -> dict[str, Any]:
        after, before = self._store.cancel(job_id)
        status = self._found(after, job_id).status
        if before == "queued":
            note = "it will never run"
        elif before == "running":
            note = "it was running: its result will be discarded"
        else:
            note = "it had ended before: nothing was changed"
        return {"id": job_id, "status": status, "note": note}

    def _found(self, job: Job | None, job_id: str) -> Job:
        if job is None:
            raise BadRequest(f"no job {job_id!r}: never submitted, or ended too long ago", 404)
        return job


def build(args: dict[str, Any]) -> serve.Application:
    """The queue's Serve application, of an ingress and a number of consumers; see `JobsArgs`."""
    a = JobsArgs(**args)
    takes = task_consumer(task_processor_config=consumer.config(a.broker_url, own_name=True))
    consumers = serve.deployment(
        takes(consumer.Consumer),
        name="Consumer",
        num_replicas=a.consumers,
        max_ongoing_requests=a.concurrency,  # to Serve, the number of a consumer's threads
        health_check_period_s=1.0,
        ray_actor_options={"num_cpus": 0},
    ).bind(a.broker_url, a.retries, a.job_timeout_s, a.keep_s)
    return serve.deployment(Jobs, max_ongoing_requests=100, ray_actor_options={"num_cpus": 0}).bind(
        a.broker_url, a.keep_s, a.max_queued, consumers
    )


def application(broker_url: str, **args: Any) -> dict[str, Any]:
    """The queue as one entry of `applications` in Serve's declarative config."""
    return {
        "name": JOBS_NAME,
        "route_prefix": "/jobs",
        "import_path": "kit.jobs:build",
        "args": {"broker_url": broker_url, **args},
    }


def submit(url: str, bodies: Iterable[Mapping[str, Any]]) -> list[str]:
    """Submit a job for each body to the queue of the Serve at `url`; returns their ids.

    Raises:
        requests.HTTPError: when one is refused; those before it are submitted.
    """
    ids = []
    with requests.Session() as session:
        for body in bodies:
            answer = session.post(f"{url}/jobs", json=dict(body), timeout=30)
            if not answer.ok:
                raise requests.HTTPError(f"{answer.status_code}: {answer.text}", response=answer)
            ids.append(answer.json()["id"])
    return ids


def wait(url: str, ids: Iterable[str], timeout_s: float = 600.0) -> pd.DataFrame:
    """Wait until all jobs have ended, with a progress bar; a row for each, in the order of `ids`.

    Columns as in `kit.jobstore.Job`. After `timeout_s` those that have not ended are as they are.
    """
    ids = list(ids)
    found: dict[str, dict[str, Any]] = {}
    pending = ids
    deadline = time.monotonic() + timeout_s
    with requests.Session() as session, tqdm(total=len(ids), desc="jobs", unit="job") as bar:
        while True:
            for job_id in pending:
                answer = session.get(f"{url}/jobs/{job_id}", timeout=30)
                answer.raise_for_status()
                found[job_id] = answer.json()
            pending = [i for i in pending if found[i]["status"] in ("queued", "running")]
            bar.update(len(ids) - len(pending) - bar.n)
            if not pending or time.monotonic() > deadline:
                return pd.DataFrame([found[i] for i in ids], columns=list(Job.model_fields))
            time.sleep(0.5)
