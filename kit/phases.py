"""Phases of a run: warm-up, cold start, transient and steady state, found from what happened.

A phase begins where something is known to have changed: the load began, a knob took effect, the load
took another step, a replica came or went. What follows is a transient until the latencies say that it
is over: first until the requests from before have all ended, then by MSER-5 (the marginal standard
error rule on means of five: White 1997, Simulation 69(6) 323-334; White, Cobb and Spratt 2000, Winter
Simulation Conference), which leaves out at the start what makes the mean of the rest less sure. Where
it would leave out half or more, no steady state was reached.

That rule takes for granted that a steady state follows. Of a queue that grows all the time, or of a
step in the second half, it leaves out nothing: in simulations of 600 correlated requests it called
over 99 of 100 of them steady. So the halves of what it leaves must agree as well (`halves`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kit.measures import (
    PARTS,
    busy_share,
    finished_s,
    moves,
    ok,
    percentile,
    records,
    series,
    took_effect,
)  # fmt: skip
from kit.store import Run

PHASES = ("warm-up", "cold start", "idle", "transient", "varying", "steady")
"""`cold start` is requests that wait while no replica runs, `idle` nobody who waits for one; `varying` is
load that never stands still, such as a day's, a trace's or a ramp's: no state of it is steady."""

LEAST = 30
"""Fewer requests than this after a change tell of no steady state."""
SETTLE = 0.3
"""Share of a stretch left out at its start where no steady state was found."""
DRIFT = 0.1
"""Halves of a steady phase may differ by so much, however sure that they differ."""
_BATCH = 5
_FIRST = 3  # requests of a new replica that warm it up
_PER_HALF = 10
_TO_TELL = 100  # requests in two halves
_T = 2.88  # Student's t with 18 degrees of freedom, two-sided 1 %


def found(run: Run) -> pd.DataFrame:
    """The phases of a run, one after the other, from its start to the end of its load.

    Returns:
        A row each: `phase` (of `PHASES`), `from_s`, `to_s`, `why` (what began it, in words), and
        `requests` that ended in it.
    """
    end_s = float(run.experiment["workload"]["duration_s"])
    good = ok(run.requests).assign(ended_s=finished_s(ok(run.requests)).to_numpy())
    good = good.sort_values("ended_s", kind="stable", ignore_index=True)
    ends, sent, latencies = (good[c].to_numpy() for c in ("ended_s", "sent_s", "e2e_s"))
    nth = good.groupby("replica_id")["ended_s"].rank("first")
    firsts = good["ended_s"][nth <= _FIRST].to_numpy()
    events = _events(run, end_s)
    rows: list[tuple[str, float, float, str]] = []
    for (from_s, phase, why, least_s), (to_s, *_) in zip(
        events, [*events[1:], (end_s, "", "", 0.0)], strict=True
    ):
        if to_s <= from_s:
            continue
        if phase in ("cold start", "idle", "varying"):
            rows.append((phase, from_s, to_s, why))
            continue
        before = ends[(sent < from_s) & (ends >= from_s) & (ends < to_s)]
        # A replica that is seldom asked may take all the time for its first requests.
        new = firsts[(firsts >= from_s) & (firsts < (from_s + to_s) / 2)]
        settled_s = max([from_s + least_s, *before, *new])
        inside = (ends >= settled_s) & (ends < to_s)
        cut = _truncation(latencies[inside]) if settled_s < to_s else None
        if cut is None:
            rows.append((phase, from_s, to_s, f"{why}; no steady state was reached"))
            continue
        steady_s = max(settled_s, float(ends[inside][cut - 1])) if cut else settled_s
        rows.append((phase, from_s, steady_s, why))
        rows.append(("steady", steady_s, to_s, f"settled after: {why}"))
    table = pd.DataFrame(
        [r for r in rows if r[2] > r[1]], columns=["phase", "from_s", "to_s", "why"]
    )
    places = np.searchsorted(ends, table[["from_s", "to_s"]].to_numpy())
    return table.assign(requests=places[:, 1] - places[:, 0] if len(table) else [])


def varying(load: Mapping[str, Any]) -> str:
    """What makes a load vary all the time, from fields of its workload and its shape; else empty."""
    arrivals, shape = load.get("arrivals", "users"), load.get("shape", "steady")
    parts = [f"arrivals {arrivals}"] if arrivals in ("on-off", "trace") else []
    day = load.get("diurnal")
    parts += [f"day {day}"] if day and isinstance(day, str) else []
    parts += [f"shape {shape}"] if shape != "steady" else []
    return ", ".join(parts)


def _events(run: Run, end_s: float) -> list[tuple[float, str, str, float]]:
    """(time, phase that it begins, why, least length) of all that changed what requests met."""
    load = dict(run.experiment["workload"])
    events = [(0.0, "warm-up", "the load began", 0.0)]
    loads = [(-math.inf, dict(load))]
    for move in records(moves(run).dropna(subset="applied_s")):
        if not move["mark"]:
            took_s = move["applied_s"] - move["asked_s"]
            events.append((float(move["asked_s"]), "transient", move["label"], float(took_s)))
    for change in records(took_effect(run.changes).sort_values("asked_s", kind="stable")):
        loads.append((change["asked_s"], load := load | {change["knob"]: change["to"]}))
    for stage in load.get("stages", []):
        users, rate = stage.get("users"), stage.get("rate_rps")
        asked = f"{users} users" if users is not None else f"{rate:g} requests/s"
        events.append((float(stage["at_s"]), "ramp", asked, float(stage["ramp_s"])))
    running = series(run, "serve", "running_replicas")
    counts = running.to_numpy()
    if len(running) and counts[0] == 0:
        events[0] = (0.0, "cold start", "no replica served when the load began", 0.0)
    for k in np.flatnonzero(np.diff(counts)) + 1:
        came = "came" if counts[k] > counts[k - 1] else "went"
        text = f"a replica {came}: {counts[k]:.0f} serve"
        phase = "transient" if counts[k] else "cold start"
        events.append((float(running.index[k]), phase, text, 0.0))
    events = sorted((e for e in events if 0 <= e[0] < end_s), key=lambda e: e[0])
    sent_s = run.requests["sent_s"].to_numpy()
    ended_s = finished_s(run.requests).to_numpy()
    found, there_s = [], 0.0
    for (from_s, phase, why, least_s), (to_s, *_) in zip(
        events, [*events[1:], (end_s, "", "", 0.0)], strict=True
    ):
        varies = varying([fields for at_s, fields in loads if at_s <= from_s][-1])
        if phase == "ramp":
            phase, there_s = "transient", from_s + least_s
        least_s = max(least_s, there_s - from_s)
        if phase == "cold start":
            waited = ((sent_s < to_s) & (ended_s > from_s)).any()
            phase = phase if waited else "idle"
        elif varies:
            phase, why = "varying", f"{why}; the load varies all the time ({varies})"
        elif there_s >= to_s:
            phase, why = "varying", f"{why}; the load varies all the time (a ramp)"
        found.append((from_s, phase, why, least_s))
    return found


def _truncation(values: NDArray[np.float64]) -> int | None:
    """How many values to leave out at the start, by MSER-5; None when half or more, when the halves
    of the rest differ, or when there are too few."""
    if len(values) < LEAST:
        return None
    count = len(values) // _BATCH
    means = values[: count * _BATCH].reshape(count, _BATCH).mean(axis=1)
    # Of the means from each on: sum of squared deviations ÷ their number squared, from the back.
    left = np.arange(count, 0, -1)
    sums, squares = (np.cumsum(v[::-1])[::-1] for v in (means, means**2))
    errors = np.maximum(squares - sums**2 / left, 0.0) / left**2
    half = count // 2
    cut = int(errors[: half + 1].argmin())
    rest = values[cut * _BATCH :]
    drifts = len(rest) >= _TO_TELL and halves(rest)[2]
    return None if cut == half or drifts else cut * _BATCH


def halves(
    values: NDArray[np.float64], figure: Callable[..., Any] = np.mean, t: float = _T
) -> tuple[float, float, bool]:
    """A figure of the first and of the second half, and whether they surely differ, by over `DRIFT`.

    By batches of successive values, which unlike single ones are nearly independent (Schmeiser 1982,
    Operations Research 30(3) 556-568): ten a half, and what is left over at the start is left out.

    Args:
        values: at least 20.
        figure: of each batch, such as `np.mean` or `np.median`.
        t: Student's t with 18 degrees of freedom that makes a difference sure.
    """
    size = len(values) // (2 * _PER_HALF)
    batches = values[len(values) - 2 * _PER_HALF * size :].reshape(2, _PER_HALF, size)
    each = figure(batches, axis=2)
    first, second = (float(v) for v in each.mean(axis=1))
    error = math.sqrt(float(each.var(axis=1, ddof=1).sum()) / _PER_HALF)
    return first, second, abs(second - first) > max(t * error, DRIFT * abs(first))


def stretches(run: Run, settle: float | None = None) -> pd.DataFrame:
    """Stretches of a run between changes that took effect, each measured in its steady state.

    Args:
        run: any run.
        settle: share of each stretch left out at its start; by default all of it but its longest
            steady phase, and `SETTLE` where it has none.

    Returns:
        One row a stretch: `label` (the change that began it), `start_s`, `from_s` (after settling),
        `end_s`, `requests`, `throughput_rps`, `output_tokens_per_s`, p50 and p95 of end-to-end,
        queueing, inference, TTFT and TPOT, mean `batch_size` and parts (`PARTS`),
        `replicas` (most running) and `busy_share` (mean).
    """
    end_s = float(run.experiment["workload"]["duration_s"])
    applied = moves(run).dropna(subset="applied_s")
    # A mark may be set while a change is still being applied: stretches never run backwards.
    starts = np.maximum.accumulate([0.0, *applied["applied_s"]])
    ends = np.maximum([*applied["asked_s"], end_s], starts)
    labels = ["start", *applied["label"]]
    good, busy = ok(run.requests), busy_share(run)
    running = series(run, "serve", "running_replicas")
    ended = finished_s(good)
    steady = found(run) if settle is None else None
    rows = []
    for label, start_s, stop_s in zip(labels, starts, ends, strict=True):
        from_s, to_s = start_s + (SETTLE if settle is None else settle) * (stop_s - start_s), stop_s
        longest = None if steady is None else _longest(steady, start_s, stop_s)
        if longest is not None:
            from_s, to_s = longest
        rows_in = good[(ended >= from_s) & (ended < to_s)]
        width_s = max(to_s - from_s, 1e-9)
        row: dict[str, Any] = {
            "label": label,
            "start_s": start_s,
            "from_s": from_s,
            "to_s": to_s,
            "end_s": stop_s,
            "steady": longest is not None,
            "requests": len(rows_in),
            "throughput_rps": len(rows_in) / width_s,
            "output_tokens_per_s": rows_in["output_tokens"].sum() / width_s,
        }
        for part in ("e2e", "response", "queueing", "inference", "ttft", "tpot"):
            row[f"{part}_p50_s"] = percentile(rows_in[f"{part}_s"], 50)
            row[f"{part}_p95_s"] = percentile(rows_in[f"{part}_s"], 95)
        for part in (*PARTS, "batch_size"):
            row[part] = rows_in[part].mean()
        row["replicas"] = running[(running.index >= start_s) & (running.index < stop_s)].max()
        inside = busy["time_s"].between(from_s, to_s)
        row["busy_share"] = busy.loc[inside, "busy_share"].mean()
        rows.append(row)
    return pd.DataFrame(rows)


def _longest(table: pd.DataFrame, start_s: float, stop_s: float) -> tuple[float, float] | None:
    """The longest steady phase within a stretch, from and to; cut where a mark parts it."""
    steady = table[table["phase"] == "steady"]
    parts = [
        (max(a, start_s), min(b, stop_s))
        for a, b in zip(steady["from_s"], steady["to_s"], strict=True)
    ]
    parts = [p for p in parts if p[1] > p[0]]
    return max(parts, key=lambda p: p[1] - p[0], default=None)
