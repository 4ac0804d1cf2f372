"""A rate over time, piecewise linear, with its integral both ways: what plans of arrivals are made of.

An arrival process of unit rate, sent through the inverse of ∫ rate dt, has that rate: exactly so for
Poisson's (Çinlar 1975, Introduction to Stochastic Processes, 4.7), and others keep their regularity or
burstiness. Gaps are never clipped, so a plan offers what was asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Knot = tuple[float, float]
"""A time in seconds and a value there; two of the same time are a step."""


class Rate:
    """A rate per second over time: straight lines between knots, the last holds for ever.

    Args:
        knots: in order of time, the first at 0.
        factors: steps (from a time on, times so much) that multiply the rate; 1 before the first.
    """

    def __init__(self, knots: Sequence[Knot], factors: Sequence[Knot] = ()) -> None:
        self.knots, self.factors = tuple(knots), tuple(factors)
        every = np.array(_multiplied(self.knots, self.factors), dtype=float)
        self._times, self._rates = every[:, 0], every[:, 1]
        widths, rises = np.diff(self._times), np.diff(self._rates)
        areas = widths * (self._rates[1:] + self._rates[:-1]) / 2
        self._units = np.concatenate([[0.0], np.cumsum(areas)])
        slopes = np.divide(rises, widths, out=np.zeros_like(rises), where=widths > 0)
        self._slopes = np.append(slopes, 0.0)

    def at(self, time_s: float) -> float:
        """The rate at a time; at a step the one after it."""
        k = self._piece(time_s)
        return float(self._rates[k] + self._slopes[k] * (time_s - self._times[k]))

    def units(self, time_s: float) -> float:
        """∫ rate dt from 0: how many arrivals are expected by then."""
        k = self._piece(time_s)
        over_s = time_s - self._times[k]
        return float(self._units[k] + over_s * (self._rates[k] + self._slopes[k] * over_s / 2))

    def times(self, units: Floats) -> Floats:
        """When the integral reaches each of `units`; infinite where it never does."""
        k = np.searchsorted(self._units, units, "right") - 1
        left, rate = units - self._units[k], self._rates[k]
        root = np.sqrt(np.maximum(rate**2 + 2 * self._slopes[k] * left, 0.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            over_s = np.where(left > 0, 2 * left / (rate + root), 0.0)
        return np.asarray(self._times[k] + over_s)

    def changed(self, at_s: float, rate: float, ramp_s: float = 0.0) -> Rate:
        """The same up to `at_s`, then `rate`, reached evenly within `ramp_s` seconds.

        What was planned for later is dropped; factors stay.
        """
        kept = [k for k in self.knots if k[0] < at_s]
        knots = [*kept, (at_s, _before(self.knots, at_s)), (at_s + ramp_s, rate)]
        return Rate(knots, self.factors)

    def _piece(self, time_s: float) -> int:
        return max(0, int(np.searchsorted(self._times, time_s, "right")) - 1)


def _before(knots: Sequence[Knot], time_s: float) -> float:
    """The value just before a time."""
    for (t0, v0), (t1, v1) in itertools.pairwise(knots):
        if t0 < time_s <= t1:
            return v0 + (v1 - v0) * (time_s - t0) / (t1 - t0)
    return knots[-1][1] if time_s > knots[-1][0] else knots[0][1]


def _after(knots: Sequence[Knot], time_s: float) -> float:
    """The value just after a time."""
    for (t0, v0), (t1, v1) in itertools.pairwise(knots):
        if t0 <= time_s < t1:
            return v0 + (v1 - v0) * (time_s - t0) / (t1 - t0)
    return knots[-1][1]


def _multiplied(knots: Sequence[Knot], factors: Sequence[Knot]) -> list[Knot]:
    """Knots of value × factor, with one on each side of every step of either."""
    edges = sorted({t for t, _ in (*knots, *factors)} | {0.0})
    found: list[Knot] = []
    factor, later = 1.0, list(factors)[::-1]
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        while later and later[-1][0] <= low:
            factor = later.pop()[1]
        found.append((low, _after(knots, low) * factor))
        if high is not None:
            found.append((high, _before(knots, high) * factor))
    return found
