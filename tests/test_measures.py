"""Figures of merit against runs of known make."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import fake_run, requests_table

from kit import explain, figures, measures, phases, store, summary
from kit.experiment import Change, Experiment
from kit.settings import Settings, SettingsError
from kit.store import StoreError
from kit.windows import parts_near
from kit.workload import Workload


def test_o18_percentiles_are_exact() -> None:
    times = pd.Series([0.147, 1.449, 1.451])
    assert [measures.percentile(times, q) for q in (0, 50, 100)] == [0.147, 1.449, 1.451]
    assert math.isnan(measures.percentile(pd.Series(dtype=float), 95))


def test_o16_rejections_are_counted_beside_and_not_in_percentiles() -> None:
    run = fake_run(200)
    before = summary.of(run)
    shed = requests_table(100, seed=5).assign(outcome="rejected", e2e_s=0.001, status=503.0)
    after = summary.of(replace(run, requests=pd.concat([run.requests, shed])))
    assert after["e2e_p50_s"] == before["e2e_p50_s"]
    assert (after["ok_requests"], after["rejected_requests"]) == (200, 100)
    assert after["good_fraction"] == pytest.approx(before["good_fraction"] * 2 / 3)


def test_parts_add_up_at_every_percentile() -> None:
    table = requests_table(1000)
    assert measures.identity_error_s(table).max() < 1e-9
    for q in (50, 95):
        total = parts_near(table, q).sum()
        assert total == pytest.approx(measures.percentile(table["e2e_s"], q), rel=0.02)


def test_stretches_are_measured_between_changes_after_settling() -> None:
    run = fake_run(1200, duration_s=60.0)
    table = phases.stretches(run, settle=0.3)
    assert list(table["label"]) == ["start", "max_batch_size 8 → 16"]
    assert table["from_s"].tolist() == pytest.approx([9.0, 30.4 + 0.3 * 29.6])
    assert table["throughput_rps"].iloc[0] == pytest.approx(1200 / 59, rel=0.1)
    assert table["replicas"].tolist() == [1, 2]


def test_littles_law_holds_for_what_is_computed() -> None:
    """In flight = rate × latency, with the mean number in flight counted independently."""
    table = requests_table(3000)
    grid = np.arange(5, 50, 0.01)
    ended = measures.finished_s(table)
    in_flight = np.mean([((table["sent_s"] <= t) & (ended > t)).sum() for t in grid[::20]])
    assert in_flight == pytest.approx(
        measures.throughput_rps(table) * table["e2e_s"].mean(), rel=0.05
    )


def test_replica_seconds_is_the_area_under_running() -> None:
    assert measures.replica_seconds(fake_run(duration_s=60.0)) == pytest.approx(90, abs=1)


def test_summary_of_nothing_has_no_zeros() -> None:
    run = fake_run(10)
    empty = replace(run, requests=run.requests.iloc[:0], samples=run.samples.iloc[:0])
    found = summary.of(empty)
    assert found["ok_requests"] == 0
    for key in ("e2e_p95_s", "throughput_rps", "good_fraction", "replica_seconds"):
        assert found[key] is None
    json.dumps(found, allow_nan=False)


def test_verdicts_follow_the_slo() -> None:
    table = summary.verdicts(fake_run()).set_index("slo")
    assert table.loc["e2e_p95_s", "met_at_the_end"]  # 0.81 s against 1.5 s
    assert not table.loc["queueing_p95_s", "met_at_the_end"]  # 0.3 s against 0.2 s


@pytest.mark.parametrize("n", [0, 1, 400])
def test_figures_and_words_stand_any_number_of_rows(n: int, tmp_path: Path) -> None:
    run = fake_run(400)
    run = replace(run, requests=run.requests.iloc[:n])
    for k, figure in enumerate(
        (figures.overview(run), figures.distribution(run), figures.comparison({"a": run}))
    ):
        figure.savefig(tmp_path / f"{k}.png")
        assert (tmp_path / f"{k}.png").stat().st_size > 5000
    assert explain.changes(run)
    assert explain.dominant(run)
    assert len(explain.verdict_sentences(run)) == 2


def test_every_axis_has_a_label_and_the_accelerator_is_said_to_be_emulated() -> None:
    run = fake_run()
    for figure in (figures.overview(run), figures.distribution(run)):
        for ax in figure.axes:
            assert ax.get_xlabel() or ax.get_ylabel()
        assert "emulated NVIDIA H100" in figure.get_suptitle()
        assert "evidence" in figure.get_suptitle()
    assert "1  max_batch_size 8 → 16" in figures.overview(run).axes[0].get_title("left")


def test_words_say_what_moved() -> None:
    assert "fell (4 → 2 s, ÷ 2.0)" in explain.moved("x", 4, 2, "s")
    assert "rose (2 → 4 s, × 2.0)" in explain.moved("x", 2, 4, "s")
    assert "about the same" in explain.moved("x", 2, 2.1, "s")
    assert "cannot be compared" in explain.moved("x", math.nan, 2, "s")


def test_run_loads_back_equal(tmp_path: Path) -> None:
    run = fake_run(300, tmp_path)
    run.requests.to_csv(tmp_path / "requests.csv", index=False)
    run.samples.to_csv(tmp_path / "samples.csv", index=False)
    store.write(run)
    once = store.load(tmp_path)
    assert once.experiment == json.loads(json.dumps(run.experiment))
    assert once.requests["e2e_s"].tolist() == run.requests["e2e_s"].tolist()
    assert once.changes.equals(store.load(tmp_path).changes)
    assert store.load(tmp_path) == once


def test_killed_run_is_marked_and_a_torn_last_row_is_left_out(tmp_path: Path) -> None:
    run = replace(fake_run(50, tmp_path), status="running")
    run.requests.to_csv(tmp_path / "requests.csv", index=False)
    with (tmp_path / "requests.csv").open("a") as file:
        file.write("51,3.2,0.")
    store.write(run)
    assert store.load(tmp_path).status == "running"
    head = json.loads((tmp_path / "run.json").read_text())
    head["process"] = [2**22 + 1, 0.0]
    (tmp_path / "run.json").write_text(json.dumps(head))
    killed = store.load(tmp_path)
    assert killed.status == "killed"
    assert len(killed.requests) == 50
    assert "killed" in killed.notes[-1]
    store.settle(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "killed"


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        store.load(tmp_path)
    with pytest.raises(StoreError, match="cannot write the run"):
        store.write(replace(fake_run(1), folder=Path("/proc/nowhere")))


def test_a_timeline_is_checked_before_anything_starts() -> None:
    w = Workload(duration_s=10.0)
    for change, text in (
        (Change(3, "max_batch_size", "eight"), "max_batch_size = 'eight'"),
        (Change(30, "max_batch_size", 4), "before the end of the load at 10 s"),
        (Change(3, "proxy", "haproxy"), "fixed once Ray runs"),
    ):
        with pytest.raises(SettingsError, match=text):
            Experiment(Settings(), w, (change,))
