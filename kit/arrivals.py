"""When requests are sent if no user waits for answers: plans of arrivals, pure and seeded.

A plan is a process of unit rate (`_gaps`) on a clock that runs as fast as the rate says (`kit.rates`):
so every plan takes stages, ramps, days and changes on the way. What is bursty in the plan stays so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kit import traces
from kit.lengths import factors_of_day
from kit.rates import Floats, Knot, Rate

if TYPE_CHECKING:
    from kit.workload import Workload

_BLOCK = 8192
_OFF_SIGMA = 1.04
"""Of the logarithm of pauses: of the Azure 2023 code trace's, mean and median differ by 43.2 / 25.1."""


def rate_of(workload: Workload) -> Rate:
    """The rate over time that a workload asks for; of a trace how fast its time runs."""
    start = workload.speed_up if workload.arrivals == "trace" else workload.rate_rps
    rate = Rate([(0.0, start)], factors(workload))
    for stage in workload.stages:
        if stage.rate_rps is not None:
            rate = rate.changed(stage.at_s, stage.rate_rps, stage.ramp_s)
    return rate


def factors(workload: Workload) -> list[Knot]:
    """What the rate is multiplied by from each time on: the hours of days, or busy and idle spells."""
    if workload.arrivals == "on-off":
        return _spells(workload)
    if not workload.diurnal:
        return []
    hours, hour_s = factors_of_day(workload.diurnal), workload.day_s / 24
    count = math.ceil(workload.duration_s / hour_s)
    return [(k * hour_s, hours[k % 24]) for k in range(count)]


def _spells(w: Workload) -> list[Knot]:
    """Busy spells (exponential) and pauses (lognormal) in turn, so that the mean factor is 1."""
    rng = np.random.default_rng([w.seed, 5])
    pairs = math.ceil(3 * w.duration_s / (w.on_s + w.off_s)) + 100
    on = rng.exponential(w.on_s, pairs)
    off = rng.lognormal(math.log(w.off_s) - _OFF_SIGMA**2 / 2, _OFF_SIGMA, pairs)
    ends = np.cumsum(np.column_stack([on, off]).ravel())
    starts = np.concatenate([[0.0], ends[:-1]])
    high = (w.on_s + w.off_s) / w.on_s
    return [
        (float(t), high if k % 2 == 0 else 0.0) for k, t in enumerate(starts) if t < w.duration_s
    ]


def _gaps(workload: Workload, block: int) -> Floats:
    """`_BLOCK` gaps of mean 1, by the block's number."""
    rng = np.random.default_rng([workload.seed, 4, block])
    if workload.arrivals == "constant":
        return np.ones(_BLOCK)
    if workload.burstiness == 1:
        return rng.exponential(size=_BLOCK)
    return rng.gamma(workload.burstiness, 1 / workload.burstiness, _BLOCK)


class Arrivals:
    """The plan of a load: which request is due when, one after the other; changeable on the way.

    Args:
        workload: its arrivals, rate and stages.
        share, shares: of so many load generators this one sends each request whose position in the
            plan leaves the rest `share`: together they send the plan, whatever their number.
    """

    def __init__(self, workload: Workload, share: int = 0, shares: int = 1) -> None:
        self._workload = workload
        self._share, self.shares = share, shares
        self.rate = rate_of(workload)
        self._made = 0  # gaps drawn so far, of all shares
        self._end = 0.0  # units at the last of them
        self._units = np.empty(0)  # not yet handed out, of this share
        self._times: Floats | None = None
        self._next = 0
        self._handed = 0

    def peek_s(self) -> float:
        """When the next request is due, in seconds from the start; infinite when none is left.

        A plan ends with its workload's `duration_s`.
        """
        while self._next == len(self._units):
            if not self._more():
                return math.inf
        if self._times is None:
            self._times = self.rate.times(self._units)
        due_s = float(self._times[self._next])
        return due_s if due_s <= self._workload.duration_s else math.inf

    def pop(self) -> int:
        """The position in the plan of the request that `peek_s` told of, which is then done."""
        self._next += 1
        self._handed += 1
        return (self._handed - 1) * self.shares + self._share

    def planned(self, until_s: float) -> int:
        """How many requests were due by a time, sent or not; of this share."""
        units = self.rate.units(min(until_s, self._workload.duration_s))
        while self._end <= units and self._more():
            pass
        due = int(np.searchsorted(self._units, units, "right"))
        return self._handed + max(0, due - self._next)

    def change(self, at_s: float, rate: float, ramp_s: float = 0.0) -> None:
        """Another rate from a time on, see `kit.rates.Rate.changed`."""
        self.rate, self._times = self.rate.changed(at_s, rate, ramp_s), None

    def times(self, until_s: float) -> Floats:
        """When every request of this share is due up to a time, in seconds: the plan as a whole."""
        self.planned(until_s)
        times = self.rate.times(self._units[self._next :])
        return times[times <= min(until_s, self._workload.duration_s)]

    def _more(self) -> bool:
        """Draw another block; False when a trace has ended."""
        if self._workload.arrivals == "trace":
            if self._made:
                return False
            units = traces.read(self._workload.trace)["time_s"].to_numpy(dtype=float)
        else:
            units = self._end + np.cumsum(_gaps(self._workload, self._made // _BLOCK))
        places = np.arange(self._made, self._made + len(units))
        self._made, self._end = self._made + len(units), float(units[-1])
        ours = units[places % self.shares == self._share]
        self._units, self._next = np.concatenate([self._units[self._next :], ours]), 0
        self._times = None
        return True
