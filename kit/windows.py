"""Requests by the window of time in which they ended; the parts of those around a percentile."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from kit.measures import OUTCOMES, PARTS, finished_s, ok, percentile
from kit.store import Run


def parts_near(requests: pd.DataFrame, q: float, width: float = 5.0) -> pd.Series[float]:
    """Mean parts of the requests whose end-to-end latency lies around its q-th percentile.

    Percentiles of parts do not add up; the parts of the requests at a percentile do.
    """
    good = ok(requests)
    if not len(good):
        return pd.Series(math.nan, index=list(PARTS))
    low, high = (min(max(x, 0.0), 100.0) for x in (q - width / 2, q + width / 2))
    bounds = np.percentile(good["e2e_s"], [low, high], method="closest_observation")
    near = good[good["e2e_s"].between(*bounds)]
    return near[list(PARTS)].mean()


def over_time(run: Run, window_s: float | None = None) -> pd.DataFrame:
    """Requests by the window in which they ended: a `window_row` each, empty ones left out."""
    end_s = float(run.experiment["workload"]["duration_s"])
    width_s = window_s or max(2.0, end_s / 60)
    window = window_of(run.requests, width_s)
    before = finished_s(run.requests) < end_s
    groups = run.requests[before].groupby(window[before])
    return pd.DataFrame([window_row(inside, int(str(k)), width_s) for k, inside in groups])


def window_of(requests: pd.DataFrame, width_s: float) -> pd.Series[int]:
    """The number of the window, `width_s` wide, in which each request ended; 0 starts the run."""
    return (finished_s(requests) // width_s).astype("int64")


def window_row(inside: pd.DataFrame, window: int, width_s: float) -> dict[str, Any]:
    """The requests that ended in one window, in figures.

    Keys: `time_s` (middle of the window), for q in 50, 95 the parts of the requests around that
    percentile (`p50_router_s`, …), `queueing_p95_s`, `e2e_p95_s`, and requests a second by outcome.
    """
    good = ok(inside)
    row: dict[str, Any] = {"time_s": (window + 0.5) * width_s}
    for q in (50, 95):
        row |= {f"p{q}_{k}": v for k, v in parts_near(good, q, 10.0).items()}
    row["queueing_p95_s"] = percentile(good["queueing_s"], 95)
    row["e2e_p95_s"] = percentile(good["e2e_s"], 95)
    counts = inside["outcome"].value_counts()
    return row | {f"{o}_rps": counts.get(o, 0) / width_s for o in OUTCOMES}
