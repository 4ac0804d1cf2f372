"""What the samples and the changes of a view say: replicas, accelerators, autoscaling, the last move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from kit import measures
from kit.application import model_names
from kit.view import View

_SLOWED = 0x04 | 0x08 | 0x20 | 0x40 | 0x80
"""NVML's reasons that mean trouble: power cap, hardware slowdown, heat (two), power brake."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """A view's samples of its last `recent_s` unless said otherwise; NaN where there are none."""

    view: View

    @cached_property
    def _by_metric(self) -> dict[str, pd.DataFrame]:
        return {str(name): table for name, table in self.view.samples.groupby("metric")}

    def all_of(self, metric: str) -> pd.DataFrame:
        """Samples of a metric within the view's span."""
        return self._by_metric.get(metric, self.view.samples.iloc[:0])

    def sampled(self, source: str, metric: str) -> pd.DataFrame:
        """Recent samples of a metric; `source` is what its name begins with."""
        s = self.all_of(metric)
        s = s[s["time_s"] >= self.view.now_s - self.view.recent_s]
        return s[s["source"].str.startswith(source)]

    def mean(self, source: str, metric: str) -> float:
        return float(self.sampled(source, metric)["value"].mean())

    def latest(self, source: str, metric: str) -> float:
        """Its last value within the span."""
        s = self.all_of(metric)
        found = s[s["source"] == source]["value"]
        return float(found.iloc[-1]) if len(found) else math.nan

    @cached_property
    def busy(self) -> float:
        """Share of the time that the accelerators worked, a mean over replicas."""
        return self.mean("replica:", "accelerator_busy_share")

    @cached_property
    def per_replica(self) -> float:
        """Requests in flight ÷ replicas running: what the autoscaler compares with its target."""
        in_flight = self.mean("load", "in_flight")
        if math.isnan(in_flight):
            in_flight = self.mean("app", "ongoing_requests")
        return in_flight / self.running if self.running else math.nan

    @property
    def asked(self) -> float:
        """How much load is asked for: users, or requests a second of a plan; NaN without samples."""
        users = self.latest("load", "users")
        return self.latest("load", "rate_rps") if math.isnan(users) else users

    @property
    def asked_words(self) -> str:
        """The same in words: `8 users`, `20 requests/s`."""
        if math.isnan(self.asked):
            return "an unknown load"
        plan = math.isnan(self.latest("load", "users"))
        return f"{self.asked:.3g} requests/s" if plan else f"{self.asked:.0f} users"

    @property
    def running(self) -> float:
        return self.latest("serve", "running_replicas")

    @property
    def target(self) -> float:
        return self.latest("serve", "target_replicas")

    @property
    def auto(self) -> bool:
        return self.view.settings.num_replicas == "auto"

    @property
    def most_replicas(self) -> int:
        """`max_replicas` of all model deployments together."""
        return self.view.settings.max_replicas * len(model_names(self.view.settings))

    @cached_property
    def short_of_s(self) -> float:
        """How long fewer replicas than the target have been running, and none has been added."""
        counts = {
            m: self.all_of(m).groupby("time_s")["value"].last()
            for m in ("target_replicas", "running_replicas")
        }
        table = pd.DataFrame(counts).dropna()
        if not len(table):
            return 0.0
        running = table["running_replicas"]
        fine = table.index[(running >= table["target_replicas"]) | (running.diff() > 0)]
        since = fine.max() if len(fine) else table.index.min()
        return float(table.index.max() - since)

    @cached_property
    def preemptions(self) -> float:
        """Preemptions within the window, all replicas together."""
        found = self.sampled("replica:", "preemptions").groupby("source")["value"]
        return float((found.max() - found.min()).sum())

    @cached_property
    def throttled(self) -> float:
        """Share of the readings in which a GPU slowed itself down; NaN without a GPU's word."""
        reasons = self.sampled("gpu:", "throttle_reasons")["value"].dropna().astype("int64")
        return float(((reasons & _SLOWED) != 0).mean())

    @cached_property
    def steady_target(self) -> pd.Series[float]:
        """The replica target since the load or a knob last changed, by time."""
        since = self.changed_s
        asked = self.all_of("users").set_index("time_s")["value"]
        if not len(asked):
            asked = self.all_of("rate_rps").set_index("time_s")["value"]
        if len(asked):
            other = asked.index[(asked - asked.iloc[-1]).abs() > 0.1 * asked.iloc[-1]]
            since = max(since, float(other.max()) if len(other) else -math.inf)
        target = self.all_of("target_replicas")
        return target[target["time_s"] > since].set_index("time_s")["value"]

    @cached_property
    def flips(self) -> int:
        """How often that target turned from rising to falling or back."""
        steps = self.steady_target.diff().dropna()
        signs = np.sign(steps[steps != 0].to_numpy())
        return int((signs[1:] != signs[:-1]).sum())

    @cached_property
    def changed_s(self) -> float:
        """When the last change took effect; −∞ without any."""
        return (
            float(self.view.changes["applied_s"].astype(float).fillna(-math.inf).max())
            if len(self.view.changes)
            else -math.inf
        )

    @property
    def last_change(self) -> str:
        """What that was, in words."""
        c = self.view.changes
        return ", ".join(
            f"{r['knob']} {r['from']} → {r['to']}"
            for r in measures.records(c[c["applied_s"] == self.changed_s])
        )
