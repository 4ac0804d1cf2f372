"""Tables of a run → tables and figures of merit. Pure; seconds throughout.

Percentiles are exact, from rows, over successful requests; of nothing they are NaN. Requests that
were rejected, timed out, failed or were cut are counted beside. Vocabulary: end-to-end latency is
finish − send, in a stream last token − send; response latency counts from when the request was to
be sent, so it has the client wait (sent − intended) in it; queueing is everything before execution
(router, batch wait, engine queue); inference is execution (prefill, decode); postprocessing is what
the app does with the output; rest is the way back. They add up to end-to-end for every request. Of
streams: TTFT is first token − send, TPOT (end-to-end − TTFT) ÷ (tokens − 1), ITL each gap between
pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import pandas as pd

from kit.store import Run

PARTS = (
    "router_s", "batch_wait_s", "engine_queue_s", "prefill_s", "decode_s", "postprocess_s", "rest_s",
)  # fmt: skip
"""The parts of one request's latency, in order; each is measured, none is what others leave."""

OUTCOMES = ("ok", "rejected", "timeout", "invalid", "error", "cut", "left")
"""How a request ended; `left` is a client that was told to leave its stream: no failure."""


class Sampled(Protocol):
    """What has samples and changes: a `Run`, and a `View` of one that is under way."""

    @property
    def samples(self) -> pd.DataFrame: ...
    @property
    def changes(self) -> pd.DataFrame: ...


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as dicts."""
    return [{str(k): v for k, v in row.items()} for row in table.to_dict("records")]


def ok(requests: pd.DataFrame) -> pd.DataFrame:
    """The successful requests."""
    return requests[requests["outcome"] == "ok"]


def finished_s(requests: pd.DataFrame) -> pd.Series[float]:
    """When each request ended, in seconds from the run's start."""
    return requests["sent_s"] + requests["e2e_s"]


def percentile(values: pd.Series[float], q: float) -> float:
    """Exact q-th percentile (0 to 100); NaN of nothing."""
    found = values.dropna()
    return float(np.percentile(found, q)) if len(found) else math.nan


TAIL = 10
"""Requests beyond a percentile that it needs to be told: 200 in all for p95, 1,000 for p99."""


def enough(count: float, q: float) -> bool:
    """Whether so many requests tell their q-th percentile (0 to 100): `TAIL` of them lie beyond it."""
    return count * (100 - q) / 100 >= TAIL


def told(values: pd.Series[float], q: float) -> float:
    """The same, but NaN where there are too few values to tell it."""
    return percentile(values, q) if enough(values.count(), q) else math.nan


def identity_error_s(requests: pd.DataFrame) -> pd.Series[float]:
    """How far the sum of the measured parts misses end-to-end latency, a value a request."""
    good = ok(requests)
    return (good[list(PARTS)].sum(axis=1, skipna=False) - good["e2e_s"]).abs()


def itl_s(requests: pd.DataFrame) -> pd.Series[float]:
    """Every gap between successive pieces of the successful streams, pooled, in seconds."""
    texts = ok(requests)["itl_ms"].dropna()
    return pd.Series(np.array(" ".join(texts).split(), dtype=float) / 1e3)


def throughput_rps(requests: pd.DataFrame) -> float:
    """Successful requests ÷ (first send → last answer); NaN without any."""
    good = ok(requests)
    if not len(good):
        return math.nan
    return len(good) / float(finished_s(good).max() - requests["sent_s"].min())


def series(of: Sampled, source: str, metric: str) -> pd.Series[float]:
    """One sampled metric of one source, indexed by time in seconds."""
    s = of.samples[of.samples["metric"] == metric]
    return s[s["source"] == source].set_index("time_s")["value"]


def mean_in_flight(of: Sampled, from_s: float, to_s: float) -> float:
    """Mean number of requests under way in a span, by the load generator's own integral over time.

    NaN where it told less than twice, or began anew within.
    """
    area_s = series(of, "load", "in_flight_s")
    area_s = area_s[(area_s.index >= from_s) & (area_s.index < to_s)]
    if len(area_s) < 2 or (area_s.diff() < 0).any():
        return math.nan
    return float((area_s.iloc[-1] - area_s.iloc[0]) / (area_s.index[-1] - area_s.index[0]))


def replica_seconds(run: Run) -> float:
    """∫ running replicas dt over the load, the cost of the run; NaN without samples."""
    end_s = float(run.experiment["workload"]["duration_s"])
    return replica_seconds_until(series(run, "serve", "running_replicas"), end_s)


def replica_seconds_until(running: pd.Series[float], end_s: float) -> float:
    """∫ running replicas dt up to `end_s`, from samples by time; each holds until the next."""
    running = running[running.index <= end_s]
    if not len(running):
        return math.nan
    widths = np.diff([*running.index, end_s])
    return float((running.to_numpy() * widths).sum())


def by_replica(of: Sampled, metric: str) -> pd.DataFrame:
    """One sampled metric of every replica: `time_s`, `replica_id` and a column named `metric`."""
    s = of.samples[of.samples["metric"] == metric]
    names = s["source"].str.removeprefix("replica:")
    return pd.DataFrame({"time_s": s["time_s"], "replica_id": names, metric: s["value"]})


def busy_share(of: Sampled) -> pd.DataFrame:
    """Busy share of each replica's accelerator: `time_s`, `replica_id`, `busy_share` (0 to 1)."""
    table = by_replica(of, "accelerator_busy_share")
    return table.rename(columns={"accelerator_busy_share": "busy_share"})


MARK = "mark"
"""In a change's place of a knob: a person's note at that time, its text in `to`."""


def took_effect(changes: pd.DataFrame) -> pd.DataFrame:
    """The changes that were applied: neither refused ones nor notes."""
    return changes[(changes["knob"] != MARK) & changes["applied_s"].notna()]


def moves(of: Sampled) -> pd.DataFrame:
    """Changes that went together, and notes between them: a row each, in order of time.

    Columns: `asked_s`, `applied_s`, `label` (a text; `mark: …` of a note), `error` (empty unless
    refused), `mark` (whether it is a note, not a change).
    """
    ordered = sorted(records(of.changes), key=lambda c: (c["asked_s"], c["knob"] == MARK))
    rows = []
    for (asked_s, mark), group in groupby(ordered, lambda c: (c["asked_s"], c["knob"] == MARK)):
        changes = list(group)
        texts = [
            f"mark: {c['to']}" if mark else f"{c['knob']} {c['from']} → {c['to']}" for c in changes
        ]
        first = changes[0]
        rows.append((asked_s, first["applied_s"], ", ".join(texts), first["error"], mark))
    return pd.DataFrame(rows, columns=["asked_s", "applied_s", "label", "error", "mark"])


def good_fraction_of(requests: pd.DataFrame, slo: Mapping[str, float | None]) -> float:
    """Successful requests within all the SLO's limits ÷ all attempts but those told to leave.

    NaN without any, and where a promise has no figure at all, as TTFT without streams.
    """
    met = keeps(requests[requests["outcome"] != "left"], slo)
    return float(met.mean()) if len(met) else math.nan


def keeps(requests: pd.DataFrame, slo: Mapping[str, float | None]) -> pd.Series[float]:
    """1 for each attempt that succeeded within all the SLO's limits, else 0; all of it NaN where a
    promise has no figure at all. An output of one token has no TPOT, so it breaks no promise of it.
    """
    met = requests["outcome"] == "ok"
    for name, limit_s in slo.items():
        if limit_s is None:
            continue
        values = requests[name.replace("_p95_s", "_s")]
        if values.isna().all():
            return pd.Series(math.nan, index=requests.index)
        within = values <= limit_s
        if name == "tpot_p95_s":
            within |= requests["output_tokens"] < 2
        met &= within
    return met.astype("float64")


def goodput_rps(requests: pd.DataFrame, slo: Mapping[str, float | None], span_s: float) -> float:
    """Successful requests within all the SLO's limits ÷ `span_s` seconds; NaN as `keeps`."""
    return float(keeps(requests, slo).sum(skipna=False)) / span_s
