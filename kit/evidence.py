"""The figures of a view on which advice rests: what users were promised, where time goes, batches.

`Evidence` reads them off a `View` when they are asked for, and keeps them. A figure that nobody
observed is NaN, so that no comparison with it holds and no rule fires on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kit import breakdown, measures
from kit.sampled import Sampled

BATCHING_APPS = (*breakdown.STATIC_APPS, "resnet50-batched")
"""Apps that form batches by `max_batch_size` and `batch_wait_timeout_s`."""
GROUPS = {
    "queueing": ("router_s", "batch_wait_s", "engine_queue_s"),
    "inference": ("prefill_s", "decode_s"),
    "postprocessing": ("postprocess_s",),
    "the way back": ("rest_s",),
}
"""The parts of latency, as people act on them."""
PROMISED = {
    "e2e_p95_s": "E2E p95",
    "queueing_p95_s": "queueing p95",
    "ttft_p95_s": "TTFT p95",
    "tpot_p95_s": "TPOT p95",
}


@dataclass(frozen=True)
class Promise:
    """One promise of the SLO, and what was measured (NaN where nothing was)."""

    name: str
    limit_s: float
    figure_s: float

    @property
    def missed(self) -> bool:
        return self.figure_s > self.limit_s

    @property
    def words(self) -> str:
        name = PROMISED.get(self.name, self.name.removesuffix("_s").replace("_", " "))
        return f"{name} is {seconds(self.figure_s)} (promised: {self.limit_s:g} s)"


def seconds(value: float) -> str:
    """`1.92 s`, `0.30 s`, `4.2 ms`."""
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.2g} ms"


@dataclass(frozen=True, eq=False)
class Evidence(Sampled):
    """What a view says now: its samples, and these figures of its recent requests."""

    @cached_property
    def good(self) -> pd.DataFrame:
        """Requests that succeeded."""
        return measures.ok(self.view.recent)

    @cached_property
    def outcomes(self) -> pd.Series[int]:
        """Attempts by outcome, most first; clients that were told to leave count for nothing."""
        found = self.view.recent["outcome"]
        return found[found != "left"].value_counts()

    @property
    def attempts(self) -> int:
        return int(self.outcomes.sum())

    def share_of(self, *outcomes: str) -> float:
        """Share of attempts that ended so; NaN without any."""
        count = sum(int(self.outcomes.get(o, 0)) for o in outcomes)
        return count / self.attempts if self.attempts else math.nan

    @cached_property
    def e2e_s(self) -> float:
        """Mean end-to-end latency."""
        return float(self.good["e2e_s"].mean())

    @cached_property
    def parts(self) -> pd.Series[float]:
        """Mean of each part of the latency (`measures.PARTS`)."""
        return self.good[list(measures.PARTS)].astype(float).mean()

    def group_s(self, group: str) -> float:
        """Mean seconds of one of `GROUPS`; unobserved parts left out."""
        return float(self.parts[list(GROUPS[group])].sum())

    def share(self, group: str) -> float:
        """Its share of the mean latency."""
        return self.group_s(group) / self.e2e_s

    def largest_part(self, group: str) -> str:
        """The part of a group that takes most."""
        return str(self.parts[list(GROUPS[group])].fillna(0).idxmax())

    def p95_s(self, what: str) -> float:
        return measures.percentile(self.good[f"{what}_s"].astype(float), 95)

    @cached_property
    def promises(self) -> list[Promise]:
        """Promises that there is a figure for."""
        known = [
            Promise(name, limit_s, self.p95_s(name.removesuffix("_p95_s")))
            for name, limit_s in self.view.slo.items()
            if limit_s is not None
        ]
        return [p for p in known if not math.isnan(p.figure_s)]

    @property
    def missed(self) -> list[Promise]:
        return [p for p in self.promises if p.missed]

    @cached_property
    def focus(self) -> str:
        """The group of parts to act on: the one to blame for a missed promise, or the largest."""
        largest = max(GROUPS, key=self.group_s)
        missed = {p.name for p in self.missed}
        if "e2e_p95_s" in missed:
            # Where inference alone would keep the promise, what is promised of queueing comes first.
            fits = self.p95_s("inference") <= (self.view.slo["e2e_p95_s"] or 0)
            return "queueing" if fits and "queueing_p95_s" in missed else largest
        if "queueing_p95_s" in missed:
            return "queueing"
        if "ttft_p95_s" in missed and self.group_s("queueing") >= self.parts["prefill_s"]:
            return "queueing"
        return "inference" if missed else largest

    # Batches.

    @property
    def batching(self) -> bool:
        return self.view.settings.app in BATCHING_APPS

    @property
    def continuous(self) -> bool:
        return self.view.settings.app == "continuous"

    @property
    def images(self) -> bool:
        return self.view.settings.app.startswith("resnet50")

    @cached_property
    def side(self) -> str:
        """Routed app: the side, `short` or `long`, whose requests wait most in all; else empty."""
        if self.view.settings.app != "routed":
            return ""
        waits = self.good[self.good["route"].isin(["short", "long"])]
        total = waits.groupby("route")["queueing_s"].sum()
        return str(total.idxmax()) if len(total) else "short"

    @cached_property
    def served(self) -> pd.DataFrame:
        """Successful requests of that side, or all."""
        return self.good[self.good["route"] == self.side] if self.side else self.good

    def side_knob(self, name: str) -> str:
        """`max_batch_size` or `batch_wait_timeout_s` as it is called on that side."""
        return f"long_{name}" if self.side == "long" else name

    @cached_property
    def inference_p95_s(self) -> float:
        """p95 of inference on that side."""
        return measures.percentile(self.served["inference_s"].astype(float), 95)

    @cached_property
    def batch_cap(self) -> int:
        return int(getattr(self.view.settings, self.side_knob("max_batch_size")))

    @cached_property
    def _batches(self) -> pd.DataFrame:
        rows = self.served.dropna(subset=["batch_id"])
        return rows[rows["batch_size"] > 0].groupby(["replica_id", "batch_id"]).agg(
            size=("batch_size", "first"), prompts=("prompt_tokens", "sum"),
            outputs=("output_tokens", "sum"), found=("batch_size", "size"),
        )  # fmt: skip

    @cached_property
    def batch_size(self) -> float:
        """Mean requests in a batch, each batch counted once; NaN where the app forms none."""
        return float(self._batches["size"].mean()) if self.batching else math.nan

    @cached_property
    def batch_tokens(self) -> float:
        """Mean tokens, prompts and outputs, of the batches that are here as a whole."""
        whole = self._batches[self._batches["found"] == self._batches["size"]]
        return float((whole["prompts"] + whole["outputs"]).mean()) if len(whole) else math.nan

    @cached_property
    def useful_share(self) -> float:
        """Output tokens ÷ token slots of whole static batches."""
        if self.view.settings.app not in breakdown.STATIC_APPS:
            return math.nan
        table = breakdown.useful_share(self.good)
        slots = float(table["slot_tokens"].sum())
        return float(table["useful_tokens"].sum()) / slots if slots else math.nan

    @cached_property
    def ongoing(self) -> float:
        """Requests inside a replica, a mean over those that served."""
        found = self.sampled("replica:", "ongoing_requests")
        names = "replica:" + self.served["replica_id"].dropna().unique().astype(object)
        return float(found[found["source"].isin(names)]["value"].mean())
