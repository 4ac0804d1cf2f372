"""Phrases that advice is put together from; each carries its figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kit.evidence import GROUPS, Evidence, seconds

FULL = 0.9
"""Share of a limit from which it is called reached."""
ROOM = 0.6
"""Larger batches are advised while inference takes less of the E2E promise than this."""


@dataclass(frozen=True)
class Finding:
    """One thing that a view shows: `text` with its figures, and the knobs to move first."""

    rule: str
    text: str
    knobs: tuple[str, ...] = ()
    severity: Literal["trouble", "hint", "well"] = "hint"


def where(e: Evidence, group: str) -> str:
    """`Queueing is 71% of the mean latency of 1.92 s, nearly all of it batch wait (1.30 s)`."""
    if e.parts.isna().all():
        return f"Mean latency is {seconds(e.e2e_s)}, of which the app does not tell the parts"
    text = f"{group.capitalize()} is {e.share(group):.0%} of the mean latency of {seconds(e.e2e_s)}"
    if len(GROUPS[group]) == 1 or (e.images and group == "inference"):
        return text
    part = e.largest_part(group)
    of_group = e.parts[part] / e.group_s(group)
    word = "nearly all of it" if of_group > 0.85 else "most of it"
    return f"{text}, {word} {_named(e, part)} ({seconds(e.parts[part])})"


def _named(e: Evidence, part: str) -> str:
    if part == "batch_wait_s" and not e.batching:
        return "waiting for its turn in the replica"
    return part.removesuffix("_s").replace("_", " ")


def more_replicas(e: Evidence) -> tuple[str, tuple[str, ...]]:
    """More replicas as a phrase after *try*, with its knobs: who adds them is the autoscaler's say."""
    s = e.view.settings
    if not e.auto:
        return f"more replicas (num_replicas is {s.num_replicas})", ("num_replicas",)
    if e.target > e.running:
        pair = f"target {e.target:.0f}, running {e.running:.0f}"
        return f"waiting for the replicas that are on their way ({pair})", ()
    if s.max_replicas == s.min_replicas or e.target >= e.most_replicas:
        return f"a higher max_replicas ({s.max_replicas} is reached)", ("max_replicas",)
    if math.isnan(e.per_replica):
        return f"a higher min_replicas (now {s.min_replicas})", ("min_replicas",)
    seen = f"{e.per_replica:.1f} requests per replica"
    target, limit = s.target_ongoing_requests, s.max_ongoing_requests
    if s.proxy == "haproxy" and target >= limit:
        return (
            f"a target_ongoing_requests (now {target:g}) below max_ongoing_requests = {limit}: behind "
            "HAProxy the autoscaler does not see requests that queue"
        ), ("target_ongoing_requests",)  # fmt: skip
    if e.per_replica <= 1.05 * target:
        return (
            f"a lower target_ongoing_requests: it is {target:g}, so with {seen} the autoscaler adds "
            "none"
        ), ("target_ongoing_requests",)  # fmt: skip
    return (
        f"waiting for upscale_delay_s = {s.upscale_delay_s:g} s to pass: {seen} are above "
        f"target_ongoing_requests = {target:g}, so the autoscaler will add some"
    ), ("upscale_delay_s",)  # fmt: skip


def is_full(e: Evidence) -> bool:
    """Whether batches are about as large as they may be."""
    return e.batch_size >= FULL * e.batch_cap


def fill(e: Evidence) -> str:
    """`7.8 of 8`, and on which side of a routed app."""
    side = f" on the {e.side} side" if e.side else ""
    return f"{e.batch_size:.1f} of {e.batch_cap}{side}"


def larger_batch(e: Evidence) -> str:
    """`a larger max_batch_size (…), or ` where batches are full and inference leaves room."""
    limit_s = e.view.slo.get("e2e_p95_s")
    p95_s = e.inference_p95_s
    if not (e.batching and is_full(e)) or (limit_s is not None and p95_s > ROOM * limit_s):
        return ""
    why = "" if limit_s is None else f" (inference p95 is {seconds(p95_s)} of {limit_s:g} s), "
    return f"a larger {e.side_knob('max_batch_size')}{why or ', '}or "
