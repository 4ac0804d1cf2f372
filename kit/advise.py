"""What is going on, in a sentence: the figures of a view → what is wrong, why, and the knob to try.

Rules look at `Evidence` one by one, the most important first; each is silent unless its figures
hold, and says them. The first that speaks is the sentence of the panel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kit.causes import latency
from kit.evidence import Evidence, seconds
from kit.phrases import Finding, where
from kit.view import View

ENOUGH = 20
"""Successful requests from which on a percentile, or a mean, says something."""
SETTLE_S = 3.0
"""How long after a change most of what ends was sent before it."""
FEW = 0.01
"""Rejections or failures up to this share are not worth a word."""
STARTS_WITHIN_S = 30.0
"""A replica that takes longer, its loading aside, is stuck; real engines take twice as long."""
FLIPS = 3
"""Changes of direction of the replica target under steady load that make an oscillation."""
IDLE = 0.3
"""Busy share below which fewer replicas are proposed, and the share they should come to."""
AIMED = 0.6


def sentence(view: View) -> str:
    """What is going on now, always with figures."""
    return findings(view)[0].text


def findings(view: View) -> list[Finding]:
    """All that the view shows, the most important first; at least one."""
    evidence = Evidence(view)
    found = []
    for rule in RULES:
        if finding := rule(evidence):
            found.append(finding)
            if finding.rule in FINAL:
                break
    return found


def _stuck(e: Evidence) -> Finding | None:
    s = e.view.settings
    patience_s = STARTS_WITHIN_S * (1 if s.engine == "emulated" else 2) + s.load_time_s
    if not (e.target > e.running and e.short_of_s > patience_s):
        return None
    starting = e.latest("serve", "starting_replicas")
    needs = f"num_cpus = {s.num_cpus:g}" + (f", num_gpus = {s.num_gpus:g}" if s.num_gpus else "")
    bound = "max_replicas" if e.auto else "num_replicas"
    return Finding(
        "replicas_stuck",
        f"{e.target:.0f} replicas are wanted, but for {e.short_of_s:.0f} s only {e.running:.0f} run "
        f"({starting:.0f} starting). Each needs {needs}: is so much free? Try a lower {bound}, or "
        "smaller needs.",
        (bound, "num_gpus" if s.num_gpus else "num_cpus"),
        "trouble",
    )


def _no_load(e: Evidence) -> Finding | None:
    if len(e.view.recent) or e.asked > 0:
        return None
    asked = "" if math.isnan(e.asked) else f"{e.asked_words}, and "
    return Finding(
        "no_load", f"No load: {asked}no request has ended within the last {e.view.recent_s:.0f} s."
    )


def _nothing_ended(e: Evidence) -> Finding | None:
    if len(e.view.recent):
        return None
    waiting = e.latest("load", "in_flight")
    run = "" if math.isnan(e.running) else f", {e.running:.0f} replicas run"
    long = e.view.recent_s >= 10
    return Finding(
        "nothing_ended",
        f"No request of {e.asked_words} has ended within {e.view.recent_s:.0f} s: {waiting:.0f} are "
        f"in flight{run}.",
        (),
        "trouble" if long else "hint",
    )


def _nothing_succeeds(e: Evidence) -> Finding | None:
    if e.attempts < 5 or len(e.good):
        return None
    counts = ", ".join(f"{n} {outcome}" for outcome, n in e.outcomes.items())
    most = str(e.outcomes.index[0])
    texts = e.view.recent.loc[e.view.recent["outcome"] == most, "error"].dropna()
    said = f" Most say: {str(texts.mode().iloc[0])[:100]!r}." if len(texts) else ""
    advice, knobs = {"rejected": _against_rejections, "timeout": _against_timeouts}.get(
        most, lambda _: ("", ())
    )(e)
    return Finding(
        "nothing_succeeds",
        f"None of {e.attempts} requests of the last {e.view.recent_s:.0f} s succeeded: {counts}."
        f"{said}{advice}",
        knobs,
        "trouble",
    )


def _against_rejections(e: Evidence) -> tuple[str, tuple[str, ...]]:
    limit = e.view.settings.max_queued_requests
    bound = "max_replicas" if e.auto else "num_replicas"
    if limit < 0:
        return (
            " max_queued_requests = -1 rejects none: there was no replica to take them. Try more "
            f"({bound})."
        ), (bound,)  # fmt: skip
    return (
        f" max_queued_requests = {limit} turns away what waits beyond it. Try a higher one if waiting "
        f"is acceptable, else more replicas ({bound})."
    ), ("max_queued_requests", bound)  # fmt: skip


def _against_timeouts(e: Evidence) -> tuple[str, tuple[str, ...]]:
    bound = "max_replicas" if e.auto else "num_replicas"
    limit = f"request_timeout_s = {e.view.settings.request_timeout_s:g} s"
    return f" Clients or the proxy ({limit}) gave up. Try more replicas ({bound}).", (bound,)


def _settling(e: Evidence) -> Finding | None:
    count, age_s = len(e.good), e.view.now_s - e.changed_s
    place = where(e, e.focus) if count else ""
    so_far = f" So far {place[0].lower()}{place[1:]}." if place else ""
    if age_s < SETTLE_S:
        text = (
            f"Still settling: {e.last_change} took effect {age_s:.1f} s ago, and {count} requests"
        )
        return Finding("settling", f"{text} have succeeded since.{so_far}")
    if count < ENOUGH:
        text = f"Too early to judge: {count} requests have succeeded in {e.view.recent_s:.0f} s"
        return Finding("too_few", f"{text}; {ENOUGH} would say something.{so_far}")
    return None


def _rejections(e: Evidence) -> Finding | None:
    share = e.share_of("rejected")
    if not (share > FEW):
        return None
    rejected = e.view.recent[e.view.recent["outcome"] == "rejected"]["status"].dropna()
    status = f" with {rejected.mode().iloc[0]:.0f}" if len(rejected) else ""
    advice, knobs = _against_rejections(e)
    return Finding(
        "rejections",
        f"{share:.0%} of {e.attempts} requests were rejected{status}; the latency of the others "
        f"(E2E p95 {seconds(e.p95_s('e2e'))}) leaves them out.{advice}",
        knobs,
        "trouble",
    )


def _failures(e: Evidence) -> Finding | None:
    kinds = [o for o in ("timeout", "error", "invalid", "cut") if e.outcomes.get(o, 0)]
    share = e.share_of(*kinds)
    if not (share > FEW):
        return None
    counts = ", ".join(f"{e.outcomes[o]} {o}" for o in kinds)
    late = "timeout" in kinds
    advice, knobs = _against_timeouts(e) if late else ("", ())
    return Finding(
        "failures",
        f"{share:.0%} of {e.attempts} requests failed: {counts}.{advice}",
        knobs,
        "trouble",
    )


def _oscillating(e: Evidence) -> Finding | None:
    if not e.auto or e.flips < FLIPS:
        return None
    s, target = e.view.settings, e.steady_target
    span_s = float(target.index[-1] - target.index[0])
    text = (
        f"Under steady load the replica target turned round {e.flips} times within {span_s:.0f} s, "
        f"between {target.min():.0f} and {target.max():.0f}. Try "
    )
    knobs = ["downscale_delay_s"]
    if s.downscale_delay_s < s.look_back_period_s:
        text += (
            f"a downscale_delay_s (now {s.downscale_delay_s:g} s) well above look_back_period_s = "
        )
        text += f"{s.look_back_period_s:g} s"
    else:
        text += f"a longer downscale_delay_s (now {s.downscale_delay_s:g} s)"
    if s.upscaling_factor > 1:
        text += f", a lower upscaling_factor (now {s.upscaling_factor:g})"
        knobs.append("upscaling_factor")
    if s.target_ongoing_requests < 1:
        text += f", a higher target_ongoing_requests (now {s.target_ongoing_requests:g})"
        knobs.append("target_ongoing_requests")
    return Finding("oscillating", text + ".", tuple(knobs), "trouble")


def _well(e: Evidence) -> Finding | None:
    if not e.promises or e.missed or e.share_of("rejected", "timeout", "error", "cut") > FEW:
        return None
    kept = ", ".join(p.words for p in e.promises)
    rate = f"{len(e.good) / e.view.recent_s:.1f} requests/s"
    text = f"All promises hold at {rate}: {kept}. {where(e, e.focus)}."
    fewer = max(1, math.ceil(e.running * e.busy / AIMED)) if e.busy < IDLE else math.inf
    if not e.auto and fewer < e.running:
        text += f" The accelerators are busy {e.busy:.0%} of the time: {fewer} of {e.running:.0f} "
        return Finding("well", text + "replicas would do.", ("num_replicas",), "well")
    return Finding("well", text, (), "well")


def _coming(e: Evidence) -> Finding | None:
    if not (e.target > e.running) or _stuck(e):
        return None
    return Finding(
        "replicas_coming",
        f"{e.target - e.running:.0f} more replicas are on their way: target {e.target:.0f}, running "
        f"{e.running:.0f}.",
    )


def _spread_thin(e: Evidence) -> Finding | None:
    s = e.view.settings
    target, cap = s.target_ongoing_requests, e.batch_cap
    if not (e.auto and e.batching and e.running > 1 and target < cap and e.batch_size < 0.7 * cap):
        return None
    return Finding(
        "spread_thin",
        f"Batches hold {e.batch_size:.1f} of {cap}: with target_ongoing_requests = {target:g} replicas "
        f"are added before a batch is full. Try one of {cap} to {2 * cap}.",
        ("target_ongoing_requests",),
    )


RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    _stuck, _no_load, _nothing_ended, _nothing_succeeds, _settling, _rejections, _failures,
    _oscillating, latency, _well, _coming, _spread_thin,
)  # fmt: skip
FINAL = ("no_load", "nothing_ended", "nothing_succeeds", "settling", "too_few")
"""Findings after which there is nothing more to judge."""
