"""Runs made up from known parts, for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from kit.experiment import Change, Experiment
from kit.rows import REQUEST_COLUMNS, TEXT_COLUMNS
from kit.settings import Settings
from kit.store import CHANGE_COLUMNS, Run
from kit.view import RECENT_S, View
from kit.workload import Workload


def requests_table(n: int, duration_s: float = 60.0, seed: int = 0) -> pd.DataFrame:
    """n rows of known make: router 10 ms, batch wait 0.1–0.3 s, inference 0.5 s, rest 5 ms."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(index=range(n), columns=list(REQUEST_COLUMNS))
    table["request"], table["attempt"] = np.arange(n, dtype=float), 1.0
    table["sent_s"] = np.sort(rng.uniform(0, duration_s - 1, n))
    table["router_s"], table["rest_s"], table["inference_s"] = 0.01, 0.005, 0.5
    table["engine_queue_s"], table["prefill_s"], table["decode_s"] = 0.0, 0.1, 0.4
    table["postprocess_s"] = 0.0
    table["batch_wait_s"] = rng.uniform(0.1, 0.3, n)
    table["queueing_s"] = table["router_s"] + table["batch_wait_s"]
    table["e2e_s"] = table["queueing_s"] + table["inference_s"] + table["rest_s"]
    table["client_wait_s"] = 0.001
    table["intended_s"] = table["sent_s"] - table["client_wait_s"]
    table["response_s"] = table["client_wait_s"] + table["e2e_s"]
    table["outcome"], table["status"] = "ok", 200.0
    table["replica_id"], table["batch_id"], table["batch_size"] = "r1", np.arange(n) // 4 + 0.0, 4.0
    table["prompt_tokens"], table["output_tokens"] = 100.0, 50.0
    table["route"], table["finish_reason"] = "-", "length"
    for unstreamed in ("ttft_s", "tpot_s", "batch_fill_s", "batch_run_s"):
        table[unstreamed] = np.nan
    for empty in ("error", "itl_ms"):
        table[empty] = pd.Series([np.nan] * n, dtype="str")
    return table.astype(dict.fromkeys(TEXT_COLUMNS, "str"))


def samples_table(duration_s: float = 60.0) -> pd.DataFrame:
    """One replica, two from half time on; busy half of the time; 8 users."""
    rows = []
    for t in np.arange(0, duration_s, 0.5):
        running = 1 if t < duration_s / 2 else 2
        rows += [(t, "serve", f"{k}_replicas", v) for k, v in
                 (("target", running), ("running", running), ("starting", 0))]  # fmt: skip
        rows += [(t, "load", "users", 8.0), (t, "load", "in_flight", 8.0)]
        rows.append((t, "replica:r1", "accelerator_busy_share", 0.5))
    return pd.DataFrame(rows, columns=["time_s", "source", "metric", "value"])


def fake_run(n: int = 400, folder: Path = Path("nowhere"), duration_s: float = 60.0) -> Run:
    """A complete run with one change at half time."""
    half = duration_s / 2
    experiment = Experiment(
        Settings(), Workload(duration_s=duration_s), (Change(half, "max_batch_size", 16),)
    )
    change = ("max_batch_size", "8", "16", half, half + 0.4, 0.0, "")
    return Run(
        run_id="fake",
        experiment=experiment.as_dict(),
        environment={"cpus": 2},
        status="complete",
        notes=(),
        requests=requests_table(n, duration_s),
        samples=samples_table(duration_s),
        changes=pd.DataFrame([change], columns=list(CHANGE_COLUMNS)),
        folder=folder,
    )


def view(
    settings: Settings | None = None,
    n: int = 200,
    recent_s: float = RECENT_S,
    slo: Mapping[str, float | None] | None = None,
    changes: tuple[tuple[object, ...], ...] = (),
    samples: Mapping[str, object] | None = None,
    **columns: object,
) -> View:
    """A minute of steady load, well within its promises unless `columns` of its requests say so.

    Router 10 ms, batch wait 10 ms, inference 0.5 s, rest 5 ms; batches of 4; one replica, half busy.

    Args:
        samples: metric, or `source metric`, → its value, or one value for each half second. Metrics
            go to where the sampler has them; those of a replica to `replica:r1`.
        columns: values of `REQUEST_COLUMNS`; sums (`queueing_s`, …) follow from the parts.
    """
    now_s = 60.0
    recent = requests_table(n).assign(**({"batch_wait_s": 0.01} | columns))
    recent["queueing_s"] = recent[["router_s", "batch_wait_s", "engine_queue_s"]].sum(axis=1)
    recent["inference_s"] = recent["prefill_s"] + recent["decode_s"]
    spans = ["queueing_s", "inference_s", "postprocess_s", "rest_s"]
    recent["e2e_s"] = recent[spans].sum(axis=1)
    recent["sent_s"] = now_s - np.linspace(recent_s, 0, n) - recent["e2e_s"]
    known = {
        "target_replicas": 1, "running_replicas": 1, "starting_replicas": 0, "users": 8,
        "in_flight": 8, "accelerator_busy_share": 0.5, "ongoing_requests": 4,
    } | dict(samples or {})  # fmt: skip
    rows = []
    for name, values in known.items():
        *source, metric = name.split()
        where = "serve" if metric.endswith("_replicas") else "replica:r1"
        where = "load" if metric in ("users", "in_flight") else where
        at_s = np.arange(0.5, now_s, 0.5)
        each = np.broadcast_to(np.asarray(values, dtype=float), at_s.shape)
        rows += [(t, *(source or [where]), metric, v) for t, v in zip(at_s, each, strict=True)]
    table = pd.DataFrame(rows, columns=["time_s", "source", "metric", "value"])
    return View(
        now_s=now_s,
        span_s=now_s,
        settings=settings or Settings(),
        slo={"e2e_p95_s": 1.5, "queueing_p95_s": 0.2} if slo is None else slo,
        windows=pd.DataFrame(),
        recent=recent,
        recent_s=recent_s,
        samples=table.sort_values("time_s", kind="stable", ignore_index=True),
        changes=pd.DataFrame(list(changes), columns=list(CHANGE_COLUMNS)),
        replica_seconds=60.0,
    )


def ks_distance(gaps_s: np.ndarray) -> float:
    """Kolmogorov and Smirnov's distance between gaps and the exponential of their mean."""
    expected = 1 - np.exp(-np.sort(gaps_s) / gaps_s.mean())
    steps = np.arange(len(gaps_s) + 1) / len(gaps_s)
    return float(max((steps[1:] - expected).max(), (expected - steps[:-1]).max()))
