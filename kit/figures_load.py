"""Figures of load against latency, with what queueing theory says laid over. Tables → Figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kit import saturation, theory
from kit.figures import CYCLE
from kit.provenance import title
from kit.settings import Settings
from kit.store import Run
from kit.workload import Workload

_THEORY: dict[str, Any] = {"color": "black", "ls": "--", "lw": 1.2}
_ROOM = 1.6
"""Axes end so far above the highest step that kept up: a saturated one grows as long as it lasts."""
_LEGEND: dict[str, Any] = {"fontsize": 7, "frameon": False}


def load_latency(run: Run) -> Figure:
    """Of a ramp: latency, throughput and requests under way against the rate that was offered."""
    figure = Figure(figsize=(10.0, 3.9), layout="constrained", dpi=100)
    left, middle, right = figure.subplots(1, 3)
    table = saturation.curve(run)
    bend = saturation.knee(table)
    table = table.sort_values("planned_rps", ignore_index=True)  # a draw may turn two rates round
    known = theory.of(
        Settings(**run.experiment["settings"]), Workload(**run.experiment["workload"])
    )
    grid = np.linspace(0.01, 1, 400) * max(table["planned_rps"].max(), 1e-9)
    lines = known.curve(grid)
    top_s = _latency(left, table, run)
    for column, name in (("mean_response_s", "mean response"), ("mean_wait_s", "mean wait")):
        inside = lines[column].to_numpy() <= 1.3 * top_s
        if inside.any():
            style = _THEORY | ({"ls": ":"} if column == "mean_wait_s" else {})
            left.plot(
                grid[inside], lines[column][inside], label=f"{known.formula}: {name}", **style
            )
    left.set_ylim(0, 1.1 * top_s)
    _throughput(middle, table, known.capacity_rps, bend)
    _under_way(right, table, lines)
    for ax in (left, middle, right):
        ax.set_xlabel("offered rate, as drawn (requests/s)")
        ax.set_xlim(0, table["planned_rps"].max() * 1.04)
        for x, dash in ((bend.slo_rps, "-"), (bend.power_rps, ":")):
            if not math.isnan(x):
                ax.axvline(x, color="#CC79A7", ls=dash, lw=1.2, zorder=0)
        ax.legend(loc="upper left", **_LEGEND)
    note = f"theory: {known.formula}" + (f" ({known.why})" if known.why else "")
    wrong = table.loc[table["invalid"] != "", ["rate_rps", "invalid"]]
    if len(wrong):
        rate, why = wrong.iloc[0]
        note += f"\nINVALID {len(wrong)} of {len(table)} rates, first {_rate(rate)}: {why}"
    bends = (
        f"knee: promises kept up to {_rate(bend.slo_rps)} (line), most power at "
        f"{_rate(bend.power_rps)} (dots)"
    )
    figure.suptitle(f"{title(run)}\n{bends} · {note}", fontsize=8)
    return figure


def _rate(value: float) -> str:
    return "no rate here" if math.isnan(value) else f"{value:.3g} requests/s"


def _latency(ax: Axes, table: pd.DataFrame, run: Run) -> float:
    """Points of every step, hollow where it was saturated; returns the highest that is no outlier."""
    ax.set_ylabel("latency (s)")
    columns = {
        "response_p95_s": "response p95", "e2e_p95_s": "E2E p95",
        "response_mean_s": "mean response", "response_p50_s": "response p50",
    }  # fmt: skip
    same = np.allclose(table["e2e_p95_s"], table["response_p95_s"], rtol=0.02, equal_nan=True)
    for (column, name), colour in zip(columns.items(), CYCLE, strict=False):
        if same and column == "e2e_p95_s":
            continue  # sent on time: the same line twice
        _points(ax, table, column, name, colour)
    for name, limit_s in run.experiment["slo"].items():
        if limit_s is not None and name == "e2e_p95_s":
            ax.axhline(limit_s, color="#D55E00", lw=1, ls="--", label=f"SLO E2E p95 {limit_s:g} s")
    steady = table.loc[~table["saturated"], "response_p95_s"].max()
    highest = table["response_p95_s"].max()
    return float(highest if math.isnan(steady) else min(highest, _ROOM * steady))


def _points(ax: Axes, table: pd.DataFrame, column: str, name: str, colour: str) -> None:
    ax.plot(table["planned_rps"], table[column], color=colour, lw=1, label=name)
    full = table["saturated"].to_numpy()
    for hollow in (False, True):
        part = table[full == hollow]
        face = "white" if hollow else colour
        ax.plot(part["planned_rps"], part[column], "o", ms=5, color=colour, mfc=face)


def _throughput(ax: Axes, table: pd.DataFrame, capacity_rps: float, bend: saturation.Knee) -> None:
    ax.set_ylabel("answered (requests/s)")
    top = table["planned_rps"].max()
    ax.plot([0, top], [0, top], color="#999999", lw=0.8, label="offered")
    _points(ax, table, "throughput_rps", "throughput", "#009E73")
    _points(ax, table, "goodput_rps", "goodput (within all promises)", "#0072B2")
    if not math.isnan(capacity_rps):
        ax.axhline(capacity_rps, label=f"capacity by theory {capacity_rps:.3g}", **_THEORY)
    if not math.isnan(bend.capacity_rps):
        ax.axhline(bend.capacity_rps, color="#009E73", ls=":", lw=1,
                   label=f"most answered {bend.capacity_rps:.3g}")  # fmt: skip
    ax.set_ylim(0, 1.45 * top)


def _under_way(ax: Axes, table: pd.DataFrame, lines: pd.DataFrame) -> None:
    ax.set_ylabel("requests under way")
    _points(ax, table, "in_flight", "measured over time", "#E69F00")
    law = table["throughput_rps"] * table["response_mean_s"]
    ax.plot(
        table["planned_rps"], law, "x", color="black", ms=6, label="Little's law: λ W, measured"
    )
    top = table.loc[~table["saturated"], "in_flight"].max()
    top = (
        table["in_flight"].max() if math.isnan(top) else min(table["in_flight"].max(), _ROOM * top)
    )
    inside = lines["in_system"].to_numpy() <= 1.3 * top
    if inside.any():
        ax.plot(lines["rate_rps"][inside], lines["in_system"][inside], label="theory", **_THEORY)
    ax.set_ylim(0, 1.45 * max(top, 0.1))
