"""Figures of the apps beyond one model behind one batch: routes, streams, KV cache, overload.

Tables → matplotlib Figures, as in `kit.figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib.ticker as ticker
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kit import breakdown, measures
from kit.figures import (
    CYCLE,
    OUTCOME_COLOURS,
    PART_COLOURS,
    PART_NAMES,
    nothing,
    parts_seen,
)
from kit.measures import OUTCOMES
from kit.provenance import title
from kit.store import Run
from kit.windows import parts_near

_WIDTH_IN = 10.0
_BESIDE: dict[str, Any] = {
    "fontsize": 8, "frameon": False, "loc": "upper left", "bbox_to_anchor": (1.0, 1.0),
}  # fmt: skip
_ABOVE: dict[str, Any] = {
    "fontsize": 8, "frameon": False, "loc": "lower left", "bbox_to_anchor": (0.0, 1.0),
}  # fmt: skip


def routes(run: Run) -> Figure:
    """Throughput of each route, and the parts of its latency at p50 and p95."""
    figure, axes = _figure(run, 1, 3, 3.6)
    table = breakdown.by_route(run)
    good = measures.ok(run.requests)
    axes[0].set_ylabel("throughput (requests/s)")
    for ax, q in zip(axes[1:], (50, 95), strict=True):
        ax.set_ylabel(f"latency at p{q} (s)")
    if not len(table):
        _all_empty(axes)
        return figure
    names = [
        f"{r['route']}\n{r['requests']} requests\n{r['prompt_tokens']:.0f} → "
        f"{r['output_tokens']:.0f} tokens" for r in measures.records(table)
    ]  # fmt: skip
    bars = axes[0].bar(names, table["throughput_rps"], color="#009E73")
    axes[0].bar_label(bars, fmt="%.3g", fontsize=8)
    axes[0].margins(y=0.12)
    for ax, q in zip(axes[1:], (50, 95), strict=True):
        near = [parts_near(good[good["route"] == r], q) for r in table["route"]]
        _stack(ax, names, near, parts_seen(good))
    axes[2].legend(*_reversed(axes[2]), **_BESIDE)
    for ax in axes:
        ax.tick_params(axis="x", labelsize=8)
    return figure


def stages(runs: Mapping[str, Run]) -> Figure:
    """What the requests at p50 and at p95 of each run spend their time on, from router to rest."""
    first = next(iter(runs.values()))
    figure, axes = _figure(first, 1, 2, 1.7 + 0.45 * len(runs), sharey=True)
    parts = parts_seen(pd.concat([r.requests for r in runs.values()]))
    for ax, q in zip(axes, (50, 95), strict=True):
        ax.set_xlabel(f"latency at p{q} (s)")
        near = [parts_near(r.requests, q) for r in runs.values()]
        _stack(ax, list(runs), near, parts, lying=True)
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def kv_cache(run: Run) -> Figure:
    """KV cache of each replica over time, with the sequences that fill it and the preemptions."""
    figure, axes = _figure(run, 3, 1, 6.5, sharex=True)
    state = breakdown.engine_state(run)
    axes[0].set_ylabel("KV cache used (%)")
    axes[1].set_ylabel("sequences")
    axes[2].set_ylabel("preemptions\n(since start)")
    axes[2].set_xlabel("time since the load began (s)")
    axes[2].set_xlim(0, float(run.experiment["workload"]["duration_s"]))
    if not len(state):
        _all_empty(axes)
        return figure
    names = sorted(state["replica_id"].unique())
    colours = {n: CYCLE[k % len(CYCLE)] for k, n in enumerate(names)}
    lines = (
        (axes[0], "kv_cache_share", "-", "", 100.0),
        (axes[0], "prefix_cache_hit_share", ":", "prefix cache hits", 100.0),
        (axes[1], "running_sequences", "-", "running", 1.0),
        (axes[1], "waiting_sequences", "--", "waiting", 1.0),
        (axes[2], "preemptions", "-", "", 1.0),
    )
    for ax, metric, style, what, factor in lines:
        rows = state[state["metric"] == metric]
        for name, of_one in rows.groupby("replica_id"):
            label = " ".join(filter(None, (what, str(name) if len(names) > 1 or not what else "")))
            ax.step(
                of_one["time_s"], of_one["value"] * factor, where="post", ls=style, lw=1.4,
                color=colours[str(name)], label=label,
            )  # fmt: skip
    axes[0].set_ylim(0, 105)
    for ax in axes:
        if ax.lines:
            ax.legend(**_BESIDE)
        else:
            nothing(ax)
    for ax in axes[1:]:
        ax.set_ylim(0, max(1.0, ax.get_ylim()[1]))  # of nothing but zeros, one step above them
        ax.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    return figure


def token_times(runs: Mapping[str, Run]) -> Figure:
    """How TTFT, TPOT and ITL of streams are spread in each run, with the promises about them."""
    first = next(iter(runs.values()))
    figure, axes = _figure(first, 1, 3, 3.8, sharey=True)
    panels: tuple[tuple[str, str, Callable[[pd.DataFrame], pd.Series[float]], str | None], ...] = (
        ("time to first token", "s", lambda t: measures.ok(t)["ttft_s"], "ttft_p95_s"),
        ("time per output token", "ms", lambda t: measures.ok(t)["tpot_s"], "tpot_p95_s"),
        ("gaps between pieces, ITL", "ms", measures.itl_s, None),
    )
    axes[0].set_ylabel("at or below (%)")
    axes[0].set_ylim(0, 100)
    q = np.linspace(0, 100, 1001)
    for ax, (name, unit, values_of, slo) in zip(axes, panels, strict=True):
        factor = {"s": 1.0, "ms": 1e3}[unit]
        ax.set_xlabel(f"{name} ({unit})")
        far = 0.0
        for k, (name, run) in enumerate(runs.items()):
            values = values_of(run.requests).dropna()
            if len(values):
                curve = np.percentile(values, q) * factor
                ax.plot(curve, q, label=name, color=CYCLE[k % len(CYCLE)])
                far = max(far, float(curve[990]))
        if not ax.lines:
            nothing(ax)
            continue
        limit_s = first.experiment["slo"].get(slo) if slo else None
        if limit_s is not None:
            ax.axvline(
                limit_s * factor, color="#D55E00", ls="--", lw=1.2,
                label=f"SLO p95 {limit_s * factor:g} {unit}",
            )  # fmt: skip
            far = max(far, limit_s * factor)
        # Up to p99: one straggler would press everything else to the left edge.
        ax.set_xlim(0, far * 1.1)
        ax.axhline(95, color="#999999", lw=0.8, ls=":")
        ax.annotate("p95", (0, 95), xytext=(2, -9), textcoords="offset points", fontsize=8)
        ax.legend(**_ABOVE)
    return figure


def useful(runs: Mapping[str, Run]) -> Figure:
    """Of the token slots of static batches: how many gave output, how many waited for the longest.

    Left each run as a whole; right how the batches are spread.
    """
    first = next(iter(runs.values()))
    figure, (left, right) = _figure(first, 1, 2, 3.6)
    left.set_xlabel("share of the batches' token slots (%)")
    right.set_xlabel("useful share of a batch (%)")
    right.set_ylabel("batches (%)")
    tables = {name: breakdown.static_batches(run) for name, run in runs.items()}
    names = [name for name, table in tables.items() if len(table)]
    if not names:
        _all_empty((left, right))
        return figure
    shares = np.array([breakdown.useful_share_total(runs[name]) * 100 for name in names])
    for values, start, colour, text in (
        (shares, np.zeros(len(names)), "#0072B2", "useful: gave a token"),
        (100 - shares, shares, "#D55E00", "lost: waited for the longest of the batch"),
    ):
        bars = left.barh(names, values, left=start, color=colour, label=text)
        left.bar_label(bars, fmt="%.0f %%", label_type="center", color="white", fontsize=9)
    left.set_xlim(0, 100)
    left.invert_yaxis()
    left.legend(**_ABOVE)
    for name in names:
        k = list(runs).index(name)
        of_batches = tables[name]["useful_share"] * 100
        right.hist(
            of_batches, bins=20, range=(0, 100),
            weights=np.full(len(of_batches), 100 / len(of_batches)),
            histtype="step", lw=1.6, color=CYCLE[k % len(CYCLE)],
            label=f"{name} ({len(of_batches)} batches)",
        )  # fmt: skip
    right.set_xlim(0, 100)
    right.legend(**_ABOVE)
    return figure


def overload(runs: Mapping[str, Run]) -> Figure:
    """Attempts a second by outcome over time, retries beside first tries, a row for each run.

    Each row has its own scale: a storm would press the others flat.
    """
    first = next(iter(runs.values()))
    figure, axes = _figure(first, len(runs), 1, 1.4 + 2.3 * len(runs), sharex=True)
    duration_s = float(first.experiment["workload"]["duration_s"])
    width_s = max(0.5, duration_s / 60)
    edges = np.arange(0, duration_s + width_s, width_s)
    middles = edges[:-1] + width_s / 2
    for ax, (name, run) in zip(axes, runs.items(), strict=True):
        ax.set_ylabel(f"{name}\nattempts/s")
        table = run.requests
        if not len(table):
            nothing(ax)
            continue
        ended = measures.finished_s(table)
        layers = [
            (o, np.histogram(ended[table["outcome"] == o], edges)[0] / width_s) for o in OUTCOMES
        ]
        layers = [(o, rate) for o, rate in layers if rate.any()]
        ax.stackplot(
            middles, [rate for _, rate in layers], labels=[o for o, _ in layers],
            colors=[OUTCOME_COLOURS[o] for o, _ in layers],
        )  # fmt: skip
        again = np.histogram(ended[table["attempt"] > 1], edges)[0] / width_s
        ax.plot(middles, again, color="black", lw=1.2, ls="--", label="of these, retries")
        ax.set_ylim(bottom=0)
        ax.legend(*_reversed(ax), **_BESIDE)
    axes[-1].set_xlim(0, duration_s)
    axes[-1].set_xlabel("time since the load began (s)")
    return figure


def _figure(
    run: Run, rows: int, columns: int, height_in: float, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained", dpi=100)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    figure.suptitle(title(run), fontsize=9)
    return figure, axes.ravel()


def _stack(
    ax: Axes, names: list[str], near: list[Any], parts: list[str], lying: bool = False
) -> None:
    """A bar for each name, made of its parts."""
    base = np.zeros(len(names))
    for part in parts:
        sizes = np.nan_to_num(np.array([p[part] for p in near], dtype=float))
        style: dict[str, Any] = {"color": PART_COLOURS[part], "label": PART_NAMES[part]}
        if lying:
            ax.barh(names, sizes, left=base, **style)
        else:
            ax.bar(names, sizes, bottom=base, **style)
        base += sizes
    for k, total in enumerate(base):
        place, shift, align = (
            ((total, k), (3, 0), "left") if lying else ((k, total), (0, 2), "center")
        )
        ax.annotate(
            f"{total:.3g}", place, xytext=shift, textcoords="offset points", ha=align,
            va="center" if lying else "bottom", fontsize=8,
        )  # fmt: skip
    (ax.set_xlim if lying else ax.set_ylim)(0, max(base.max() * 1.15, 1e-9))


def _reversed(ax: Axes) -> tuple[list[Any], list[Any]]:
    handles, labels = ax.get_legend_handles_labels()
    return handles[::-1], labels[::-1]


def _all_empty(axes: Any) -> None:
    for ax in axes:
        nothing(ax)
