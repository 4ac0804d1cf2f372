"""What is known of each job, in Redis: the truth of the queue, whatever happens to messages.

A message in the broker only says *look at job X*. It may come twice, or get lost with the process
that took it; each step of a job is one atomic step of its record here:

    queued ─▶ running ─▶ done
      │  ▲      │ └────▶ failed      (a dead letter, with its reason)
      │  └──────┘ └────▶ cancelled   (its result is discarded)
      └─▶ expired, cancelled

Whoever runs a job holds a lease on it. A lease that is not renewed ends after `LEASE_S`; then the
job may be taken over. The result of one who was taken over is refused, so a job has one result.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import redis
from pydantic import BaseModel, Field

Status = Literal["queued", "running", "done", "failed", "cancelled", "expired"]
STATUSES: tuple[Status, ...] = get_args(Status)
OPEN: tuple[Status, ...] = ("queued", "running")
LEASE_S = 5


class Job(BaseModel):
    """One job. Instants in seconds since 1970; None is not yet (or never)."""

    id: str
    status: Status
    attempts: int = Field(default=0, description="How often it was begun")
    submitted_s: float
    expires_at_s: float | None = Field(default=None, description="Not begun by then, it never runs")
    started_s: float | None = Field(default=None, description="Begun last")
    ended_s: float | None = None
    result: dict[str, Any] | None = Field(default=None, description="What the app answered")
    error: str | None = Field(default=None, description="Why it failed, or was begun again")


class JobStore:
    """All jobs of one queue. Finished ones are forgotten `keep_s` after their end."""

    def __init__(
        self, client: redis.Redis, keep_s: float = 3600.0, prefix: str = "kit:job"
    ) -> None:
        self._redis: Any = client  # redis-py types every answer as perhaps awaitable
        self._keep_s = keep_s
        self._prefix = prefix

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    def create(self, body: dict[str, Any], expires_s: float | None = None) -> Job:
        """Write a new job down; it is queued. It must begin within `expires_s`, if given."""
        now = time.time()
        job = Job(
            id=uuid.uuid4().hex,
            status="queued",
            submitted_s=now,
            expires_at_s=None if expires_s is None else now + expires_s,
        )
        with self._redis.pipeline() as pipe:
            fields = job.model_dump(exclude_none=True) | {"body": json.dumps(body)}
            pipe.hset(self._key("record", job.id), mapping=fields)
            pipe.zadd(self._key("queued"), {job.id: now})
            if job.expires_at_s is not None:
                pipe.zadd(self._key("deadlines"), {job.id: job.expires_at_s})
            pipe.execute()
        return job

    def get(self, job_id: str) -> Job | None:
        """The job as it stands, or None when there is no such job (any more)."""
        self.expire_due()
        return _read(self._redis.hgetall(self._key("record", job_id)))

    def body(self, job_id: str) -> dict[str, Any]:
        """The request of a job that is there."""
        return dict(json.loads(self._redis.hget(self._key("record", job_id), "body")))

    def claim(self, job_id: str, lease: str) -> Job | None:
        """Begin a job under a lease; None when it is not to be begun (now), whoever asks."""
        self.expire_due()

        def free(job: Job, owner: str | None) -> bool:
            # Its own lease: an answer to this very claim got lost, and it is asked again.
            return job.status == "queued" or (
                job.status == "running" and (owner == lease or not self.alive(owner))
            )

        self.renew([lease])
        begun = {"started_s": time.time(), "owner": lease}
        return self._step(job_id, "running", free, begun, attempts=1)

    def finish(self, job_id: str, lease: str, result: dict[str, Any]) -> bool:
        """Keep the result. False when it was refused: the job was cancelled or taken over."""
        return self._end(job_id, "done", lease, {"result": json.dumps(result)})

    def bury(self, job_id: str, lease: str, why: str) -> bool:
        """Make it a dead letter. False as in `finish`."""
        return self._end(job_id, "failed", lease, {"error": why})

    def release(self, job_id: str, lease: str, why: str, counts: bool = True) -> bool:
        """Back into the queue, to be begun again; `counts` as an attempt. False as in `finish`."""
        back = self._step(
            job_id, "queued", _held_by(lease), {"error": why}, attempts=0 if counts else -1
        )
        return back is not None

    def cancel(self, job_id: str) -> tuple[Job | None, Status | None]:
        """The job after it was cancelled, and its status before; one that has ended stays so."""
        before: list[Status] = []

        def is_open(job: Job, owner: str | None) -> bool:
            before[:] = [job.status]
            return job.status in OPEN

        self.expire_due()
        done = self._step(job_id, "cancelled", is_open, {"ended_s": time.time()})
        return done or self.get(job_id), before[0] if before else None

    def discard(self, job_id: str) -> None:
        """Forget a job that was never handed to the broker."""
        with self._redis.pipeline() as pipe:
            pipe.delete(self._key("record", job_id))
            pipe.zrem(self._key("queued"), job_id)
            pipe.zrem(self._key("deadlines"), job_id)
            pipe.execute()

    def expire_due(self) -> None:
        """Mark what was not begun in time."""
        now = time.time()
        for job_id in self._redis.zrangebyscore(self._key("deadlines"), "-inf", now):
            self._step(job_id, "expired", lambda job, _: job.status == "queued", {"ended_s": now})
            self._redis.zrem(self._key("deadlines"), job_id)

    def counts(self) -> dict[Status, int]:
        """Jobs by status; of those that have ended, the ones not forgotten yet."""
        self.expire_due()
        self._forget()
        with self._redis.pipeline() as pipe:
            for status in STATUSES:
                pipe.zcard(self._key(status))
            return dict(zip(STATUSES, pipe.execute(), strict=True))

    def dead(self, most: int = 1000) -> list[Job]:
        """The dead letters, the newest first."""
        self._forget()
        jobs = (self.get(job_id) for job_id in self._redis.zrevrange(self._key("failed"), 0, most))
        return [job for job in jobs if job]

    def adrift(self) -> list[str]:
        """Ids of jobs that nobody runs: queued ones, and those whose runner's lease has ended."""
        running = self._redis.zrange(self._key("running"), 0, -1)
        left = [i for i in running if not self.alive(self._owner(i))]
        return [*self._redis.zrange(self._key("queued"), 0, -1), *left]

    def renew(self, leases: Iterable[str]) -> None:
        """Hold leases for another `LEASE_S`."""
        with self._redis.pipeline() as pipe:
            for lease in leases:
                pipe.set(self._key("lease", lease), 1, ex=LEASE_S)
            pipe.execute()

    def drop(self, lease: str) -> None:
        """Give a lease back."""
        self._redis.delete(self._key("lease", lease))

    def alive(self, lease: str | None) -> bool:
        """Whether the holder of a lease still renews it."""
        return bool(lease and self._redis.exists(self._key("lease", lease)))

    def _owner(self, job_id: str) -> str | None:
        owner = self._redis.hget(self._key("record", job_id), "owner")
        return None if owner is None else str(owner)

    def _end(self, job_id: str, to: Status, lease: str, fields: dict[str, Any]) -> bool:
        ended = self._step(job_id, to, _held_by(lease), {"ended_s": time.time(), **fields})
        return ended is not None

    def _step(
        self,
        job_id: str,
        to: Status,
        may: Callable[[Job, str | None], bool],
        fields: dict[str, Any],
        attempts: int = 0,
    ) -> Job | None:
        """One atomic step of a job, if it `may`; None if not. Others' steps between are noticed."""
        key = self._key("record", job_id)

        def step(pipe: Any) -> Job | None:
            record = pipe.hgetall(key)
            job = _read(record)
            pipe.multi()
            if job is None or not may(job, record.get("owner")):
                return None
            now = {**record, **fields, "status": to, "attempts": job.attempts + attempts}
            pipe.hset(key, mapping={k: now[k] for k in [*fields, "status", "attempts"]})
            pipe.zrem(self._key(job.status), job_id)
            pipe.zrem(self._key("deadlines"), job_id)
            if to in OPEN:
                pipe.zadd(self._key(to), {job_id: job.submitted_s})
            else:
                pipe.zadd(self._key(to), {job_id: fields["ended_s"]})
                pipe.expire(key, int(self._keep_s) + 1)
            return _read(now)

        after: Job | None = self._redis.transaction(step, key, value_from_callable=True)
        return after

    def _forget(self) -> None:
        with self._redis.pipeline() as pipe:
            for status in STATUSES:
                if status not in OPEN:
                    pipe.zremrangebyscore(self._key(status), "-inf", time.time() - self._keep_s)
            pipe.execute()


def _held_by(lease: str) -> Callable[[Job, str | None], bool]:
    return lambda job, owner: job.status == "running" and owner == lease


def _read(record: dict[str, Any]) -> Job | None:
    if "status" not in record:
        return None
    fields = {k: v for k, v in record.items() if k in Job.model_fields}
    if "result" in fields:
        fields["result"] = json.loads(fields["result"])
    return Job(**fields)
