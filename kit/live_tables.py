"""What the live plots draw, made ready: the time axis, windows without holes, numbers over moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kit import figures
from kit.live import WINDOW_S
from kit.measures import PARTS
from kit.view import View

LONGEST_GAP_WINDOWS = 5
"""Without an answer for longer than this the layers of latency break; shorter is bridged."""


def limits_s(now_s: float, span_s: float) -> tuple[float, float]:
    """Ends of the time axis: the last `span_s` seconds; a young session gets whole minutes."""
    if now_s >= span_s:
        return now_s - span_s, now_s
    return 0.0, min(span_s, 60.0 * math.ceil(max(now_s, 1.0) / 60.0))


def on_grid(view: View) -> pd.DataFrame:
    """All windows from the first one to now, in which nothing ended too: 0 requests/s, no latency."""
    table = view.windows
    if not len(table):
        return table
    numbers = (table["time_s"] / WINDOW_S - 0.5).round().astype("int64")
    last = max(int(numbers.iloc[-1]), int(view.now_s // WINDOW_S) - 1)
    every = pd.RangeIndex(int(numbers.iloc[0]), last + 1)
    table = table.set_index(pd.Index(numbers)).reindex(every)
    table["time_s"] = (every.to_numpy() + 0.5) * WINDOW_S
    rates = [str(c) for c in table if str(c).endswith("_rps")]
    table[rates] = table[rates].fillna(0.0)
    return table.reset_index(drop=True)


def bridged(table: pd.DataFrame) -> pd.DataFrame:
    """Windows ready to draw latency: short gaps joined by a line, long ones a row of nothing.

    What stands alone between gaps is as wide as its windows, not a point that nobody sees.
    """
    latency = [str(c) for c in table if str(c).endswith("_s") and c != "time_s"]
    seen: pd.Series[bool] = table[latency].notna().any(axis=1)
    if seen.all() or not seen.any():
        return table[seen]
    length = (~seen).groupby(seen.cumsum()).transform("sum")
    table = table.copy()
    table[latency] = table[latency].interpolate(limit_area="inside")
    ends = table.index[seen][[0, -1]]
    drawn = seen | (
        (length <= LONGEST_GAP_WINDOWS) & (table.index > ends[0]) & (table.index < ends[1])
    )
    table.loc[~drawn, table.columns != "time_s"] = math.nan
    first, last = drawn & ~drawn.shift(fill_value=False), drawn & ~drawn.shift(-1, fill_value=False)
    edges = [
        table[of].assign(time_s=table["time_s"] + shift_s)
        for of, shift_s in ((first, -WINDOW_S / 2), (last, WINDOW_S / 2))
    ]
    whole: pd.DataFrame = pd.concat([table, *edges])
    return whole.sort_values("time_s", kind="stable", ignore_index=True)


def parts_of(windows: pd.DataFrame) -> list[str]:
    """The parts that took any time within the span; all of them where none did."""
    seen = [p for p in PARTS if windows[[f"p50_{p}", f"p95_{p}"]].gt(0).any(axis=None)]
    return seen or list(PARTS)


def flags(
    moves: Sequence[Mapping[str, Any]], px_per_s: float
) -> list[tuple[str, float, str]]:  # fmt: skip
    """Numbers over the lines of moves: `text`, time and colour; those too close share one, `3–5`."""
    found: list[tuple[int, int, float, str]] = []  # first and last number, time, colour
    for m in reversed(moves):
        here = (m["n"], m["n"], float(m["asked_s"]), figures.move_colour(m))
        if found:
            first, last, at_s, colour = found[-1]
            # As wide as it gets when others share it.
            room_px = (_flag_px(first, last) + _flag_px(m["n"], m["n"] + 1)) / 2
            if (at_s - here[2]) * px_per_s < room_px:
                found[-1] = (m["n"], last, at_s, colour)
                continue
        found.append(here)
    return [(f"{a}–{b}" if a != b else f"{a}", at_s, colour) for a, b, at_s, colour in found]


def _flag_px(first: int, last: int) -> float:
    return 4 + 7.5 * (len(f"{first}–{last}") if first != last else len(str(first)))


def shortened(text: str, room: int) -> str:
    """One line of at most `room` characters."""
    line = " ".join(text.split(" ")).replace("\n", " ").replace("\r", " ")
    return line if len(line) <= room else line[: room - 1] + "…"
