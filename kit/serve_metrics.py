"""What Ray Serve itself counted: the Prometheus metrics that each node of a cluster exports.

Only counts of buckets are read. The sums beside them are made up of the buckets' midpoints in Ray
2.60, so a mean of them says no more than which bucket it lies in.
"""

from __future__ import annotations

import time
from typing import Any

import pandas as pd
import requests

from kit import cluster
from kit.application import APP_NAME
from kit.connection import Connection

HISTOGRAMS = {
    "ray_serve_actual_batch_size": "batch size",
    "ray_serve_batch_wait_time_ms": "batch wait",
    "ray_serve_batch_execution_time_ms": "batch execution",
}
"""Metric → what it counts: batches, by their size and by how long they filled and ran, in ms."""
REQUESTS = "ray_serve_deployment_request_counter_total"
ANSWERED = ("ok", "invalid", "error", "left")
"""Outcomes of requests that a replica answered."""
COLUMNS = ("metric", "deployment", "replica", "le", "count")

WHY = "why"
"""In a table's `attrs`: why it has no counts, or not all, in words; absent where it has."""
UNREAD = "Serve's metrics could not be read: "
"""How a run's note of that begins."""

DEFAULT_INTERVAL_S = 10.0
"""How often Ray's processes hand over their metrics in a cluster that others started."""
MARGIN_S = 0.5
"""What a hand-over takes; Serve itself keeps counts back for 0.1 s."""


def scrape(connection: Connection, app: str = APP_NAME) -> pd.DataFrame:
    """Counts so far of one app: `COLUMNS`; `le` is a bucket's upper edge, infinite of plain counters.

    Counts of a histogram are cumulative, as Prometheus has them. It never raises: where a node does
    not tell, its counts are missing and `attrs[WHY]` says why.
    """
    rows: list[tuple[Any, ...]] = []
    urls = connection.metrics_urls()
    why = "" if urls else "the dashboard names no node that exports metrics"
    for url in urls:
        try:
            answer = requests.get(url, timeout=5)
            answer.raise_for_status()
            rows += _counts(answer.text, app)
        except (requests.RequestException, ValueError, KeyError) as error:
            why = f"{url} does not tell them ({type(error).__name__})"
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    keys = list(COLUMNS[:-1])
    if len(table):
        table = pd.DataFrame(table.groupby(keys)["count"].sum()).reset_index()
    return _because(table, why)


def _counts(text: str, app: str) -> list[tuple[Any, ...]]:
    """The counts in a page of Prometheus' text format; a ValueError where it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    wanted = (*HISTOGRAMS, REQUESTS)
    # A node tells of far more than Serve: only what is wanted is parsed.
    lines = [
        line for line in text.splitlines()
        if line.startswith(wanted) or line.startswith(tuple(f"# TYPE {w}" for w in wanted))
    ]  # fmt: skip
    rows = []
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
    return rows


def _because(table: pd.DataFrame, why: str) -> pd.DataFrame:
    if why:
        table.attrs[WHY] = why
    return table


def grown(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """What was counted between two scrapes.

    A replica that began in between starts at zero, and so does one whose counts fell, since counters
    only grow. Of one that is in `before` alone nothing is known. Empty, with the reason, where either
    scrape was not whole: a difference to half of the counts would be one to nothing.
    """
    if why := before.attrs.get(WHY) or after.attrs.get(WHY):
        return _because(pd.DataFrame(columns=list(COLUMNS)), why)
    keys = list(COLUMNS[:-1])
    new = after.set_index(keys)["count"]
    since = new - before.set_index(keys)["count"].reindex(new.index, fill_value=0.0)
    anew = (since < 0).groupby(level=keys[:3]).transform("any")
    return pd.DataFrame({"count": since.where(~anew, new)}).reset_index()


def interval_s(connection: Connection) -> float:
    """How long counts take at most until they can be read."""
    return MARGIN_S + (cluster.metrics_interval_s() if connection.owned else DEFAULT_INTERVAL_S)


def begin(connection: Connection) -> pd.DataFrame:
    """The counts before a load; of an earlier one, which there was if any count, all are in by then."""
    table = scrape(connection)
    if not len(table):
        return table
    time.sleep(interval_s(connection))
    return scrape(connection)


def end(before: pd.DataFrame, connection: Connection, answered: int) -> pd.DataFrame:
    """What was counted since, all of it: one interval after the load has ended, or earlier.

    Earlier where a single deployment works and has counted so many answers: a replica hands over all
    that it counted at once.
    """
    until_s = time.monotonic() + interval_s(connection)
    while True:
        table = grown(before, scrape(connection))
        alone = (requests_counted(table) > 0).sum() == 1
        if WHY in table.attrs or (alone and entered(table) >= answered):
            return table
        if time.monotonic() > until_s:
            return table if len(table) else _because(table, "Serve exports none of this app")
        time.sleep(0.25)


def requests_counted(counted: pd.DataFrame) -> pd.Series[float]:
    """Requests that each deployment answered."""
    rows = counted[counted["metric"] == REQUESTS]
    return rows.groupby("deployment")["count"].sum()


def entered(counted: pd.DataFrame) -> float:
    """Requests that the app's entrance answered: of its deployments the one with most."""
    return float(requests_counted(counted).max()) if len(counted) else 0.0
