"""Two settings compared by repeats: pairs of runs, so that what drifts between them cancels.

    runs = kit.run_many(kit.repeats.alternating(a, b, 4), serving, folder)
    kit.repeats.paired(runs[0::2], runs[1::2])

A block bootstrap (`kit.compare`) knows how much one run varies within; it cannot know how much runs vary
among themselves. Repeats do, and need no assumption about neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kit import compare, summary, validity
from kit.estimates import MEASURES, Measure
from kit.experiment import Experiment
from kit.store import Run
from kit.stretch import obstacles, whole

LEAST = 3
"""Fewer pairs give no interval."""

_T = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t, two-sided 5 %, by degrees of freedom."""
_KEYS = {"replicas_mean": "replica_seconds"}


def alternating(a: Experiment, b: Experiment, pairs: int) -> list[Experiment]:
    """The two experiments in turn, named and seeded by pair: both of a pair get the same requests.

    Raises:
        ValueError: for fewer than `LEAST` pairs.
    """
    if pairs < LEAST:
        raise ValueError(f"pairs = {pairs}: must be {LEAST} or more to tell anything")
    made = []
    for pair in range(pairs):
        for side, one in (("a", a), ("b", b)):
            seed = one.workload.seed + pair
            load = one.workload.model_copy(update={"seed": seed})
            made.append(replace(one, workload=load, name=f"{pair + 1}{side} {one.name}"))
    return made


def paired(a: Sequence[Run], b: Sequence[Run], force: bool = False) -> pd.DataFrame:
    """Every figure of merit of B over that of A, pair by pair, and whether B is better.

    Args:
        a: runs of the first settings.
        b: runs of the second, each beside its partner in `a`.
        force: whether to compare what differs in more than its settings, or is invalid.

    Returns:
        Indexed by figure: `pairs` (that have it), `a` and `b` (means), `ratio` (the geometric mean of
        b ÷ a), `ratio_low`, `ratio_high` (95 %, Student's t of the ratios' logarithms), `verdict` as in
        `kit.compare.compare`: `cannot tell` with fewer than `LEAST` pairs, or invalid runs.

    Raises:
        CompareError: when there are not as many of each, or what differs is more than settings.
    """
    if len(a) != len(b) or not len(a):
        raise compare.CompareError(f"{len(a)} runs and {len(b)}: must be pairs, one of each side")
    wrong = list(dict.fromkeys(
        w for x, y in zip(a, b, strict=True) for w in obstacles(whole(x), whole(y))
    ))  # fmt: skip
    if wrong and not force:
        raise compare.CompareError(
            "not comparable: " + "; ".join(wrong) + "; force=True compares all the same"
        )
    spoilt = not force and any(validity.invalid(r) for r in (*a, *b))
    first, second = (pd.DataFrame([summary.of(r) for r in side]) for side in (a, b))
    rows = {m.name: _row(m, first, second, spoilt) for m in MEASURES}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("figure")


def _row(m: Measure, a: pd.DataFrame, b: pd.DataFrame, spoilt: bool) -> dict[str, Any]:
    key = _KEYS.get(m.name, m.name)
    x, y = (t[key].to_numpy(dtype=float) for t in (a, b))
    both = (x > 0) & (y > 0)
    n = int(both.sum())
    logs = np.log(y[both] / x[both])
    middle = float(logs.mean()) if n else math.nan
    half = math.nan
    if n >= LEAST:
        freedom = n - 1
        t = _T[freedom] if freedom < len(_T) else 1.96 + 2.7 / freedom
        half = t * float(logs.std(ddof=1)) / math.sqrt(n)
    low, high = math.exp(middle - half), math.exp(middle + half)
    verdict = compare.CANNOT_TELL
    sure = low > 1 or high < 1
    if sure and not spoilt and abs(math.exp(middle) - 1) >= compare.SMALL:
        verdict = compare.verdict(m, risen=low > 1)
    return {
        "pairs": n, "a": x[both].mean() if n else math.nan, "b": y[both].mean() if n else math.nan,
        "ratio": math.exp(middle), "ratio_low": low, "ratio_high": high, "verdict": verdict,
    }  # fmt: skip
