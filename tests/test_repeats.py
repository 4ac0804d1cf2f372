"""Pairs of runs: what drifts between them cancels, and what cannot be compared says why."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from test_phases import made

from kit import compare, repeats
from kit.experiment import Experiment
from kit.settings import Settings
from kit.store import Run
from kit.workload import Workload


def pair_runs(n: int, factor: float, seed: int = 0) -> tuple[list[Run], list[Run]]:
    rng = np.random.default_rng(seed)
    sides: tuple[list[Run], list[Run]] = ([], [])
    for _ in range(n):
        machine = rng.lognormal(0, 0.2)  # what both of a pair share
        for side, times in zip(sides, (1.0, factor), strict=True):
            side.append(made(machine * times * (0.4 + rng.gamma(4, 0.02, 400))))
    return sides


def test_pairs_find_what_drift_between_them_would_hide() -> None:
    a, b = pair_runs(4, 0.9)
    found = repeats.paired(a, b)
    assert found.loc["e2e_p95_s", "verdict"] == "better"
    assert found.loc["e2e_p95_s", "ratio"] == pytest.approx(0.9, rel=0.05)
    assert found.loc["e2e_p95_s", "ratio_low"] < 0.9 < found.loc["e2e_p95_s", "ratio_high"]
    few = repeats.paired(a[:2], b[:2])
    assert set(few["verdict"]) == {"cannot tell"}
    assert few.loc["e2e_p95_s", "why"] == "2 pairs have it: 3 or more are needed"


def test_pairs_of_the_same_settings_cannot_be_told_apart() -> None:
    verdicts = pd.concat([repeats.paired(*pair_runs(4, 1.0, s))["verdict"] for s in range(12)])
    assert (verdicts == "cannot tell").mean() >= 0.9


def test_pairs_must_be_comparable_and_valid() -> None:
    a, b = pair_runs(3, 0.8)
    with pytest.raises(compare.CompareError, match="3 runs and 2: must be pairs"):
        repeats.paired(a, b[:2])
    elsewhere = [replace(r, environment=r.environment | {"cpus": 64}) for r in b]
    with pytest.raises(compare.CompareError, match="not comparable: cpus"):
        repeats.paired(a, elsewhere)
    assert repeats.paired(a, elsewhere, force=True).loc["e2e_p95_s", "verdict"] == "better"
    wrong = [replace(r, requests=r.requests.assign(outcome=["ok", "error"] * 200)) for r in b]
    found = repeats.paired(a, wrong)
    assert set(found["verdict"]) == {"cannot tell"}
    assert "run is invalid: 50.0% of" in found["why"].iloc[0]
    assert repeats.paired(a, wrong, force=True).loc["e2e_p50_s", "verdict"] == "better"


def test_what_failed_altogether_is_not_left_out_of_the_mean() -> None:
    a, b = pair_runs(4, 1.0)
    # In one pair nothing of B keeps its promise: the other three alone would tell of no loss.
    b[2] = replace(b[2], requests=b[2].requests.assign(queueing_s=9.0))
    row = repeats.paired(a, b).loc["good_fraction"]
    assert (row["pairs"], row["verdict"]) == (4, "cannot tell")
    assert row["why"] == "it is zero in a pair, which gives no ratio"
    assert math.isnan(row["ratio"])


def test_turns_cancel_what_drifts_evenly() -> None:
    """Each run takes 3 % longer than the one before it, whosever it is."""
    one = Experiment(Settings(), Workload(duration_s=60.0), name="chat")
    order = repeats.alternating(one, replace(one, name="bulk"), 4)
    assert [e.name for e in order] == [
        "1a chat", "1b bulk", "2b bulk", "2a chat", "3a chat", "3b bulk", "4b bulk", "4a chat",
    ]  # fmt: skip
    assert [e.workload.seed for e in order] == [1, 1, 2, 2, 3, 3, 4, 4]
    latency_s = 0.4 + np.random.default_rng(1).gamma(4, 0.02, 400)
    runs = [
        replace(run, experiment=run.experiment | {"name": e.name})
        for k, e in enumerate(order)
        for run in [made(latency_s * 1.03**k)]
    ]
    row = repeats.paired(*repeats.sides(runs)).loc["e2e_p95_s"]
    assert (row["ratio"], row["verdict"]) == (pytest.approx(1.0), "cannot tell")
    by_turns = repeats.paired(runs[0::2], runs[1::2], force=True).loc["e2e_p95_s"]
    assert (by_turns["ratio"], by_turns["verdict"]) == (pytest.approx(1.03), "worse")
    a, b = repeats.sides(runs[:-1])
    assert [r.experiment["name"] for r in (*a, *b)] == [
        "1a chat", "2a chat", "3a chat", "1b bulk", "2b bulk", "3b bulk",
    ]  # fmt: skip
    with pytest.raises(compare.CompareError, match=r"run: not of kit\.repeats\.alternating"):
        repeats.sides([made(latency_s)])
    with pytest.raises(ValueError, match="pairs = 2: must be 3 or more"):
        repeats.alternating(one, one, 2)


def test_the_interval_is_students() -> None:
    """Of three ratios 1, 2 and 4 the mean is 2, the spread of logarithms log 2, and t 4.303."""
    latency_s = 0.4 + np.random.default_rng(1).gamma(4, 0.02, 400)
    a = [made(latency_s) for _ in range(3)]
    b = [made(latency_s * times) for times in (1, 2, 4)]
    row = repeats.paired(a, b).loc["e2e_p95_s"]
    assert row["ratio"] == pytest.approx(2)
    assert row["ratio_high"] == pytest.approx(2 * 2 ** (4.303 / math.sqrt(3)), rel=0.01)
    assert row["ratio_low"] == pytest.approx(2 / 2 ** (4.303 / math.sqrt(3)), rel=0.01)
    assert repeats.paired(a, a).loc["replicas_mean", "a"] == pytest.approx(1.0)
