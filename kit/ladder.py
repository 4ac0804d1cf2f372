"""The steps of a knob's slider, and its values as people write them: `20 ms`, `no limit`, `auto`.

Where a range spans decades the steps are even on a log scale: thirds of an octave for whole numbers,
about seven a decade otherwise, with zero, *none* and *auto* before them where a knob has these.
"""

from __future__ import annotations

import bisect
import re
from typing import Any

from kit.knobs import Knob

_WHOLE = (4, 5, 6)  # quarters of an octave's start, as in 8, 10, 12, 16
_DECADE = (1, 1.5, 2, 3, 4, 6, 8)
_MOST_SINGLE = 40
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_NO_LIMIT, _NONE = "no limit", "none"


def text(knob: Knob, value: Any) -> str:
    """A value as people read it, with its unit: `20 ms`, `16 requests`, `no limit`."""
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if value == -1 and knob.low == -1:
        return _NO_LIMIT
    if knob.unit == "s" and 0 < value < 1:
        return f"{value * 1e3:.4g} ms"
    plain = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    unit = (
        knob.unit[:-1] if value == 1 and knob.unit.endswith("s") and knob.unit != "s" else knob.unit
    )
    return f"{plain} {unit}".strip()


def bounds(knob: Knob, high: float | None = None) -> str:
    """What the knob takes, briefly: `1 to 512 requests`, `0 to 60 s or none`; empty of a choice.

    `high` is a bound below the knob's own, from what the cluster holds.
    """
    if knob.low is None or knob.high is None:
        return "text" if knob.kind == "text" and not knob.choices else ""
    low = "0" if knob.low == -1 else "above " * knob.low_open + f"{knob.low:,.9g}"
    most = f"{min(knob.high, high or knob.high):,.9g} {knob.unit}".strip()
    words = [f"{low} to {most}", *(c for c in knob.choices if isinstance(c, str))]
    words += [_NO_LIMIT] * (knob.low == -1) + [_NONE] * knob.nullable
    return " or ".join(words)


def parse(knob: Knob, written: str) -> Any:
    """A value from what a person wrote: a number with or without unit, or a word that `text` gives.

    What cannot be read comes back as the text itself, for validation to name.
    """
    asked = written.strip()
    words = {text(knob, c).lower(): c for c in knob.choices}
    if knob.nullable:
        words |= {_NONE: None, "": None}
    if knob.low == -1:
        words[_NO_LIMIT] = -1
    if asked.lower() in words:
        return words[asked.lower()]
    if knob.kind not in ("whole number", "number"):
        return written
    found = re.fullmatch(r"([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*([^\d\s]*)", asked, re.IGNORECASE)
    if not found:
        return asked
    number, unit = found[1].replace(",", ""), found[2]
    factor = _SECONDS.get(unit, 0.0) if knob.unit == "s" and unit else 1.0
    if not factor or (unit and knob.unit != "s" and unit not in (knob.unit, knob.unit.rstrip("s"))):
        return asked
    value = float(f"{float(number) * factor:.12g}")
    if knob.kind == "whole number" and value.is_integer():
        return int(value)
    return value


def steps(knob: Knob, high: float | None = None) -> list[Any]:
    """Values of a slider in order, from the knob's lowest to `high` (default: the knob's own)."""
    assert knob.low is not None
    assert knob.high is not None
    high = knob.high if high is None else min(high, knob.high)
    first: list[Any] = [None] if knob.nullable else []
    first += [c for c in knob.choices if isinstance(c, str)]
    if knob.low == -1:
        first.append(-1)
    if knob.kind == "whole number":
        return first + _whole(max(0, int(knob.low)), int(high))
    return first + _decades(knob, high)


def _whole(low: int, high: int) -> list[int]:
    if high - low < _MOST_SINGLE:
        return list(range(low, high + 1))
    fine = [k * 2**octave // 4 for octave in range(2, 25) for k in _WHOLE]
    found = sorted({0, 1, 2, 3, *fine})
    return [v for v in found if low <= v < high] + [high]


def _decades(knob: Knob, high: float) -> list[float]:
    smallest = 1e-3 if knob.unit == "s" else 0.1
    zero = [] if knob.low_open or knob.low else [0.0]
    low = max(smallest, knob.low or 0.0)
    fine = [float(f"{m}e{e}") for e in range(-3, 7) for m in _DECADE]
    return zero + [v for v in fine if low <= v < high] + [float(high)]


def with_value(values: list[Any], value: Any) -> list[Any]:
    """The steps with `value` among them, in its place."""
    if value in values:
        return values
    numbers = [v for v in values if isinstance(v, (int, float)) and v != -1]
    if not isinstance(value, (int, float)):
        return [value, *values]
    at = len(values) - len(numbers) + bisect.bisect(numbers, value)
    return [*values[:at], value, *values[at:]]
