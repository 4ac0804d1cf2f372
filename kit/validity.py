"""Whether a figure may be believed: was the load as planned, did it last, is there enough of it.

A check that fails makes a run, or a stretch of it, *invalid: why*: it is shown with its figures, says so
beside each of them, and wins no comparison. Limits are below, with their reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from kit import measures
from kit.store import Run
from kit.stretch import Stretch, stretches, whole

RATE = 0.01
"""Sent requests may miss the planned ones by this share."""
DELAY_S, DELAY_SHARE = 0.02, 0.05
"""Sends may be late, at p99, by the larger of this and a share of the median latency: what the client
adds must be small beside what it measures."""
CPU = 0.9
"""Of a core, that the busiest load process takes: from there on it is the load that is measured."""
ERRORS = 0.01
"""Share of attempts that may time out, fail or be cut. Rejections are answers, and no errors."""
HITS = 0.05
"""Share of prompt tokens that a prefix cache may answer for the model: prompts are unique, so more is
another run's, or somebody's template."""
DRIFT = 0.1
"""Halves of a steady stretch may differ by so much, however sure that they differ."""
_BATCHES = 10
_T = 2.88
"""Student's t with 18 degrees of freedom, two-sided 1 %."""
_ERRORS = ("timeout", "invalid", "error", "cut")


@dataclass(frozen=True)
class Check:
    """One thing that was checked; `ok` is None where it could not be, and `text` tells figures.

    One that does not spoil all takes only the percentiles that it names.
    """

    name: str
    ok: bool | None
    text: str
    spoils_all: bool = True


def of(part: Run | Stretch) -> list[Check]:
    """Every check of a stretch, or of a run: its load as a whole, its figures where it ended."""
    if isinstance(part, Stretch):
        return [check(part) for check in (*_LOAD, *_FIGURES)]
    last = stretches(part)[-1:]
    figures = [check(stretch) for stretch in last for check in _FIGURES]
    return [check(whole(part)) for check in _LOAD] + figures


def invalid(part: Run | Stretch) -> str:
    """Why a run or a stretch is invalid, in words; empty when it is not."""
    return "; ".join(c.text for c in of(part) if c.ok is False and c.spoils_all)


def table(part: Run | Stretch) -> pd.DataFrame:
    """The checks for people."""
    words = {True: "yes", False: "NO", None: "unknown"}
    return pd.DataFrame(
        {c.name: {"sound": words[c.ok], "found": c.text} for c in of(part)}
    ).T.rename_axis("check")


def _load(stretch: Stretch) -> Check:
    samples = _samples_of(stretch)
    planned, sent = (_grown(samples, "load", f"{k}_requests") for k in ("planned", "sent"))
    if math.isnan(planned) or not planned:
        return Check("load as planned", None, "users who wait: there is no plan to miss")
    missed = 1 - sent / planned
    # What is due at this moment may be under way: one request is no share of a few.
    ok = abs(sent - planned) <= max(RATE * planned, 2.0)
    limit = stretch.run.experiment["workload"].get("max_concurrency")
    if not ok and limit:
        text = f"{missed:.1%} of the plan was held back by max_concurrency = {limit}, as asked"
        return Check("load as planned", True, text)
    word = "were never sent" if not ok else "missing"
    return Check("load as planned", ok, f"{missed:.1%} of {planned:.0f} planned requests {word}")


def _delay(stretch: Stretch) -> Check:
    load, rows = stretch.run.experiment["workload"], stretch.requests()
    if load.get("arrivals", "users") == "users":
        return Check("sent on time", None, "users who wait: there is no time to miss")
    waits = rows["client_wait_s"].dropna()
    if not len(waits):
        return Check("sent on time", None, "not recorded when requests were to be sent")
    late_s = measures.percentile(waits, 99)
    limit_s = max(DELAY_S, DELAY_SHARE * measures.percentile(measures.ok(rows)["e2e_s"], 50))
    if limit := load.get("max_concurrency"):
        text = f"late by {late_s:.3f} s at p99, which max_concurrency = {limit} allows"
        return Check("sent on time", True, text)
    ok = bool(late_s <= limit_s) if not math.isnan(limit_s) else None
    return Check("sent on time", ok, f"late by {late_s:.3f} s at p99 (limit {limit_s:.3f} s)")


def _cpu(stretch: Stretch) -> Check:
    samples = _samples_of(stretch)
    shares = samples[(samples["source"] == "load") & (samples["metric"] == "cpu_share")]["value"]
    if not len(shares):
        return Check("load generator keeps up", None, "its CPU was not sampled")
    text = f"the busiest load process takes {shares.mean():.0%} of a core (limit {CPU:.0%})"
    ok = bool(shares.mean() <= CPU)
    return Check("load generator keeps up", ok, text if ok else f"{text}: give it more processes")


def _errors(stretch: Stretch) -> Check:
    rows = stretch.requests()
    if not len(rows):
        return Check("few errors", None, "no request ended")
    counts = rows["outcome"].value_counts()
    wrong = {k: int(counts[k]) for k in _ERRORS if k in counts}
    share = sum(wrong.values()) / len(rows)
    kinds = f" ({', '.join(f'{n} {k}' for k, n in wrong.items())})" if wrong else ""
    rejected = counts.get("rejected", 0) / len(rows)
    more = f"; {rejected:.1%} were rejected" if rejected else ""
    text = f"{share:.1%} of {len(rows)} attempts failed{kinds}, limit {ERRORS:.0%}{more}"
    return Check("few errors", share <= ERRORS, text)


def hit_share(part: Run | Stretch) -> float:
    """Share of prompt tokens that prefix caches answered for the model; NaN where no engine tells."""
    samples = _samples_of(whole(part) if isinstance(part, Run) else part)
    asked, hit = (
        sum(_grown(samples, source, metric) for source in _sources(samples, metric))
        for metric in ("prefix_cache_queried_tokens", "prefix_cache_hit_tokens")
    )
    return hit / asked if asked else math.nan


def _hits(stretch: Stretch) -> Check:
    share = hit_share(stretch)
    if math.isnan(share):
        return Check(
            "no answers from a cache", None, "no engine tells of a prefix cache that was asked"
        )
    text = f"{share:.1%} of prompt tokens came from the prefix cache (limit {HITS:.0%})"
    return Check("no answers from a cache", share <= HITS, text)


def _enough(stretch: Stretch) -> Check:
    count = int((stretch.requests()["outcome"] == "ok").sum())
    told = [f"p{q}" for q in (50, 95, 99) if measures.enough(count, q)]
    text = (
        f"{count} successful requests where it ended: enough for {told[-1] if told else 'nothing'}"
    )
    return Check("enough requests for p95", measures.enough(count, 95), text, spoils_all=False)


def _steady(stretch: Stretch) -> Check:
    """By means of batches of successive requests, which unlike single ones are nearly independent
    (Schmeiser 1982, Operations Research 30(3) 556-568)."""
    name = "two halves agree"
    load = stretch.run.experiment["workload"]
    if load.get("diurnal") or load.get("arrivals") in ("on-off", "trace"):
        return Check(name, None, "the load itself varies all the time")
    values = measures.ok(stretch.requests())["e2e_s"].to_numpy(dtype=float)
    size = len(values) // (2 * _BATCHES)
    if not measures.enough(len(values), 95):
        return Check(name, None, f"{len(values)} requests are too few to tell")
    batches = values[: 2 * _BATCHES * size].reshape(2, _BATCHES, size).mean(axis=2)
    first, second = batches.mean(axis=1)
    error = math.sqrt(batches.var(axis=1, ddof=1).sum() / _BATCHES)
    apart = abs(second - first) > max(_T * error, DRIFT * first)
    text = f"mean latency of the halves: {first:.3g} and {second:.3g} s"
    return Check(name, not apart, f"not steady: {text}" if apart else text)


def _samples_of(stretch: Stretch) -> pd.DataFrame:
    samples = stretch.run.samples
    return samples[samples["time_s"].between(stretch.from_s, stretch.to_s)]


def _sources(samples: pd.DataFrame, metric: str) -> list[str]:
    return list(samples.loc[samples["metric"] == metric, "source"].unique())


def _grown(samples: pd.DataFrame, source: str, metric: str) -> float:
    """How much a counter grew, one that starts anew included; NaN when it was not sampled."""
    s = samples[(samples["source"] == source) & (samples["metric"] == metric)]["value"]
    if len(s) < 2:
        return math.nan
    steps = s.diff().iloc[1:]
    return float(steps.where(steps >= 0, s.iloc[1:]).sum())


_LOAD: tuple[Callable[[Stretch], Check], ...] = (_load, _delay, _cpu, _errors, _hits)
_FIGURES: tuple[Callable[[Stretch], Check], ...] = (_steady, _enough)
