"""Figures of a sweep: heat maps over two of its axes, and the Pareto front. Tables → Figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kit import sweep
from kit.figures import CYCLE

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
    found: pd.DataFrame, axes: Sequence[str], figures: Sequence[str] = ("goodput_rps", "e2e_p95_s")
) -> Figure:
    """Figures of a sweep's `table` over its first two axes, a panel each; darker is better.

    What further axes and repeats have is averaged. A cell whose run is invalid is crossed out, one
    without a figure is empty.

    Args:
        found: what `kit.sweep.run` gave.
        axes: two of its axes, the first one upwards; with one axis it is a single row.
        figures: columns of `found`.
    """
    drawn = Figure(figsize=(5.0 * len(figures), 3.9), layout="constrained", dpi=100)
    panels = np.atleast_1d(drawn.subplots(1, len(figures)))
    up, along = (axes[0], axes[1]) if len(axes) > 1 else ("", axes[0])
    table = found.assign(**{"": "all"}) if not up else found
    for ax, name in zip(panels, figures, strict=True):
        cells = table.pivot_table(name, up, along, aggfunc="mean", dropna=False)
        sound = table.pivot_table("valid", up, along, aggfunc="all").reindex_like(cells)
        colours = "viridis" if name in _LOWER_IS_BETTER else "viridis_r"
        values = cells.to_numpy(dtype=float)
        image = ax.imshow(values, cmap=colours, aspect="auto", origin="lower")
        drawn.colorbar(image, ax=ax, label=NAMES.get(name, name))
        middle = (
            np.nanmean([np.nanmin(values), np.nanmax(values)]) if np.isfinite(values).any() else 0
        )
        for (row, column), value in np.ndenumerate(values):
            if np.isnan(value):
                continue
            dark = (value > middle) != (name in _LOWER_IS_BETTER)
            text = f"{value:.3g}" if sound.iloc[row, column] else f"✗ {value:.3g}\ninvalid"
            ax.text(column, row, text, ha="center", va="center", fontsize=8,
                    color="white" if dark else "black")  # fmt: skip
        ax.set_xticks(range(len(cells.columns)), [str(c) for c in cells.columns])
        ax.set_yticks(range(len(cells.index)), [str(c) for c in cells.index])
        ax.set_xlabel(along)
        ax.set_ylabel(up)
        ax.set_title(NAMES.get(name, name), fontsize=9)
    return drawn


def pareto(found: pd.DataFrame) -> Figure:
    """Goodput against p95, the size of a point its replica-seconds; the front is joined and named."""
    drawn = Figure(figsize=(10.0, 4.4), layout="constrained", dpi=100)
    ax = drawn.subplots()
    on = sweep.front(found)
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
        "Not beaten in goodput, p95 and replica-seconds together (size: replica-seconds)",
        fontsize=9,
    )
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.legend(title="\n".join(lines), fontsize=8, title_fontsize=8, frameon=False, loc="upper left",
              bbox_to_anchor=(1.0, 1.0), alignment="left")  # fmt: skip
    return drawn
