"""The figures of a stretch of load that comparisons are made of, each with its resamples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kit import bootstrap, measures
from kit.bootstrap import Floats
from kit.stretch import Stretch

LEAST = 10
"""Fewer requests, or samples, than this give no interval."""


@dataclass(frozen=True)
class Measure:
    """A figure that is compared. `better` says which way; a figure without one is only told."""

    name: str
    heading: str
    unit: str
    better: Literal["lower", "higher", ""]
    column: str = ""
    share: float | None = None


MEASURES = (
    Measure("e2e_p50_s", "E2E p50", "s", "lower", "e2e_s", 0.5),
    Measure("e2e_p95_s", "E2E p95", "s", "lower", "e2e_s", 0.95),
    Measure("response_p95_s", "response p95", "s", "lower", "response_s", 0.95),
    Measure("queueing_p95_s", "queueing p95", "s", "lower", "queueing_s", 0.95),
    Measure("inference_p95_s", "inference p95", "s", "lower", "inference_s", 0.95),
    Measure("throughput_rps", "throughput", "requests/s", "higher"),
    Measure("output_tokens_per_s", "output", "tokens/s", "higher"),
    Measure("batch_size_mean_requests", "mean batch", "requests", ""),
    Measure("goodput_rps", "goodput", "requests/s", "higher"),
    Measure("good_fraction", "within all promises", "%", "higher"),
    Measure("replicas_mean", "mean running replicas", "replicas", "lower"),
)
"""All of them, in order; replicas are the cost, so fewer are better."""

BY_NAME = {m.name: m for m in MEASURES}


def resampled(
    stretch: Stretch, slo: Mapping[str, float | None], rng: np.random.Generator
) -> dict[str, tuple[float, Floats]]:
    """Each figure of a stretch, with its value in each of `bootstrap.RESAMPLES` resamples.

    All NaN where there is too little to resample; of a percentile the value too. Requests are drawn
    in the order in which they ended, in whole blocks of attempts, so that figures of one resample
    belong together. `slo`: promises in seconds by name, as in a run's experiment.
    """
    table = stretch.requests()
    good = np.asarray(table["outcome"] == "ok", dtype=np.float64)
    # Rates are what ended ÷ the time it took: each request carries the time since the one before,
    # and the first, on the circle, also what was left after the last.
    ends = np.asarray(table["ended_s"], dtype=np.float64)
    gaps: Floats = np.diff(ends, prepend=np.float64(stretch.from_s))
    if len(gaps):
        gaps[0] += stretch.to_s - ends[-1]
    tokens: Floats = np.nan_to_num(table["output_tokens"].to_numpy(dtype=float)) * good
    sizes = table["batch_size"].to_numpy(dtype=float)
    batched = good * ~np.isnan(sizes)
    every: Floats = np.ones(len(table))
    kept = np.asarray(measures.keeps(table, slo), dtype=np.float64)
    sums: dict[str, tuple[Floats, Floats]] = {  # figure: what is summed over what
        "throughput_rps": (good, gaps),
        "output_tokens_per_s": (tokens, gaps),
        "batch_size_mean_requests": (np.nan_to_num(sizes) * batched, batched),
        "goodput_rps": (kept, gaps),
        "good_fraction": (kept, every),
    }
    columns: dict[str, Floats] = {
        m.column: np.where(good > 0, table[m.column].to_numpy(dtype=float), math.nan)
        for m in MEASURES
        if m.column
    }
    found = figures_of(columns, sums, rng)
    if not len(table) and stretch.to_s > stretch.from_s:
        for rate in ("throughput_rps", "output_tokens_per_s", "goodput_rps"):
            found[rate] = (0.0, found[rate][1])
    running = measures.series(stretch.run, "serve", "running_replicas")
    inside = running[(running.index >= stretch.from_s) & (running.index < stretch.to_s)]
    values = np.asarray(inside, dtype=np.float64)
    found |= figures_of({}, {"replicas_mean": (values, np.ones_like(values))}, rng)
    return found


def figures_of(
    columns: Mapping[str, Floats],
    sums: Mapping[str, tuple[Floats, Floats]],
    rng: np.random.Generator,
) -> dict[str, tuple[float, Floats]]:
    """Percentiles of columns and ratios of sums over the same rows, each with its resamples.

    Args:
        columns: by name (`Measure.column`), NaN where a row does not count.
        sums: by the name of the figure, what is summed over what.
        rng: draws the blocks.
    """
    n = len(next(iter([*columns.values(), *(top for top, _ in sums.values())])))
    ones = np.ones((1, n), np.int32)
    rows = _Rows(columns, sums)
    names = [*(m.name for m in MEASURES if m.column in columns), *sums]
    values = {k: float(v[0]) for k, v in rows.figures(ones).items()}
    unknown = np.full(bootstrap.RESAMPLES, math.nan)
    if n < LEAST:
        return {k: (math.nan if BY_NAME[k].column else values[k], unknown) for k in names}
    block = min(
        2 * max(map(bootstrap.block_length, _influences(columns, sums, values))), max(1, n // 8)
    )
    chunks = [rows.figures(c) for c in bootstrap.resamples(n, block, rng)]
    found = {}
    for name in names:
        m = BY_NAME[name]
        draws = bootstrap.widened(np.concatenate([c[name] for c in chunks]), n // block)
        if m.column:
            # So few might all lie on one side of the percentile: they bound it from one side only.
            least = max(LEAST, math.log(0.025) / math.log(m.share or 0.5))
            if np.count_nonzero(~np.isnan(columns[m.column])) < least:
                found[name] = (math.nan, unknown)
                continue
        found[name] = (values[name], draws.clip(0, 1 if m.unit == "%" else None))
    return found


class _Rows:
    """What figures are made of, laid out once for many resamples."""

    def __init__(
        self, columns: Mapping[str, Floats], sums: Mapping[str, tuple[Floats, Floats]]
    ) -> None:
        self._columns = {k: (v, bootstrap.ordered_by(v)) for k, v in columns.items()}
        self._names = list(sums)
        tops, bottoms = zip(*sums.values(), strict=True) if sums else ((), ())
        self._sums = np.column_stack([*tops, *bottoms]) if sums else None

    def figures(self, counts: bootstrap.Counts) -> dict[str, Floats]:
        """The figures of resamples that hold each row so many times."""
        found: dict[str, Floats] = {}
        for column, (values, order) in self._columns.items():
            wanted = [m for m in MEASURES if m.column == column]
            shares = tuple(m.share or 0.5 for m in wanted)
            each = bootstrap.quantiles(values, counts, shares, order)
            found |= {m.name: each[:, k] for k, m in enumerate(wanted)}
        if self._sums is not None:
            # Not by BLAS: its threads would fight with the server and the load on the same cores.
            totals = np.einsum("ij,jk->ik", counts.astype(float), self._sums)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = totals[:, : len(self._names)] / totals[:, len(self._names) :]
            found |= {name: ratios[:, k] for k, name in enumerate(self._names)}
        return found


def _influences(
    columns: Mapping[str, Floats],
    sums: Mapping[str, tuple[Floats, Floats]],
    values: Mapping[str, float],
) -> list[Floats]:
    """How each row moves each figure: what depends on its neighbours here makes blocks long."""
    rows = [
        np.where(
            np.isnan(columns[m.column]), 0.0, (columns[m.column] > values[m.name]) - 1 + m.share
        )
        for m in MEASURES
        if m.column in columns and m.share
    ]
    rows += [top - values[name] * bottom for name, (top, bottom) in sums.items()]
    return [np.zeros(1), *(r for r in rows if not np.isnan(r).any())]
