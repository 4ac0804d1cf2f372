"""Runs made up from known parts, for tests of what is computed from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from kit.experiment import Change, Experiment
from kit.load import REQUEST_COLUMNS, TEXT_COLUMNS
from kit.settings import Settings
from kit.store import CHANGE_COLUMNS, Run
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
    table["outcome"], table["status"] = "ok", 200.0
    table["replica_id"], table["batch_id"], table["batch_size"] = "r1", np.arange(n) // 4 + 0.0, 4.0
    table["prompt_tokens"], table["output_tokens"] = 100.0, 50.0
    table["route"], table["finish_reason"] = "-", "length"
    for unstreamed in ("ttft_s", "tpot_s"):
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
