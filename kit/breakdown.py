"""A run from four sides: by route, by static batch, by what a user wanted, by the engine's state.

Pure tables → tables, in the vocabulary of `kit.measures`.
"""

from __future__ import annotations

import math

import pandas as pd

from kit.measures import finished_s, ok, percentile
from kit.store import Run

STATIC_APPS = ("batched", "routed")
"""Apps whose batches start together and come back together."""


def by_route(run: Run) -> pd.DataFrame:
    """Successful requests by the route that served them: one row a route.

    Columns: `route`, `requests`, `throughput_rps`, `output_tokens_per_s`, `prompt_tokens` and
    `output_tokens` (means), p50 and p95 of end-to-end, queueing and inference in seconds.
    """
    good = ok(run.requests)
    span_s = float(finished_s(good).max() - run.requests["sent_s"].min()) if len(good) else math.nan
    rows = []
    for route, inside in good.groupby("route", sort=True):
        row = {
            "route": route,
            "requests": len(inside),
            "throughput_rps": len(inside) / span_s,
            "output_tokens_per_s": inside["output_tokens"].sum() / span_s,
            "prompt_tokens": inside["prompt_tokens"].mean(),
            "output_tokens": inside["output_tokens"].mean(),
        }
        for part in ("e2e", "queueing", "inference"):
            for q in (50, 95):
                row[f"{part}_p{q}_s"] = percentile(inside[f"{part}_s"], q)
        rows.append(row)
    return pd.DataFrame(rows)


def useful_share(requests: pd.DataFrame) -> pd.DataFrame:
    """How much of each static batch was work: a batch lasts as long as its longest output.

    Only batches of which every request is here and succeeded; meaningless for continuous batching.

    Returns:
        One row a batch: `replica_id`, `batch_id`, `batch_size`, `longest_tokens`, `useful_tokens`
        (the outputs), `slot_tokens` (batch size × longest) and `useful_share`, their ratio.
    """
    good = ok(requests).dropna(subset=["batch_id", "output_tokens"])
    table = (
        good.groupby(["replica_id", "batch_id"])
        .agg(
            batch_size=("batch_size", "first"),
            found=("batch_size", "size"),
            longest_tokens=("output_tokens", "max"),
            useful_tokens=("output_tokens", "sum"),
        )
        .reset_index()
    )
    table = table[table["found"] == table["batch_size"]].drop(columns="found")
    table["slot_tokens"] = table["batch_size"] * table["longest_tokens"]
    table["useful_share"] = table["useful_tokens"] / table["slot_tokens"]
    return table.reset_index(drop=True)


def static_batches(run: Run) -> pd.DataFrame:
    """`useful_share` of a run; no rows when its app forms no static batches."""
    static = run.experiment["settings"]["app"] in STATIC_APPS
    return useful_share(run.requests if static else run.requests.iloc[:0])


def useful_share_total(run: Run) -> float:
    """Output tokens ÷ slot tokens over all whole static batches; NaN where there are none."""
    table = static_batches(run)
    return (
        float(table["useful_tokens"].sum() / table["slot_tokens"].sum()) if len(table) else math.nan
    )


def demands(requests: pd.DataFrame) -> pd.DataFrame:
    """What users wanted, retries taken together: one row a request number, in order.

    Columns: `request`, `attempts`, `outcome` (of the last attempt), `first_sent_s`, `finished_s`,
    `answer_s` (first send → last answer, the pauses between included).
    """
    ordered = requests.assign(finished_s=finished_s(requests)).sort_values(["request", "attempt"])
    table = (
        ordered.groupby("request")
        .agg(
            attempts=("attempt", "size"),
            outcome=("outcome", "last"),
            first_sent_s=("sent_s", "first"),
            finished_s=("finished_s", "last"),
        )
        .reset_index()
    )
    return table.assign(answer_s=table["finished_s"] - table["first_sent_s"])


def engine_state(run: Run) -> pd.DataFrame:
    """What the engines said of themselves: `time_s`, `replica_id`, `metric`, `value`.

    Metrics: `running_sequences`, `waiting_sequences`, `kv_cache_share` and
    `prefix_cache_hit_share` (0 to 1), `preemptions` (since the replica's start).
    """
    s = run.samples[run.samples["metric"].isin(ENGINE_METRICS)]
    s = s[s["source"].str.startswith("replica:")]
    names = s["source"].str.removeprefix("replica:")
    return s.assign(replica_id=names)[["time_s", "replica_id", "metric", "value"]]


ENGINE_METRICS = (
    "running_sequences", "waiting_sequences", "kv_cache_share", "preemptions",
    "prefix_cache_hit_share",
)  # fmt: skip
