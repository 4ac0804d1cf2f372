"""The live plots: one `View` → one PNG. The panels are those of `kit.figures`, drawn again and again.

Axes are made once and only emptied between pictures, margins are fixed in pixels: a tenth of the
time that a new figure with a computed layout takes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox
from PIL import Image

from kit import figures, gpu, measures
from kit.accelerator import NO_ACCELERATOR, any_profile
from kit.figures import CYCLE
from kit.live_tables import bridged, flags, limits_s, on_grid, parts_of, shortened
from kit.settings import Settings
from kit.view import View

DPI = 100
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 66, 198, 78, 42
"""Margins; the right one holds the second scale and the legends, the upper one the last moves."""
SCALE_PX = 52
LABEL_PX = 36
LINE_PX = 14
FONT_PT = 8.0
LISTED = 4
_NARROWEST_PX, _LOWEST_PX = 440, 420
_CHARACTER_PX = 6.2


class LiveFigure:
    """Draws views, all in one size. To be called from one thread at a time.

    Args:
        width_px: of the pictures, at least 440.
        height_px: of the pictures, at least 420.

    Raises:
        ValueError: for a size that its margins would fill.
    """

    def __init__(self, width_px: int = 760, height_px: int = 860) -> None:
        if width_px < _NARROWEST_PX or height_px < _LOWEST_PX:
            raise ValueError(
                f"{width_px} × {height_px} px: must be at least {_NARROWEST_PX} × {_LOWEST_PX} px, "
                "so that there is room for axes and legends"
            )
        self._plot_px = width_px - LEFT_PX - RIGHT_PX
        self._width_px, self._height_px = width_px, height_px
        self._figure = Figure(figsize=(width_px / DPI, height_px / DPI), dpi=DPI)
        self._canvas = FigureCanvasAgg(self._figure)
        self._axes: list[Axes] = list(
            self._figure.subplots(
                5, 1, sharex=True, height_ratios=[3, 3, 2, 2, 2],
                gridspec_kw={
                    "left": LEFT_PX / width_px, "right": 1 - RIGHT_PX / width_px,
                    "bottom": BOTTOM_PX / height_px, "top": 1 - TOP_PX / height_px, "hspace": 0.12,
                },
            )
        )  # fmt: skip
        self._users, self._power = self._axes[3].twinx(), self._axes[4].twinx()
        self._axes[-1].set_xlabel("time since the start (s)")
        for ax in (*self._axes, self._users, self._power):
            ax.tick_params(labelsize=FONT_PT, pad=2)
            ax.xaxis.label.set_fontsize(FONT_PT)
            ax.yaxis.label.set_fontsize(FONT_PT)
            ax.yaxis.set_major_locator(MaxNLocator(4))
            # At a fixed place: else every tick label is measured to find one, in every picture.
            right = ax in (self._users, self._power)
            ax.yaxis.set_label_coords(
                1 + 34 / self._plot_px if right else -LABEL_PX / self._plot_px, 0.5
            )
        self._axes[-1].xaxis.set_label_coords(0.5, -24 / self._axes[-1].get_window_extent().height)
        self._legend: dict[str, Any] = {
            "fontsize": FONT_PT, "title_fontsize": FONT_PT, "alignment": "left", "frameon": False,
            "loc": "upper left", "bbox_to_anchor": (1 + SCALE_PX / self._plot_px, 1.03),
            "borderaxespad": 0, "borderpad": 0, "handlelength": 1.3, "handletextpad": 0.5,
            "labelspacing": 0.2,
        }  # fmt: skip
        self._shown: dict[Axes, tuple[str, ...]] = {}
        self._colours: dict[str, str] = {}
        self._known = FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap()

    def png(self, view: View) -> bytes:
        """One picture of a view, as PNG."""
        self._wipe()
        left_s, right_s = limits_s(view.now_s, view.span_s)
        self._axes[0].set_xlim(left_s, right_s)
        windows = on_grid(view)
        self._latency(view, windows)
        self._throughput(windows)
        self._replicas(view)
        self._accelerator(view)
        self._moves(view, left_s, right_s)
        self._canvas.draw()  # type: ignore[no-untyped-call]
        pixels = np.asarray(self._canvas.buffer_rgba())  # type: ignore[no-untyped-call]
        picture = Image.fromarray(pixels).convert("RGB")
        # A picture a second, seen once: fast to make matters more than small.
        out = BytesIO()
        picture.save(out, "png", compress_level=1)
        return out.getvalue()

    def _wipe(self) -> None:
        for text in list(self._figure.texts):
            text.remove()
        for ax in (*self._axes, self._users, self._power):
            for artist in (*ax.lines, *ax.collections, *ax.texts):
                artist.remove()
            ax.dataLim.set(Bbox.null())
            ax.ignore_existing_data_limits = True
            ax.set_autoscaley_on(True)
            ax.set_prop_cycle(None)
        self._axes[4].set_ylim(0, 1, auto=True)

    def _latency(self, view: View, windows: pd.DataFrame) -> None:
        median, tail = self._axes[:2]
        table = bridged(windows)
        parts = parts_of(view.windows)
        figures.latency(median, table, parts, 50)
        figures.latency(tail, table, parts, 95, view.slo)
        if not len(table):
            self._nothing(median)
            self._nothing(tail)
            return
        self._explain(median, median.get_legend_handles_labels()[0][::-1])
        self._explain(tail, tail.lines)

    def _throughput(self, windows: pd.DataFrame) -> None:
        ax = self._axes[2]
        figures.throughput(ax, windows)
        if ax.collections:
            self._explain(ax, ax.get_legend_handles_labels()[0][::-1])
        else:
            self._nothing(ax)

    def _replicas(self, view: View) -> None:
        ax = self._axes[3]
        lines = figures.replicas(ax, self._users, view)
        if any(len(np.asarray(line.get_xdata())) for line in lines):
            self._explain(ax, lines)
        else:
            self._nothing(ax)

    def _accelerator(self, view: View) -> None:
        ax, s = self._axes[4], view.settings
        self._power.set_visible(False)
        if s.engine == "emulated":
            figures.busy(ax, view)
            self._one_each(ax, _whose(s))
        elif s.num_gpus:
            _gpus(ax, self._power, view)
            lines = [*ax.lines, *self._power.lines]
            if lines:
                self._explain(ax, [x for x in lines if str(x.get_label())[0] != "_"], "GPU")
        else:
            cores(ax, view)
            self._one_each(ax, f"CPU ({s.engine}), replica")
        if not ax.lines:
            self._nothing(ax)

    def _explain(self, ax: Axes, handles: Iterable[Any], title: str = "") -> None:
        """The legend beside a panel; kept from picture to picture while it says the same."""
        handles = list(handles)
        labels = [str(h.get_label()) for h in handles]
        # The panel says which percentile it is.
        labels = [x.replace(" p95 ", " ") if x.startswith("SLO") else x for x in labels]
        if self._shown.get(ax) != (title, *labels):
            ax.legend(handles, labels, title=title or None, **self._legend)
            self._shown[ax] = (title, *labels)

    def _nothing(self, ax: Axes) -> None:
        figures.nothing(ax)
        legend = ax.get_legend()
        if legend is not None:
            legend.remove()
        self._shown.pop(ax, None)

    def _one_each(self, ax: Axes, title: str) -> None:
        """A colour for each replica that stays its own, and as many names as there is room for."""
        for line in ax.lines:
            name = str(line.get_label())
            line.set_color(self._colours.setdefault(name, CYCLE[len(self._colours) % len(CYCLE)]))
        if not ax.lines:
            return
        lines = title.count("\n") + 1
        room = max(1, int(ax.get_window_extent().height / (LINE_PX * 0.93)) - lines)
        handles: list[Line2D] = list(ax.lines)
        if len(handles) > room:
            more = Line2D([], [], color="none", label=f"and {len(handles) - room + 1} more")
            handles = [*handles[: room - 1], more]
        self._explain(ax, handles, title)

    def _moves(self, view: View, left_s: float, right_s: float) -> None:
        moves = [m | {"n": n} for n, m in enumerate(measures.records(measures.moves(view)), 1)]
        moves = [m for m in moves if m["asked_s"] >= left_s]
        figures.move_lines(self._axes, moves)
        top = self._axes[0]
        px_per_s = self._plot_px / (right_s - left_s)
        for text, at_s, colour in flags(moves, px_per_s):
            top.annotate(
                text, (at_s, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
                textcoords="offset points", ha="center", fontsize=FONT_PT, fontweight="bold",
                color=colour, annotation_clip=False,
            )  # fmt: skip
        room = int((self._width_px - 16) / _CHARACTER_PX)
        for k, m in enumerate(moves[-LISTED:]):
            what = str(m["label"])
            text = f"{m['n']}  {what}"
            if m["error"]:
                text = f"{shortened(text, room - 10)} (refused)"
            self._figure.text(
                8 / self._width_px, 1 - (4 + LINE_PX * k) / self._height_px,
                self._drawable(shortened(text, room)), va="top", fontsize=FONT_PT,
                color=figures.move_colour(m), parse_math=False,
            )  # fmt: skip

    def _drawable(self, text: str) -> str:
        """People's own words may hold what the font lacks, and matplotlib would warn of each."""
        return "".join(c if ord(c) in self._known else "□" for c in text)


def cores(ax: Axes, view: View) -> None:
    """How many cores each replica's processes use."""
    ax.set_ylabel("CPU used\n(cores)")
    for name, rows in measures.by_replica(view, "cpu_cores").groupby("replica_id"):
        ax.plot(rows["time_s"], rows["cpu_cores"], lw=1, alpha=0.8, label=str(name))
    if ax.lines:
        ax.set_ylim(bottom=0)


def _gpus(ax: Axes, beside: Axes, view: View) -> None:
    """SM, memory and, `beside` them, power of each GPU, and when a GPU was throttled."""
    ax.set_ylabel("GPU used (%)")
    beside.set_ylabel("power (W)")
    s = view.samples[view.samples["source"].str.startswith("gpu:")]
    why: set[str] = set()
    if len(s) and not (s["metric"] == "sm_percent").any():
        ax.plot([], [], ls="", label="SM: not supported")
    for k, (_, of_one) in enumerate(s.groupby("source", sort=True)):
        table = of_one.pivot_table(index="time_s", columns="metric", values="value")
        label = "" if k == 0 else "_"  # all GPUs in the colours of the first
        if "sm_percent" in table:
            ax.plot(table.index, table["sm_percent"], lw=1.2, color="#0072B2", label=f"{label}SM")
        if {"memory_used_bytes", "memory_total_bytes"} <= set(table):
            used = table["memory_used_bytes"] / table["memory_total_bytes"] * 100
            ax.plot(table.index, used, lw=1.2, color="#E69F00", label=f"{label}memory used")
        if "power_w" in table:
            beside.plot(
                table.index, table["power_w"], lw=1, ls=":", color="#CC79A7",
                label=f"{label}power (right)",
            )  # fmt: skip
        if "throttle_reasons" in table:
            words = table["throttle_reasons"].dropna().map(gpu.throttling)
            slow = words[words.map(len) > 0]
            why |= {word for of_one_time in slow for word in of_one_time}
            ax.plot(slow.index, [105] * len(slow), ls="", marker="|", ms=6, color="#D55E00")
    if ax.lines:
        ax.set_ylim(0, 110)
        if why:
            text = "\n".join(textwrap.wrap(f"throttled: {', '.join(sorted(why))}", 22))
            ax.plot([], [], ls="", marker="|", ms=6, color="#D55E00", label=text)
    if beside.lines:
        beside.set_visible(True)
        beside.set_ylim(bottom=0)


def _whose(settings: Settings) -> str:
    p = any_profile(settings.accelerator)
    if settings.accelerator == NO_ACCELERATOR:
        return "no accelerator, replica"
    clock = "" if settings.time_scale == 1 else f" (times × {settings.time_scale:g})"
    return "\n".join(textwrap.wrap(f"emulated {p.accelerator}{clock}, replica", 25))
