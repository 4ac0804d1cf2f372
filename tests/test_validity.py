"""What makes a run invalid is said, wherever its figures are; healthy runs are left in peace."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from fakes import fake_run
from test_phases import made

from kit import compare, explain, figures, measures, summary, validity
from kit.store import Run


def load_samples(run: Run, **values: object) -> Run:
    """The run with samples of the load generator: a number, or one for each sample."""
    grid = np.arange(0, 60, 0.5)
    rows = [
        pd.DataFrame({"time_s": grid, "source": "load", "metric": m, "value": v})
        for m, v in values.items()
    ]
    return replace(run, samples=pd.concat([run.samples, *rows], ignore_index=True))


@pytest.fixture
def healthy() -> Run:
    rng = np.random.default_rng(1)
    run = made(0.4 + rng.gamma(4, 0.02, 1200), arrivals="poisson", rate_rps=20.0)
    counted = np.arange(120) * 10.0
    return load_samples(run, planned_requests=counted, sent_requests=counted, cpu_share=0.2)


def spoilt(run: Run, how: str) -> Run:
    rows, n = run.requests, len(run.requests)
    match how:
        case "load":
            return load_samples(
                replace(run, samples=run.samples[run.samples["metric"] != "sent_requests"]),
                sent_requests=np.arange(120) * 9.7,
            )
        case "late":
            return replace(run, requests=rows.assign(client_wait_s=0.1))
        case "cpu":
            return load_samples(
                replace(run, samples=run.samples[run.samples["metric"] != "cpu_share"]),
                cpu_share=0.97,
            )
        case "errors":
            wrong = rows["outcome"].where(np.arange(n) % 20 > 0, "error")
            return replace(run, requests=rows.assign(outcome=wrong))
        case "cache":
            counters = {"prefix_cache_queried_tokens": 100.0, "prefix_cache_hit_tokens": 60.0}
            grid = np.arange(0, 60, 0.5)
            more = [
                pd.DataFrame(
                    {"time_s": grid, "source": "replica:r1", "metric": m, "value": v * grid}
                )
                for m, v in counters.items()
            ]
            return replace(run, samples=pd.concat([run.samples, *more], ignore_index=True))
        case "drift":
            slow = rows["e2e_s"] + np.where(np.arange(n) > 0.55 * n, 0.4, 0.0)
            return replace(run, requests=rows.assign(e2e_s=slow))
    raise AssertionError(how)


WORDS = {
    "load": "3.0% of 1190 planned requests were never sent",
    "late": "late by 0.100 s at p99",
    "cpu": "the busiest load process takes 97% of a core",
    "errors": "5.0% of 119. attempts failed .* error",
    "cache": "60.0% of prompt tokens came from the prefix cache",
    "drift": "not steady: mean latency of the halves",
}


@pytest.mark.parametrize("how", WORDS)
def test_each_fault_is_found_and_said_everywhere(healthy: Run, how: str) -> None:
    bad = spoilt(healthy, how)
    why = validity.invalid(bad)
    wrong = [c.text for c in validity.of(bad) if c.ok is False]
    assert len(wrong) == 1, why
    assert re.search(WORDS[how], wrong[0])
    found = summary.of(bad)
    assert (found["valid"], found["invalid_because"]) == (False, why)
    assert explain.what_ran(bad)[0].startswith(f"**Invalid: {why}")
    assert "INVALID" in str(figures.overview(bad).get_suptitle())
    assert explain.comparison_table({"a": healthy, "b": bad})["invalid"].tolist() == ["", why]


def test_a_healthy_run_is_valid_and_nothing_says_otherwise(healthy: Run) -> None:
    assert validity.invalid(healthy) == ""
    assert {c.ok for c in validity.of(healthy)} <= {True, None}
    assert summary.of(healthy)["valid"]
    assert "INVALID" not in str(figures.overview(healthy).get_suptitle())
    assert "invalid" not in explain.comparison_table({"a": healthy})
    assert set(validity.table(healthy)["sound"]) <= {"yes", "unknown"}
    # Closed-loop users, as most runs here have them, and nothing sampled of the load.
    assert validity.invalid(fake_run(1200)) == ""


@pytest.mark.parametrize("seed", range(30))
def test_correlated_latencies_are_no_drift(seed: int) -> None:
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 0.05, 1000)
    for k in range(1, 1000):
        noise[k] += 0.8 * noise[k - 1]
    assert validity.invalid(made(0.5 + np.abs(noise))) == ""


def test_an_invalid_run_wins_no_comparison(healthy: Run) -> None:
    faster = replace(healthy, requests=healthy.requests.assign(e2e_s=healthy.requests["e2e_s"] / 2))
    a, b = compare.whole(healthy), compare.whole(faster)
    assert compare.compare(a, b).loc["e2e_p95_s", "verdict"] == "better"
    late = compare.whole(spoilt(faster, "errors"))
    found = compare.compare(a, late)
    assert set(found["verdict"]) == {"cannot tell"}
    assert any(w.startswith("**B is invalid**: 5.0% of") for w in compare.words(a, late, found))
    assert compare.compare(a, late, force=True).loc["e2e_p95_s", "verdict"] == "better"


def test_a_bound_on_concurrency_holds_requests_back_as_asked(healthy: Run) -> None:
    load = healthy.experiment["workload"] | {"max_concurrency": 4}
    bound = replace(healthy, experiment=healthy.experiment | {"workload": load})
    assert validity.invalid(spoilt(spoilt(bound, "load"), "late")) == ""


@pytest.mark.parametrize(
    ("count", "told"), [(19, []), (20, [50]), (200, [50, 95]), (1000, [50, 95, 99])]
)
def test_percentiles_need_requests_beyond_them(count: int, told: list[int]) -> None:
    assert [q for q in (50, 95, 99) if measures.enough(count, q)] == told
    run = made(np.full(count, 0.4))
    assert [q for q in (50, 95, 99) if summary.of(run)[f"e2e_p{q}_s"] is not None] == told
    assert explain.phase_table(run)["E2E p95 (s)"].isna().item() == (count < 1000)
