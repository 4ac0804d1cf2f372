"""The users of a session: started, stopped and changed while others look on; one load process at most."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.load import LEAD_S, Load, LoadError
from kit.shapes import SHAPES, share_at, users_at
from kit.workload import Workload, WorkloadError

LONGEST_S = 43_200.0
"""A forgotten session ends its load after so long."""
_NUMBERS_APART = 10_000_000  # requests of one load process; the next starts at the next multiple
_NEW_PROCESS = (  # fields that a running process cannot change
    "kind", "timeout_s", "arrivals", "burstiness", "on_s", "off_s", "diurnal", "day_s", "trace",
    "max_concurrency", "seed", "processes", "remote_workers", "join_address",
)  # fmt: skip


class Crowd:
    """Who sends what `workload` says: as many users, or such a rate, as it and the `shape` ask for.

    Args:
        workload: its users, or its rate, are the most there will be.
        url: where the app answers.
        folder: takes the rows.
        t0_s: when the rows' clock starts, monotonic.
        record: called with name → (before, after) of what changed, `users` included.
    """

    def __init__(
        self,
        workload: Workload,
        url: str,
        folder: Path,
        t0_s: float,
        record: Callable[[dict[str, tuple[Any, Any]]], None],
    ) -> None:
        self.workload, self.shape = workload, "steady"
        self.died = ""
        """Why the load generator is gone without being asked; empty otherwise."""
        self._url, self._folder, self._t0_s = url, folder, t0_s
        self._run = zlib.crc32(str(folder.resolve()).encode())  # no prompt as in another session
        self._record = record
        self._lock = threading.RLock()
        self._load: Load | None = None
        self._retired: list[threading.Thread] = []
        self._processes = 0
        self._since_s = math.nan
        self._now: float = 0

    @property
    def active(self) -> bool:
        """Whether load is being sent."""
        return not math.isnan(self._since_s)

    def status(self) -> dict[str, Any]:
        """Last word of the load generator, see `kit.load.Load.status`; zeros without one."""
        load = self._load
        if load is None or not load.alive:
            return {"t_s": time.monotonic(), self._knob: 0, "in_flight": 0}
        return load.status()

    @property
    def _knob(self) -> str:
        """The field of the workload that says how much is sent."""
        if self.workload.trace:
            return "speed_up"
        return "rate_rps" if self.workload.open_loop else "users"

    def start(self) -> None:
        """Let the users go.

        Raises:
            LoadError: when nothing answers, or Locust does not come up.
        """
        with self._lock:
            if self.active:
                return
            before_s, self._since_s = self._since_s, time.monotonic()
            try:
                if self._load is None or not self._load.alive:
                    self._begin_process()
            except LoadError:
                self._since_s = before_s
                raise
            self.died = ""
            self._follow()

    def stop(self) -> None:
        """Send the users home: requests under way may finish."""
        with self._lock:
            if self.active:
                self._since_s = math.nan
                with contextlib.suppress(LoadError):
                    self._follow()

    def change(self, **fields: Any) -> None:
        """Change fields of the workload, or the `shape`; in effect from each next request on.

        Raises:
            WorkloadError: for values that a workload does not take, or an unknown shape.
            LoadError: when the load generator is gone.
        """
        with self._lock:
            shape = fields.pop("shape", self.shape)
            if shape not in SHAPES:
                raise WorkloadError(f"shape = {shape!r}: must be one of {', '.join(SHAPES)}")
            before = self.workload.model_dump() | {"shape": self.shape}
            workload = Workload(**self.workload.model_dump() | fields)
            after = workload.model_dump() | {"shape": shape}
            changed = {k: (before[k], v) for k, v in after.items() if v != before[k]}
            self.workload, self.shape = workload, shape
            if not changed:
                return
            if self._load is not None and self._load.alive:
                if any(k in changed for k in _NEW_PROCESS):
                    self._retire()
                    if self.active:
                        self._begin_process()
                else:
                    self._load.set_workload(workload)
            # Without a load the users that are meant change nothing yet.
            self._record({k: v for k, v in changed.items() if k != self._knob or self.active})
            self._follow()

    def tick(self) -> None:
        """Follow the shape, and see whether the process still lives; to be called once a second."""
        with self._lock:
            if not self.active or self._load is None:
                return
            if self._load.alive:
                with contextlib.suppress(LoadError):
                    self._follow()
            else:
                self._since_s = math.nan
                self._now = 0
                self.died = f"The load generator died: {self._load.last_words()}. Start it again."

    def close(self) -> None:
        """End the process; requests under way may finish first."""
        with self._lock:
            self._since_s = math.nan
            if self._load is not None:
                self._load.stop()
        for thread in self._retired:
            thread.join()

    def _retire(self) -> None:
        """End the process beside the next one: its answers under way take up to some seconds."""
        assert self._load
        self._retired = [t for t in self._retired if t.is_alive()]
        self._retired.append(threading.Thread(target=self._load.stop, name="kit-retired"))
        self._retired[-1].start()
        self._load = None

    def _begin_process(self) -> None:
        # A plan begins at once, with what it is to send; users come by `_follow`.
        start: dict[str, Any] = {} if self.workload.open_loop else {"users": 0}
        if self.workload.open_loop and not self.workload.trace:
            start["rate_rps"] = self._wanted()
        workload = self.workload.model_copy(
            update={"duration_s": LONGEST_S, "stages": (), **start}
        )  # fmt: skip
        first = self._processes * _NUMBERS_APART
        self._load = Load(workload, self._url, self._folder, first, run=self._run)
        self._processes += 1
        self._load.begin(self._t0_s, time.monotonic() - self._t0_s + LEAD_S)
        self._now = 0

    def _wanted(self) -> float:
        """Users, rate or speed that workload and shape ask for now; 0 while inactive."""
        if not self.active:
            return 0
        since_s = time.monotonic() - self._since_s
        if not self.workload.open_loop:
            return users_at(self.shape, self.workload.users, since_s)
        return share_at(self.shape, since_s) * float(getattr(self.workload, self._knob))

    def _follow(self) -> None:
        wanted = self._wanted()
        if wanted == self._now or self._load is None:
            return
        if self.workload.open_loop:
            self._load.set_rate(wanted)
        else:
            self._load.set_users(int(wanted))
        if not wanted or not self._now:  # start and stop; a wave is no list of changes
            self._record({self._knob: (self._now, wanted)})
        self._now = wanted
