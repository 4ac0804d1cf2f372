"""Two settings compared by repeats: pairs of runs, so that what drifts between them cancels.

    runs = kit.run_many(kit.repeats.alternating(a, b, 4), serving, folder)
    kit.repeats.paired(*kit.repeats.sides(runs))

A block bootstrap (`kit.compare`) knows how much one run varies within; it cannot know how much runs vary
among themselves. Repeats do, and need no assumption about neighbours. Figures are of whole runs, as
`kit.summary` tells them: what starts up is in both of a pair.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kit import compare, measures, summary
from kit.estimates import MEASURES, Measure
from kit.experiment import Experiment
from kit.store import Run
from kit.stretch import obstacles, whole

LEAST = 3
"""Fewer pairs give no interval."""

_T = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t, two-sided 5 %, by degrees of freedom."""


def alternating(a: Experiment, b: Experiment, pairs: int) -> list[Experiment]:
    """The two experiments by turns, A B B A A B …, named and seeded by pair.

    Both of a pair get the same requests. With each second pair turned round, neither side is always the
    later one: what drifts evenly cancels in an even number of pairs.

    Raises:
        ValueError: for fewer than `LEAST` pairs.
    """
    if pairs < LEAST:
        raise ValueError(f"pairs = {pairs}: must be {LEAST} or more to tell anything")
    made = []
    for pair in range(pairs):
        turn = (("a", a), ("b", b))
        for side, one in turn if pair % 2 == 0 else turn[::-1]:
            seed = one.workload.seed + pair
            load = one.workload.model_copy(update={"seed": seed})
            made.append(replace(one, workload=load, name=f"{pair + 1}{side} {one.name}"))
    return made


def sides(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """The runs of `alternating` experiments by side, partners at the same place; a run without its
    partner, as after an interruption, is left out.

    Raises:
        CompareError: for a run that `alternating` did not name.
    """
    found: dict[str, dict[int, Run]] = {"a": {}, "b": {}}
    for run in runs:
        named = re.match(r"(\d+)([ab]) ", str(name := run.experiment["name"]))
        if named is None:
            raise compare.CompareError(
                f"{name}: not of kit.repeats.alternating, whose names begin with 1a, 1b, 2a, …"
            )
        found[named[2]][int(named[1])] = run
    both = sorted(found["a"].keys() & found["b"].keys())
    return [found["a"][k] for k in both], [found["b"][k] for k in both]


def paired(a: Sequence[Run], b: Sequence[Run], force: bool = False) -> pd.DataFrame:
    """Every figure of merit of B over that of A, pair by pair, and whether B is better.

    Args:
        a: runs of the first settings.
        b: runs of the second, each beside its partner in `a`.
        force: whether to compare what differs in more than its settings, or is invalid.

    Returns:
        Indexed by figure: `pairs` (that have it), `a` and `b` (means), `ratio` (the geometric mean of
        b ÷ a), `ratio_low`, `ratio_high` (95 %, Student's t of the ratios' logarithms), `verdict` as in
        `kit.compare.compare`, and `why` there can be none, in words: fewer than `LEAST` pairs, a zero,
        which has no ratio, or invalid runs.

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
    first, second = (pd.DataFrame([_figures(r) for r in side]) for side in (a, b))
    spoilt = [
        f"{run['name']} is invalid: {run['invalid_because']}"
        for side in (first, second) for run in measures.records(side) if not run["valid"]
    ]  # fmt: skip
    rows = {m.name: _row(m, first, second, "" if force else "; ".join(spoilt)) for m in MEASURES}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("figure")


def _figures(run: Run) -> dict[str, Any]:
    """The flat figures of a whole run, and what of `MEASURES` these lack."""
    found = summary.of(run)
    mean = measures.replica_seconds(run) / found["duration_s"]
    return found | {"name": run.experiment["name"], "replicas_mean": mean}


def _row(m: Measure, a: pd.DataFrame, b: pd.DataFrame, why: str) -> dict[str, Any]:
    x, y = (t[m.name].to_numpy(dtype=float) for t in (a, b))
    known = ~(np.isnan(x) | np.isnan(y))
    x, y = x[known], y[known]
    n = len(x)
    if n < LEAST:
        why = why or f"{n} pairs have it: {LEAST} or more are needed"
    elif not (x > 0).all() or not (y > 0).all():
        # Without its pair, what failed altogether would count for nothing.
        why = why or "it is zero in a pair, which gives no ratio"
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(y / x)
    middle = half = math.nan
    if n and np.isfinite(logs).all():
        middle = float(logs.mean())
        if n >= LEAST:
            t = _T[n - 1] if n <= len(_T) else 1.96 + 2.7 / (n - 1)
            half = t * float(logs.std(ddof=1)) / math.sqrt(n)
    verdict = compare.CANNOT_TELL
    if not why:
        verdict = compare.verdict(m, 1.0, math.exp(middle), middle - half, middle + half)
    return {
        "pairs": n, "a": x.mean() if n else math.nan, "b": y.mean() if n else math.nan,
        "ratio": math.exp(middle), "ratio_low": math.exp(middle - half),
        "ratio_high": math.exp(middle + half), "verdict": verdict, "why": why,
    }  # fmt: skip
