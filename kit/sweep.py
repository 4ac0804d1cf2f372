"""A grid over knobs and loads: every combination a run, resumed where it was left, compared in one table.

found = kit.sweep.run(kit.sweep.Sweep(settings, workload, {"max_batch_size": [4, 16]},
                                      {"rate_rps": [5.0, 10.0]}), serving, folder)
kit.figures_sweep.heat_map(found, ["max_batch_size"], ["rate_rps"])
    kit.figures_sweep.pareto(found, ["rate_rps"])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kit import experiment, measures, summary, validity
from kit.experiment import Experiment, Slo
from kit.serving import Serving
from kit.settings import BY_NAME, Settings, SettingsError
from kit.store import Run
from kit.workload import Workload, WorkloadError

MERITS = {"goodput_rps": "higher", "e2e_p95_s": "lower", "replica_seconds": "lower"}
"""What a Pareto front is made of, and which way is better."""


class SweepError(ValueError):
    """A grid that cannot be; the text names the axis or the point, and why."""


@dataclass(frozen=True)
class Sweep:
    """Settings and a load, and what to vary of them. All of its points are checked here.

    Args of the grid: `knobs` has knob → values, `loads` has field of the workload → values; each point is
    run `repeats` times with another seed each.

    Raises:
        SweepError: for an unknown axis, one without values, or a point that cannot be.
    """

    settings: Settings
    workload: Workload
    knobs: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    loads: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    slo: Slo = field(default_factory=Slo)
    repeats: int = 1

    def __post_init__(self) -> None:
        for axis in self.knobs:
            if axis not in BY_NAME:
                raise SweepError(f"{axis}: no such knob; kit.knobs() lists them")
            if BY_NAME[axis].level == "start":
                raise SweepError(f"{axis} is fixed once Ray runs: one sweep cannot vary it")
        for axis in self.loads:
            if axis not in Workload.model_fields:
                raise SweepError(f"{axis}: no field of a workload")
        for axis, values in (self.knobs | self.loads).items():  # type: ignore[operator]
            if isinstance(values, str) or not values:
                raise SweepError(f"{axis} = {values!r}: must be a list of values")
        if self.repeats < 1:
            raise SweepError(f"repeats = {self.repeats}: must be 1 or more")
        self.experiments()

    @property
    def axes(self) -> list[str]:
        """What varies: first the knobs that need new replicas, so that they change most seldom."""
        dear = sorted(self.knobs, key=lambda k: BY_NAME[k].cost != "restart")
        return [*dear, *self.loads]

    def experiments(self) -> list[Experiment]:
        """One for each point and repeat, in the order in which they run, named after their values."""
        values = {**self.knobs, **self.loads}
        made = []
        for point in itertools.product(*(values[a] for a in self.axes)):
            at = dict(zip(self.axes, point, strict=True))
            name = " ".join(f"{k}={v}" for k, v in at.items()).replace("/", "_") or "only"
            try:
                settings = self.settings.replace(**{k: at[k] for k in self.knobs})
                for repeat in range(self.repeats):
                    load = self.workload.model_dump() | {k: at[k] for k in self.loads}
                    load["seed"] = int(load["seed"]) + repeat
                    label = f"{name} #{repeat + 1}" if self.repeats > 1 else name
                    made.append(Experiment(settings, Workload(**load), slo=self.slo, name=label))
            except (SettingsError, WorkloadError) as error:
                raise SweepError(f"the point {name} cannot be: {error}") from None
        return made


def run(sweep: Sweep, serving: Serving, folder: Path, progress: bool = True) -> pd.DataFrame:
    """Run what is not there yet of a sweep, one folder a run, and return its `table`.

    Settings change in place where they can. Interrupted, it goes on from there the next time.

    Raises:
        ServingError, LoadError, StoreError: as `kit.run` does; what was run is kept.
    """
    return table(experiment.run_many(sweep.experiments(), serving, folder, progress), sweep.axes)


def table(runs: Sequence[Run], axes: Sequence[str]) -> pd.DataFrame:
    """A row a run: its axes' values, figures of merit, and whether it is valid.

    Columns: the axes, `run` (its name), `goodput_rps`, `good_fraction`, `throughput_rps`,
    `e2e_p50_s`, `e2e_p95_s`, `response_p95_s`, `queueing_p95_s`, `batch_size_mean_requests`,
    `replica_seconds`, `prefix_cache_hit_share`, `requests`, `valid`, `why` (it is not). Percentiles are
    NaN of too few requests.
    """
    rows = []
    for each in runs:
        found = summary.of(each)
        about = each.experiment["settings"] | each.experiment["workload"]
        row: dict[str, Any] = {a: about[a] for a in axes} | {"run": each.experiment["name"]}
        for figure in _FIGURES:
            value = found[figure]
            row[figure] = math.nan if value is None else value
        row["prefix_cache_hit_share"] = validity.hit_share(each)
        row["requests"] = len(measures.ok(each.requests))
        row["valid"], row["why"] = found["valid"], found["invalid_because"] or ""
        rows.append(row)
    return pd.DataFrame(rows)


_FIGURES = (
    "goodput_rps", "good_fraction", "throughput_rps", "e2e_p50_s", "e2e_p95_s", "response_p95_s",
    "queueing_p95_s", "batch_size_mean_requests", "replica_seconds",
)  # fmt: skip


def front(
    found: pd.DataFrame, loads: Sequence[str] = (), merits: Mapping[str, str] | None = None
) -> pd.Series[bool]:
    """Which rows of a `table` are on the Pareto front of their load.

    Valid ones, than which no other under the same load is better in a merit and as good in the rest.

    Args:
        found: what `table` gave.
        loads: columns that tell loads apart: settings compete under the same one only.
        merits: column → `higher` or `lower`, by default `MERITS`.
    """
    merits = MERITS if merits is None else merits
    signs = [1 if way == "higher" else -1 for way in merits.values()]
    points = found[list(merits)].to_numpy(dtype=float) * signs
    sound = found["valid"].to_numpy(dtype=bool) & ~pd.isna(points).any(axis=1)
    load = (
        found[list(loads)].astype(str).agg(" ".join, axis=1)
        if loads
        else pd.Series("", found.index)
    )
    same = load.to_numpy()
    on = [
        bool(ok)
        and not any(
            sound[k]
            and same[k] == mine
            and (points[k] >= point).all()
            and (points[k] > point).any()
            for k in range(len(points))
        )
        for point, ok, mine in zip(points, sound, same, strict=True)
    ]
    return pd.Series(on, index=found.index)


def words(found: pd.DataFrame, grid: Sweep) -> list[str]:
    """What a sweep shows, in sentences: the best settings for each load, and what is invalid."""
    loads = list(grid.loads)
    groups = found.groupby(loads, sort=False) if loads else [((), found)]
    texts = []
    for at, rows in groups:
        load = ", ".join(f"{k} = {v}" for k, v in zip(loads, at, strict=True))  # type: ignore[arg-type]
        texts.append(f"**{load or 'This load'}**: {_best(rows, list(grid.knobs))}")
    bad = found[~found["valid"]]
    texts += [
        f"**{r['run']}** is invalid and wins nothing: {r['why']}." for r in measures.records(bad)
    ]
    return [
        *texts,
        "Compare a best one with its neighbours (kit.compare) before you believe in a small lead.",
    ]


def _best(rows: pd.DataFrame, knobs: Sequence[str]) -> str:
    good = rows[rows["valid"] & rows["goodput_rps"].notna()]
    if not len(good):
        return "no valid run has a goodput: nothing is best."
    best = measures.records(good.sort_values("goodput_rps", ascending=False, kind="stable"))[0]
    at = ", ".join(f"{k} = {best[k]}" for k in knobs) or "the settings"
    p95_s = best["e2e_p95_s"]
    tail = (
        f"p95 {p95_s:.3g} s"
        if not math.isnan(p95_s)
        else f"{best['requests']} requests, too few for a p95"
    )
    return (
        f"most goodput by {at}: {best['goodput_rps']:.3g} requests/s within all promises "
        f"({best['good_fraction']:.0%} of all), {tail}, {best['replica_seconds']:.0f} replica-seconds."
    )
