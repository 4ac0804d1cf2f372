"""A tuning session: load, moves and samples of what serves, recorded as a run until it ends.

It has no widgets: `kit.panel` shows one, scripts and tests drive one by the same methods. Its
threads are the mover's, the sampler's and one that ticks once a second; `end` stops them all.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from kit import advise, cluster, store
from kit.accelerator import NO_ACCELERATOR, VISION_APPS
from kit.cluster import ServingError
from kit.connection import Connection
from kit.crowd import Crowd
from kit.experiment import Experiment, Slo
from kit.live import Recent
from kit.mover import Move, Mover, timer_reset
from kit.sampler import Sampler
from kit.settings import Settings
from kit.store import Run
from kit.view import View
from kit.workload import Workload

TICK_S = 1.0
WRITE_S = 10.0
"""How much of a session's length a kill may lose; its rows are written as they come."""


class Session:
    """Load, moves and samples of a running app, from its making until `end`; all of it a `Run`.

    Args:
        serving: what runs, deployed.
        workload: what `crowd` sends once it is started; its users are the most there will be.
        slo: what is promised.
        name: of the run.
        folder: takes the run; empty or None for `data/runs/<run id>`.
        tell: called with each `Move` of a knob, from another thread.
        on_tick: called with a `View` once a second, from another thread.

    Raises:
        ServingError: when nothing is deployed.
        StoreError: when the folder cannot be written.
    """

    def __init__(
        self,
        serving: Connection,
        workload: Workload | None = None,
        slo: Slo | None = None,
        name: str = "session",
        folder: Path | str | None = None,
        tell: Callable[[Move], None] | None = None,
        on_tick: Callable[[View], None] | None = None,
    ) -> None:
        if serving.settings is None:
            raise ServingError("nothing is deployed: call deploy(settings) first")
        self.serving = serving
        workload = _fitting(workload or Workload(), serving.settings)
        self.slo = slo or Slo()
        self.last_good: Settings = serving.settings
        """The latest settings under which every promise was kept; at first those it began with."""
        self.trouble = ""
        """What ails Serve or the load now, in words; empty while all is well."""
        self._failed = ""
        self.view: View | None = None
        self.ended = False
        self._tell = tell or (lambda move: None)
        self._on_tick = on_tick or (lambda view: None)
        about = Experiment(serving.settings, workload, slo=self.slo, name=name)
        self._blank = store.begun(about.as_dict(), about.doubts(), folder)
        self._changes: list[dict[str, Any]] = []
        self._notes = list(self._blank.notes)
        self._lock = threading.RLock()
        self.t0_s = self._written_s = time.monotonic()
        self._length_s: float | None = None
        store.write(self._blank)
        self.crowd = Crowd(workload, serving.url, self.folder, self.t0_s, self._record)
        """Who sends the load: start, change and stop it here."""
        self._recent = Recent(self.folder)
        self.sampler = Sampler(serving, self.crowd.status, self.folder / "samples.csv")
        self.sampler.start(self.t0_s)
        self.mover = Mover(serving, self._moved)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ticks, name="kit-session", daemon=True)
        self._thread.start()
        atexit.register(self.end)  # threads that draw while Python ends would take it down

    @property
    def folder(self) -> Path:
        return self._blank.folder

    @property
    def settings(self) -> Settings:
        """What serves."""
        return self.serving.settings or self.last_good

    @property
    def now_s(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self.t0_s

    @property
    def replicas(self) -> int:
        """Replicas that run, as the controller last told."""
        return len(self.sampler.status.running) if self.sampler.status else 0

    def move(self, **knobs: Any) -> None:
        """Ask for other values of knobs; returns at once, what becomes of it is told.

        Raises:
            SettingsError: when they cannot work together; then nothing is asked for.
        """
        self.mover.move(**knobs)

    def mark(self, text: str) -> None:
        """Write a note at this time; it shows in plots and begins a stretch to compare."""
        text = text.strip()
        if text:
            self._record({"mark": ("", text)})

    def run(self) -> Run:
        """All so far, read back from disk."""
        self._write("complete" if self.ended else "running")
        return store.load(self.folder)

    def end(self) -> Run:
        """Stop the load and all threads; what serves goes on serving. Again: just the run."""
        with self._lock:
            first, self.ended = not self.ended, True
        if first:
            atexit.unregister(self.end)
            self._stop.set()
            self.mover.close()
            self._length_s = self.now_s
            self.crowd.close()
            if threading.current_thread() is not self._thread:
                self._thread.join(10)
            self.sampler.stop()
        return self.run()

    def _moved(self, move: Move) -> None:
        text = move.text
        if move.state == "applied":
            self.crowd.change(kind=_fitting(self.crowd.workload, self.settings).kind)
            in_flight = float(self.crowd.status()["in_flight"])
            again = timer_reset(self.settings, move, in_flight, self._target())
            if again:
                text = f"{text}; {again}"
                self._note(f"{move.asked_s - self.t0_s:.1f} s: {again}")
        if move.state in ("applied", "refused"):
            error = text.splitlines()[0] if move.state == "refused" else ""
            self._record(move.knobs, move, error)
        self._tell(replace(move, text=text))

    def _target(self) -> int | None:
        return self.sampler.status.target if self.sampler.status else None

    def _note(self, text: str) -> None:
        with self._lock:
            self._notes.append(text)

    def _record(
        self, knobs: dict[str, tuple[Any, Any]], move: Move | None = None, error: str = ""
    ) -> None:
        now_s = self.now_s
        with self._lock:
            self._changes += store.change_rows(
                knobs, move.asked_s - self.t0_s if move else now_s,
                move.applied_s - self.t0_s if move else now_s,
                move.restarted_replicas if move else 0, error,
            )  # fmt: skip
            self._write("running")

    def outline(self, changes: pd.DataFrame) -> Run:
        """The run without its rows: what it is about, and these of its changes."""
        experiment = self._blank.experiment | {"settings": self.settings.model_dump()}
        return replace(self._blank, experiment=experiment, changes=changes)

    def changes(self) -> pd.DataFrame:
        """All changes so far, `store.CHANGE_COLUMNS`."""
        with self._lock:
            return store.change_table(self._changes)

    def _write(self, status: store.Ending) -> None:
        with self._lock:
            self._written_s = time.monotonic()
            length_s = self._length_s or max(self.now_s, 0.1)
            workload = self.crowd.workload.model_copy(update={"duration_s": length_s})
            experiment = self._blank.experiment | {
                "workload": workload.model_dump(mode="json"),
                "slo": asdict(self.slo),
            }
            run = replace(
                self._blank, status=status, experiment=experiment, notes=tuple(self._notes),
                changes=self.changes(),
            )  # fmt: skip
            store.write(run)

    def _ticks(self) -> None:
        next_s = time.monotonic()
        while not self._stop.wait(max(0.0, next_s - time.monotonic())):
            started_s = time.monotonic()
            try:
                self.tick()
                self._failed = ""
            except Exception as error:  # shown, and tried again: a thread must not end unseen
                self._failed = str(error) or type(error).__name__
            # At most a quarter of a core, however long a tick takes.
            next_s = max(next_s + TICK_S, started_s + 4 * (time.monotonic() - started_s))

    def tick(self) -> None:
        """Once a second: users by the shape, what ails, the view, and now and then a write."""
        self.trouble = self._ailing()
        self.crowd.tick()
        view = self._recent.view(self.now_s, self.settings, asdict(self.slo), self.changes())
        self.view = view
        if not self.mover.busy and advise.findings(view)[0].severity == "well":
            self.last_good = view.settings
        while cluster.said:
            self._note(f"Ray says: {cluster.said.popleft()}")
        if time.monotonic() - self._written_s > WRITE_S:
            self._write("running")
        self._on_tick(view)

    def _ailing(self) -> str:
        texts = []
        status = self.sampler.status
        if self.sampler.silence:
            texts.append(f"Serve's controller does not answer: {self.sampler.silence}")
        elif status is not None and status.app not in ("RUNNING", "DEPLOYING"):
            texts.append(
                f"The app is not running: Serve says {status.app}. {status.message}".strip()
            )
        elif self.sampler.unheard > 1:
            texts.append(
                f"Nothing answers at {self.serving.url}: requests fail until Serve's HTTP entrance "
                "is back."
            )
        if self.sampler.error:
            texts.append(self.sampler.error)
        return " ".join(filter(None, [*texts, self.crowd.died, self._failed]))


def _fitting(workload: Workload, settings: Settings) -> Workload:
    """The workload, of images where the app takes nothing else, and of text where it takes none."""
    kind: Literal["text", "image"] = "image" if settings.app in VISION_APPS else "text"
    if workload.kind == kind or settings.accelerator == NO_ACCELERATOR:
        return workload  # an app of others, which may take either
    return Workload(**workload.model_dump() | {"kind": kind})
