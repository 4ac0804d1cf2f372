"""Tables → matplotlib Figures. Nothing is shown or saved here, and pyplot is not used.

Colours are Okabe and Ito's, told apart by all common kinds of colour vision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.ticker as ticker
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kit import measures, phases
from kit.figures_phases import strip
from kit.measures import OUTCOMES, PARTS, Sampled
from kit.provenance import title
from kit.store import Run
from kit.windows import over_time, parts_near

PART_COLOURS = {
    "router_s": "#E69F00",
    "batch_wait_s": "#F0E442",
    "engine_queue_s": "#CC79A7",
    "prefill_s": "#56B4E9",
    "decode_s": "#0072B2",
    "postprocess_s": "#009E73",
    "rest_s": "#999999",
}
PART_NAMES = {
    "router_s": "queueing: router",
    "batch_wait_s": "queueing: batch wait",
    "engine_queue_s": "queueing: engine",
    "prefill_s": "inference: prefill",
    "decode_s": "inference: decode",
    "postprocess_s": "postprocessing",
    "rest_s": "rest (way back)",
}
OUTCOME_COLOURS = dict(
    zip(
        OUTCOMES,
        ("#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442"),
        strict=True,
    )
)
CYCLE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "black", "#999999")
"""For what has no colour of its own, in this order."""
_SLO_STYLE: dict[str, Any] = {"lw": 1.2, "color": "#D55E00"}
_WIDTH_IN = 10.0


def overview(run: Run) -> Figure:
    """Latency, throughput, replicas and accelerator of one run on one time axis."""
    figure = Figure(figsize=(_WIDTH_IN, 13), layout="constrained", dpi=100)
    axes = figure.subplots(5, 1, sharex=True, height_ratios=[3, 3, 2, 2, 1.6])
    windows, parts = over_time(run), parts_seen(run.requests)
    latency(axes[0], windows, parts, 50)
    latency(axes[1], windows, parts, 95, run.experiment["slo"])
    throughput(axes[2], windows)
    for ax in axes[:3]:
        if len(windows):
            _legend(ax)
        else:
            nothing(ax)
    lines = replicas(axes[3], axes[3].twinx(), run)
    axes[3].legend(lines, [str(line.get_label()) for line in lines], **_LEGEND)
    busy(axes[4], run)
    settings = run.experiment["settings"]
    emulated = settings.get("engine", "emulated") == "emulated"
    whose = f"emulated, replica\n({settings['accelerator'].split('.')[0]})"
    if axes[4].lines:
        axes[4].legend(**_LEGEND | {"title": whose if emulated else "replica"})
    else:
        nothing(axes[4])
    strip(axes[0], run)
    _mark_moves(axes, run)
    axes[-1].set_xlim(0, float(run.experiment["workload"]["duration_s"]))
    axes[-1].set_xlabel("time since the load began (s)")
    figure.suptitle(title(run), fontsize=9)
    return figure


def latency(
    ax: Axes, windows: pd.DataFrame, parts: Sequence[str], q: int,
    slo: Mapping[str, float | None] | None = None,
) -> None:  # fmt: skip
    """The stacked parts of the requests around the q-th percentile (50 or 95) of latency.

    Args:
        ax: where to draw.
        windows: columns as `kit.windows.window_row`, in order of time; a row of which nothing is
            known but the time breaks the layers.
        parts: which of `measures.PARTS` to stack, bottom first.
        q: 50 or 95; at 95 the 95th percentile of queueing is drawn too.
        slo: promises in seconds by name, of which the first two are drawn as lines.
    """
    ax.set_ylabel(f"latency at p{q} (s)")
    if not len(windows):
        return
    gap = windows["ok_rps"].isna()
    ax.stackplot(
        windows["time_s"], [windows[f"p{q}_{p}"].fillna(0).mask(gap) for p in parts],
        labels=[PART_NAMES[p] for p in parts], colors=[PART_COLOURS[p] for p in parts],
    )  # fmt: skip
    if q == 95:
        ax.plot(
            windows["time_s"], windows["queueing_p95_s"], color="black", lw=1.2,
            label="queueing p95",
        )  # fmt: skip
    for (name, limit_s), style in zip((slo or {}).items(), ("--", ":"), strict=False):
        if limit_s is not None:
            text = f"SLO {name.removesuffix('_s').replace('_', ' ')} {limit_s:g} s"
            ax.axhline(limit_s, ls=style, label=text, **_SLO_STYLE)
    ax.set_ylim(bottom=0)


def throughput(ax: Axes, windows: pd.DataFrame) -> None:
    """Requests a second by outcome, stacked; `windows` as for `latency`."""
    ax.set_ylabel("ended (requests/s)")
    if not len(windows):
        return
    seen = [o for o in OUTCOMES if windows[f"{o}_rps"].any()]
    ax.stackplot(
        windows["time_s"], [windows[f"{o}_rps"] for o in seen], labels=seen,
        colors=[OUTCOME_COLOURS[o] for o in seen],
    )  # fmt: skip
    ax.set_ylim(bottom=0)


def replicas(ax: Axes, beside: Axes, of: Sampled) -> list[Line2D]:
    """Replicas wanted, running and starting, and `beside` them the users or the rate that cause them.

    Returns:
        The lines drawn, each with its label.
    """
    styles: dict[str, tuple[str, dict[str, Any]]] = {
        "target_replicas": ("target", {"color": "black", "ls": "--", "lw": 1.2}),
        "running_replicas": ("running", {"color": "#0072B2", "lw": 2.2}),
        "starting_replicas": ("starting", {"color": "#E69F00", "lw": 1.5}),
    }
    ax.set_ylabel("replicas")
    for metric, (name, style) in styles.items():
        values = measures.series(of, "serve", metric)
        ax.step(values.index, values, where="post", label=name, **style)
    ax.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)
    asked, name = measures.series(of, "load", "users"), "users"
    if not len(asked):
        asked, name = measures.series(of, "load", "rate_rps"), "requests/s"
    beside.step(asked.index, asked, where="post", color="#CC79A7", lw=1.0, label=f"{name} (right)")
    beside.set_ylabel(name)
    beside.set_ylim(0, max([1.0, *asked]) * 1.15)
    return [*ax.get_lines(), *beside.get_lines()]


def busy(ax: Axes, of: Sampled) -> None:
    """How busy each replica's accelerator was."""
    ax.set_ylabel("accelerator\nbusy (%)")
    for name, rows in measures.busy_share(of).groupby("replica_id"):
        ax.plot(rows["time_s"], rows["busy_share"] * 100, lw=1, alpha=0.8, label=str(name))
        ax.set_ylim(0, 105)


def distribution(run: Run) -> Figure:
    """How end-to-end latency is spread, and what the mean request spends it on."""
    figure = Figure(figsize=(_WIDTH_IN, 3.6), layout="constrained", dpi=100)
    left, right = figure.subplots(1, 2)
    good = measures.ok(run.requests)
    left.set_xlabel("end-to-end latency (s)")
    left.set_ylabel("requests at or below (%)")
    right.set_xlabel("mean request, time from send to answer (s)")
    if not len(good):
        nothing(left)
        nothing(right)
        return figure
    for column, name, colour in (
        ("e2e_s", "end-to-end", "black"),
        ("queueing_s", "queueing", "#E69F00"),
        ("inference_s", "inference", "#0072B2"),
    ):
        # One point a percentile tenth is plenty for the eye, whatever the number of rows.
        q = np.linspace(0, 100, 1001)
        left.plot(np.percentile(good[column].dropna(), q), q, color=colour, label=name)
    left.axhline(95, color="#999999", lw=0.8, ls=":")
    left.annotate("p95", (0, 95), xytext=(2, 2), textcoords="offset points", fontsize=8)
    left.set_xlim(left=0)
    left.set_ylim(0, 100)
    left.set_xlabel("latency (s)")
    left.legend(fontsize=8)
    _waterfall(right, good)
    figure.suptitle(title(run), fontsize=9)
    return figure


def _waterfall(ax: Axes, good: pd.DataFrame) -> None:
    parts = parts_seen(good)
    means = good[parts].mean()
    start_s = 0.0
    total_s = float(means.sum())
    for k, part in enumerate(parts):
        ax.barh(k, means[part], left=start_s, color=PART_COLOURS[part], edgecolor="black", lw=0.5)
        start_s += means[part]
        ax.annotate(
            f" {means[part]:.3f} s ({means[part] / total_s:.0%})", (start_s, k), va="center",
            fontsize=8,
        )  # fmt: skip
    ax.set_yticks(range(len(parts)), [PART_NAMES[p] for p in parts])
    ax.invert_yaxis()
    ax.set_xlim(0, total_s * 1.35)


def comparison(runs: Mapping[str, Run]) -> Figure:
    """Runs side by side at the same load: throughput, and the parts of latency at p50 and p95."""
    figure = Figure(figsize=(_WIDTH_IN, 3.8), layout="constrained", dpi=100)
    axes = figure.subplots(1, 3)
    names = list(runs)
    stretches = [phases.stretches(r).iloc[-1] for r in runs.values()]
    axes[0].bar(names, [s["throughput_rps"] for s in stretches], color="#009E73")
    axes[0].set_ylabel("throughput (requests/s)")
    for ax, q in zip(axes[1:], (50, 95), strict=True):
        bottom = np.zeros(len(runs))
        parts = [
            parts_near(_settled(r, float(s["from_s"])), q)
            for r, s in zip(runs.values(), stretches, strict=True)
        ]
        for part in parts_seen(pd.concat([r.requests for r in runs.values()])):
            heights = np.array([p[part] for p in parts])
            ax.bar(names, heights, bottom=bottom, color=PART_COLOURS[part], label=PART_NAMES[part])
            bottom += np.nan_to_num(heights)
        ax.set_ylabel(f"latency at p{q} (s)")
    axes[2].legend(fontsize=7)
    for ax in axes:
        ax.tick_params(axis="x", labelsize=8)
    figure.suptitle(title(next(iter(runs.values()))), fontsize=9)
    return figure


def parts_seen(requests: pd.DataFrame) -> list[str]:
    """The parts that this app has: an engine without a queue of its own needs no empty layer."""
    return [p for p in PARTS if requests[p].gt(0).any()] or list(PARTS)


def _settled(run: Run, from_s: float) -> pd.DataFrame:
    return run.requests[measures.finished_s(run.requests) >= from_s]


_LEGEND: dict[str, Any] = {
    "fontsize": 7, "loc": "upper left", "bbox_to_anchor": (1.07, 1.0), "frameon": False,
    "title_fontsize": 7,
}  # fmt: skip


def _legend(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], **_LEGEND)


def nothing(ax: Axes) -> None:
    """Say that a panel has no data."""
    ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color="#666666")


def move_colour(move: Mapping[str, Any]) -> str:
    """Of a row of `measures.moves`: refused ones and notes are told from changes."""
    return "#D55E00" if move["error"] else "#0072B2" if move["mark"] else "black"


def move_lines(axes: Iterable[Axes], moves: Sequence[Mapping[str, Any]]) -> None:
    """A line through all panels for each row of `measures.moves`."""
    for ax in axes:
        # One artist for all of them, which leaves the axes' limits alone.
        lines = LineCollection(
            [((m["asked_s"], 0), (m["asked_s"], 1)) for m in moves],
            colors=[move_colour(m) for m in moves], linestyles="-.", zorder=2,
            linewidths=0.9 if len(moves) <= 20 else 0.4,  # many must not hide what they mark
            transform=ax.get_xaxis_transform(),
        )  # fmt: skip
        ax.add_collection(lines, autolim=False)


def _mark_moves(axes: Any, run: Run) -> None:
    """A numbered line through all panels for each change, its names above the first panel."""
    moves = measures.records(measures.moves(run))
    move_lines(axes, moves)
    for number, move in enumerate(moves, 1):
        axes[0].annotate(
            str(number), (move["asked_s"], 1), xycoords=("data", "axes fraction"), xytext=(0, 16),
            textcoords="offset points", ha="center", fontsize=9, fontweight="bold",
        )  # fmt: skip
    texts = [
        f"{n}  {m['label']}{' (refused)' if m['error'] else ''}" for n, m in enumerate(moves, 1)
    ]
    if texts:
        axes[0].set_title("\n".join(texts), loc="left", fontsize=8, pad=29)
