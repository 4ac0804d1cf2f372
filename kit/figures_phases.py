"""The phases of a run as a band in its figures."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from kit import measures, phases
from kit.store import Run

PHASE_COLOURS = {
    "warm-up": "#F5C26B", "cold start": "#9AD0F5", "idle": "#F0F0F0", "transient": "#F5C26B",
    "varying": "#DDDDDD", "steady": "#8FD9BD",
}  # fmt: skip


def strip(ax: Axes, run: Run) -> None:
    """The phases as a thin band on top of a panel, each named where there is room."""
    end_s = float(run.experiment["workload"]["duration_s"])
    for phase in measures.records(phases.found(run)):
        width_s = phase["to_s"] - phase["from_s"]
        ax.add_patch(
            Rectangle(
                (phase["from_s"], 1), width_s, 0.055, transform=ax.get_xaxis_transform(),
                clip_on=False,
                facecolor=PHASE_COLOURS[phase["phase"]], edgecolor="white", lw=0.8, zorder=3,
            )
        )  # fmt: skip
        if width_s > 0.012 * end_s * len(phase["phase"]):
            ax.text(
                phase["from_s"] + width_s / 2, 1.027, phase["phase"], fontsize=7, ha="center",
                va="center", transform=ax.get_xaxis_transform(), zorder=4,
            )  # fmt: skip
