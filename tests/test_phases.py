"""Phases are found where they are: theory and made-up runs whose steady state is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from fakes import fake_run

from kit import explain, figures, phases
from kit.experiment import Experiment
from kit.settings import Settings
from kit.store import CHANGE_COLUMNS, Run
from kit.workload import Stage, Workload


def made(
    latency_s: np.ndarray, duration_s: float = 60.0, running: list[tuple[float, float]] | None = None,
    **workload: object,
) -> Run:  # fmt: skip
    """A run of evenly sent requests with these latencies, and so many replicas from each time on."""
    run = fake_run(len(latency_s), duration_s=duration_s)
    sent_s = np.linspace(0, duration_s, len(latency_s), endpoint=False)
    table = run.requests.assign(sent_s=sent_s, intended_s=sent_s, e2e_s=latency_s)
    grid = np.arange(0, duration_s, 0.5)
    steps = running or [(0.0, 1.0)]
    counts = [[n for t, n in steps if t <= now][-1] for now in grid]
    samples = pd.DataFrame(
        {"time_s": grid, "source": "serve", "metric": "running_replicas", "value": counts}
    )
    about = Experiment(Settings(), Workload(duration_s=duration_s, **workload)).as_dict()
    return replace(run, experiment=about, requests=table, samples=samples, changes=run.changes[:0])


def test_a_warm_up_is_left_out_and_no_more(rng: np.random.Generator) -> None:
    # Latency falls from 2 s with a time constant of 40 requests; after five of them it is steady.
    n = 1200
    settled = 0.5 + rng.gamma(4, 0.02, n)
    table = phases.found(made(settled + 1.5 * np.exp(-np.arange(n) / 40)))
    assert table["phase"].tolist() == ["warm-up", "steady"]
    steady = table.iloc[1]
    assert 100 / 20 < steady["from_s"] < 300 / 20
    assert (steady["to_s"], table["from_s"].iloc[0]) == (60.0, 0.0)
    assert table["requests"].sum() == pytest.approx(n, abs=20)


@pytest.mark.parametrize("seed", range(20))
def test_a_steady_run_is_called_steady(seed: int) -> None:
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 0.05, 800)
    for k in range(1, 800):  # neighbours in a queue are alike
        noise[k] += 0.7 * noise[k - 1]
    table = phases.found(made(0.5 + np.abs(noise)))
    assert table["phase"].iloc[-1] == "steady"
    assert table["from_s"].iloc[-1] < 30


def test_a_queue_that_grows_reaches_no_steady_state(rng: np.random.Generator) -> None:
    growing = 0.2 + np.linspace(0, 8, 600) + rng.gamma(2, 0.05, 600)
    table = phases.found(made(growing))
    assert table["phase"].tolist() == ["warm-up"]
    assert "no steady state" in table["why"].iloc[0]


@pytest.mark.parametrize(
    "shape",
    [lambda t: 1 + t, lambda t: 1 + 0.5 * (t > 0.6), lambda t: 1 + 3 * np.exp(-t / 0.3)],
    ids=["grows", "steps up", "decays slowly"],
)
def test_what_drifts_is_not_steady(shape: Callable[[np.ndarray], np.ndarray]) -> None:
    """MSER leaves out nothing of a line or of a late step: that the halves agree is asked as well."""
    t = np.linspace(0, 1, 2000)
    called = [
        "steady" in set(phases.found(made(shape(t) * noisy(seed, 2000)))["phase"])
        for seed in range(20)
    ]
    assert sum(called) <= 6
    still = ["steady" in set(phases.found(made(noisy(seed, 2000)))["phase"]) for seed in range(20)]
    assert sum(still) >= 18


def noisy(seed: int, n: int) -> np.ndarray:
    """Lognormal latencies, those of neighbours alike (AR(1), correlation 0.7)."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=n)
    noise[1:] *= np.sqrt(1 - 0.7**2)
    for k in range(1, n):
        noise[k] += 0.7 * noise[k - 1]
    return np.exp(0.3 * noise)


def test_steps_replicas_and_cold_starts_begin_phases(rng: np.random.Generator) -> None:
    latency_s = 0.3 + rng.gamma(4, 0.01, 2400)
    run = made(
        latency_s, running=[(0.0, 0.0), (6.0, 1.0), (40.0, 2.0)], users=4,
        stages=(Stage(at_s=20.0, users=8, ramp_s=3.0),),
    )  # fmt: skip
    table = phases.found(run)
    assert table["phase"].tolist() == [
        "cold start", "transient", "steady", "transient", "steady", "transient", "steady",
    ]  # fmt: skip
    assert table["why"].iloc[1] == "a replica came: 1 serve"
    assert table["why"].iloc[3] == "8 users"
    ramp = table.iloc[3]
    assert (ramp["from_s"], ramp["to_s"] >= 23.0) == (20.0, True)
    assert (table["from_s"].to_numpy()[1:] == table["to_s"].to_numpy()[:-1]).all()
    assert "cold start" in explain.phase_list(run).index


@pytest.mark.parametrize(
    "varying",
    [{"arrivals": "on-off"}, {"arrivals": "poisson", "diurnal": "azure-2024-code", "day_s": 60.0}],
)
def test_load_that_never_stands_still_has_no_steady_state(varying: dict[str, object]) -> None:
    table = phases.found(made(np.full(600, 0.4), **varying))
    assert table["phase"].tolist() == ["varying"]
    assert "varies all the time" in table["why"].iloc[0]


def test_a_ramp_has_no_steady_state_whatever_happens_on_the_way(rng: np.random.Generator) -> None:
    latency_s = 0.3 + rng.gamma(4, 0.01, 2400)
    run = made(
        latency_s, running=[(0.0, 1.0), (30.0, 2.0)], users=4,
        stages=(Stage(at_s=10.0, users=40, ramp_s=30.0),),
    )  # fmt: skip
    table = phases.found(run)
    assert table["phase"].tolist() == ["warm-up", "steady", "varying", "transient", "steady"]
    assert table["why"].iloc[2] == "40 users; the load varies all the time (a ramp)"
    assert table["to_s"].iloc[3] >= 40, "a replica that came does not end the ramp"


def test_load_that_is_made_to_vary_while_it_runs_is_steady_no_more() -> None:
    run = made(np.random.default_rng(1).gamma(4, 0.1, 1200), arrivals="poisson", rate_rps=20.0)
    change = ("arrivals", "poisson", "on-off", 30.0, 30.0, 0.0, "")
    moved = replace(run, changes=pd.DataFrame([change], columns=list(CHANGE_COLUMNS)))
    table = phases.found(moved)
    assert table["phase"].tolist() == ["warm-up", "steady", "varying"]
    assert table["why"].iloc[2].endswith("varies all the time (arrivals on-off)")


def test_no_replica_and_nobody_who_waits_is_idle(rng: np.random.Generator) -> None:
    run = made(0.3 + rng.gamma(4, 0.01, 2400), running=[(0.0, 1.0), (20.0, 0.0), (40.0, 1.0)])
    sent_s = run.requests["sent_s"]
    asleep = run.requests[(sent_s < 19) | (sent_s > 40)]
    assert phases.found(replace(run, requests=asleep)).iloc[2]["phase"] == "idle"
    woken = run.requests[(sent_s < 19) | (sent_s > 39)]
    assert phases.found(replace(run, requests=woken)).iloc[2]["phase"] == "cold start"


def test_first_requests_of_a_new_replica_warm_it_up(rng: np.random.Generator) -> None:
    run = made(0.3 + rng.gamma(4, 0.01, 1200), running=[(0.0, 1.0), (20.0, 2.0)])
    new = (run.requests["sent_s"] > 25) & (np.arange(1200) % 50 == 0)
    table = phases.found(
        replace(run, requests=run.requests.assign(replica_id=np.where(new, "r2", "r1")))
    )
    third_s = run.requests["sent_s"][new].iloc[2]
    assert table.iloc[-1]["phase"] == "steady"
    assert third_s < table.iloc[-1]["from_s"] < third_s + 1


def test_figures_of_a_stretch_are_of_its_steady_part(rng: np.random.Generator) -> None:
    n = 1200
    latency_s = 0.5 + rng.gamma(4, 0.02, n) + 3 * np.exp(-np.arange(n) / 40)
    row = phases.stretches(made(latency_s)).iloc[0]
    assert row["steady"]
    assert row["e2e_p95_s"] < 0.9 < np.percentile(latency_s, 95)
    assert phases.stretches(made(latency_s), settle=0.0).iloc[0]["e2e_p95_s"] > 0.9
    short = phases.stretches(made(np.full(12, 0.4))).iloc[0]
    assert not short["steady"]
    assert short["from_s"] == pytest.approx(18.0)
    assert figures.overview(made(latency_s)).axes[0].patches


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
