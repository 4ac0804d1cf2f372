"""Load to a plan, by real Locust against a server that does nothing: on time, whoever waits."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import ks_distance

from kit import measures, traces
from kit.arrivals import Arrivals
from kit.crowd import Crowd
from kit.load import LEAD_S, Load, read_requests
from kit.workload import Workload

pytestmark = pytest.mark.cluster
NOOP = Path(__file__).with_name("noop_server.py")
STALL_S = 2.0
SECONDS = 25.0
SEEDS = {2.0: 6, 20.0: 187, 200.0: 11}
"""Rate → a seed whose plan for so long has that rate within 1 %, and the moments of its process."""


@pytest.fixture
def noop(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a server that does nothing; with a parameter it stalls so long, once."""
    stall_s = getattr(request, "param", 0.0)
    server = subprocess.Popen(
        [sys.executable, str(NOOP), "0", str(stall_s)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout
    yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    server.kill()
    server.wait()
    server.stdout.close()


def driven(url: str, place: Path, **loads: Workload) -> dict[str, pd.DataFrame]:
    """Several loads at the same time; the rows of each."""
    made = {}
    for name, workload in loads.items():
        (folder := place / name).mkdir()
        made[name] = Load(workload, url, folder)
    t0_s = time.monotonic() + LEAD_S
    for load in made.values():
        load.begin(t0_s)
    time.sleep(max(w.duration_s for w in loads.values()) + LEAD_S)
    for load in made.values():
        load.stop()
    return {name: load.rows() for name, load in made.items()}


def test_plans_are_sent_on_time_and_with_their_moments(noop: str, tmp_path: Path) -> None:
    # The rate of a few hundred drawn arrivals lies some percent off its mean, of these seeds it does not:
    # so the load is judged by what was asked for, and not by the luck of the draw.
    loads = {
        f"poisson-{rate:g}": Workload(
            arrivals="poisson", rate_rps=rate, duration_s=SECONDS, seed=seed, prompt_tokens=20
        )
        for rate, seed in SEEDS.items()
    } | {
        "code": Workload(arrivals="trace", trace="azure-2023-code", speed_up=12.0, duration_s=SECONDS),
        "conv": Workload(arrivals="trace", trace="azure-2023-conv", speed_up=6.0, duration_s=SECONDS),
    }  # fmt: skip
    rows = driven(noop, tmp_path, **loads)
    for name, table in rows.items():
        planned = Arrivals(loads[name]).times(SECONDS)
        assert table["intended_s"].to_numpy() == pytest.approx(planned, abs=1e-5)
        assert table["client_wait_s"].quantile(0.99) < 0.02, name
        assert table["client_wait_s"].min() >= 0
    for rate in SEEDS:
        sent_s = rows[f"poisson-{rate:g}"]["sent_s"]
        gaps_s = np.diff(sent_s)
        assert len(sent_s) / SECONDS == pytest.approx(rate, rel=0.01)
        assert gaps_s.std() / gaps_s.mean() == pytest.approx(1, abs=0.05)
        # Kolmogorov's 5 % point; more gaps would show the quarter of a millisecond that sending takes.
        some_s = gaps_s[:1000]
        assert ks_distance(some_s) * np.sqrt(len(some_s)) < 1.36
    recorded = traces.read("azure-2023-conv")
    lengths = rows["conv"].sort_values("request")["prompt_tokens"].head(300)
    assert lengths.tolist() == recorded["prompt_tokens"].clip(upper=8192).head(300).tolist()


@pytest.mark.parametrize("noop", [STALL_S], indirect=True)
def test_a_stall_hides_from_those_who_wait_and_shows_in_response_latency(
    noop: str, tmp_path: Path
) -> None:
    """Coordinated omission: 50 requests/s for 20 s at a server that stalls for 2 s."""
    every = {"duration_s": 20.0, "prompt_tokens": 20}
    rows = driven(
        noop, tmp_path,
        users=Workload(users=1, think_time_s=0.02, **every),
        one_by_one=Workload(arrivals="constant", rate_rps=50.0, max_concurrency=1, **every),
        plan=Workload(arrivals="constant", rate_rps=50.0, **every),
    )  # fmt: skip
    e2e_s, response_s = (
        {k: measures.percentile(measures.ok(r)[column], 99) for k, r in rows.items()}
        for column in ("e2e_s", "response_s")
    )
    for name, table in rows.items():
        print(f"{name}: {len(table)} requests, p99 of E2E {e2e_s[name]:.3f} s, of response "
              f"{response_s[name]:.3f} s")  # fmt: skip
    # Each saw the stall: one request of the two that wait for answers, a hundred of the plan.
    assert all(r["e2e_s"].max() > 0.9 * STALL_S for r in rows.values())
    assert e2e_s["users"] < 0.1
    assert response_s["users"] < 0.1
    assert e2e_s["one_by_one"] < 0.1
    assert response_s["one_by_one"] >= 1.5
    assert e2e_s["plan"] >= 1.5
    assert response_s["plan"] >= 1.5
    late = rows["one_by_one"]
    assert (late["client_wait_s"] + late["e2e_s"]).to_numpy() == pytest.approx(
        late["response_s"], abs=2e-6
    )
    assert len(late) == pytest.approx(1000, rel=0.01)


def test_several_processes_send_one_plan_here_or_from_elsewhere(noop: str, tmp_path: Path) -> None:
    # The third worker joins as from another machine: it has no file, its rows come by Locust's messages.
    port = 5600 + int(time.time()) % 300
    workload = Workload(
        arrivals="poisson", rate_rps=100.0, duration_s=4.0, processes=2, remote_workers=1,
        join_address=f"127.0.0.1:{port}", prompt_tokens=20,
    )  # fmt: skip
    joining = subprocess.Popen([sys.executable, "-m", "kit.worker", f"127.0.0.1:{port}"])
    try:
        load = Load(workload, noop, tmp_path)
        t0_s = time.monotonic() + 2 * LEAD_S
        load.begin(t0_s)
        time.sleep(max(0.0, t0_s + 2 - time.monotonic()))
        load.set_rate(10.0)
        time.sleep(max(0.0, t0_s + 4 - time.monotonic()))
        status = load.status()
        load.stop()
        assert joining.wait(10) is not None
    finally:
        joining.kill()
        joining.wait()
    rows = load.rows().sort_values("request")
    assert status["sent_requests"] == pytest.approx(status["planned_requests"], abs=5)
    assert status["rate_rps"] == pytest.approx(10.0)
    numbers = rows["request"].to_numpy()
    assert sorted(numbers) == list(range(len(rows)))
    plan_s = Arrivals(workload).times(2.0)
    assert rows["intended_s"].head(len(plan_s)).to_numpy() == pytest.approx(plan_s, abs=1e-5)
    assert measures.ok(rows)["client_wait_s"].quantile(0.9) < 0.02
    after = rows[rows["intended_s"] > 2.2]
    assert 4 <= len(after) <= 40


def test_users_are_spread_over_processes_too(noop: str, tmp_path: Path) -> None:
    workload = Workload(users=6, think_time_s=0.05, processes=2, duration_s=3.0, prompt_tokens=20)
    load = Load(workload, noop, tmp_path)
    load.begin(time.monotonic())
    time.sleep(2)
    assert load.status()["users"] == 6
    load.set_users(2)
    time.sleep(1)
    assert load.status()["users"] == 2
    load.stop()
    rows = load.rows()
    assert rows["request"].is_unique
    assert set(rows["request"] % 2) == {0, 1}
    assert not load.alive


def test_a_session_goes_from_users_to_a_rate_and_back(noop: str, tmp_path: Path) -> None:
    moves: list[dict[str, tuple[object, object]]] = []
    t0_s = time.monotonic() - 50.0  # the load begins long after its clock
    crowd = Crowd(
        Workload(users=2, think_time_s=0.05, rate_rps=40.0, prompt_tokens=20), noop, tmp_path, t0_s,
        moves.append,
    )  # fmt: skip
    try:
        crowd.start()
        time.sleep(1.0)
        crowd.change(arrivals="constant")
        time.sleep(2.0)
        assert crowd.status()["rate_rps"] == 40.0
        crowd.change(rate_rps=10.0)
        time.sleep(2.0)
        assert crowd.status()["rate_rps"] == 10.0
        crowd.stop()
        time.sleep(0.5)
        assert crowd.status()["rate_rps"] == 0.0
        sent = crowd.status()["sent_requests"]
        time.sleep(0.5)
        assert crowd.status()["sent_requests"] == sent
    finally:
        crowd.close()
    rows = read_requests(tmp_path / "requests.csv")
    assert rows["request"].is_unique
    planned = rows[rows["request"] >= 10_000_000].sort_values("request")
    gaps_s = planned["intended_s"].diff()
    assert gaps_s.iloc[5:40].median() == pytest.approx(1 / 40, rel=0.01)
    assert gaps_s.iloc[-5:].median() == pytest.approx(1 / 10, rel=0.01)
    # Nothing was made up for the fifty seconds before it began.
    assert planned["intended_s"].min() > 51
    assert planned["client_wait_s"].median() < 0.02
    asked = [name for move in moves for name in move]
    assert asked == ["users", "arrivals", "rate_rps", "rate_rps", "rate_rps"]
