"""What Ray Serve itself counted: the Prometheus metrics that each node of a cluster exports.

Only counts of buckets are read. The sums beside them are made up of the buckets' midpoints in Ray
2.60, so a mean of them says no more than which bucket it lies in.
"""

from __future__ import annotations

import time
from typing import Any

import pandas as pd
import requests

from kit.application import APP_NAME
from kit.connection import Connection

HISTOGRAMS = {
    "ray_serve_actual_batch_size": "batch size",
    "ray_serve_batch_wait_time_ms": "batch wait",
    "ray_serve_batch_execution_time_ms": "batch execution",
}
"""Metric → what it counts: batches, by their size and by how long they filled and ran, in ms."""
REQUESTS = "ray_serve_deployment_request_counter_total"
COLUMNS = ("metric", "deployment", "replica", "le", "count")

PUSH_S = 2.5
"""Ray's processes hand their metrics over every two seconds (`kit.cluster` sees to it)."""
SETTLE_S = 12.0
"""The longest wait: in a cluster that others started it is every ten."""


def scrape(connection: Connection, app: str = APP_NAME) -> pd.DataFrame:
    """Counts so far of one app: `COLUMNS`; `le` is a bucket's upper edge, infinite of plain counters.

    Counts of a histogram are cumulative, as Prometheus has them. Empty where no node answers.
    """
    from prometheus_client.parser import text_string_to_metric_families

    rows: list[tuple[Any, ...]] = []
    wanted = (*HISTOGRAMS, REQUESTS)
    for url in connection.metrics_urls():
        try:
            text = requests.get(url, timeout=5).text
        except requests.RequestException:
            continue
        # A node tells of far more than Serve: only what is wanted is parsed.
        lines = [
            line for line in text.splitlines()
            if line.startswith(wanted) or line.startswith(tuple(f"# TYPE {w}" for w in wanted))
        ]  # fmt: skip
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for s in family.samples:
                name = s.name.removesuffix("_bucket")
                if s.labels.get("application") == app and (
                    s.name.endswith("_bucket") or name == REQUESTS
                ):
                    edge = float(s.labels.get("le", "inf"))
                    rows.append(
                        (name, s.labels["deployment"], s.labels.get("replica", ""), edge, s.value)
                    )
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    keys = list(COLUMNS[:-1])
    return pd.DataFrame(table.groupby(keys)["count"].sum()).reset_index() if len(table) else table


def grown(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """What was counted between two scrapes; a replica that began in between starts at zero."""
    keys = list(COLUMNS[:-1])
    old = before.set_index(keys)["count"]
    new = after.set_index(keys)["count"]
    since = new - old.reindex(new.index, fill_value=0.0)
    return pd.DataFrame({"count": since}).reset_index()


def begin(connection: Connection) -> pd.DataFrame:
    """The counts before a load; of an earlier one all have come in by then."""
    if len(scrape(connection)):
        time.sleep(PUSH_S)
    return scrape(connection)


def end(before: pd.DataFrame, connection: Connection, answered: int) -> pd.DataFrame:
    """What was counted since, once the app's entrance has counted so many answers.

    Or after `SETTLE_S`, whatever it has counted.
    """
    until_s = time.monotonic() + SETTLE_S
    while True:
        table = grown(before, scrape(connection))
        if entered(table) >= answered or time.monotonic() > until_s:
            return table
        time.sleep(0.25)


def entered(counted: pd.DataFrame) -> float:
    """Requests that the app's entrance answered: of its deployments the one with most."""
    rows = counted[counted["metric"] == REQUESTS]
    return float(rows.groupby("deployment")["count"].sum().max()) if len(rows) else 0.0
