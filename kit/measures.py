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

from kit.settings import BY_NAME
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


def phases(run: Run, settle: float = 0.3) -> pd.DataFrame:
    """Stretches of a run between changes that took effect, each measured after settling.

    Args:
        run: any run.
        settle: share of each stretch left out at its start: what was under way before the change
            is not its effect.

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
    rows = []
    for label, start_s, stop_s in zip(labels, starts, ends, strict=True):
        from_s = start_s + settle * (stop_s - start_s)
        rows_in = good[(ended >= from_s) & (ended < stop_s)]
        width_s = max(stop_s - from_s, 1e-9)
        row: dict[str, Any] = {
            "label": label,
            "start_s": start_s,
            "from_s": from_s,
            "end_s": stop_s,
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
        inside = busy["time_s"].between(from_s, stop_s)
        row["busy_share"] = busy.loc[inside, "busy_share"].mean()
        rows.append(row)
    return pd.DataFrame(rows)


def verdicts(run: Run) -> pd.DataFrame:
    """One row for each promise of the run's SLO: `slo`, `limit_s`, and the figure over the whole
    run and in its last stretch, each with whether it is met (None where there is no figure)."""
    last = phases(run).iloc[-1]
    good = ok(run.requests)
    rows = []
    for name, limit_s in run.experiment["slo"].items():
        if limit_s is None:
            continue
        whole = percentile(good[name.replace("_p95_s", "_s")], 95)
        end = float(last[name])
        met = [None if math.isnan(v) else v <= limit_s for v in (whole, end)]
        rows.append((name, limit_s, whole, met[0], end, met[1]))
    columns = ["slo", "limit_s", "whole_run_s", "met_whole_run", "last_stretch_s", "met_at_the_end"]
    return pd.DataFrame(rows, columns=columns)


def good_fraction(run: Run) -> float:
    """`good_fraction_of` the run's requests under its own SLO."""
    return good_fraction_of(run.requests, run.experiment["slo"])


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


def summary(run: Run) -> dict[str, Any]:
    """The run in flat figures, the unit in each key; None where there is nothing to measure."""
    good = ok(run.requests)
    outcome = run.requests["outcome"].value_counts()
    span_s = float(finished_s(good).max() - run.requests["sent_s"].min()) if len(good) else math.nan
    good_share, gaps_s = good_fraction(run), itl_s(run.requests)
    attempts = int((run.requests["outcome"] != "left").sum())
    # Changes of the load and marks reach no replica.
    sent = run.changes[run.changes["knob"].isin(BY_NAME)]
    found: dict[str, Any] = {
        "run_id": run.run_id,
        "status": run.status,
        "duration_s": float(run.experiment["workload"]["duration_s"]),
        **{f"{o}_requests": int(outcome.get(o, 0)) for o in OUTCOMES},
        "throughput_rps": throughput_rps(run.requests),
        "output_tokens_per_s": float(good["output_tokens"].sum()) / span_s,
        "goodput_rps": good_share * attempts / span_s,
        "good_fraction": good_share,
        **{
            f"{part}_p{q}_s": percentile(good[f"{part}_s"], q)
            for part in (
                *("e2e", "response", "client_wait", "queueing", "inference", "ttft", "tpot"),
                *(p.removesuffix("_s") for p in PARTS),
            )
            for q in (50, 95, 99)
        },
        **{f"itl_p{q}_s": percentile(gaps_s, q) for q in (50, 95, 99)},
        "batch_size_mean_requests": float(good["batch_size"].mean()),
        "identity_error_p99_s": percentile(identity_error_s(run.requests), 99),
        "max_running_replicas": float(series(run, "serve", "running_replicas").max()),
        "replica_seconds": replica_seconds(run),
        "accelerator_busy_share_mean": float(busy_share(run)["busy_share"].mean()),
        "change_applied_median_s": float((sent["applied_s"] - sent["asked_s"]).median()),
        "restarted_replicas": float(sent["restarted_replicas"].sum()),
    }
    plain = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in found.items()}
    return plain | {
        f"slo_{v['slo'].removesuffix('_s')}_met_at_the_end": v["met_at_the_end"]
        for v in records(verdicts(run))
    }
