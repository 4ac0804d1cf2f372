"""Do the figures agree with what others counted of the same run: Ray Serve itself, and Little's law.

Serve's batch metrics and the kit's rows are two measurements of the same batches. Their buckets are
compared, count by count: a batch that one of them puts into the next bucket differs by one. Nobody's
clock is exact at a bucket's edge, so a batch within `EDGE_S` of one may lie on either side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kit import measures, phases
from kit.serve_metrics import HISTOGRAMS, entered
from kit.store import Run

EDGE_S = 0.001
BATCHES = 0.02
"""Share of all batches that may lie in another bucket."""
REQUEST_COUNT = 0.01
LITTLE = 0.05
"""The law is of long runs: at both ends of a stretch some requests lie half inside."""

POLLED = 0.1
"""Polling twice a second sees a moment of each half second, the driver all of it."""
COUNTED_S = 10.0
"""Energy counters move in steps, and power is a mean of the last second: a shorter run says nothing."""

_OURS = {
    "ray_serve_actual_batch_size": ("batch_size", 1.0, 0.0),
    "ray_serve_batch_wait_time_ms": ("batch_fill_s", 1e3, EDGE_S),
    "ray_serve_batch_execution_time_ms": ("batch_run_s", 1e3, EDGE_S),
}
"""Serve's metric → our column, times what, and how far from an edge it may be off."""


@dataclass(frozen=True)
class Agreement:
    """One figure from two sources; `agrees` is None where one of them is missing, and `note` says why."""

    what: str
    ours: str
    theirs: str
    difference: float
    allowed: float
    agrees: bool | None
    note: str = ""


def checks(run: Run) -> list[Agreement]:
    """Every figure that has a second source: batches, requests, requests under way."""
    batches = _batches(run.requests)
    found = [_histogram(run, metric, batches) for metric in HISTOGRAMS]
    return [*found, _requests(run), *_littles_law(run), *_gpus(run)]


def table(run: Run) -> pd.DataFrame:
    """The checks for people."""
    words = {True: "yes", False: "NO", None: "not known"}
    rows = {
        c.what: {
            "the kit": c.ours,
            "the other": c.theirs,
            "difference (%)": math.nan
            if math.isnan(c.difference)
            else round(c.difference * 100, 2),
            "allowed (%)": c.allowed * 100,
            "agree": words[c.agrees],
            "note": c.note,
        }
        for c in checks(run)
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("figure")


def misplaced(values: np.ndarray, edges: np.ndarray, counts: np.ndarray, slack: float) -> float:
    """How many values lie in another bucket than counted: Σ over edges of what passes each in excess.

    Args:
        values: one for each batch.
        edges: upper edges of the buckets, rising, the last infinite.
        counts: cumulative counts at those edges.
        slack: values so close to an edge may lie on either side of it.
    """
    ordered = np.sort(values)
    least = np.searchsorted(ordered, edges - slack, "right")
    most = np.searchsorted(ordered, edges + slack, "right")
    return float(np.maximum(np.maximum(least - counts, counts - most), 0).sum())


def _batches(requests: pd.DataFrame) -> pd.DataFrame:
    """One row a batch, of whatever became of its requests."""
    told = requests.dropna(subset=["replica_id", "batch_id", "batch_run_s"])
    return told.drop_duplicates(["replica_id", "batch_id"])


def _histogram(run: Run, metric: str, batches: pd.DataFrame) -> Agreement:
    what = f"{HISTOGRAMS[metric]} (Serve's buckets)"
    rows = run.counted[run.counted["metric"] == metric]
    if not len(rows) or not len(batches):
        note = "no batches by @serve.batch" if len(run.counted) else _UNCOUNTED
        return Agreement(what, "", "", math.nan, BATCHES, None, note)
    cumulative = rows.groupby("le")["count"].sum().sort_index()
    column, times, slack_s = _OURS[metric]
    values = batches[column].to_numpy(dtype=float) * times
    off = misplaced(
        values, cumulative.index.to_numpy(), cumulative.to_numpy(), slack_s * times
    )  # fmt: skip
    share = off / len(values)
    pair = f"{len(values)} batches", f"{cumulative.iloc[-1]:.0f} batches"
    return Agreement(what, *pair, share, BATCHES, bool(share <= BATCHES))


def _requests(run: Run) -> Agreement:
    what = "requests that a replica answered"
    # Of an app with a router or a postprocessor each deployment counts: its entrance counts all.
    theirs = entered(run.counted)
    if not theirs:
        return Agreement(what, "", "", math.nan, REQUEST_COUNT, None, _UNCOUNTED)
    ours = int(run.requests["outcome"].isin(["ok", "invalid", "error", "left"]).sum())
    cut = int(run.requests["outcome"].isin(["cut", "timeout"]).sum())
    # Those that were cut may have reached a replica or not.
    off = max(ours - theirs, theirs - ours - cut, 0.0) / max(theirs, 1.0)
    note = f"and {cut} cut" if cut else ""
    return Agreement(
        what, f"{ours}", f"{theirs:.0f}", off, REQUEST_COUNT, bool(off <= REQUEST_COUNT), note
    )


def _littles_law(run: Run) -> list[Agreement]:
    """L = λ W (Little 1961, Operations Research 9(3) 383-387), in the last stretch's steady part."""
    last = phases.stretches(run).iloc[-1]
    from_s, to_s = float(last["from_s"]), float(last["to_s"])
    ended = measures.finished_s(run.requests)
    inside = run.requests[(ended >= from_s) & (ended < to_s)]
    rate_rps = len(inside) / max(to_s - from_s, 1e-9)
    server = ["batch_wait_s", "engine_queue_s", "prefill_s", "decode_s", "postprocess_s"]
    in_replica_s = inside[server].sum(axis=1, skipna=False)
    each = measures.by_replica(run, "mean_ongoing_requests")
    each = each[each["time_s"].between(from_s, to_s)]
    in_flight = measures.mean_in_flight(run, from_s, to_s)
    told = measures.series(run, "load", "in_flight_s").index
    count = int(((told >= from_s) & (told < to_s)).sum())
    of_replicas = each.groupby("replica_id")["mean_ongoing_requests"].mean().sum()
    found = []
    for what, sampled, readings, width_s in (
        ("requests under way (Little's law)", in_flight, count, inside["e2e_s"].mean()),
        ("requests in replicas (Little's law)", of_replicas, len(each), in_replica_s.mean()),
    ):
        law = rate_rps * width_s
        if readings < 10 or math.isnan(law + sampled) or not law:
            note = f"too short a stretch: {readings} readings"
            found.append(Agreement(what, "", "", math.nan, LITTLE, None, note))
            continue
        off = abs(float(sampled) / law - 1)
        note = f"from {from_s:.0f} to {to_s:.0f} s"
        pair = f"{law:.2f} = {rate_rps:.2f}/s × {width_s:.3f} s", f"{sampled:.2f} over time"
        found.append(Agreement(what, *pair, off, LITTLE, bool(off <= LITTLE), note))
    return found


def _gpus(run: Run) -> list[Agreement]:
    """Polled utilisation against what the driver itself sampled meanwhile, power against its counter."""
    found = []
    rows = run.samples[run.samples["source"].str.startswith("gpu:")]
    for source, of_one in rows.groupby("source", sort=True):
        t = of_one.pivot_table(index="time_s", columns="metric", values="value")
        if {"sm_percent", "driver_sm_percent"} <= set(t):
            # While a GPU idles the driver may keep no samples: only where both have told.
            polled, own = t[["sm_percent", "driver_sm_percent"]].dropna().mean()
            off = abs(polled - own) / 100
            what = f"utilisation of {source} (NVML's own samples)"
            pair = f"{polled:.1f} %", f"{own:.1f} %"
            note = "points of a whole GPU"
            found.append(Agreement(what, *pair, off, POLLED, bool(off <= POLLED), note))
        if {"power_w", "energy_j"} <= set(t):
            power = t[["power_w", "energy_j"]].dropna()
            span_s = power.index.max() - power.index.min()
            if not span_s >= COUNTED_S:
                continue
            mean_w = np.trapezoid(power["power_w"], power.index) / span_s
            counted_w = (power["energy_j"].iloc[-1] - power["energy_j"].iloc[0]) / span_s
            off = abs(mean_w / counted_w - 1) if counted_w > 0 else math.nan
            what = f"power of {source} (its energy counter)"
            pair = f"{mean_w:.1f} W", f"{counted_w:.1f} W"
            agrees = None if math.isnan(off) else bool(off <= POLLED)
            note = "" if agrees is not None else "the counter stood still"
            found.append(Agreement(what, *pair, off, POLLED, agrees, note))
    return found


_UNCOUNTED = "Serve's metrics were not read in this run: kit.run(…, agreement=True)"
