"""The kit's figures against what Ray Serve counted, and against Little's law; disagreement is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import fake_run, requests_table

from kit import agreement, serve_metrics
from kit.experiment import Experiment, run
from kit.serving import Serving
from kit.settings import Settings
from kit.store import Run
from kit.workload import Workload

INF = float("inf")
PAGE = """# HELP ray_serve_actual_batch_size The actual number of requests in each batch.
# TYPE ray_serve_actual_batch_size histogram
ray_serve_actual_batch_size_bucket{application="kit",deployment="Model",replica="r1",le="4.0"} 3.0
ray_serve_actual_batch_size_bucket{application="kit",deployment="Model",replica="r1",le="+Inf"} 5.0
ray_serve_actual_batch_size_count{application="kit",deployment="Model",replica="r1"} 5.0
ray_serve_actual_batch_size_sum{application="kit",deployment="Model",replica="r1"} 99.0
ray_serve_actual_batch_size_bucket{application="other",deployment="Model",replica="r9",le="+Inf"} 7.0
# TYPE ray_serve_deployment_request_counter_total counter
ray_serve_deployment_request_counter_total{application="kit",deployment="Model",replica="r1"} 20.0
ray_serve_deployment_request_counter_total{application="kit",deployment="Router",replica="r2"} 24.0
# TYPE ray_node_cpu gauge
ray_node_cpu{NodeAddress="here"} 1.0
"""


class Node:
    """A connection whose one node answers `pages` in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *pages: str) -> None:
        left = list(pages)

        class Answer:
            def __init__(self) -> None:
                self.text = left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(serve_metrics.requests, "get", lambda url, timeout: Answer())

    def metrics_urls(self) -> list[str]:
        return ["http://node:1/metrics"]


def test_counts_of_one_app_are_read_and_never_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    table = serve_metrics.scrape(Node(monkeypatch, PAGE))  # type: ignore[arg-type]
    sizes = table[table["metric"] == "ray_serve_actual_batch_size"]
    assert dict(zip(sizes["le"], sizes["count"], strict=True)) == {4.0: 3.0, INF: 5.0}
    assert set(table["replica"]) == {"r1", "r2"}
    assert 99.0 not in set(table["count"])
    assert serve_metrics.entered(table) == 24


def test_what_grew_counts_replicas_that_began_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    later = PAGE.replace("} 20.0", "} 29.0") + PAGE.splitlines()[8].replace('"r1"', '"r3"') + "\n"
    node = Node(monkeypatch, PAGE, later)
    before = serve_metrics.scrape(node)  # type: ignore[arg-type]
    grown = serve_metrics.end(before, node, answered=29)  # type: ignore[arg-type]
    counted = grown[grown["metric"] == serve_metrics.REQUESTS].set_index("replica")["count"]
    assert counted.to_dict() == {"r1": 9.0, "r2": 0.0, "r3": 20.0}


def counted(requests: pd.DataFrame, edges_ms: tuple[float, ...] = (5, 100, 600)) -> pd.DataFrame:
    """What Serve would have counted of these requests."""
    batches = requests.drop_duplicates(["replica_id", "batch_id"])
    rows = [(serve_metrics.REQUESTS, "Model", "r1", INF, float(len(requests)))]
    for metric, (column, times, _) in agreement._OURS.items():
        values = batches[column] * times
        edges = (1.0, 4.0, INF) if column == "batch_size" else (*edges_ms, INF)
        rows += [(metric, "Model", "r1", e, float((values <= e).sum())) for e in edges]
    return pd.DataFrame(rows, columns=list(serve_metrics.COLUMNS))


@pytest.fixture
def made() -> Run:
    rng = np.random.default_rng(0)
    table = requests_table(800)
    batch = table["batch_id"].astype(int)
    table["batch_fill_s"] = rng.uniform(0, 0.2, 200)[batch]
    table["batch_run_s"] = rng.uniform(0.4, 0.7, 200)[batch]
    return replace(fake_run(800), requests=table, counted=counted(table))


def test_the_same_batches_agree_and_a_hair_at_an_edge_is_forgiven(made: Run) -> None:
    batches = agreement.checks(made)[:4]
    assert [c.agrees for c in batches] == [True] * 4
    assert {c.difference for c in batches} == {0.0}
    near = made.requests.assign(batch_run_s=0.6004)
    theirs = counted(made.requests.assign(batch_run_s=0.5996))
    found = agreement.checks(replace(made, requests=near, counted=theirs))[2]
    assert (found.agrees, found.difference) == (True, 0.0)


@pytest.mark.parametrize(("share", "agree"), [(0.01, True), (0.05, False)])
def test_batches_in_another_bucket_are_counted(made: Run, share: float, agree: bool) -> None:
    slow = made.requests["batch_run_s"].where(made.requests["batch_id"] >= share * 200, 0.65)
    slow = slow.where(slow == 0.65, 0.55)
    theirs = counted(made.requests.assign(batch_run_s=0.55))
    found = agreement.checks(
        replace(made, requests=made.requests.assign(batch_run_s=slow), counted=theirs)
    )[2]
    assert found.difference == pytest.approx(share)
    assert found.agrees is agree


def test_lost_rows_are_noticed(made: Run) -> None:
    fewer = replace(made, requests=made.requests.iloc[:700])
    found = agreement.checks(fewer)
    assert [c.agrees for c in found[:4]] == [False] * 4
    assert (agreement.table(fewer)["agree"] == "NO").sum() >= 4


def test_what_was_not_counted_is_not_called_agreement(made: Run) -> None:
    alone = replace(made, counted=made.counted.iloc[:0])
    found = agreement.checks(alone)
    assert [c.agrees for c in found[:4]] == [None] * 4
    assert all("agreement=True" in c.note for c in found[:4])
    nobody = replace(alone, requests=made.requests.iloc[:0], samples=made.samples.iloc[:0])
    assert {c.agrees for c in agreement.checks(nobody)} == {None}
    assert set(agreement.table(nobody)["agree"]) == {"not known"}


def test_littles_law_sees_requests_that_nobody_wrote_down(made: Run) -> None:
    """800 requests in 60 s of 0.715 s each: 9.5 under way."""
    steady = made.requests.sort_values("sent_s").reset_index(drop=True)
    law = len(steady) / 59 * steady["e2e_s"].mean()
    grid = np.arange(0, 60, 0.5)
    for in_flight, agrees in ((law, True), (1.2 * law, False)):
        samples = pd.DataFrame(
            {"time_s": grid, "source": "load", "metric": "in_flight_s", "value": in_flight * grid}
        )
        found = agreement.checks(replace(made, samples=samples, changes=made.changes[:0]))[4]
        assert found.agrees is agrees, found


@pytest.mark.parametrize("hold", [True, False])
def test_batches_match_serves_own_buckets(as_left: Serving, tmp_path: Path, hold: bool) -> None:
    """On the real thing: within 2 % of all batches, and Little's law within 5 %."""
    settings = Settings(max_batch_size=4, hold_while_busy=hold, time_scale=0.1 if hold else 0.04)
    workload = Workload(users=6, duration_s=18.0 if hold else 6.0)
    done = run(
        Experiment(settings, workload), as_left, tmp_path / "run", progress=False, agreement=True
    )
    found = {c.what: c for c in agreement.checks(done)}
    print(agreement.table(done).to_string())
    assert len(done.requests) > 50
    batches = [c for what, c in found.items() if what.startswith("batch")]
    assert [c.agrees for c in batches] == [True] * 3, batches
    assert found["requests that a replica answered"].agrees
    if hold:
        law = [c for what, c in found.items() if "Little" in what]
        assert [c.agrees for c in law] == [True] * 2, law
