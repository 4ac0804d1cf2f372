"""Ramps: what is asked for, what a curve tells of it, and when a search for the capacity ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fakes import fake_run, requests_table

from kit import experiment, figures_load, saturation, theory
from kit.experiment import Experiment
from kit.load import LoadError
from kit.settings import Settings
from kit.store import Run
from kit.workload import Stage, Workload, WorkloadError

SINGLE = Settings(app="unbatched", time_scale=0.05)
NOWHERE: Any = object()
"""In place of a cluster: whatever is asked of it is an error."""


def made(rates: list[float], service_s: float, seconds: float = 40.0, seed: int = 5) -> Run:
    """A ramp of M/M/1, simulated."""
    rng = np.random.default_rng(seed)
    stages = tuple(Stage(at_s=k * seconds, rate_rps=r) for k, r in enumerate(rates) if k)
    load = Workload(
        arrivals="poisson", rate_rps=rates[0], stages=stages, duration_s=seconds * len(rates)
    )
    sent = np.concatenate(
        [
            np.sort(rng.uniform(k, k + 1, rng.poisson(r * seconds))) * seconds
            for k, r in enumerate(rates)
        ]
    )
    services = rng.exponential(service_s, len(sent))
    e2e = theory.waits_s(sent, services) + services
    table = requests_table(len(sent)).assign(
        sent_s=sent,
        intended_s=sent,
        client_wait_s=0.0,
        e2e_s=e2e,
        response_s=e2e,
        queueing_s=e2e - services,
    )
    grid = np.arange(0, load.duration_s, 0.5)
    area_s = [np.clip(t - sent, 0, e2e).sum() for t in grid]
    samples = pd.DataFrame(
        {"time_s": grid, "source": "load", "metric": "in_flight_s", "value": area_s}
    )
    about = Experiment(Settings(app="unbatched"), load).as_dict()
    about["slo"] = {"e2e_p95_s": 1.0}
    run = fake_run(4)
    return replace(run, experiment=about, requests=table, samples=samples, changes=run.changes[:0])


def sent_to(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[Experiment], Run]
) -> list[Experiment]:
    """Put `answer` in the place of a cluster; the list gets every experiment that is run."""
    asked: list[Experiment] = []

    def run(about: Experiment, serving: object, folder: Path | None, progress: bool) -> Run:
        assert serving is NOWHERE, "without a serving the real one would start a cluster"
        asked.append(about)
        return answer(about)

    monkeypatch.setattr(experiment, "run", run)
    return asked


def emulated(about: Experiment, service_s: float = 0.05) -> Run:
    """What M/M/1 would have answered to the steps that were asked for."""
    load = about.workload
    assert load.stages[-1].rate_rps == 0
    rates = [load.rate_rps, *(s.rate_rps or 0.0 for s in load.stages)]
    return made(rates, service_s, load.duration_s / len(rates))


def test_the_curve_of_a_simulated_server_and_its_knees() -> None:
    service_s = 0.05  # capacity 20 requests/s; power is highest at half of it
    run = made([4.0, 7.0, 10.0, 13.0, 16.0, 26.0], service_s)
    table = saturation.curve(run)
    steady = table[~table["saturated"]]
    assert table["saturated"].tolist() == [False] * 5 + [True]
    expected = [theory.mean_wait_s(r, service_s) + service_s for r in steady["planned_rps"]]
    assert steady["response_mean_s"].head(4).to_numpy() == pytest.approx(expected[:4], rel=0.3)
    # Little's law on sampled requests under way.
    law = steady["throughput_rps"] * steady["response_mean_s"]
    assert steady["in_flight"].to_numpy() == pytest.approx(law.to_numpy(), rel=0.1)
    bend = saturation.knee(table)
    assert bend.power_rps in (7.0, 10.0, 13.0)
    assert bend.capacity_rps == pytest.approx(1 / service_s, rel=0.1)
    assert bend.slo_rps in (13.0, 16.0)
    assert figures_load.load_latency(run).axes


@pytest.mark.parametrize("rates", [[], [3.0, 2.0], [2.0, 2.0], [0.0], [-1.0, 2.0]])
def test_rates_that_cannot_be_a_ramp_are_refused_before_anything_runs(
    rates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sent_to(monkeypatch, emulated)
    with pytest.raises(WorkloadError, match="must be above 0 and rise"):
        saturation.ramp(SINGLE, Workload(), NOWHERE, rates)
    assert asked == []


def test_a_ramp_ends_with_a_pause_in_which_all_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = sent_to(monkeypatch, emulated)
    bursty = Workload(arrivals="on-off", rate_rps=9.0, burstiness=0.5)
    table = saturation.curve(saturation.ramp(SINGLE, bursty, NOWHERE, [4.0, 8.0], step_s=10.0))
    load = asked[0].workload
    assert [(s.at_s, s.rate_rps) for s in load.stages] == [(10.0, 8.0), (20.0, 0.0)]
    assert (load.arrivals, load.burstiness, load.duration_s) == ("poisson", 1.0, 30.0)
    assert table["rate_rps"].tolist() == [4.0, 8.0]  # the pause is no step


def test_by_default_rates_lead_past_the_capacity_that_theory_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capacity = theory.of(SINGLE, Workload()).capacity_rps
    asked = sent_to(monkeypatch, lambda about: emulated(about, 1 / capacity))
    run = saturation.ramp(SINGLE, Workload(), NOWHERE)
    assert len(asked) == 1
    table = saturation.curve(run)
    assert not table["saturated"].head(6).any()
    assert table["saturated"].iloc[-1]
    assert saturation.knee(table).capacity_rps == pytest.approx(capacity, rel=0.15)


def test_a_capacity_that_theory_does_not_know_is_searched_and_the_search_stops_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = sent_to(monkeypatch, emulated)  # answers 20 requests/s
    saturation.ramp(Settings(app="continuous"), Workload(), NOWHERE, step_s=20.0)
    *searched, ramp = [about.workload for about in asked]
    assert [w.rate_rps for w in searched] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    most = [s.rate_rps for s in ramp.stages][-2]
    assert most is not None
    assert most / 1.6 == pytest.approx(20, rel=0.1)


def test_a_search_that_finds_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sent_to(monkeypatch, lambda about: emulated(about, 1e-9))
    with pytest.raises(LoadError, match=r"2\.048 requests/s did not saturate.*higher rate"):
        saturation.capacity_rps(SINGLE, Workload(), NOWHERE, from_rps=0.001)
    assert len(asked) == 12

    def died(about: Experiment) -> Run:
        return replace(emulated(about), status="failed", notes=("the load generator died",))

    asked = sent_to(monkeypatch, died)
    with pytest.raises(LoadError, match="search at 5 requests/s failed: the load generator died"):
        saturation.capacity_rps(SINGLE, Workload(), NOWHERE, from_rps=5.0)
    sent_to(monkeypatch, lambda about: replace(emulated(about), status="interrupted"))
    with pytest.raises(KeyboardInterrupt):
        saturation.capacity_rps(SINGLE, Workload(), NOWHERE, from_rps=5.0)


def sampled(run: Run, metric: str, values: np.ndarray) -> pd.DataFrame:
    at_s = run.samples["time_s"].unique()
    return pd.DataFrame({"time_s": at_s, "source": "load", "metric": metric, "value": values})


def test_a_step_that_was_not_sent_as_planned_is_invalid_and_makes_no_knee() -> None:
    run = made([5.0, 10.0, 30.0], 0.05)
    at_s = run.samples["time_s"].unique()
    planned = np.cumsum(np.where(at_s < 40, 5, np.where(at_s < 80, 10, 30)) * 0.5)
    sent = np.where(at_s < 80, planned, planned - 0.2 * np.maximum(at_s - 80, 0) * 30)
    more = [sampled(run, "planned_requests", planned), sampled(run, "sent_requests", sent)]
    late = replace(run, samples=pd.concat([run.samples, *more]))
    table = saturation.curve(late)
    assert table["invalid"].str.contains("never sent").tolist() == [False, False, True]
    assert not math.isnan(saturation.knee(saturation.curve(run)).capacity_rps)
    assert math.isnan(saturation.knee(table).capacity_rps)
    assert saturation.knee(table).power_rps in (5.0, 10.0)
    title = figures_load.load_latency(late).get_suptitle()
    assert "INVALID 1 of 3 rates, first 30 requests/s" in title


def test_a_step_in_which_nothing_was_answered_is_not_the_one_of_most_power() -> None:
    run = made([5.0, 10.0, 15.0], 0.05)
    first = run.requests["intended_s"] < 40
    table = saturation.curve(
        replace(run, requests=run.requests.assign(outcome=np.where(first, "error", "ok")))
    )
    assert math.isnan(table["response_mean_s"].iloc[0])
    assert saturation.knee(table).power_rps in (10.0, 15.0)
    assert math.isnan(saturation.knee(table).slo_rps)
    assert table["saturated"].iloc[0]


def test_promises_without_figures_have_no_knee() -> None:
    run = made([5.0, 10.0], 0.05)
    about = run.experiment | {"slo": {"ttft_p95_s": 1.0}}
    table = saturation.curve(replace(run, experiment=about))
    assert table["goodput_rps"].isna().all()
    assert math.isnan(saturation.knee(table).slo_rps)


def test_the_last_rate_by_default_tells_saturation_from_chance() -> None:
    # 100 requests due in the later part of a step, of which the capacity is 1/1.6; and none falsely.
    found = []
    for seed in range(40):
        table = saturation.curve(made([9.0, 17.8 * 1.6], 1 / 17.8, 5.0, seed))
        found.append(table["saturated"].tolist())
    quiet, full = np.mean(found, axis=0)
    assert quiet <= 0.05
    assert full >= 0.9


def test_long_requests_alone_are_no_saturation() -> None:
    # Nobody queues; answers take longer than a step, so that few come within it.
    rng = np.random.default_rng(2)
    flagged = []
    for seed in range(20):
        run = made([4.0, 8.0, 16.0, 32.0], 0.001, 8.0, seed)
        e2e_s = 10 * rng.lognormal(-0.32, 0.8, len(run.requests))
        long = run.requests.assign(e2e_s=e2e_s, response_s=e2e_s, inference_s=e2e_s)
        table = saturation.curve(replace(run, requests=long))
        assert (table["throughput_rps"] < saturation.KEPT * table["planned_rps"]).sum() >= 3
        flagged.append(table["saturated"].mean())
    assert np.mean(flagged) <= 0.05
