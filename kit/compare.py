"""Two stretches of recorded load side by side: what differs, by how much, and how sure that is.

    before, after = kit.compare.stretches(run)[:2]
    kit.compare.table(before, after)

Each figure comes with a 95 % interval (`kit.bootstrap`), each stretch resampled on its own. Of eleven
figures of two equal stretches one may well look different by chance: believe a verdict that the
figures beside it share.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kit import bootstrap, measures, validity
from kit.bootstrap import Floats
from kit.estimates import BY_NAME, MEASURES, Measure, resampled
from kit.figures import PART_COLOURS, PART_NAMES, nothing, parts_seen
from kit.stretch import Stretch, differences, obstacles, steady, stretches, whole

__all__ = [  # noqa: RUF022  as people use them
    "stretches", "whole", "steady", "Stretch", "compare", "table", "figure", "words", "CompareError",
    "Measure", "MEASURES",
]  # fmt: skip

CANNOT_TELL = "cannot tell"
SMALL = 0.02
"""Differences under 2 % get no verdict, however sure: nobody would act on them. Not of shares, where
99 and 98 % are far apart."""

_UNSURE = "**cannot tell** (the intervals leave room for both, or there are too few requests)"
COLOURS = {"better": "#009E73", "worse": "#D55E00"}

_AXIS = (1 / 12, 12.0)


class CompareError(ValueError):
    """Stretches that cannot be compared; the text names what differs."""


def compare(a: Stretch, b: Stretch, seed: int = 0, force: bool = False) -> pd.DataFrame:
    """Every figure of `a` and of `b`, with intervals, and whether `b` is better.

    Args:
        a: the first, what `b` is compared with.
        b: the second; both are judged by the promises of `a`'s run.
        seed: of the resampling.
        force: whether to compare what differs in more than its settings, or is invalid.

    Returns:
        Indexed by figure (`MEASURES`): `a`, `a_low`, `a_high`, the same for `b` and for
        `ratio` (b ÷ a), and `verdict`: `better`, `worse` or `cannot tell`; of the batch size, which
        is neither good nor bad, `larger` or `smaller`. Intervals are 95 %. Without enough requests
        they are NaN, as is a percentile, and the verdict is `cannot tell`; so it is where either is
        invalid (`kit.validity`).

    Raises:
        CompareError: when hardware, packages, the engine, what it emulates or its model differ,
            or the workloads of two runs, unless `force`.
    """
    wrong = obstacles(a, b)
    if wrong and not force:
        raise CompareError(
            "not comparable: " + "; ".join(wrong) + ". What differs beside the settings would be "
            "taken for their effect; force=True compares all the same"
        )
    slo = a.run.experiment["slo"]
    first = resampled(a, slo, np.random.default_rng([seed, 0]))
    second = resampled(b, slo, np.random.default_rng([seed, 1]))
    rows = {m.name: _row(m, first[m.name], second[m.name]) for m in MEASURES}
    if not force and any(map(validity.invalid, (a, b))):
        rows = {name: row | {"verdict": CANNOT_TELL} for name, row in rows.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("figure")


def _row(m: Measure, a: tuple[float, Floats], b: tuple[float, Floats]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, (value, draws) in (("a", a), ("b", b)):
        row[name] = value
        row[f"{name}_low"], row[f"{name}_high"] = bootstrap.interval(draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(a[1] > 0, b[1] / a[1], math.nan)
        row["ratio"] = b[0] / a[0] if a[0] else math.nan
    row["ratio_low"], row["ratio_high"] = bootstrap.interval(ratios)
    # By differences: they order as ratios do, and a figure may be zero.
    low, high = bootstrap.interval(b[1] - a[1])
    row["verdict"] = verdict(m, a[0], b[0], low, high)
    return row


def verdict(m: Measure, a: float, b: float, low: float, high: float) -> str:
    """What it means that a figure went from `a` to `b`, and how sure it is.

    Args:
        m: the figure.
        a: its first value.
        b: its second.
        low: where the interval of the change begins; only its sign counts.
        high: where it ends.
    """
    told = m.unit == "%" or abs(b - a) >= SMALL * abs(a)
    if not told or not (low > 0 or high < 0):
        return CANNOT_TELL
    words = ("better", "worse") if m.better else ("larger", "smaller")
    return words[0] if (low > 0) == (m.better != "lower") else words[1]


def words(a: Stretch, b: Stretch, found: pd.DataFrame) -> list[str]:
    """What was compared, what differs, and how it came out, in sentences.

    Args:
        a: the first.
        b: the second.
        found: what `compare` gave for them.
    """
    texts = [
        f"**{name}**: {s.label}, {s.from_s:.1f} to {s.to_s:.1f} s, {len(s.requests())} requests."
        for name, s in zip("AB", (a, b), strict=True)
    ]
    texts += [
        f"**{name} is invalid**: {why}." for name, s in zip("AB", (a, b), strict=True)
        if (why := validity.invalid(s))
    ]  # fmt: skip
    texts += [
        f"**{name}, mind**: {why}." for name, s in zip("AB", (a, b), strict=True)
        if (why := validity.cautions(s))
    ]  # fmt: skip
    texts += differences(a, b)
    for verdict, rows in found.groupby("verdict", sort=True):
        headings = ", ".join(BY_NAME[str(name)].heading for name in rows.index)
        texts.append(f"**{verdict}** in B: {headings}.".replace("**cannot tell** in B", _UNSURE))
    return texts


def table(
    a: Stretch, b: Stretch, found: pd.DataFrame | None = None, force: bool = False
) -> pd.DataFrame:
    """The comparison for people: values with their intervals and units, and the verdict on B.

    Args:
        a: the first.
        b: the second.
        found: what `compare` gave for them, if that is there already.
        force: as in `compare`.

    Raises:
        CompareError: as `compare` does.
    """
    found = compare(a, b, force=force) if found is None else found
    rows = {}
    for m, row in zip(MEASURES, measures.records(found), strict=True):
        rows[m.heading] = {
            f"A: {a.label}": _with_interval(row["a"], row["a_low"], row["a_high"], m.unit),
            f"B: {b.label}": _with_interval(row["b"], row["b_low"], row["b_high"], m.unit),
            "B ÷ A": _with_interval(row["ratio"], row["ratio_low"], row["ratio_high"], ""),
            "B is": row["verdict"],
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("figure (95 % interval)")


def _with_interval(value: float, low: float, high: float, unit: str) -> str:
    """`1.92 s (1.85–2.01)`, to as many digits as tell the ends apart from the value."""
    if math.isnan(value):
        return "too few" if unit else "–"
    times = 100 if unit == "%" else 1
    value, low, high = value * times, low * times, high * times
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or not unit else 3
    text = f"{value:,.{digits}f} {unit}".rstrip()
    return text if math.isnan(low) else f"{text} ({low:,.{digits}f}–{high:,.{digits}f})"


def figure(
    a: Stretch, b: Stretch, found: pd.DataFrame | None = None, force: bool = False
) -> Figure:
    """What the mean request spends its time on in each stretch, and every ratio with its interval.

    Args and Raises: as `table`.
    """
    found = compare(a, b, force=force) if found is None else found
    drawn = Figure(figsize=(10.0, 4.2), layout="constrained", dpi=100)
    left, right = drawn.subplots(1, 2, width_ratios=[3, 4])
    _parts(left, a, b)
    _ratios(right, found)
    drawn.suptitle(f"A: {a.label}   ·   B: {b.label}", fontsize=9)
    return drawn


def _parts(ax: Axes, a: Stretch, b: Stretch) -> None:
    tables = [measures.ok(s.requests()) for s in (a, b)]
    ax.set_ylabel("mean latency by part (s)")
    if not any(map(len, tables)):
        nothing(ax)
        return
    bottom = np.zeros(2)
    for part in parts_seen(pd.concat([t for t in tables if len(t)])):
        heights = np.array([t[part].mean() for t in tables])
        ax.bar(
            ["A", "B"], heights, bottom=bottom, width=0.6, color=PART_COLOURS[part],
            label=PART_NAMES[part],
        )  # fmt: skip
        bottom += np.nan_to_num(heights)
    for k, total in enumerate(bottom):
        text = f"{total:.3g} s" if len(tables[k]) else "no request"
        ax.annotate(text, (k, total), ha="center", va="bottom", fontsize=8)
    ax.margins(y=0.08)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], fontsize=7, frameon=False, loc="upper left",
              bbox_to_anchor=(1.0, 1.0))  # fmt: skip


def _ratios(ax: Axes, found: pd.DataFrame) -> None:
    """Ratios on a logarithmic axis, so that twice and half lie equally far from *the same*."""
    ax.axvline(1.0, color="black", lw=0.8)
    for k, row in enumerate(measures.records(found)):
        colour = COLOURS.get(row["verdict"], "#666666")
        known = not math.isnan(row["ratio_low"])
        text = f"× {row['ratio']:.2f} {row['verdict']}" if known else "cannot tell (too few)"
        ax.annotate(text, (1.02, k), xycoords=("axes fraction", "data"), va="center", fontsize=8,
                    color=colour)  # fmt: skip
        if known:
            # What is further off, or zero, lies on the edge; its figure stands beside it.
            low, mid, high = np.clip([row[c] for c in ("ratio_low", "ratio", "ratio_high")], *_AXIS)
            ax.plot([low, high], [k, k], color=colour, lw=3, solid_capstyle="butt")
            ax.plot(mid, k, "o", color=colour, ms=6, clip_on=False)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.set_xlim(max(min(low, 0.75), _AXIS[0]), min(max(high, 1.33), _AXIS[1]))
    ax.set_xticks([t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10) if low < t < high or t == 1])
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.minorticks_off()
    ax.set_xlabel("B ÷ A (ratio, with 95 % interval)")
    ax.set_yticks(range(len(MEASURES)), [f"{m.heading} ({m.unit})" for m in MEASURES], fontsize=8)
    ax.set_ylim(len(MEASURES) - 0.5, -0.5)
