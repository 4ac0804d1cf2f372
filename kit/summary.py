"""A run in flat figures, and whether its promises were kept."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from kit import phases, validity
from kit.measures import (
    OUTCOMES,
    PARTS,
    busy_share,
    finished_s,
    good_fraction_of,
    identity_error_s,
    itl_s,
    ok,
    percentile,
    records,
    replica_seconds,
    series,
    throughput_rps,
    told,
)  # fmt: skip
from kit.settings import BY_NAME
from kit.store import Run


def verdicts(run: Run) -> pd.DataFrame:
    """One row for each promise of the run's SLO: `slo`, `limit_s`, and the figure over the whole
    run and in its last stretch, each with whether it is met (None where there is no figure), and how
    many requests ended in the latter."""
    last = phases.stretches(run).iloc[-1]
    good = ok(run.requests)
    rows = []
    for name, limit_s in run.experiment["slo"].items():
        if limit_s is None:
            continue
        whole = percentile(good[name.replace("_p95_s", "_s")], 95)
        end = float(last[name])
        met = [None if math.isnan(v) else v <= limit_s for v in (whole, end)]
        rows.append((name, limit_s, whole, met[0], end, met[1], last["requests"]))
    columns = [
        "slo",
        "limit_s",
        "whole_run_s",
        "met_whole_run",
        "last_stretch_s",
        "met_at_the_end",
        "requests_at_the_end",
    ]
    return pd.DataFrame(rows, columns=columns)


def good_fraction(run: Run) -> float:
    """`good_fraction_of` the run's requests under its own SLO."""
    return good_fraction_of(run.requests, run.experiment["slo"])


def of(run: Run) -> dict[str, Any]:
    """The run in flat figures, the unit in each key; None where there is too little to tell."""
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
        "valid": not (why := validity.invalid(run)),
        "invalid_because": why or None,
        "duration_s": float(run.experiment["workload"]["duration_s"]),
        **{f"{o}_requests": int(outcome.get(o, 0)) for o in OUTCOMES},
        "throughput_rps": throughput_rps(run.requests),
        "output_tokens_per_s": float(good["output_tokens"].sum()) / span_s,
        "goodput_rps": good_share * attempts / span_s,
        "good_fraction": good_share,
        **{
            f"{part}_p{q}_s": told(good[f"{part}_s"], q)
            for part in (
                *("e2e", "response", "client_wait", "queueing", "inference", "ttft", "tpot"),
                *(p.removesuffix("_s") for p in PARTS),
            )
            for q in (50, 95, 99)
        },
        **{f"itl_p{q}_s": told(gaps_s, q) for q in (50, 95, 99)},
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
