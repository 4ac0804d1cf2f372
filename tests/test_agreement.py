"""The kit's figures against what Ray Serve counted, and against Little's law; disagreement is seen."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import requests
from fakes import fake_run, requests_table

from kit import agreement, replica, serve_metrics, store
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
    """A connection whose one node answers `pages` in turn, or fails with what is no text."""

    owned = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *pages: str | Exception | int) -> None:
        left = list(pages)

        def get(url: str, timeout: float) -> requests.Response:
            page = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(page, Exception):
                raise page
            answer = requests.Response()
            answer.status_code = page if isinstance(page, int) else 200
            answer._content = b"" if isinstance(page, int) else page.encode()
            return answer

        monkeypatch.setattr(serve_metrics.requests, "get", get)
        monkeypatch.setattr(serve_metrics, "MARGIN_S", 0.0)
        monkeypatch.setattr(serve_metrics, "DEFAULT_INTERVAL_S", 0.0)

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


def test_what_grew_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that fell began anew, all buckets of their histogram; of one forgotten none is known."""
    anew = PAGE.replace('le="4.0"} 3.0', 'le="4.0"} 2.0').replace(
        'le="+Inf"} 5.0', 'le="+Inf"} 6.0'
    )
    gone = "\n".join(line for line in anew.splitlines() if '"r2"' not in line) + "\n"
    node = Node(monkeypatch, PAGE, gone)
    grown = serve_metrics.grown(serve_metrics.scrape(node), serve_metrics.scrape(node))  # type: ignore[arg-type]
    sizes = grown[grown["metric"] == "ray_serve_actual_batch_size"].set_index("le")["count"]
    assert sizes.to_dict() == {4.0: 2.0, INF: 6.0}
    assert set(grown["replica"]) == {"r1"}
    assert (grown["count"] >= 0).all()


@pytest.mark.parametrize(
    ("page", "why"),
    [(requests.ConnectionError(), "ConnectionError"), (500, "HTTPError"),
     (PAGE.replace('replica="r1"', 'replica="r1'), "ValueError")],
)  # fmt: skip
def test_a_silent_node_is_a_reason_and_no_error(
    monkeypatch: pytest.MonkeyPatch, page: str | Exception | int, why: str
) -> None:
    """Half of a difference is none: it does not matter which of the two scrapes failed."""
    for pages in ((page, PAGE), (PAGE, page)):
        node = Node(monkeypatch, *pages)
        before = serve_metrics.scrape(node)  # type: ignore[arg-type]
        table = serve_metrics.end(before, node, answered=1)  # type: ignore[arg-type]
        assert list(table.columns) == list(serve_metrics.COLUMNS)
        assert not len(table)
        assert why in table.attrs[serve_metrics.WHY]


def test_what_works_behind_the_entrance_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router has counted all answers; what the model counted comes with its own hand-over."""
    early = PAGE.replace("} 20.0", "} 21.0").replace("} 24.0", "} 34.0")
    late = PAGE.replace("} 20.0", "} 30.0").replace("} 24.0", "} 34.0")
    node = Node(monkeypatch, PAGE, early, late)
    monkeypatch.setattr(serve_metrics, "MARGIN_S", 0.1)
    before = serve_metrics.scrape(node)  # type: ignore[arg-type]
    table = serve_metrics.end(before, node, answered=10)  # type: ignore[arg-type]
    assert serve_metrics.requests_counted(table).to_dict() == {"Model": 10.0, "Router": 10.0}


def test_counts_of_a_run_are_read_back_and_old_runs_have_none(tmp_path: Path, made: Run) -> None:
    old = replace(made, folder=tmp_path)
    store.write(old)
    assert list(store.load(tmp_path).counted.columns) == list(serve_metrics.COLUMNS)
    made.counted.to_csv(tmp_path / store.COUNTED, index=False)
    pd.testing.assert_frame_equal(store.load(tmp_path).counted, made.counted)


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


def test_the_least_that_is_misplaced_is_found() -> None:
    """Against every way to move what lies at an edge; a batch two buckets away is one batch."""
    rng = np.random.default_rng(1)
    edges = np.array([10.0, 20.0, 50.0, INF])
    for _ in range(50):
        values = rng.choice([9.5, 10.5, 19.5, 20.5, 30.0, 50.5], size=6)
        theirs = rng.integers(0, 4, size=4)
        home = np.searchsorted(edges, values)
        other = [
            int(np.searchsorted(edges, v + (1 if v % 1 and v % 10 > 5 else -1))) for v in values
        ]
        least = min(
            (np.abs(apart).sum() + abs(apart.sum())) / 2
            for places in itertools.product(*zip(home, other, strict=True))
            for apart in [np.bincount(places, minlength=4) - theirs]
        )
        assert agreement.misplaced(values, edges, np.cumsum(theirs), 1.0) == least
    assert agreement.misplaced(np.array([100.0]), edges, np.array([1, 1, 1, 1]), 1.0) == 1
    assert agreement.misplaced(np.array([]), edges, np.array([0, 0, 2, 2]), 1.0) == 2


@pytest.mark.parametrize(("until_s", "agrees"), [(20, None), (60, False)])
def test_a_replica_that_died_leaves_it_open(made: Run, until_s: float, agrees: bool | None) -> None:
    lives = (("r1", until_s), ("r2", 60))
    beats = [
        (t, f"replica:{r}", "mean_ongoing_requests", 1.0)
        for r, end_s in lives
        for t in np.arange(0.5, end_s, 0.5)
    ]
    samples = pd.DataFrame(beats, columns=["time_s", "source", "metric", "value"])
    fewer = replace(made, requests=made.requests.iloc[:700], samples=samples)
    found = agreement.checks(fewer)[:4]
    assert [c.agrees for c in found] == [agrees] * 4
    assert all(("r1 fell silent" in c.note) == (agrees is None) for c in found)
    assert all(c.agrees for c in agreement.checks(replace(made, samples=samples))[:4])


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
    unread = replace(alone, notes=(f"{serve_metrics.UNREAD}no node answers",))
    assert all("no node answers" in c.note for c in agreement.checks(unread)[:4])
    mute = replace(made, requests=made.requests.assign(batch_run_s=np.nan))
    assert [c.note for c in agreement.checks(mute)[:3]] == [
        "no row tells of the 200 batches by @serve.batch"
    ] * 3
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


def littles_law_in_replicas(run: Run, *samples: tuple[float, str, float]) -> agreement.Agreement:
    """Of a run with readings (time, replica, mean since the last one)."""
    rows = [(t, f"replica:{r}", "mean_ongoing_requests", v) for t, r, v in samples]
    table = pd.DataFrame(rows, columns=["time_s", "source", "metric", "value"])
    return agreement.checks(replace(run, samples=table, changes=run.changes[:0]))[5]


def test_requests_in_replicas_are_integrated_over_time(made: Run) -> None:
    """Heartbeats that lag weigh as long as they speak for; a replica counts while it lives."""
    law = len(made.requests) / 59 * 0.7
    grid = np.arange(0.5, 60, 0.5)
    lagging = [t for t in grid if t < 30 or t % 3 == 0]
    uneven = [(t, "r1", law * (0.5 if t < 30 else 1.5)) for t in lagging]
    halves = [(t, "r1", law) for t in grid if t <= 30] + [(t, "r2", law) for t in grid if t > 30]
    for samples in ([(t, "r1", law) for t in grid], uneven, halves):
        assert littles_law_in_replicas(made, *samples).agrees
    both = [(t, r, law) for t in grid for r in ("r1", "r2")]
    assert littles_law_in_replicas(made, *both).agrees is False


def test_a_request_is_ongoing_since_it_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not since its handler began, which on a busy event loop is later: rows count from its arrival."""
    clock = iter((12.0, 15.0))
    monkeypatch.setattr(replica.time, "monotonic", lambda: next(clock))
    one = object.__new__(replica.Replica)
    one.ongoing, one._ongoing_s, one._counted_s = 0, 0.0, 10.0
    with one.counted(arrived_s=11.0):
        assert one.ongoing == 1
    assert (one.ongoing, one._ongoing_s) == (0, 4.0)


def test_requests_that_never_reached_a_replica_are_not_in_it(made: Run) -> None:
    law = len(made.requests) / 59 * 0.7
    samples = [(t, "r1", law) for t in np.arange(0.5, 60, 0.5)]
    away = made.requests.assign(outcome="rejected", e2e_s=0.001)
    away[agreement._IN_REPLICA] = np.nan
    rejected = replace(made, requests=pd.concat([made.requests, away], ignore_index=True))
    assert littles_law_in_replicas(rejected, *samples).agrees
    lost = replace(made, requests=pd.concat([made.requests, away.assign(outcome="timeout")]))
    assert littles_law_in_replicas(lost, *samples).agrees is None
    few = made.requests.iloc[::50].assign(decode_s=law / (16 / 59) - 0.3)
    assert littles_law_in_replicas(replace(made, requests=few), *samples).agrees is None


@pytest.mark.parametrize(("hold", "stream"), [(True, False), (False, False), (True, True)])
def test_batches_match_serves_own_buckets(
    as_left: Serving, tmp_path: Path, hold: bool, stream: bool
) -> None:
    """On the real thing: within 2 % of all batches, and Little's law within 5 %."""
    settings = Settings(max_batch_size=4, hold_while_busy=hold, time_scale=0.06 if hold else 0.04)
    law_asked = hold and not stream
    workload = Workload(users=6, duration_s=18.0 if law_asked else 6.0, stream=stream)
    done = run(
        Experiment(settings, workload), as_left, tmp_path / "run", progress=False, agreement=True
    )
    found = {c.what: c for c in agreement.checks(done)}
    print(agreement.table(done).to_string())
    assert len(done.requests) > 50
    batches = [c for what, c in found.items() if what.startswith("batch")]
    assert [c.agrees for c in batches] == [True] * 3, batches
    assert found["requests that a replica answered"].agrees
    if law_asked:
        law = [c for what, c in found.items() if "Little" in what]
        assert [c.agrees for c in law] == [True] * 2, law
