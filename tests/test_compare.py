"""Two stretches side by side: intervals that hold the truth, and refusals that say why."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest
from fakes import fake_run, requests_table

from kit import bootstrap, compare, estimates, phases, summary
from kit.compare import CompareError, Stretch
from kit.store import CHANGE_COLUMNS, Run


def correlated(shape: tuple[int, int], rho: float, seed: int) -> np.ndarray:
    """Rows of a stationary AR(1) process with standard normal values."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape)
    values[:, 1:] *= math.sqrt(1 - rho**2)
    for k in range(1, shape[1]):
        values[:, k] += rho * values[:, k - 1]
    return values


def simulated(seed: int, times: float = 1.0, n: int = 600, duration_s: float = 60.0) -> Run:
    """A run whose queueing is correlated, its median 0.2 s × `times`; the SLO is met by half."""
    noise = correlated((1, n), 0.6, seed)[0]
    table = requests_table(n, duration_s, seed)
    table["batch_wait_s"] = 0.2 * times * np.exp(0.3 * noise)
    table["queueing_s"] = table["router_s"] + table["batch_wait_s"]
    table["inference_s"] = 0.5 * times * (1 + 0.1 * np.roll(noise, 1))
    table["e2e_s"] = table["queueing_s"] + table["inference_s"] + table["rest_s"]
    table["sent_s"] = np.sort(np.random.default_rng(seed).uniform(0, duration_s - 3, n))
    table["output_tokens"] = np.random.default_rng([seed, 1]).integers(10, 90, n).astype(float)
    table["batch_size"] = np.clip(np.round(4 + noise), 1, 8)
    run = fake_run(1, duration_s=duration_s)
    samples = run.samples.copy()
    samples.loc[samples["metric"] == "running_replicas", "value"] = 1.0
    return replace(run, requests=table, samples=samples, changes=run.changes.iloc[:0])


def with_changes(run: Run, *rows: tuple[str, str, str, float, float]) -> Run:
    """The run with (knob, from, to, asked_s, applied_s) as its changes."""
    table = pd.DataFrame([(*r, 0.0, "") for r in rows], columns=list(CHANGE_COLUMNS))
    return replace(run, changes=table)


def test_the_same_process_twice_cannot_be_told_apart() -> None:
    verdicts = []
    for seed in range(0, 80, 2):
        a, b = (compare.whole(simulated(s)) for s in (seed, seed + 1))
        verdicts += list(compare.compare(a, b, seed)["verdict"])
    assert verdicts.count("cannot tell") / len(verdicts) >= 0.9


def test_the_interval_of_p95_holds_the_truth() -> None:
    """Lognormal latencies, correlated: the truth is known, and each of 200 runs sees a part of it."""
    n, truth_s = 1200, math.exp(0.4 * NormalDist().inv_cdf(0.95))
    held = alone = 0
    for k, noise in enumerate(correlated((200, n), 0.8, 3)):
        latency_s = np.exp(0.4 * noise)
        rng = np.random.default_rng(k)
        _, draws = estimates.figures_of({"e2e_s": latency_s}, {}, rng)["e2e_p95_s"]
        low_s, high_s = bootstrap.interval(draws)
        held += low_s <= truth_s <= high_s
        singly = bootstrap.quantiles(latency_s, next(bootstrap.resamples(n, 1, rng)), (0.95,))
        low_s, high_s = bootstrap.interval(singly[:, 0])
        alone += low_s <= truth_s <= high_s
    assert 0.90 <= held / 200 <= 0.98
    assert alone / 200 < 0.85, "the simulated correlation is too weak to matter"


def test_doubled_latency_is_worse_and_the_reverse_is_better() -> None:
    a, b = compare.whole(simulated(1)), compare.whole(simulated(2, times=2.0))
    forth, back = compare.compare(a, b), compare.compare(b, a)
    for name in ("e2e_p50_s", "e2e_p95_s", "queueing_p95_s", "inference_p95_s", "good_fraction"):
        assert forth.loc[name, "verdict"] == "worse", name
        assert back.loc[name, "verdict"] == "better", name
    row = forth.loc["e2e_p50_s"]
    assert row["ratio_low"] < 2 < row["ratio_high"]
    assert row["ratio_low"] > 1.7
    assert forth.loc["replicas_mean", "verdict"] == "cannot tell"


def test_values_are_those_of_measures_and_lie_in_their_intervals() -> None:
    run = simulated(5)
    shed = requests_table(60, seed=9).assign(outcome="rejected", e2e_s=0.001)
    run = replace(run, requests=pd.concat([run.requests, shed], ignore_index=True))
    found = compare.compare(s := compare.whole(run), s)
    whole = phases.stretches(run, settle=0).iloc[0]
    for name in ("e2e_p50_s", "e2e_p95_s", "queueing_p95_s", "inference_p95_s"):
        assert found.loc[name, "a"] == pytest.approx(whole[name])
    for name in ("throughput_rps", "output_tokens_per_s"):
        assert found.loc[name, "a"] == pytest.approx(whole[name])
    assert found.loc["batch_size_mean_requests", "a"] == pytest.approx(whole["batch_size"])
    assert found.loc["good_fraction", "a"] == pytest.approx(summary.good_fraction(run))
    assert (found["a_low"] <= found["a"]).all()
    assert (found["a"] <= found["a_high"]).all()


def test_resampled_figures_are_those_of_the_rows_drawn() -> None:
    values = np.random.default_rng(1).exponential(size=700)
    values[::9] = math.nan
    counts = next(bootstrap.resamples(700, 13, np.random.default_rng(2)))
    assert set(counts.sum(axis=1)) == {700 // 13 * 13}
    found = bootstrap.quantiles(values, counts, (0.5, 0.95))
    for row, c in zip(found[:20], counts[:20], strict=True):
        assert row == pytest.approx(np.nanquantile(np.repeat(values, c), [0.5, 0.95]))


def test_blocks_grow_with_the_correlation_and_every_row_is_drawn_alike() -> None:
    lengths = [
        np.median([bootstrap.block_length(x) for x in correlated((20, 2000), rho, 4)])
        for rho in (0.0, 0.5, 0.9)
    ]
    assert lengths[0] <= 3 < lengths[1] < lengths[2] < 200
    assert bootstrap.block_length(np.ones(100)) == 1
    drawn = sum(c.sum(axis=0) for c in bootstrap.resamples(50, 20, np.random.default_rng(0)))
    assert drawn.min() > 0.8 * drawn.mean(), "the ends are drawn as often as the middle"


@pytest.mark.parametrize("n", [0, 1, 5, 40])
def test_too_few_requests_get_no_verdict(n: int) -> None:
    run = simulated(1)
    few = replace(run, requests=run.requests.iloc[:n])
    a, b = compare.whole(run), compare.whole(few)
    found = compare.compare(a, b)
    assert math.isnan(found.loc["e2e_p95_s", "b"])
    assert math.isnan(found.loc["e2e_p95_s", "b_low"])
    assert found.loc["e2e_p95_s", "verdict"] == "cannot tell"
    assert "too few" in compare.table(a, b, found).loc["E2E p95"].iloc[1]
    if n < estimates.LEAST:
        assert set(found["verdict"]) == {"cannot tell"}
        assert found.loc["throughput_rps", "b"] == pytest.approx(n / 60)
    assert compare.words(a, b, found)
    drawn = [t.get_text() for t in compare.figure(a, b, found).axes[1].texts]
    assert len(drawn) == len(compare.MEASURES)
    assert drawn[1] == "cannot tell (too few)"


def test_a_ratio_off_the_scale_is_drawn_on_its_edge() -> None:
    a, b = compare.whole(simulated(1)), compare.whole(simulated(2, times=2.0))
    for pair in ((a, b), (b, a)):
        found = compare.compare(*pair)
        assert not 1 / 20 < found.loc["good_fraction", "ratio"] < 20
        ax = compare.figure(*pair, found).axes[1]
        low, high = ax.get_xlim()
        for line in ax.lines:
            xs = np.asarray(line.get_xdata(), dtype=float)
            assert ((low <= xs) & (xs <= high)).all()
            assert (np.diff(xs) >= 0).all()


def test_people_read_units_intervals_and_reasons(tmp_path: Path) -> None:
    run = with_changes(
        simulated(1),
        ("max_batch_size", "8", "16", 20.0, 20.5),
        ("users", "8", "32", 40.0, 40.0),
        ("mark", "", "before lunch", 50.0, 50.0),
    )
    parts = compare.stretches(run)
    assert [p.label for p in parts] == [
        "start", "max_batch_size 8 → 16", "users 8 → 32", "mark: before lunch",
    ]  # fmt: skip
    table = compare.table(parts[0], parts[1])
    assert re.fullmatch(r"0\.\d{3} s \(0\.\d{3}–0\.\d{3}\)", table.loc["E2E p50"].iloc[0])
    assert "requests/s (" in table.loc["throughput"].iloc[1]
    found = compare.compare(parts[0], parts[2])
    said = " ".join(compare.words(parts[0], parts[2], found))
    assert "Settings: max_batch_size 8 → 16." in said
    assert "load differs too (users 8 → 32)" in said
    figure = compare.figure(parts[0], parts[2], found)
    assert all(ax.get_ylabel() or ax.get_xlabel() for ax in figure.axes)
    figure.savefig(tmp_path / "compared.png")
    whole = compare.whole(run)
    assert "Within the first, max_batch_size, users changed" in " ".join(
        compare.words(whole, parts[1], found)
    )


def test_what_differs_beside_the_settings_is_refused_by_name() -> None:
    run = simulated(1)
    other = simulated(2)

    def refused(changed: Run) -> str:
        a, b = compare.whole(run), compare.whole(changed)
        with pytest.raises(CompareError) as error:
            compare.compare(a, b)
        assert len(compare.compare(a, b, force=True)) == len(compare.MEASURES)
        return str(error.value)

    settings, load = run.experiment["settings"], run.experiment["workload"]
    assert "cpus 2 → 64" in refused(replace(other, environment={"cpus": 64}))
    newer = {"cpus": 2, "packages": {"ray": "9.9"}}
    assert "ray none → 9.9" in refused(replace(other, environment=newer))
    slower = run.experiment | {"settings": settings | {"time_scale": 2.0}}
    assert "time_scale 1.0 → 2.0" in refused(replace(other, experiment=slower))
    fuller = run.experiment | {"workload": load | {"users": 64}}
    assert "users 8 → 64" in refused(replace(other, experiment=fuller))
    # A knob, a seed and a duration are no reasons.
    tuned = {"settings": settings | {"max_batch_size": 32}, "workload": load | {"seed": 7}}
    compare.compare(
        compare.whole(run), compare.whole(replace(other, experiment=run.experiment | tuned))
    )


def test_the_engine_changed_within_one_run_is_refused_and_its_load_is_not() -> None:
    run = with_changes(
        simulated(1),
        ("users", "8", "32", 15.0, 15.0),
        ("accelerator", "h100.llama-3.1-8b.bf16", "none", 35.0, 36.0),
    )
    first, second, third = compare.stretches(run)
    assert len(compare.compare(first, second)) == len(compare.MEASURES)
    with pytest.raises(CompareError, match="accelerator h100.llama-3.1-8b.bf16 → none"):
        compare.compare(first, third)


def test_users_of_stages_count_as_the_load_then() -> None:
    run = simulated(1)
    load = run.experiment["workload"] | {"stages": [{"at_s": 30.0, "users": 50, "ramp_s": 0.0}]}
    run = replace(run, experiment=run.experiment | {"workload": load})
    early, late = (Stretch(run, s, s + 20, "x") for s in (5.0, 35.0))
    assert (early.workload()["users"], late.workload()["users"]) == ("8", "50")
