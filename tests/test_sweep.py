"""Sweeps: grids checked at once, resumed, judged by what is valid; their notebooks run and true."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import papermill
import pytest
from test_phases import made

from kit import experiment, figures_sweep, store, sweep
from kit.experiment import Experiment
from kit.parameters import ReportError
from kit.settings import Settings
from kit.store import Run
from kit.sweep import Sweep, SweepError
from kit.sweep_parameters import Parameters
from kit.workload import Workload

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
LOAD = Workload(arrivals="poisson", rate_rps=5.0, duration_s=10.0)


def test_a_grid_is_every_combination_and_restarts_least() -> None:
    grid = Sweep(
        Settings(), LOAD, {"max_batch_size": [4, 8], "app": ["batched", "continuous"]},
        {"rate_rps": [2.0, 4.0, 8.0]}, repeats=2,
    )  # fmt: skip
    made_of = grid.experiments()
    assert len(made_of) == 2 * 2 * 3 * 2
    assert grid.axes == ["app", "max_batch_size", "rate_rps"]
    apps = [e.settings.app for e in made_of]
    assert sum(a != b for a, b in itertools.pairwise(apps)) == 1
    assert len({e.name for e in made_of}) == len(made_of)
    assert made_of[0].name == "app=batched max_batch_size=4 rate_rps=2.0 #1"
    assert [e.workload.seed for e in made_of[:2]] == [1, 2]


@pytest.mark.parametrize(
    ("knobs", "loads", "words"),
    [
        ({"max_batch": [4]}, {}, "max_batch: no such knob"),
        ({}, {"rps": [4]}, "rps: no field of a workload"),
        ({"max_batch_size": []}, {}, "must be a list of values"),
        ({"max_batch_size": "48"}, {}, "must be a list of values"),
        ({"proxy": ["haproxy"]}, {}, "proxy is fixed once Ray runs"),
        (
            {"max_batch_size": [4, 0]},
            {},
            "the point max_batch_size=0 cannot be: max_batch_size = 0",
        ),
        ({}, {"users": [2]}, "^$"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_before_anything_runs(
    knobs: dict[str, Any], loads: dict[str, Any], words: str
) -> None:
    if words == "^$":
        assert Sweep(Settings(), LOAD, knobs, loads).experiments()
        return
    with pytest.raises(SweepError, match=words):
        Sweep(Settings(), LOAD, knobs, loads)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was run; each writes a run like a real one's, the third is interrupted."""
    names: list[str] = []

    def fake(about: Experiment, serving: object, folder: Path, progress: bool) -> Run:
        names.append(about.name)
        rng = np.random.default_rng(len(names))
        whole = made(0.3 + rng.gamma(4, 0.02, 400), duration_s=10.0)
        status = "interrupted" if len(names) == 3 else "complete"
        run = replace(whole, experiment=about.as_dict(), folder=folder, status=status)
        store.write(run)
        run.requests.to_csv(folder / "requests.csv", index=False)
        run.samples.to_csv(folder / "samples.csv", index=False)
        return run

    monkeypatch.setattr(experiment, "run", fake)
    return names


def test_an_interrupted_sweep_goes_on_where_it_was(ran: list[str], tmp_path: Path) -> None:
    grid = Sweep(Settings(), LOAD, {"max_batch_size": [4, 8]}, {"rate_rps": [2.0, 4.0]})
    first = sweep.run(grid, None, tmp_path, progress=False)  # type: ignore[arg-type]
    assert len(ran) == len(first) == 3
    found = sweep.run(grid, None, tmp_path, progress=False)  # type: ignore[arg-type]
    assert ran[3:] == ["max_batch_size=8 rate_rps=2.0", "max_batch_size=8 rate_rps=4.0"]
    assert found[["max_batch_size", "rate_rps"]].to_numpy().tolist() == [
        [4, 2],
        [4, 4],
        [8, 2],
        [8, 4],
    ]
    assert found["valid"].all()
    other = Sweep(Settings(), LOAD, {"max_batch_size": [4, 8]}, {"rate_rps": [2.0]}, repeats=1)
    assert len(sweep.run(other, None, tmp_path, progress=False)) == 2  # type: ignore[arg-type]
    assert len(ran) == 5, "points of another grid that were run already are taken from there"


def points(**columns: list[Any]) -> pd.DataFrame:
    n = len(columns["goodput_rps"])
    base = {
        "run": [f"r{k}" for k in range(n)],
        "x": [k % 2 for k in range(n)], "y": [k // 2 for k in range(n)],
        "good_fraction": [1.0] * n, "valid": [True] * n, "why": [""] * n, "replica_seconds": [10.0] * n,
    }  # fmt: skip
    return pd.DataFrame(base | columns)


def test_the_front_holds_what_nothing_beats_and_nothing_invalid() -> None:
    found = points(
        goodput_rps=[5.0, 6.0, 6.0, 9.0, 4.0], e2e_p95_s=[1.0, 1.0, 2.0, 0.5, 0.4],
        replica_seconds=[10.0, 10.0, 5.0, 10.0, 10.0], valid=[True, True, True, False, True],
        why=["", "", "", "cache", ""],
    )  # fmt: skip
    assert sweep.front(found).tolist() == [False, True, True, False, True]
    assert sweep.front(found, ["y"]).tolist() == [False, True, True, False, True]
    assert sweep.front(found, ["x"]).tolist() == [True, True, True, False, True]
    grid = Sweep(Settings(), LOAD, {"max_batch_size": [4, 8]}, {"rate_rps": [2.0, 4.0]})
    named = found.assign(max_batch_size=found["x"], rate_rps=found["y"], requests=300)
    said = sweep.words(named, grid)
    assert said[0].startswith("**rate_rps = 0**: most goodput by max_batch_size = 1: 6 requests/s")
    assert said[1].startswith("**rate_rps = 1**: most goodput by max_batch_size = 0: 6 requests/s")
    assert "r3** is invalid and wins nothing: cache" in said[3]
    figures_sweep.pareto(found)
    drawn = figures_sweep.heat_map(found.head(4), ["y"], ["x"])
    texts = [t.get_text() for t in drawn.axes[0].texts]
    assert texts == ["5", "6", "6", "✗ 9 invalid"]
    assert figures_sweep.heat_map(found.head(1), ["x"], []).axes


def test_parameters_of_the_notebook_are_checked() -> None:
    assert Parameters(knobs="{'max_batch_size': [4]}").knobs == {"max_batch_size": [4]}
    for wrong, words in (
        ({"knob": {}}, "did you mean 'knobs'"),
        ({"knobs": "4"}, "knobs"),
        ({"knobs": {"max_batch_size": ["eight"]}}, "max_batch_size = 'eight': must be"),
        ({"duration_s": "20"}, "duration_s = '20'"),
    ):
        with pytest.raises(ReportError, match=words):
            Parameters(**wrong)


@pytest.mark.cluster
def test_the_sweep_notebook_runs_resumes_and_its_runs_compare(tmp_path: Path) -> None:
    """As papermill runs them: a small grid, and the comparison of two of its points."""
    place, out = tmp_path / "runs", tmp_path / "out.ipynb"
    values = {
        "knobs": "{'max_batch_size': [2, 16]}", "loads": {"rate_rps": [16.0]}, "duration_s": 13.0,
        "slo_e2e_p95_s": 3.0, "folder": str(place), "port": 8061,
    }  # fmt: skip
    papermill.execute_notebook(NOTEBOOKS / "report_sweep.ipynb", out, values, progress_bar=False)
    found = pd.read_csv(place / "sweep.csv").set_index("max_batch_size")
    assert len(found) == 2
    assert found["valid"].all(), found["why"].tolist()
    # What it teaches: a small batch does not carry the rate, and its goodput is gone.
    assert found.loc[16, "goodput_rps"] > 2 * found.loc[2, "goodput_rps"]
    pictures = [o for c in papermill.iorw.load_notebook_node(str(out)).cells for o in c.get("outputs", [])
                if "image/png" in o.get("data", {})]  # fmt: skip
    assert len(pictures) == 2
    names = sorted(p.parent.name for p in place.glob("*/run.json"))
    assert names == ["max_batch_size=16 rate_rps=16.0", "max_batch_size=2 rate_rps=16.0"]
    folders = {"a": str(place / names[1]), "b": str(place / names[0])}
    papermill.execute_notebook(
        NOTEBOOKS / "compare_runs.ipynb", tmp_path / "c.ipynb", folders, progress_bar=False
    )
    text = json.dumps(papermill.iorw.load_notebook_node(str(tmp_path / "c.ipynb")))
    assert "**better** in B" in text
