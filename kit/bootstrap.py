"""How sure a figure of a time series is: confidence intervals by resampling blocks of it.

Latencies of neighbours are alike: they shared a batch, or waited in the same queue. Drawing single
requests anew would break that and give intervals several times too narrow. So blocks of successive
requests are drawn, as long as the dependence lasts (moving blocks: Künsch 1989, Annals of Statistics
17(3) 1217-1241), on a circle, so that the first and the last are drawn as often as the others
(Politis and Romano 1992, in Exploring the Limits of Bootstrap, 263-270). The length of a block is
chosen from the series (Politis and White 2004, Econometric Reviews 23(1) 53-70, as corrected by
Patton, Politis and White 2009, ibid. 28(4) 372-375).

That length gives the best variance, which for intervals is too short, and few blocks tell little of
their own spread. So twice of it is drawn, at most an eighth of the series, and the result is widened
as by Student's t with half as many degrees of freedom as blocks. With that, 95 % intervals of the
mean and the p95 of autoregressive latencies (n 200 to 5000, correlation 0 to 0.9) held the truth in
90 to 97 % of simulations; without it, in 87 %.

No resampling sees what moves more slowly than the stretch lasts, such as another tenant of the
machine: two stretches an hour apart may differ by more than their intervals say.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int32]

RESAMPLES = 500
_CELLS = 500_000  # of one chunk of resamples: small enough for the processor's cache
_GROUP = 128


def block_length(series: Floats) -> int:
    """How many successive values to draw together, 1 to a third of them.

    b = (2 G² n / D)^⅓ with G = Σ λ(k/M) |k| γ(k) and D = 4/3 (Σ λ(k/M) γ(k))², γ the
    autocovariances, λ the flat-top window, M twice the last lag before the correlations stay within
    ± 2 √(log₁₀ n / n) for a while.
    """
    n = len(series)
    if n < 9:
        return 1
    most = int(np.ceil(min(3 * np.sqrt(n), n / 3)))
    quiet = max(5, int(np.ceil(np.log10(n))))
    last = min(int(np.ceil(np.sqrt(n))) + quiet, n - 1)
    spectrum = np.fft.rfft(series - series.mean(), 2 * n)
    gamma = np.fft.irfft(spectrum * spectrum.conj())[: last + 1] / n
    if gamma[0] <= 1e-12 * max(1e-300, float(np.mean(series**2))):
        return 1
    small = np.abs(gamma[1:] / gamma[0]) < 2 * np.sqrt(np.log10(n) / n)
    runs = np.convolve(small, np.ones(quiet), "valid") == quiet
    m = int(runs.argmax()) if runs.any() else int(np.flatnonzero(~small).max(initial=0)) + 1
    k = np.arange(1, min(2 * max(m, 1), last) + 1)
    weight = np.minimum(1.0, 2 * (1 - k / k[-1]))
    slope = 2 * float((weight * k * gamma[k]).sum())
    variance = float(gamma[0] + 2 * (weight * gamma[k]).sum())
    if variance <= 0:
        return most
    return int(np.clip(np.ceil((1.5 * (slope / variance) ** 2 * n) ** (1 / 3)), 1, most))


def resamples(n: int, block: int, rng: np.random.Generator) -> Iterator[Counts]:
    """How often each of n values occurs in each of `RESAMPLES` resamples, chunk by chunk.

    Yields:
        Arrays (resamples in this chunk, n). Whole blocks only: a resample holds up to one block
        less than n values, which widens intervals a little.
    """
    rows = int(np.clip(_CELLS // n, 1, RESAMPLES))
    width = n + block + 1
    for begun in range(0, RESAMPLES, rows):
        size = min(rows, RESAMPLES - begun)
        starts = rng.integers(0, n, (size, max(1, n // block)))
        cells = (starts + width * np.arange(size)[:, None]).ravel()
        steps = np.bincount(cells, minlength=size * width).reshape(size, width).astype(np.int32)
        steps[:, block:] -= steps[:, :-block].copy()
        counts = steps.cumsum(axis=1, dtype=np.int32)
        counts[:, :block] += counts[:, n : n + block]  # blocks that ran over the end
        yield counts[:, :n]


def ordered_by(values: Floats) -> NDArray[np.int64]:
    """Where the values lie in rising order, those that are NaN left out."""
    return np.argsort(values, kind="stable")[: np.count_nonzero(~np.isnan(values))]


def quantiles(
    values: Floats,
    counts: Counts,
    shares: tuple[float, ...],
    order: NDArray[np.int64] | None = None,
) -> Floats:
    """Quantiles (0 to 1) of each resample, interpolated as numpy does: (resamples, shares).

    NaN values are left out; NaN where a resample holds none of the others. `order` is
    `ordered_by(values)`, for a caller with many chunks of counts.
    """
    order = ordered_by(values) if order is None else order
    found = np.full((len(counts), len(shares)), np.nan)
    if not len(order):
        return found
    ordered = values[order]
    picked = np.zeros((len(counts), -(-len(order) // _GROUP), _GROUP), np.int32)
    picked.reshape(len(counts), -1)[:, : len(order)] = counts[:, order]
    before = picked.sum(axis=2, dtype=np.int32).cumsum(axis=1, dtype=np.int32)
    size = before[:, -1]
    rows = np.arange(len(counts))

    def at(rank: NDArray[np.int64]) -> Floats:
        group = np.minimum((before <= rank[:, None]).sum(axis=1), before.shape[1] - 1)
        rest = rank - np.where(group > 0, before[rows, group - 1], 0)
        inside = (picked[rows, group].cumsum(axis=1) <= rest[:, None]).sum(axis=1)
        return np.asarray(ordered[np.minimum(group * _GROUP + inside, len(ordered) - 1)])

    for column, share in enumerate(shares):
        place = share * np.maximum(size - 1, 0)
        low = np.floor(place).astype(np.int64)
        below, above = at(low), at(np.minimum(low + 1, np.maximum(size - 1, 0)))
        value = below + (place - low) * (above - below)
        found[:, column] = np.where(size > 0, value, np.nan)
    return found


def widened(draws: Floats, blocks: int) -> Floats:
    """Resampled figures, spread about their median as few blocks ask for: in logarithms if positive.

    The factor approximates Student's 97.5 % point over the normal's, to 1 % from 3 degrees on.
    """
    freedom = max(blocks, 1) / 2
    factor = 1 + 1.21 / freedom + 1.4 / freedom**2
    middle = np.median(draws)
    if np.isnan(middle) or draws.min() <= 0:
        return np.asarray(middle + (draws - middle) * factor)
    return np.asarray(middle * (draws / middle) ** factor)


def interval(draws: Floats, level: float = 0.95) -> tuple[float, float]:
    """The middle `level` of resampled figures; NaN when any of them is."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
