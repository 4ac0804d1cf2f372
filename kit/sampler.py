"""Reads the cluster at 2 Hz while a run lasts, and writes each reading down at once.

One row is (time_s, source, metric, value). Sources: `serve` (what the controller says), `load` (the
load generator), `app` (all replicas together), `replica:<id>`, `gpu:<uuid>`. A reading that failed
leaves a gap, never a zero.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd

from kit import gpu
from kit.connection import Connection
from kit.status import Status

SAMPLE_COLUMNS = ("time_s", "source", "metric", "value")
SAMPLE_TYPES = {"time_s": "float64", "source": "str", "metric": "str", "value": "float64"}
PERIOD_S = 0.5

Row = tuple[float, str, str, float]


class Sampler:
    """A thread that samples from `start` to `stop`.

    Args:
        serving: what to sample.
        load_status: what `kit.load.Load.status` tells.
        path: CSV file that takes the rows.
    """

    def __init__(
        self, serving: Connection, load_status: Callable[[], dict[str, Any]], path: Path
    ) -> None:
        self._serving = serving
        self._load_status = load_status
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kit-sampler", daemon=True)
        self._t0_s = 0.0
        self._before: dict[str, dict[str, Any]] = {}
        self._running: set[str] = set()
        self._gpu_seen: dict[str, int] = {}
        self.lost_replicas: list[tuple[float, str]] = []
        self.error: str | None = None
        self.status: Status | None = None
        """The last that Serve's controller told."""
        self.silence = ""
        """Why the controller's last answer failed to come; empty when it came."""
        self.unheard = 0
        """Readings in a row in which replicas ran and none was heard of, though some were before."""
        self._heard = False

    def start(self, t0_s: float) -> None:
        """Begin; times count from `t0_s` on the monotonic clock."""
        self._t0_s = t0_s
        self._path.write_text(",".join(SAMPLE_COLUMNS) + "\n")
        self._thread.start()

    def stop(self) -> None:
        """End and wait for the last reading."""
        self._stop.set()
        if self._thread.ident:
            self._thread.join(10)

    def _run(self) -> None:
        try:
            self._sample()
        except OSError as error:
            self.error = f"cannot write {self._path}: {error.strerror}"

    def _sample(self) -> None:
        next_s = time.monotonic()
        with self._path.open("a") as file:
            while not self._stop.is_set():
                rows = self._read()
                file.writelines(f"{t:.3f},{s},{m},{_digits(v)}\n" for t, s, m, v in rows)
                file.flush()
                # Keeps its beat; a reading that took too long skips beats instead of bunching up.
                now_s = time.monotonic()
                next_s += PERIOD_S * max(1, -((next_s - now_s) // PERIOD_S))
                self._stop.wait(next_s - now_s)

    def _read(self) -> list[Row]:
        rows: list[Row] = []
        try:
            self.status = status = self._serving.status()
            self.silence = ""
        except Exception as error:
            status, self.silence = None, f"{type(error).__name__}"
        now_s = time.monotonic() - self._t0_s
        if status is not None:
            rows += self._of_serve(now_s, status)
        load = self._load_status()
        told_s = load["t_s"] - self._t0_s
        rows += [(told_s, "load", m, v) for m, v in load.items() if m != "t_s"]
        states = self._serving.replicas()
        self._heard = self._heard or bool(states)
        deaf = self._heard and not states and status is not None and status.running
        self.unheard = self.unheard + 1 if deaf else 0
        if status is not None:
            known = {r.replica_id for r in status.running}
            helpers = {r.replica_id for r in status.helpers}
            for s in (s for s in states if s["replica_id"] in helpers):
                rows += [
                    (now_s, f"replica:{s['replica_id']}", m, v) for m, v in s["engine"].items()
                ]
            states = [s for s in states if s["replica_id"] in known]
        rows += self._of_replicas(now_s, states, float(load["in_flight"]))
        for uuid, fields in gpu.readings(self._gpu_seen).items():
            rows += [(now_s, f"gpu:{uuid}", m, v) for m, v in fields.items()]
        return rows

    def _of_serve(self, now_s: float, status: Status) -> list[Row]:
        gone = self._running - {r.replica_id for r in status.replicas}
        # One that stops on purpose is seen as STOPPING first; one that just vanishes has died.
        for name in gone:
            self.lost_replicas.append((now_s, name))
        self._running = {r.replica_id for r in status.running}
        counts: dict[str, float] = {
            "running_replicas": len(status.running),
            "starting_replicas": len(status.starting),
        }
        if status.target is not None:
            counts["target_replicas"] = status.target
        return [(now_s, "serve", m, v) for m, v in counts.items()]

    def _of_replicas(
        self, now_s: float, states: list[dict[str, Any]], in_flight: float
    ) -> list[Row]:
        rows: list[Row] = []
        if not states:
            return rows
        ongoing = sum(s["ongoing"] for s in states)
        executing = sum(s["executing"] for s in states)
        rows.append((now_s, "app", "ongoing_requests", ongoing))
        rows.append((now_s, "app", "executing_requests", executing))
        rows.append((now_s, "app", "queued_requests", max(0.0, in_flight - executing)))
        for s in states:
            source, name = f"replica:{s['replica_id']}", s["replica_id"]
            rows.append((now_s, source, "ongoing_requests", s["ongoing"]))
            rows += [(now_s, source, metric, value) for metric, value in s["engine"].items()]
            before = self._before.get(name)
            if before is None or s["t_s"] > before["t_s"]:
                self._before[name] = s
                if before is not None:
                    rows += [
                        (s["t_s"] - self._t0_s, source, metric, rate)
                        for metric, rate in _rates(before, s)
                    ]
        return rows


def _digits(value: float) -> str:
    """Six digits; large numbers whole, since a counter that grew for months is read by differences."""
    return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"


def _rates(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """What a replica used between two of its heartbeats, for each second."""
    width_s = now["t_s"] - before["t_s"]
    for counter, metric in (
        ("busy_s", "accelerator_busy_share"), ("cpu_s", "cpu_cores"),
        ("ongoing_s", "mean_ongoing_requests"),
    ):  # fmt: skip
        # A replica that another version of the kit deployed may not tell of its CPU.
        if counter in before and counter in now:
            # A child that ended unseen takes its time along: nothing was used backwards.
            yield metric, max(0.0, now[counter] - before[counter]) / width_s


def read_samples(path: Path) -> pd.DataFrame:
    """A samples.csv as a table; a last line cut by a kill is left out."""
    text = path.read_text()
    return pd.read_csv(StringIO(text[: text.rfind("\n") + 1]), dtype=SAMPLE_TYPES)
