"""Why one part of the latency dominates, and which knob to try: rules on measured figures.

Each rule takes `Evidence` and gives (its name, the cause with its figures and the advice, knobs), or
None where it does not hold. Of one group of parts the first that holds is taken: the more particular
ones come first, the last always holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kit.evidence import Evidence, seconds
from kit.phrases import FULL, Finding, fill, is_full, larger_batch, more_replicas, where

Cause = tuple[str, str, tuple[str, ...]]
Rule = Callable[[Evidence], Cause | None]

SATURATED = 0.9
"""Busy share from which an accelerator has nothing left to give."""
POOR = 0.6
"""Share of token slots below which lengths are too mixed for one batch."""


def latency(e: Evidence) -> Finding | None:
    """What dominates, why, and what to try; None while all promises hold."""
    if e.promises and not e.missed:
        return None
    missed = ", ".join(p.words for p in e.missed)
    text = f"{missed[:1].upper()}{missed[1:]}. " if missed else ""
    severity: Literal["trouble", "hint"] = "trouble" if missed else "hint"
    if e.parts.isna().all():
        return Finding("parts_unknown", f"{text}{where(e, e.focus)}.", (), severity)
    rules = {"queueing": QUEUEING, "inference": INFERENCE}.get(e.focus, (_elsewhere,))
    rule, cause, knobs = next(found for r in rules if (found := r(e)))
    text += f"{where(e, e.focus)}: {cause}"
    return Finding(rule, text, knobs, severity)


def _cache_full(e: Evidence) -> bool:
    return e.continuous and e.mean("replica:", "kv_cache_share") > FULL


def _slots_full(e: Evidence) -> bool:
    limit = e.view.settings.max_num_seqs
    return e.continuous and e.mean("replica:", "running_sequences") >= FULL * limit


# Queueing.


def _cut_by_ongoing(e: Evidence) -> Cause | None:
    limit = e.view.settings.max_ongoing_requests
    if not (limit < e.batch_cap and 0.85 * limit <= e.batch_size <= limit):
        return None
    wait_s = getattr(e.view.settings, e.side_knob("batch_wait_timeout_s"))
    return "batches_cut", (
        f"batches hold {fill(e)}, for max_ongoing_requests = {limit} lets no more into a replica, and "
        f"each waits the full {seconds(wait_s)}. Try max_ongoing_requests of {2 * e.batch_cap} or more."
    ), ("max_ongoing_requests",)  # fmt: skip


def _not_held(e: Evidence) -> Cause | None:
    backlog = e.ongoing >= 1.5 * e.batch_size and e.batch_size < 0.7 * e.batch_cap
    if e.view.settings.hold_while_busy or not (backlog and e.busy >= SATURATED):
        return None
    return "batches_not_held", (
        f"a replica holds {e.ongoing:.1f} requests, yet batches close with {fill(e)}, while the one "
        f"before still runs (busy {e.busy:.0%} of the time). Try hold_while_busy = True."
    ), ("hold_while_busy",)  # fmt: skip


def _cut_by_tokens(e: Evidence) -> Cause | None:
    limit = e.view.settings.max_batch_tokens
    if limit is None or e.images or not (e.batch_tokens >= 0.7 * limit) or is_full(e):
        return None
    more, knobs = more_replicas(e)
    return "batches_cut_by_tokens", (
        f"batches hold {fill(e)}, for their {e.batch_tokens:,.0f} tokens come near max_batch_tokens "
        f"= {limit:,}. Try a higher one if the KV cache has room, or {more}."
    ), ("max_batch_tokens", *knobs)  # fmt: skip


def _never_fills(e: Evidence) -> Cause | None:
    knob = e.side_knob("batch_wait_timeout_s")
    limit_s = getattr(e.view.settings, knob)
    wait_s = float(e.served["batch_wait_s"].mean())
    waits = e.largest_part("queueing") == "batch_wait_s" and 0.4 * limit_s <= wait_s <= 3 * limit_s
    if not (e.batching and waits and e.batch_size < 0.8 * e.batch_cap and e.busy < SATURATED):
        return None
    return "batch_never_fills", (
        f"batches wait up to {seconds(limit_s)} and still hold {fill(e)}, while the accelerator is "
        f"busy only {e.busy:.0%} of the time. Try a lower {knob}."
    ), (knob,)  # fmt: skip


def _replicas_full(e: Evidence) -> Cause | None:
    s = e.view.settings
    limit = s.max_ongoing_requests
    if e.largest_part("queueing") != "router_s" or not (e.ongoing >= FULL * limit):
        return None
    full = f"replicas are full ({e.ongoing:.1f} of max_ongoing_requests = {limit})"
    if e.continuous:
        moves_on = not (_cache_full(e) or _slots_full(e))
    else:
        moves_on = not e.busy >= SATURATED or (e.batching and e.batch_cap > limit)
    if moves_on:
        text = f"{full}, and the rest wait in the router. Try a higher max_ongoing_requests."
        return "replicas_full", text, ("max_ongoing_requests",)
    busy = "" if e.continuous else f" and busy {e.busy:.0%} of the time"
    more, knobs = more_replicas(e)
    larger = larger_batch(e)
    return "replicas_full", (
        f"{full}{busy}: a higher limit would only move the wait into them. Try {larger}{more}."
    ), (("max_batch_size",) if larger else ()) + knobs  # fmt: skip


def _saturated(e: Evidence) -> Cause | None:
    if not (e.busy >= SATURATED) or e.continuous:
        return None
    busy = f"the accelerator is busy {e.busy:.0%} of the time"
    more, knobs = more_replicas(e)
    if not e.batching:
        app = "resnet50-batched" if e.images else "batched"
        return "saturated", (
            f"{busy} with one request after the other. Try {more}, or batches (app = {app!r})."
        ), (*knobs, "app")  # fmt: skip
    if not is_full(e):
        text = f"{busy}, and requests wait behind running batches of {fill(e)}. Try {more}."
        return "saturated", text, knobs
    larger = larger_batch(e)
    if not larger:
        limit_s, p95_s = e.view.slo["e2e_p95_s"], e.inference_p95_s
        more += f"; a larger batch has no room (inference p95 is {seconds(p95_s)} of {limit_s:g} s)"
        return "saturated", f"batches are full ({fill(e)}) and {busy}. Try {more}.", knobs
    first = [e.side_knob("max_batch_size")]
    if e.batch_cap >= e.view.settings.max_ongoing_requests:
        first.append("max_ongoing_requests")
    text = f"batches are full ({fill(e)}) and {busy}. Try {larger}{more}."
    return "saturated", text, (*first, *knobs)


def _no_cache(e: Evidence) -> Cause | None:
    if not _cache_full(e):
        return None
    share = e.mean("replica:", "kv_cache_share")
    more, knobs = more_replicas(e)
    return "kv_cache_full", (
        f"the KV cache is {share:.0%} full. Try a larger kv_cache_tokens if there is memory, shorter "
        f"outputs (max_new_tokens), or {more}."
    ), ("kv_cache_tokens", "max_new_tokens", *knobs)  # fmt: skip


def _no_slot(e: Evidence) -> Cause | None:
    running, limit = e.mean("replica:", "running_sequences"), e.view.settings.max_num_seqs
    if not _slots_full(e):
        return None
    more, knobs = more_replicas(e)
    return "slots_full", (
        f"{running:.1f} sequences run of max_num_seqs = {limit}. Try a higher max_num_seqs, or {more}."
    ), ("max_num_seqs", *knobs)  # fmt: skip


def _entrance(e: Evidence) -> Cause | None:
    limit = e.view.settings.max_ongoing_requests
    if e.largest_part("queueing") != "router_s" or not (e.ongoing < 0.7 * limit):
        return None
    faster = e.view.settings.proxy == "default"
    return "entrance", (
        f"replicas have room ({e.ongoing:.1f} of max_ongoing_requests = {limit}), so the way in (load "
        f"generator, network, proxy) takes {seconds(e.parts['router_s'])}, not the model. Try fewer "
        f"requests a second{', or proxy = haproxy' if faster else ''}."
    ), ("proxy",) if faster else ()  # fmt: skip


def _queueing(e: Evidence) -> Cause:
    more, knobs = more_replicas(e)
    known = [
        f"batches of {fill(e)}" if e.batch_size > 0 else "",
        f"{e.per_replica:.1f} requests in flight per replica" if e.per_replica > 0 else "",
        f"the accelerator busy {e.busy:.0%} of the time" if e.busy > 0 and not e.continuous else "",
    ]
    figures = " and ".join(filter(None, known))
    behind = f"requests wait behind those that are served{', with ' if figures else ''}{figures}"
    return "queueing", f"{behind}. Try {more}.", knobs


# Inference.


def _throttled(e: Evidence) -> Cause | None:
    if not (e.throttled >= 0.2):
        return None
    clock = e.mean("gpu:", "sm_clock_mhz")
    at = f" at {clock:.0f} MHz" if clock > 0 else ""
    return "throttled", (
        f"a GPU slowed itself down{at} in {e.throttled:.0%} of the readings (power or heat). See to "
        "its power limit and cooling first: no knob of the deployment makes up for it."
    ), ()  # fmt: skip


def _preempts(e: Evidence) -> Cause | None:
    if not (e.continuous and e.preemptions >= max(3, 0.01 * len(e.good))):
        return None
    share = e.mean("replica:", "kv_cache_share")
    more, knobs = more_replicas(e)
    return "kv_pressure", (
        f"{e.preemptions:.0f} preemptions in {e.view.recent_s:.0f} s with the KV cache {share:.0%} "
        "full: sequences are thrown out and computed again. Try a lower max_num_seqs, a larger "
        f"kv_cache_tokens if there is memory, shorter outputs (max_new_tokens), or {more}."
    ), ("max_num_seqs", "kv_cache_tokens", "max_new_tokens", *knobs)  # fmt: skip


def _mixed_lengths(e: Evidence) -> Cause | None:
    if not (e.useful_share < POOR and e.batch_size >= 2):
        return None
    text = (
        f"only {e.useful_share:.0%} of the token slots of its batches gave a token, for short requests "
        "wait for the longest of their batch "
        f"(outputs: mean {e.served['output_tokens'].mean():.0f}, "
        f"longest {e.served['output_tokens'].max():.0f} tokens). Try "
    )
    if e.view.settings.app == "routed":
        return "mixed_lengths", text + (
            f"another route_threshold_tokens (now {e.view.settings.route_threshold_tokens}), or a "
            "lower max_new_tokens."
        ), ("route_threshold_tokens", "max_new_tokens")  # fmt: skip
    return "mixed_lengths", text + (
        "app = 'continuous' or 'routed', or a lower max_new_tokens."
    ), ("app", "max_new_tokens")  # fmt: skip


def _large_batch(e: Evidence) -> Cause | None:
    if not (e.batch_size >= 2):
        return None
    knob = e.side_knob("max_batch_size")
    more, knobs = more_replicas(e)
    return "batch_too_large", (
        f"batches of {fill(e)} take {seconds(e.p95_s('inference'))} at p95. Try a smaller {knob}; "
        f"where requests then queue, {more}."
    ), (knob, *knobs)  # fmt: skip


def _many_sequences(e: Evidence) -> Cause | None:
    running = e.mean("replica:", "running_sequences")
    if not (e.continuous and running >= 2):
        return None
    more, knobs = more_replicas(e)
    text = f"{running:.1f} sequences share each step"
    if e.largest_part("inference") == "prefill_s":
        limit = e.view.settings.max_num_batched_tokens
        return "prefill", (
            f"{text}, and prompts take {seconds(e.parts['prefill_s'])} to read, "
            f"at most {limit:,} tokens a step. Try a higher max_num_batched_tokens, or {more}."
        ), ("max_num_batched_tokens", *knobs)  # fmt: skip
    return "many_sequences", (
        f"{text}. Try a lower max_num_seqs (now {e.view.settings.max_num_seqs}), shorter outputs "
        f"(max_new_tokens), or {more}."
    ), ("max_num_seqs", "max_new_tokens", *knobs)  # fmt: skip


def _alone(e: Evidence) -> Cause:
    p95_s = seconds(e.inference_p95_s)
    emulated = e.view.settings.engine == "emulated"
    faster: tuple[str, ...] = ("accelerator",) if emulated else ("num_cpus", "num_gpus")
    device = "a faster accelerator" if emulated else "more num_cpus or num_gpus for each replica"
    if e.images:
        text = f"an image takes {p95_s} at p95 on this device. Try {device}."
        return "device_too_slow", text, faster
    tokens = e.good["output_tokens"].mean()
    return "device_too_slow", (
        f"requests of {tokens:.0f} output tokens on average take {p95_s} at p95, each nearly alone "
        f"on its accelerator. Try shorter outputs (max_new_tokens), or {device}."
    ), ("max_new_tokens", *faster)  # fmt: skip


def _elsewhere(e: Evidence) -> Cause:
    if e.focus == "postprocessing":
        return "postprocessing", (
            "what is done with the output takes longer than the model. Try a cheaper filter or "
            "schema, or postprocess = False."
        ), ("postprocess",)  # fmt: skip
    slower = e.view.settings.engine == "emulated"
    advice = "a higher time_scale, or longer requests" if slower else "longer requests"
    return "plumbing", (
        "the plumbing (proxy, network, load generator) is what is measured, not the model. "
        f"Try {advice}."
    ), ("time_scale",) if slower else ("proxy",)  # fmt: skip


QUEUEING: tuple[Rule, ...] = (
    _cut_by_ongoing, _not_held, _cut_by_tokens, _never_fills, _replicas_full, _no_cache, _no_slot,
    _saturated, _entrance, _queueing,
)  # fmt: skip
INFERENCE: tuple[Rule, ...] = (
    _throttled, _preempts, _mixed_lengths, _large_batch, _many_sequences, _alone,
)  # fmt: skip
