"""Whether a figure may be believed: was the load as planned, did it last, is there enough of it.

A check that fails makes a run, or a stretch of it, *invalid: why*: it is shown with its figures, says so
beside each of them, and wins no comparison. Limits are below, with their reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kit import measures, phases
from kit.store import Run
from kit.stretch import Stretch, stretches, whole

RATE = 0.01
"""Sent requests may miss the planned ones by this share, and users the number that was asked for."""
DELAY_S, DELAY_SHARE, LATE = 0.02, 0.05, 0.01
"""Sends may be late by the larger of this and a share of the median latency, but for a hundredth of them:
what the client adds must be small beside what it measures."""
FEW = 2
"""So many requests are no share of a few: one that is under way, or sent late, makes no run invalid."""
CPU = 0.9
"""Of a core, that the busiest load process takes: from there on it is the load that is measured."""
ERRORS = 0.01
"""Share of attempts that may time out, fail or be cut. Rejections are answers, and no errors."""
HITS = 0.05
"""Share of prompt tokens that a prefix cache may answer for the model: prompts are unique, so more is
another run's, or somebody's template."""
UNSTEADY = 0.05
"""Share of a stretch that may be warm-up or transient before its figures are marked as not steady."""
_T = 3.38
"""Student's t with 18 degrees of freedom, two-sided 1 % shared by three figures."""
_GRACE_S = 2.0  # until users are there and sampled
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


def cautions(part: Run | Stretch) -> str:
    """What else is to be kept in mind with its figures, in words: too few of them, or not steady."""
    return "; ".join(c.text for c in of(part) if c.ok is False and not c.spoils_all)


def table(part: Run | Stretch) -> pd.DataFrame:
    """The checks for people."""
    words = {True: "yes", False: "NO", None: "unknown"}
    return pd.DataFrame(
        {c.name: {"sound": words[c.ok], "found": c.text} for c in of(part)}
    ).T.rename_axis("check")


def _load(stretch: Stretch) -> Check:
    samples = _samples_of(stretch)
    if stretch.run.experiment["workload"].get("arrivals", "users") == "users":
        return _users(stretch, samples)
    planned, sent = (_grown(samples, "load", f"{k}_requests") for k in ("planned", "sent"))
    if math.isnan(planned) or not planned:
        return Check("load as planned", None, "not sampled what was planned")
    missed = 1 - sent / planned
    # What is due at this moment may be under way: one request is no share of a few.
    ok = abs(sent - planned) <= max(RATE * planned, FEW)
    limit = stretch.run.experiment["workload"].get("max_concurrency")
    if not ok and limit:
        text = f"{missed:.1%} of the plan was held back by max_concurrency = {limit}, as asked"
        return Check("load as planned", True, text)
    word = "were never sent" if not ok else "missing"
    return Check("load as planned", ok, f"{missed:.1%} of {planned:.0f} planned requests {word}")


def _users(stretch: Stretch, samples: pd.DataFrame) -> Check:
    name, run = "load as planned", stretch.run
    if run.changes["knob"].isin(["users", "shape"]).any():
        return Check(name, None, "users were moved while it ran: there is no plan to miss")
    load = run.experiment["workload"]
    steps = [{"at_s": 0.0, "users": load["users"], "ramp_s": 0.0}, *load.get("stages", [])]
    there = samples[(samples["source"] == "load") & (samples["metric"] == "users")]
    begun = np.searchsorted([s["at_s"] for s in steps], there["time_s"], side="right") - 1
    asked = np.array([s["users"] for s in steps], dtype=float)[begun]
    settled_s = np.array([s["at_s"] + s["ramp_s"] + _GRACE_S for s in steps])[begun]
    counted = (there["time_s"] >= settled_s).to_numpy()
    if not asked[counted].sum():
        return Check(name, None, "users were not sampled, or none were asked for")
    mean, wanted = there["value"][counted].mean(), asked[counted].mean()
    text = f"{mean:.4g} users on average, {wanted:.4g} were asked for"
    return Check(name, bool(abs(mean - wanted) <= RATE * wanted), text)


def _delay(stretch: Stretch) -> Check:
    load, rows = stretch.run.experiment["workload"], stretch.requests()
    if load.get("arrivals", "users") == "users":
        return Check("sent on time", None, "users who wait: there is no time to miss")
    waits = rows["client_wait_s"].dropna()
    if not len(waits):
        return Check("sent on time", None, "not recorded when requests were to be sent")
    late_s = measures.percentile(waits, 99)
    if limit := load.get("max_concurrency"):
        text = f"late by {late_s:.3f} s at p99, which max_concurrency = {limit} allows"
        return Check("sent on time", True, text)
    median_s = measures.percentile(measures.ok(rows)["e2e_s"], 50)
    limit_s = max(DELAY_S, 0.0 if math.isnan(median_s) else DELAY_SHARE * median_s)
    late = int((waits > limit_s).sum())
    text = f"{late} of {len(waits)} were sent over {limit_s:.3f} s late ({late_s:.3f} s at p99)"
    return Check("sent on time", late <= max(LATE * len(waits), FEW), text)


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
    settings = stretch.settings()
    before = settings.get("prompt_template", "{prompt}").split("{prompt}")[0]
    if share > HITS and before and settings.get("app") == "routed":
        text += ": the template before each prompt is known to it, so this tells nothing"
        return Check("no answers from a cache", None, text)
    return Check("no answers from a cache", share <= HITS, text)


def _enough(stretch: Stretch) -> Check:
    count = int((stretch.requests()["outcome"] == "ok").sum())
    told = [f"p{q}" for q in (50, 95, 99) if measures.enough(count, q)]
    text = (
        f"{count} successful requests where it ended: enough for {told[-1] if told else 'nothing'}"
    )
    return Check("enough requests for p95", measures.enough(count, 95), text, spoils_all=False)


def _steady(stretch: Stretch) -> Check:
    """Whether its halves agree, and whether it is of a steady phase, which alone spoils nothing."""
    name, table = "steady", phases.found(stretch.run)
    width_s = np.clip(table["to_s"], None, stretch.to_s) - table["from_s"].clip(stretch.from_s)
    share = width_s.clip(0).groupby(table["phase"]).sum() / max(stretch.to_s - stretch.from_s, 1e-9)
    if share.get("varying", 0.0) > 0:
        return Check(name, None, "the load itself varies all the time")
    rows = measures.ok(stretch.requests())
    if measures.enough(len(rows), 95):
        latency_s = rows["e2e_s"].to_numpy(dtype=float)
        spans = np.linspace(stretch.from_s, stretch.to_s, 21)
        rates = np.histogram(rows["ended_s"], spans)[0] / (spans[1] - spans[0])
        mean, median, rate = (
            phases.halves(v, figure, _T)
            for v, figure in ((latency_s, np.mean), (latency_s, np.median), (rates, np.mean))
        )
        text = f"mean latency of the halves: {mean[0]:.3g} and {mean[1]:.3g} s"
        if not mean[2] and median[2]:
            text = f"median latency of the halves: {median[0]:.3g} and {median[1]:.3g} s"
        elif not mean[2] and rate[2]:
            text = f"throughput of the halves: {rate[0]:.3g} and {rate[1]:.3g} requests/s"
        if mean[2] or median[2] or rate[2]:
            return Check(name, False, f"not steady: {text}")
    else:
        text = f"{len(rows)} requests are too few to compare halves"
    if share.get("steady", 0.0) < 1 - UNSTEADY:
        other = " and ".join(str(k) for k, v in share.items() if k != "steady" and v)
        text = f"not steady: {1 - share.get('steady', 0.0):.0%} of it is {other}"
        return Check(name, False, text, spoils_all=False)
    return Check(name, True if measures.enough(len(rows), 95) else None, text)


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
