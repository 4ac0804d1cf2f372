"""What every replica does around its work: takes new knobs, tells of itself, answers with its times.

Each answer carries its own durations in a `Server-Timing` header (batch wait, engine queue, prefill,
decode, postprocess); a second one, `X-Served-By`, says which replica, batch (id, size) and route
served it, and the instants of arrival and completion on the machine's monotonic clock, so that a
client on the same machine measures the way in and the way back instead of inferring them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
from ray import serve

from kit.application import MONITOR_NAME
from kit.batching import SERVED
from kit.clock import SERVED_BY, clock_id
from kit.engine import Done
from kit.settings import Settings, SettingsError

HEARTBEAT_S = 0.5
RESCAN_S = 10.0


class CpuMeter:
    """CPU time of this process and of all it started, so far.

    Looking for children reads all of `/proc`, so it is done every `RESCAN_S`; a new child's time
    comes in with the next look, that of one that ended is with its parent.
    """

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._children: list[psutil.Process] = []
        self._scanned_s = -RESCAN_S

    def read_s(self) -> float:
        """Seconds of CPU so far, user and system."""
        now_s = time.monotonic()
        if now_s - self._scanned_s >= RESCAN_S:
            self._scanned_s = now_s
            with contextlib.suppress(psutil.Error):
                self._children = self._me.children(recursive=True)
        total_s = 0.0
        for process in (self._me, *self._children):
            with contextlib.suppress(psutil.Error):
                total_s += sum(process.cpu_times()[:4])  # its own and its ended children's
        return total_s


class Replica:
    """The common part of all deployments; subclasses say what knobs and state they have."""

    route = "-"

    def __init__(self) -> None:
        self.user_config: dict[str, Any] = {}
        self.refused: dict[str, Any] | None = None
        self.ongoing = 0
        self._ongoing_s, self._counted_s = 0.0, time.monotonic()
        self._clock = clock_id()
        self._cpu = CpuMeter()
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

    def work(self) -> dict[str, Any]:
        """What the replica is busy with: `executing`, `batches`, `busy_s`, `engine` (its stats)."""
        return {"executing": 0, "batches": 0, "busy_s": 0.0, "engine": {}}

    def state(self) -> dict[str, Any]:
        """This replica now: seconds (`t_s`, `cpu_s`, `busy_s`), counts, and `ongoing_s`, their ∫ dt.

        A count read now and then by the event loop that does the work is seldom read while it is high.
        """
        self._count(0)
        return {
            "replica_id": self._replica_id,
            "pid": os.getpid(),
            "t_s": time.monotonic(),
            "cpu_s": self._cpu.read_s(),
            "route": self.route,
            "user_config": self.user_config,
            "refused": self.refused,
            "ongoing": self.ongoing,
            "ongoing_s": self._ongoing_s,
            **self.work(),
        }

    @contextlib.contextmanager
    def counted(self, arrived_s: float | None = None) -> Iterator[None]:
        """Around a request: it is ongoing meanwhile, and has been since it arrived."""
        self._count(1)
        if arrived_s is not None:
            self._ongoing_s += self._counted_s - arrived_s
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, step: int) -> None:
        now_s = time.monotonic()
        self._ongoing_s += self.ongoing * (now_s - self._counted_s)
        self._counted_s = now_s
        self.ongoing += step

    def timing(
        self, arrived_s: float, done: Done, returned_s: float, route: str | None = None
    ) -> dict[str, str]:
        """The two headers of an answer; `returned_s` is when postprocessing, if any, was over."""
        spans = {
            "batch_wait": done.queued_s - arrived_s,
            "engine_queue": done.started_s - done.queued_s,
            "prefill": done.first_token_s - done.started_s,
            "decode": done.done_s - done.first_token_s,
            "postprocess": returned_s - done.done_s,
        }
        if batch := SERVED.get():
            spans |= {"batch_fill": batch[0], "batch_run": batch[1]}
        return {
            "Server-Timing": ", ".join(f"{k};dur={v * 1e3:.4f}" for k, v in spans.items()),
            SERVED_BY: f"{self._replica_id} {done.batch_id} {done.batch_size} {self._clock} "
            f"{arrived_s:.6f} {returned_s:.6f} {route or self.route}",
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
