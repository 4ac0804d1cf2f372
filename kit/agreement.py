"""Do the figures agree with what others counted of the same run: Ray Serve itself, and Little's law.

Serve's batch metrics and the kit's rows are two measurements of the same batches. Their buckets are
compared, count by count: a batch that one of them puts into the next bucket differs by one. Nobody's
clock is exact at a bucket's edge, so a batch within `EDGE_S` of one may lie on either side: below 3 ms,
where Serve's edges are as close as that, durations are hardly told apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kit import measures, phases
from kit.sampler import PERIOD_S
from kit.serve_metrics import ANSWERED, HISTOGRAMS, UNREAD, entered
from kit.store import Run

EDGE_S = 0.001
BATCHES = 0.02
"""Share of all batches that may lie in another bucket."""
REQUEST_COUNT = 0.01
LITTLE = 0.05
"""The law is of long runs: at both ends of a stretch some requests lie half inside. So a stretch must see
so many come and go that those under way at any time are no larger a share of them."""

POLLED = 0.1
"""Polling twice a second sees a moment of each half second, the driver all of it."""
COUNTED_S = 10.0
"""Energy counters move in steps, and power is a mean of the last second: a shorter run says nothing."""

_SILENT_S = 3.0
"""Six heartbeats."""
_IN_REPLICA = ["batch_wait_s", "engine_queue_s", "prefill_s", "decode_s", "postprocess_s"]

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


def misplaced(
    values: NDArray[np.float64],
    edges: NDArray[np.float64],
    counts: NDArray[np.float64],
    slack: float,
) -> float:
    """How many values lie in another bucket than counted: Σ|ours − theirs| / 2 over the buckets.

    One that only one side has counts as a whole. Of all ways to move values that are close to an edge
    into the bucket beyond it, the one is taken that leaves least.

    Args:
        values: one for each batch.
        edges: upper edges of the buckets, rising, the last infinite.
        counts: cumulative counts at those edges.
        slack: values so close to an edge may lie on either side of it.
    """
    ordered = np.sort(values)
    below = np.searchsorted(ordered, edges, "right")
    down = np.searchsorted(ordered, edges + slack, "right") - below
    up = below - np.searchsorted(ordered, edges - slack, "right")
    # From the lowest bucket on, what is too much or too little goes over its upper edge as far as may
    # be: at worst it is as wrong there.
    apart, moved = [], 0.0
    for excess, most, least in zip(np.diff(below - counts, prepend=0.0), up, -down, strict=True):
        over = min(max(excess + moved, least), most)
        apart.append(excess + moved - over)
        moved = over
    return float(np.abs(apart).sum() + abs(sum(apart))) / 2


def _batches(requests: pd.DataFrame) -> pd.DataFrame:
    """One row a batch, of whatever became of its requests."""
    told = requests.dropna(subset=["replica_id", "batch_id", "batch_run_s"])
    return told.drop_duplicates(["replica_id", "batch_id"])


def _histogram(run: Run, metric: str, batches: pd.DataFrame) -> Agreement:
    what = f"{HISTOGRAMS[metric]} (Serve's buckets)"
    rows = run.counted[run.counted["metric"] == metric]
    if not len(rows) or not len(batches):
        theirs = rows.loc[np.isinf(rows["le"].astype(float)), "count"].sum()
        none = f"no row tells of the {theirs:.0f}" if theirs else "no"
        note = f"{none} batches by @serve.batch" if len(run.counted) else _uncounted(run)
        return Agreement(what, "", "", math.nan, BATCHES, None, note)
    cumulative = rows.groupby("le")["count"].sum().sort_index()
    column, times, slack_s = _OURS[metric]
    values = batches[column].to_numpy(dtype=float) * times
    edges, counts = cumulative.index.to_numpy(), cumulative.to_numpy()
    share = misplaced(values, edges, counts, slack_s * times) / max(len(values), counts[-1], 1.0)
    pair = f"{len(values)} batches", f"{counts[-1]:.0f} batches"
    return _excused(run, Agreement(what, *pair, share, BATCHES, bool(share <= BATCHES)))


def _excused(run: Run, found: Agreement) -> Agreement:
    """Where a replica ended in the run, a disagreement tells nothing: one that is killed takes along
    what it did since it last handed its counts over."""
    if found.agrees:
        return found
    heard_s = (
        measures.by_replica(run, "mean_ongoing_requests").groupby("replica_id")["time_s"].max()
    )
    ended = heard_s[heard_s < run.samples["time_s"].max() - _SILENT_S]
    if not len(ended):
        return found
    text = f"replica {ended.index[0]} fell silent at {ended.iloc[0]:.0f} s; its last counts may be lost"
    return replace(found, agrees=None, note=text)


def _requests(run: Run) -> Agreement:
    what = "requests that a replica answered"
    # Of an app with a router or a postprocessor each deployment counts: its entrance counts all.
    theirs = entered(run.counted)
    if not theirs:
        return Agreement(what, "", "", math.nan, REQUEST_COUNT, None, _uncounted(run))
    ours = int(run.requests["outcome"].isin(ANSWERED).sum())
    cut = int(run.requests["outcome"].isin(["cut", "timeout"]).sum())
    # Those that were cut may have reached a replica or not.
    off = max(ours - theirs, theirs - ours - cut, 0.0) / max(theirs, 1.0)
    note = f"and {cut} cut" if cut else ""
    found = Agreement(
        what, f"{ours}", f"{theirs:.0f}", off, REQUEST_COUNT, bool(off <= REQUEST_COUNT), note
    )
    return _excused(run, found)


def _littles_law(run: Run) -> list[Agreement]:
    """L = λ W (Little 1961, Operations Research 9(3) 383-387), in the last stretch's steady part."""
    last = phases.stretches(run).iloc[-1]
    from_s, to_s = float(last["from_s"]), float(last["to_s"])
    ended = measures.finished_s(run.requests)
    inside = run.requests[(ended >= from_s) & (ended < to_s)]
    in_replica_s = inside[_IN_REPLICA].sum(axis=1, skipna=False)
    # A stream is under way until its last event, which a static batch sends after the last token.
    ends_s = pd.DataFrame({"last": inside["e2e_s"], "over": inside["router_s"] + in_replica_s})
    under_way_s = ends_s.max(axis=1)
    unseen = int((in_replica_s.isna() & (inside["outcome"] != "rejected")).sum())
    found = []
    for what, sampled, each_s, cut in (
        ("requests under way (Little's law)", measures.mean_in_flight(run, from_s, to_s),
         under_way_s.dropna(), 0),
        ("requests in replicas (Little's law)", _mean_in_replicas(run, from_s, to_s),
         in_replica_s.dropna(), unseen),
    ):  # fmt: skip
        rate_rps = len(each_s) / max(to_s - from_s, 1e-9)
        law = rate_rps * each_s.mean()
        pair = f"{law:.2f} = {rate_rps:.2f}/s × {each_s.mean():.3f} s", f"{sampled:.2f} over time"
        why = ""
        if math.isnan(law + sampled) or not law:
            pair, why = ("", ""), "not sampled, or no request told its times"
        elif law > LITTLE * len(each_s):
            why = f"too short a stretch: {len(each_s)} requests ended in it"
        elif cut > LITTLE * len(each_s):
            why = f"of {cut} requests nobody knows how long they were in a replica"
        if why:
            found.append(Agreement(what, *pair, math.nan, LITTLE, None, why))
            continue
        off = float(abs(sampled / law - 1))
        note = f"from {from_s:.0f} to {to_s:.0f} s"
        found.append(Agreement(what, *pair, off, LITTLE, bool(off <= LITTLE), note))
    return found


def _mean_in_replicas(run: Run, from_s: float, to_s: float) -> float:
    """∫ requests in all replicas dt ÷ the span; NaN without readings.

    Each reading is a replica's own mean since the one before it. One that lived in a part of the span
    alone counts for that part; one was there at an end of the span where it was heard of no further
    from it than its heartbeats lag.
    """
    area_s = math.nan
    for _, own in measures.by_replica(run, "mean_ongoing_requests").groupby("replica_id"):
        ends = own["time_s"].to_numpy(dtype=float)
        begins = np.append(ends[0] - PERIOD_S, ends[:-1])
        inside_s = np.maximum(np.minimum(ends, to_s) - np.maximum(begins, from_s), 0.0)
        if not inside_s.sum():
            continue
        near_s = PERIOD_S + float((ends - begins).max())
        first_s = from_s if begins[0] - from_s < near_s else begins[0]
        last_s = to_s if to_s - ends[-1] < near_s else ends[-1]
        mean = (own["mean_ongoing_requests"] * inside_s).sum() / inside_s.sum()
        area_s = float(np.nansum([area_s, mean * (last_s - first_s)]))
    return area_s / max(to_s - from_s, 1e-9)


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


def _uncounted(run: Run) -> str:
    """Why a run has none of Serve's counts."""
    told = (n for n in run.notes if n.startswith(UNREAD))
    return next(told, "Serve's metrics were not read in this run: kit.run(…, agreement=True)")
