"""Figures of a sweep: heat maps over two of its axes, and the Pareto front. Tables → Figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kit import sweep
from kit.figures import CYCLE, nothing

NAMES = {
    "goodput_rps": "goodput (requests/s)",
    "good_fraction": "within all promises (share)",
    "throughput_rps": "throughput (requests/s)",
    "e2e_p50_s": "E2E p50 (s)",
    "e2e_p95_s": "E2E p95 (s)",
    "response_p95_s": "response p95 (s)",
    "queueing_p95_s": "queueing p95 (s)",
    "batch_size_mean_requests": "mean batch (requests)",
    "replica_seconds": "replica-seconds (s)",
}
_LOWER_IS_BETTER = ("e2e_p50_s", "e2e_p95_s", "response_p95_s", "queueing_p95_s", "replica_seconds")


def heat_map(
    found: pd.DataFrame, up: Sequence[str], along: Sequence[str],
    figures: Sequence[str] = ("goodput_rps", "e2e_p95_s"),
) -> Figure:  # fmt: skip
    """Figures of a sweep's `table` over two groups of its axes, a panel each; darker is better.

    Repeats, and axes that are named in neither group, are averaged. A cell with an invalid run is crossed
    out, one without a figure is empty.

    Args:
        found: what `kit.sweep.run` gave.
        up: axes whose combinations are the rows, such as the knobs.
        along: axes whose combinations are the columns, such as the loads.
        figures: columns of `found`.
    """
    table = found.assign(_up=_joined(found, up), _along=_joined(found, along))
    rows, columns = (list(dict.fromkeys(table[c])) for c in ("_up", "_along"))
    size = (5.0 * len(figures), 1.6 + 0.42 * max(3, len(rows)))
    drawn = Figure(figsize=size, layout="constrained", dpi=100)
    panels = np.atleast_1d(drawn.subplots(1, len(figures), sharey=True))
    for ax, name in zip(panels, figures, strict=True):
        cells = (
            table.groupby(["_up", "_along"])[name].mean().unstack().reindex(rows, columns=columns)
        )
        sound = (
            table.groupby(["_up", "_along"])["valid"].all().unstack().reindex(rows, columns=columns)
        )
        values = cells.to_numpy(dtype=float)
        lower = name in _LOWER_IS_BETTER
        ax.set_title(NAMES.get(name, name), fontsize=9)
        ax.set_xticks(range(len(columns)), columns, fontsize=8)
        ax.set_yticks(range(len(rows)), rows, fontsize=8)
        ax.set_xlabel(" · ".join(along))
        ax.set_xlim(-0.5, len(columns) - 0.5)
        ax.set_ylim(-0.5, len(rows) - 0.5)
        if not np.isfinite(values).any():
            nothing(ax)  # too few requests in every run
            continue
        image = ax.imshow(
            values, cmap="viridis" if lower else "viridis_r", aspect="auto", origin="lower"
        )
        drawn.colorbar(image, ax=ax, label=NAMES.get(name, name))
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                text = f"{value:.3g}" if sound.iloc[row, column] else f"✗ {value:.3g} invalid"
                dark = (value > middle) != lower
                ax.text(column, row, text, ha="center", va="center", fontsize=8,
                        color="white" if dark else "black")  # fmt: skip
    panels[0].set_ylabel(" · ".join(up))
    return drawn


def _joined(found: pd.DataFrame, axes: Sequence[str]) -> pd.Series[str]:
    return (
        found[list(axes)].astype(str).agg(" · ".join, axis=1)
        if axes
        else pd.Series("all", index=found.index)
    )


def pareto(found: pd.DataFrame, loads: Sequence[str] = ()) -> Figure:
    """Goodput against p95, the size of a point its replica-seconds; each load's front is named.

    Args:
        found: what `kit.sweep.run` gave.
        loads: the axes that are loads, under each of which settings compete.
    """
    drawn = Figure(figsize=(10.0, 4.4), layout="constrained", dpi=100)
    ax = drawn.subplots()
    on = sweep.front(found, loads)
    cost = found["replica_seconds"].fillna(0)
    sizes = 30 + 170 * cost / max(float(cost.max()), 1e-9)
    kinds: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("valid", found["valid"] & ~on, {"color": CYCLE[4]}),
        ("on the front", on, {"color": CYCLE[0]}),
        ("invalid", ~found["valid"].astype(bool), {"color": CYCLE[5], "marker": "x"}),
    )
    for name, rows, style in kinds:
        part = found[rows]
        if len(part):
            ax.scatter(part["e2e_p95_s"], part["goodput_rps"], s=sizes[rows], label=name, **style)
    chosen = found[on].sort_values("e2e_p95_s")
    for number, (_, row) in enumerate(chosen.iterrows(), 1):
        ax.annotate(str(number), (row["e2e_p95_s"], row["goodput_rps"]), xytext=(7, 5),
                    textcoords="offset points", fontsize=9, fontweight="bold")  # fmt: skip
    lines = [f"{n}  {r['run']} · {r['replica_seconds']:.0f} replica-seconds"
             for n, (_, r) in enumerate(chosen.iterrows(), 1)]  # fmt: skip
    ax.set_xlabel("E2E p95 (s)")
    ax.set_ylabel("goodput (requests/s)")
    ax.set_title(
        "Not beaten under their load in goodput, p95 and replica-seconds (size)", fontsize=9
    )
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.legend(title="\n".join(lines), fontsize=8, title_fontsize=8, frameon=False, loc="upper left",
              bbox_to_anchor=(1.0, 1.0), alignment="left")  # fmt: skip
    return drawn
