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
from kit.stretch import Stretch


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
        case "users":
            load = run.experiment["workload"] | {"arrivals": "users", "users": 32}
            closed = replace(run, experiment=run.experiment | {"workload": load})
            return load_samples(closed, users=np.where(np.arange(120) < 4, 0.0, 30.0))
        case "thins out":
            kept = (np.arange(n) < 0.5 * n) | (np.arange(n) % 3 == 0)
            return replace(run, requests=rows[kept])
        case "drift":
            slow = rows["e2e_s"] + np.where(np.arange(n) > 0.55 * n, 0.4, 0.0)
            return replace(run, requests=rows.assign(e2e_s=slow))
    raise AssertionError(how)


WORDS = {
    "load": "3.0% of 1190 planned requests were never sent",
    "late": r"1191 of 1191 were sent over 0.024 s late \(0.100 s at p99\)",
    "cpu": "the busiest load process takes 97% of a core",
    "errors": "5.0% of 119. attempts failed .* error",
    "cache": "60.0% of prompt tokens came from the prefix cache",
    "drift": "not steady: mean latency of the halves",
    "users": "30 users on average, 32 were asked for",
    "thins out": r"not steady: throughput of the halves: \d\d.* and [67].* requests/s",
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


def test_what_is_not_steady_is_marked_and_not_invalid(healthy: Run) -> None:
    latency_s = healthy.requests["e2e_s"] + 3 * np.exp(-np.arange(1200) / 40)
    warm = replace(healthy, requests=healthy.requests.assign(e2e_s=latency_s))
    assert validity.cautions(warm) == "", "the figures of a run are of its steady part"
    early = Stretch(warm, 0.0, 20.0, "early")
    assert re.fullmatch(r"not steady: \d\d% of it is warm-up", validity.cautions(early))
    assert validity.invalid(early) == ""
    found = compare.compare(early, compare.steady(warm), force=True)
    said = compare.words(early, compare.steady(warm), found)
    assert any(w.startswith("**A, mind**: not steady") for w in said)
    assert not any(w.startswith("**B, mind**") for w in said)


def test_what_is_as_it_should_be_raises_no_alarm(healthy: Run) -> None:
    """A ramp of users, one late request of a few, requests cut by the end of the load, a template."""
    stages = ({"at_s": 30.0, "users": 16, "rate_rps": None, "ramp_s": 10.0},)
    load = healthy.experiment["workload"] | {"arrivals": "users", "users": 8, "stages": stages}
    there = np.interp(np.arange(120) / 2, [0, 0.5, 30, 40], [0, 8, 8, 16])
    ramped = load_samples(
        replace(healthy, experiment=healthy.experiment | {"workload": load}), users=there
    )
    (planned,) = (c for c in validity.of(ramped) if c.name == "load as planned")
    assert planned.ok
    few = healthy.requests.iloc[:20]
    one_late = few.assign(client_wait_s=np.where(np.arange(20) == 3, 0.2, 0.0))
    assert validity.invalid(replace(healthy, requests=one_late)) == ""
    last = np.arange(1200) >= 1180
    cut = healthy.requests.assign(outcome=np.where(last, "cut", "ok"))
    cut["e2e_s"] = cut["e2e_s"].where(~last, 60.1 - cut["sent_s"])
    assert validity.invalid(replace(healthy, requests=cut)) == ""
    template = {"app": "routed", "prompt_template": "Answer in one word. {prompt}"}
    known = healthy.experiment | {"settings": healthy.experiment["settings"] | template}
    told = replace(spoilt(healthy, "cache"), experiment=known)
    assert validity.invalid(told) == ""
    assert any("the template before each prompt" in c.text for c in validity.of(told))


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
