"""One experiment: deploy, send load, change knobs on a timeline, sample, and keep all of it.

`run` returns a `Run` even when it is interrupted or the load generator dies: what was measured up
to then is kept, and its status and notes say what happened.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kit import serve_metrics, store
from kit import serving as serving_module
from kit.cluster import ServingError
from kit.doubts import doubts
from kit.load import LEAD_S, Load, LoadError
from kit.progress import seconds
from kit.sampler import Sampler
from kit.serving import Applied, Serving
from kit.settings import Settings, SettingsError, knobs
from kit.store import Run, StoreError
from kit.workload import Workload

TICK_S = 0.1


@dataclass(frozen=True)
class Change:
    """One move of one knob, `at_s` seconds into the run. Those at the same time go together."""

    at_s: float
    knob: str
    value: Any


@dataclass(frozen=True)
class Slo:
    """What is promised, in seconds at the 95th percentile; None promises nothing.

    The defaults are the chat preset: end-to-end 1.5 s, of which queueing 200 ms. Time to first
    token and time per output token have figures in streaming workloads only. Response latency counts
    from when a request was to be sent.
    """

    e2e_p95_s: float | None = 1.5
    queueing_p95_s: float | None = 0.2
    ttft_p95_s: float | None = None
    tpot_p95_s: float | None = None
    response_p95_s: float | None = None


SLOS: dict[str, Slo] = {
    "chat": Slo(e2e_p95_s=1.5, queueing_p95_s=0.2),
    "llama-3.1-8b-server": Slo(None, None, ttft_p95_s=2.0, tpot_p95_s=0.1),
    "interactive": Slo(None, None, ttft_p95_s=0.5, tpot_p95_s=0.03),
    "resnet50": Slo(e2e_p95_s=0.015, queueing_p95_s=None),
}
"""Named promises."""


@dataclass(frozen=True)
class Experiment:
    """Settings under a workload, with changes on the way. All of it is checked here.

    Raises:
        SettingsError: when a change on the timeline would not be accepted when its time comes.
    """

    settings: Settings
    workload: Workload
    timeline: tuple[Change, ...] = ()
    slo: Slo = field(default_factory=Slo)
    name: str = "run"

    def __post_init__(self) -> None:
        fixed = {k.name for k in knobs("start")}
        for change in self.timeline:
            if change.knob in fixed:
                raise SettingsError(f"{change.knob} is fixed once Ray runs: not on a timeline")
            if not 0 <= change.at_s < self.workload.duration_s:
                raise SettingsError(
                    f"{change.knob} at {change.at_s:g} s: must be from 0 to before the end of the "
                    f"load at {self.workload.duration_s:g} s"
                )
        self.steps()

    def steps(self) -> list[tuple[float, Settings]]:
        """The settings from each time on, changes of the same time taken together."""
        steps = []
        settings = self.settings
        ordered = sorted(self.timeline, key=lambda c: c.at_s)
        for at_s, changes in itertools.groupby(ordered, key=lambda c: c.at_s):
            settings = settings.replace(**{c.knob: c.value for c in changes})
            steps.append((at_s, settings))
        return steps

    def doubts(self) -> list[str]:
        """What settings at any step will probably surprise with."""
        every = [self.settings, *(s for _, s in self.steps())]
        return list(dict.fromkeys(text for s in every for text in doubts(s)))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as `run.json` holds them."""
        return {
            "name": self.name,
            "settings": self.settings.model_dump(),
            "workload": self.workload.model_dump(mode="json"),
            "timeline": [[c.at_s, c.knob, c.value] for c in self.timeline],
            "slo": asdict(self.slo),
        }


def run(
    experiment: Experiment,
    serving: Serving | None = None,
    folder: Path | None = None,
    progress: bool = True,
    agreement: bool = False,
) -> Run:
    """Run one experiment and return it with its tables, which are on disk in `folder`.

    Args:
        experiment: what to run.
        serving: where; by default one is started and shut down again.
        folder: takes the run; default `data/runs/<run id>`.
        progress: whether to draw a progress bar.
        agreement: whether to read what Serve counted meanwhile, for `kit.agreement`: up to 3 s
            more before and after the load; up to 11 s each in a cluster that others started.

    Raises:
        ServingError: when the app cannot be deployed.
        LoadError: when the load generator cannot start.
        StoreError: when the folder cannot be written.
    """
    if serving is None:
        with serving_module.start(experiment.settings) as serving:
            return run(experiment, serving, folder, progress, agreement)
    empty = store.begun(experiment.as_dict(), experiment.doubts(), folder)
    store.write(empty)
    try:
        serving.deploy(experiment.settings)
        attempt = _Attempt(experiment, serving, empty, agreement)
    except BaseException as error:
        status: store.Ending = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        notes = (*empty.notes, f"ended before any load: {error or type(error).__name__}")
        store.write(replace(empty, status=status, notes=notes))
        raise
    try:
        return attempt.run(progress)
    finally:
        attempt.close()


def run_many(
    experiments: Iterable[Experiment], serving: Serving, folder: Path, progress: bool = True
) -> list[Run]:
    """Run several in one folder each, named after them; those already complete are loaded.

    With `progress`, a bar shows how many are done and how long the rest will take.
    """
    runs: list[Run] = []
    ordered = list(experiments)
    bar = tqdm(ordered, desc="runs", unit="run", disable=not progress or len(ordered) < 2)
    for experiment in bar:
        bar.set_postfix_str(experiment.name)
        place = folder / experiment.name
        if (place / "run.json").exists():
            known = store.load(place)
            if known.status == "complete" and known.experiment == experiment.as_dict():
                runs.append(known)
                continue
        runs.append(run(experiment, serving, place, progress and len(ordered) < 2))
        if runs[-1].status == "interrupted":
            break
    return runs


class _Attempt:
    """The moving parts of one run."""

    def __init__(
        self, experiment: Experiment, serving: Serving, blank: Run, agreement: bool
    ) -> None:
        self.experiment = experiment
        self.serving = serving
        self.blank = blank
        for stale in ("requests.csv", "samples.csv", store.COUNTED):
            (blank.folder / stale).unlink(missing_ok=True)
        run = zlib.crc32(blank.run_id.encode())  # so that no prompt was sent in an earlier run
        self.load = Load(experiment.workload, serving.url, blank.folder, run=run)
        self.sampler = Sampler(serving, self.load.status, blank.folder / "samples.csv")
        self.changes: list[dict[str, Any]] = []
        self.notes = list(blank.notes)
        self.t0_s = 0.0
        self.counted = serve_metrics.begin(serving) if agreement else None

    def run(self, progress: bool) -> Run:
        duration_s = self.experiment.workload.duration_s
        status: store.Ending = "complete"
        stages = [(s.at_s, s) for s in self.experiment.workload.stages]
        due = sorted([*self.experiment.steps(), *stages], key=lambda step: step[0])
        self.t0_s = time.monotonic() + LEAD_S
        bar = seconds(duration_s, self.experiment.name, progress)
        try:
            self.load.begin(self.t0_s)
            time.sleep(LEAD_S)
            self.sampler.start(self.t0_s)
            while (now_s := time.monotonic() - self.t0_s) < duration_s:
                bar.update(min(now_s, duration_s) - bar.n)
                while due and due[0][0] <= now_s:
                    self._do(due.pop(0)[1])
                if not self.load.alive:
                    status = "failed"
                    words = self.load.last_words()
                    self.notes.append(
                        f"the load generator died {now_s:.1f} s into the run: {words}"
                    )
                    break
                if self.sampler.error:
                    status = "failed"
                    self.notes.append(self.sampler.error)
                    break
                time.sleep(TICK_S)
            self.load.stop()
        except KeyboardInterrupt:
            status = "interrupted"
            self.notes.append(f"interrupted {time.monotonic() - self.t0_s:.1f} s into the run")
        except LoadError as error:
            status = "failed"
            self.notes.append(str(error))
        finally:
            bar.update(max(0.0, min(time.monotonic() - self.t0_s, duration_s) - bar.n))
            bar.close()
        return self._finish(status)

    def _do(self, step: Settings | Any) -> None:
        if not isinstance(step, Settings):
            if step.users is not None:  # stages of a rate are part of the plan
                self.load.set_users(step.users, step.ramp_s)
            return
        before = self.serving.settings or self.experiment.settings
        asked_s = time.monotonic()
        try:
            applied = self.serving.update(step)
        except ServingError as error:
            applied = Applied(before.diff(step), asked_s, float("nan"), 0)
            self.notes.append(f"refused {asked_s - self.t0_s:.1f} s into the run: {error}")
            self._record(applied, str(error).splitlines()[0])
        else:
            if before.num_replicas == step.num_replicas == "auto":
                self.notes.append(
                    f"the change {asked_s - self.t0_s:.1f} s into the run started the autoscaler's "
                    f"delays anew (upscale_delay_s = {step.upscale_delay_s:g} s): Serve does so with "
                    "every config it receives"
                )
            self._record(applied, "")

    def _record(self, applied: Applied, error: str) -> None:
        self.changes += store.change_rows(
            applied.changes, applied.asked_s - self.t0_s, applied.applied_s - self.t0_s,
            applied.restarted_replicas, error,
        )  # fmt: skip
        store.write(self._so_far())

    def _so_far(self) -> Run:
        changes = store.change_table(self.changes)
        return replace(self.blank, notes=tuple(self.notes), changes=changes)

    def _finish(self, status: store.Ending) -> Run:
        self.close()
        died = [
            f"replica {name} died {t:.1f} s into the run" for t, name in self.sampler.lost_replicas
        ]
        self.notes += died
        done = replace(self._so_far(), status=status)
        store.write(done)
        if self.counted is not None:
            answered = int(self.load.rows()["outcome"].isin(serve_metrics.ANSWERED).sum())
            counted = serve_metrics.end(self.counted, self.serving, answered)
            counted.to_csv(done.folder / store.COUNTED, index=False)
            if why := counted.attrs.get(serve_metrics.WHY):
                self.notes.append(f"{serve_metrics.UNREAD}{why}")
                store.write(replace(self._so_far(), status=status))
        whole = store.load(done.folder)
        if status == "complete" and not len(whole.requests):
            raise StoreError(
                f"the run made no request at all: see {done.folder / 'load.log'} for the reason"
            )
        return whole

    def close(self) -> None:
        self.sampler.stop()
        self.load.kill()
