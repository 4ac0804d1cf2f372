"""How much load is too much: a short ramp of open-loop rates, and where its curve bends.

run = kit.saturation.ramp(settings, workload, serving)
kit.figures_load.load_latency(run)
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kit import experiment, measures, theory, validity
from kit.experiment import Experiment, Slo
from kit.load import LoadError
from kit.serving import Serving
from kit.settings import Settings
from kit.store import Run
from kit.stretch import Stretch
from kit.workload import Stage, Workload, WorkloadError

SETTLE = 0.3
"""Share of each step left out at its start."""
KEPT = 0.95
"""A server keeps up with a rate of which it answers this share."""
_SPREAD = 2.0
"""Of few requests a few less are chance: so many times the root of their number, Poisson's spread."""
_SHARES = (0.2, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.6)
"""The last so far above the capacity that a hundred requests tell it from chance."""
_OF_LOAD = ("load as planned", "load generator keeps up")
"""What `kit.validity` checks of the sending alone: errors and waits are what a ramp is for."""
_MOST = 12
"""Doublings of a rate in search of the capacity."""


def ramp(
    settings: Settings,
    workload: Workload,
    serving: Serving,
    rates_rps: Sequence[float] | None = None,
    step_s: float = 8.0,
    slo: Slo | None = None,
    folder: Path | None = None,
    progress: bool = True,
) -> Run:
    """Send rising rates to a deployment, each for `step_s`, then none until all are answered, as long.

    `curve` reads the run.

    Args:
        settings: what to deploy.
        workload: its lengths; its arrivals where they have a rate, else Poisson's.
        serving: where.
        rates_rps: rising; by default shares from 0.2 to 1.6 of the capacity that theory knows, or else
            of the one that `capacity_rps` finds.
        step_s: seconds of each rate: several times a request's latency. Saturation shows surely from
            about a hundred requests a step on.
        slo: what counts as good; the default promises.
        folder: takes the run.
        progress: whether to draw a progress bar.

    Raises:
        WorkloadError: with rates that do not rise.
        LoadError: when the load generator fails while the capacity is searched.
    """
    if rates_rps is None:
        full_rps = theory.of(settings, workload).capacity_rps
        if math.isnan(full_rps):
            full_rps = capacity_rps(settings, workload, serving, step_s=step_s, progress=progress)
        rates_rps = [round(share * full_rps, 3) for share in _SHARES]
    rates = [float(r) for r in rates_rps]
    if not rates or rates[0] <= 0 or any(b <= a for a, b in itertools.pairwise(rates)):
        raise WorkloadError(f"rates_rps = {rates}: must be above 0 and rise")
    about = Experiment(settings, _steps(workload, rates, step_s), slo=slo or Slo(), name="ramp")
    return experiment.run(about, serving, folder, progress)


def capacity_rps(
    settings: Settings,
    workload: Workload,
    serving: Serving,
    from_rps: float = 1.0,
    step_s: float = 8.0,
    progress: bool = True,
) -> float:
    """The most requests/s that a deployment answers: the rate doubles until it no longer keeps up.

    Each rate is a run of its own that is not kept, so that nothing is sent after the first too many.

    Args:
        from_rps: the first rate.
        step_s: seconds of each rate, and of the pause after it: several times a request's latency.

    Raises:
        LoadError: when the load generator died or could not send as planned, or no rate was too much.
        KeyboardInterrupt: when a run was interrupted.
    """
    rates = [from_rps * 2**k for k in range(_MOST)]
    most_rps = 0.0
    for rate in rates:
        name = f"search at {rate:g} requests/s"
        about = Experiment(settings, _steps(workload, [rate], step_s), name=name)
        with tempfile.TemporaryDirectory() as place:
            run = experiment.run(about, serving, Path(place), progress)
        if run.status == "interrupted":
            raise KeyboardInterrupt
        step = curve(run).iloc[0]
        if run.status == "failed" or step["invalid"]:
            raise LoadError(f"{name} failed: {step['invalid'] or ' / '.join(run.notes)}")
        most_rps = max(most_rps, float(step["throughput_rps"]))
        if step["saturated"]:
            return most_rps
    raise LoadError(
        f"{rates[-1]:g} requests/s did not saturate the server: begin with a higher rate"
    )


def _steps(workload: Workload, rates: list[float], step_s: float) -> Workload:
    """The workload with these rates one after the other, and then none while what waits is answered."""
    kind = workload.arrivals if workload.arrivals in ("gamma", "constant") else "poisson"
    later = [*rates[1:], 0.0]
    steps = tuple(Stage(at_s=k * step_s, rate_rps=r) for k, r in enumerate(later, 1))
    burstiness = workload.burstiness if kind == "gamma" else 1.0
    load = workload.model_dump() | {
        "arrivals": kind, "rate_rps": rates[0], "stages": steps, "diurnal": "", "trace": "",
        "burstiness": burstiness, "duration_s": step_s * (len(rates) + 1),
    }  # fmt: skip
    return Workload(**load)


def curve(run: Run) -> pd.DataFrame:
    """What each rate of a ramp led to, a row each, in order.

    Latencies are of the requests that were due within a step's later part, throughput is of what was
    answered then. Rates of nothing have no row.

    Returns:
        `rate_rps` asked for, `planned_rps` as drawn, `sent_rps`, `throughput_rps`, `goodput_rps` (within
        the run's SLO), `e2e_p50_s`, `e2e_p95_s`, `response_p50_s`, `response_p95_s`, `response_mean_s`,
        `queueing_p95_s`, `inference_p50_s`, `in_flight` and `replicas` (means over time), `requests`,
        `saturated` (less than `KEPT` of the plan was answered then, by more than chance and while latency
        rose, or less than that ever), and
        `invalid`: why the load was not as planned, by `kit.validity`; empty when it was.
    """
    load = run.experiment["workload"]
    starts = [0.0, *(s["at_s"] for s in load["stages"])]
    rates = [load["rate_rps"], *(s["rate_rps"] for s in load["stages"])]
    ends = [*starts[1:], load["duration_s"]]
    ended = measures.finished_s(run.requests)
    rows = [
        _step(run, ended, rate, start_s + SETTLE * (end_s - start_s), end_s)
        for rate, start_s, end_s in zip(rates, starts, ends, strict=True)
        if rate > 0
    ]
    return pd.DataFrame(rows)


def _step(
    run: Run, ended: pd.Series[float], rate: float, from_s: float, to_s: float
) -> dict[str, Any]:
    rows, width_s = run.requests, to_s - from_s
    due = rows[(rows["intended_s"] >= from_s) & (rows["intended_s"] < to_s)]
    sent = rows[(rows["sent_s"] >= from_s) & (rows["sent_s"] < to_s)]
    done = measures.ok(rows[(ended >= from_s) & (ended < to_s)])
    good = measures.ok(due)
    share = measures.good_fraction_of(due, run.experiment["slo"])
    throughput = len(done) / width_s
    row: dict[str, Any] = {
        "rate_rps": rate,
        "planned_rps": len(due) / width_s,
        "sent_rps": len(sent) / width_s,
        "throughput_rps": throughput,
        "goodput_rps": share * len(due) / width_s,
    }
    for part in ("e2e", "response"):
        for q in (50, 95):
            row[f"{part}_p{q}_s"] = measures.percentile(good[f"{part}_s"], q)
    row["response_mean_s"] = good["response_s"].mean()
    row["queueing_p95_s"] = measures.percentile(good["queueing_s"], 95)
    row["in_flight"] = measures.mean_in_flight(run, from_s, to_s)
    row["inference_p50_s"] = measures.percentile(good["inference_s"], 50)
    replicas = measures.series(run, "serve", "running_replicas")
    row["replicas"] = replicas[(replicas.index >= from_s) & (replicas.index < to_s)].mean()
    row["requests"] = len(due)
    missing, unanswered = len(due) - len(done), len(due) - len(good)
    chance = _SPREAD * math.sqrt(max(len(due), 1))
    behind = missing > max((1 - KEPT) * len(due), chance)
    # Answers to long requests come after the step, however idle the server: then latency stays as it is.
    row["saturated"] = bool(
        (behind and _rises(good, from_s, to_s)) or unanswered > (1 - KEPT) * len(due)
    )
    checks = validity.of(Stretch(run, from_s, to_s, f"{rate:g} requests/s"))
    row["invalid"] = "; ".join(c.text for c in checks if c.name in _OF_LOAD and c.ok is False)
    return row


def _rises(good: pd.DataFrame, from_s: float, to_s: float) -> bool:
    """Whether latency rises as where less than `KEPT` of what is due is answered, by more than chance.

    Of requests due t seconds apart the later waits t / KEPT - t longer, where just so much is answered.
    """
    later = good["intended_s"] >= (from_s + to_s) / 2
    halves = [good.loc[part, "response_s"] for part in (~later, later)]
    chance_s = _SPREAD * math.sqrt(sum(h.var() / max(len(h), 1) for h in halves))
    rise_s = halves[1].mean() - halves[0].mean()
    return bool(rise_s > max((1 / KEPT - 1) * (to_s - from_s) / 2, chance_s))


@dataclass(frozen=True)
class Knee:
    """Where a load-latency curve bends, in requests/s; NaN where it does not, or not yet."""

    slo_rps: float
    """The highest rate up to which at least `KEPT` of what was due kept all promises."""
    power_rps: float
    """The rate of the highest power, throughput ÷ mean response (Kleinrock 1979, ICC 43.1): more load
    buys less throughput than it costs latency. Of M/M/1 it is half of the capacity."""
    capacity_rps: float
    """The most that was answered, once a rate saturated the server; NaN when none did."""


def knee(table: pd.DataFrame) -> Knee:
    """Where the curve of a ramp bends, from what `curve` gives; steps of an invalid load do not count."""
    table = table[table["invalid"] == ""]
    kept = (table["goodput_rps"] >= KEPT * table["planned_rps"]).to_numpy()
    first_missed = int(np.argmin(kept)) if not kept.all() else len(kept)
    within = table["rate_rps"].iloc[first_missed - 1] if first_missed else math.nan
    power = table["throughput_rps"] / table["response_mean_s"]
    best = table["rate_rps"].iloc[int(power.argmax())] if power.notna().any() else math.nan
    full = table["throughput_rps"].max() if table["saturated"].any() else math.nan
    return Knee(float(within), float(best), float(full))
