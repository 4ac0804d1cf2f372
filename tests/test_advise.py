"""Each rule of the advice speaks on figures that provoke it, and is silent where all is well."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from fakes import fake_run, view

from kit import advise, explain, measures, presets, settings
from kit.settings import Settings
from kit.view import View

SLOW = {"batch_wait_s": 1.6}  # misses 1.5 s, and queueing is what dominates
LONG = {"decode_s": 2.0}  # misses 1.5 s, and inference is what dominates
BUSY = {"accelerator_busy_share": 0.97}
AUTO = {"num_replicas": "auto", "max_replicas": 4}
SOLO = {"batch_size": 1.0, "batch_id": np.arange(200) + 0.0}
HALVES = np.arange(0.5, 60, 0.5)  # when there are samples


def auto(**more: object) -> Settings:
    return Settings(**(AUTO | {"target_ongoing_requests": 8.0} | more))


def changed(age_s: float) -> tuple[tuple[object, ...], ...]:
    return (("max_batch_size", "8", "16", 59.5 - age_s, 60.0 - age_s, 0.0, ""),)


CASES: dict[str, tuple[View, str, set[str], str]] = {
    # Nothing to judge.
    "no load": (view(n=0, samples={"users": 0}), "no_load", set(), "0 users"),
    "no load of ours": (
        replace(view(n=0), samples=view().samples.iloc[:0]), "no_load", set(), "within the last 20 s",
    ),
    "nothing ends": (view(n=0), "nothing_ended", set(), "8 are in flight, 1 replicas run"),
    "all rejected": (
        view(Settings(max_queued_requests=2), outcome="rejected", status=503.0, error="come again"),
        "nothing_succeeds", {"max_queued_requests", "num_replicas"},
        "None of 200 requests of the last 20 s succeeded: 200 rejected. Most say: 'come again'",
    ),
    "all late": (
        view(outcome="timeout"), "nothing_succeeds", {"num_replicas"}, "request_timeout_s = 120 s"
    ),
    "all wrong": (view(outcome="error"), "nothing_succeeds", set(), "200 error"),
    "just changed": (
        view(changes=changed(1.2), n=7), "settling", set(),
        "max_batch_size 8 → 16 took effect 1.2 s ago, and 7 requests",
    ),
    "few": (view(n=12, **SLOW), "too_few", set(), "12 requests have succeeded in 20 s"),
    "all left": (view(outcome="left"), "too_few", set(), "0 requests have succeeded"),
    # What is wrong beside latency.
    "stuck": (
        view(Settings(num_replicas=3), samples={"target_replicas": 3, "starting_replicas": 2}),
        "replicas_stuck", {"num_replicas", "num_cpus"}, "for 59 s only 1 run (2 starting)",
    ),
    "some rejected": (
        view(Settings(max_queued_requests=4, reject_status=429),
             outcome=np.where(np.arange(200) % 5, "ok", "rejected"), status=429.0),
        "rejections", {"max_queued_requests", "num_replicas"},
        "20% of 200 requests were rejected with 429",
    ),
    "rejected without a limit": (
        view(auto(), outcome=np.where(np.arange(200) % 5, "ok", "rejected"), status=503.0),
        "rejections", {"max_replicas"}, "max_queued_requests = -1",
    ),
    "some fail": (
        view(outcome=np.where(np.arange(200) % 10, "ok", "error")), "failures", set(),
        "10% of 200 requests failed: 20 error",
    ),
    "oscillating": (
        view(auto(downscale_delay_s=5.0, upscaling_factor=4.0),
             samples={"target_replicas": 1 + (HALVES // 10) % 2, "running_replicas": 2}),
        "oscillating", {"downscale_delay_s", "upscaling_factor"},
        "turned round 4 times within 59 s, between 1 and 2",
    ),
    # Queueing.
    "full and busy": (
        view(Settings(max_batch_size=4), samples=BUSY, **SLOW),
        "saturated", {"max_batch_size", "num_replicas"},
        "Queueing is 76% of the mean latency of 2.12 s, nearly all of it batch wait (1.60 s): batches "
        "are full (4.0 of 4) and the accelerator is busy 97% of the time. Try a larger max_batch_size "
        "(inference p95 is 0.50 s of 1.5 s), or more replicas (num_replicas is 1).",
    ),
    "full and busy, images": (
        view(Settings(app="resnet50-batched", max_batch_size=4), samples=BUSY,
             output_tokens=math.nan, **SLOW),
        "saturated", {"max_batch_size", "num_replicas"},
        "batch wait (1.60 s): batches are full (4.0 of 4)",
    ),
    "full, busy, no room": (
        view(Settings(max_batch_size=4), samples=BUSY, decode_s=1.2, batch_wait_s=3.0),
        "saturated", {"num_replicas"}, "a larger batch has no room (inference p95 is 1.30 s of 1.5 s)",
    ),
    "as many as max_ongoing_requests": (
        view(Settings(max_batch_size=4, max_ongoing_requests=4), samples=BUSY, **SLOW),
        "saturated", {"max_batch_size", "max_ongoing_requests", "num_replicas"}, "4.0 of 4",
    ),
    "busy, not full": (
        view(samples=BUSY, **SLOW), "saturated", {"num_replicas"}, "running batches of 4.0 of 8"
    ),
    "no replica left to add": (
        view(auto(), samples=BUSY | {"target_replicas": 4, "running_replicas": 4}, **SLOW),
        "saturated", {"max_replicas"}, "max_replicas (4 is reached)",
    ),
    "target too high": (
        view(auto(target_ongoing_requests=16.0), samples=BUSY, **SLOW),
        "saturated", {"target_ongoing_requests"},
        "a lower target_ongoing_requests: it is 16, so with 8.0 requests per replica the autoscaler "
        "adds none",
    ),
    "will scale": (
        view(auto(), samples=BUSY | {"in_flight": 32}, **SLOW), "saturated", {"upscale_delay_s"},
        "waiting for upscale_delay_s = 30 s to pass: 32.0 requests per replica are above",
    ),
    "is scaling": (
        view(auto(), samples=BUSY | {"target_replicas": np.where(HALVES < 50, 1, 3)}, **SLOW),
        "saturated", set(), "on their way (target 3, running 1)",
    ),
    "blind autoscaler": (
        view(auto(proxy="haproxy", max_ongoing_requests=8), samples=BUSY | {"in_flight": 32}, **SLOW),
        "saturated", {"target_ongoing_requests"}, "below max_ongoing_requests = 8: behind HAProxy",
    ),
    "one at a time": (
        view(Settings(app="unbatched"), samples=BUSY, **SOLO, **SLOW), "saturated",
        {"num_replicas", "app"},
        "waiting for its turn in the replica (1.60 s): the accelerator is busy 97%",
    ),
    "one image at a time": (
        view(Settings(app="resnet50"), samples=BUSY, **SOLO, **SLOW), "saturated", {"num_replicas",
        "app"},
        "app = 'resnet50-batched'",
    ),
    "never fills": (
        view(Settings(batch_wait_timeout_s=2.0), **SLOW), "batch_never_fills", {"batch_wait_timeout_s"},
        "batches wait up to 2.00 s and still hold 4.0 of 8, while the accelerator is busy only 50%",
    ),
    "never fills, long side": (
        view(Settings(app="routed", long_max_batch_size=8, long_batch_wait_timeout_s=2.0),
             route="long", **SLOW),
        "batch_never_fills", {"long_batch_wait_timeout_s"}, "4.0 of 8 on the long side",
    ),
    "cut by max_ongoing_requests": (
        view(Settings(max_ongoing_requests=4, batch_wait_timeout_s=0.5), router_s=1.0, batch_wait_s=0.5),
        "batches_cut", {"max_ongoing_requests"},
        "4.0 of 8, for max_ongoing_requests = 4 lets no more into a replica",
    ),
    "not held": (
        view(Settings(hold_while_busy=False), samples=BUSY | {"ongoing_requests": 16}, **SLOW),
        "batches_not_held", {"hold_while_busy"}, "holds 16.0 requests, yet batches close with 4.0 of 8",
    ),
    "cut by tokens": (
        view(Settings(max_batch_tokens=700), samples=BUSY, **SLOW),
        "batches_cut_by_tokens", {"max_batch_tokens", "num_replicas"},
        "600 tokens come near max_batch_tokens = 700",
    ),
    "replicas full": (
        view(Settings(max_ongoing_requests=8), samples={"ongoing_requests": 8}, router_s=1.5),
        "replicas_full", {"max_ongoing_requests"}, "replicas are full (8.0 of max_ongoing_requests = 8)",
    ),
    "replicas full and busy": (
        view(Settings(max_ongoing_requests=8, max_batch_size=4),
             samples=BUSY | {"ongoing_requests": 8}, router_s=1.5),
        "replicas_full", {"max_batch_size", "num_replicas"}, "a higher limit would only move the wait",
    ),
    "images, replicas full and busy": (
        view(Settings(**presets.PRESETS["resnet50"]), samples=BUSY | {"ongoing_requests": 5,
             "in_flight": 12},
             router_s=1.5, **SOLO),
        "replicas_full", {"upscale_delay_s"},
        "12.0 requests per replica are above target_ongoing_requests = 2",
    ),
    "vLLM, replicas full": (
        view(Settings(app="continuous", engine="vllm", num_cpus=1.0, max_ongoing_requests=8),
             samples=BUSY | {"ongoing_requests": 8, "running_sequences": 8, "kv_cache_share": 0.2},
             router_s=1.5),
        "replicas_full", {"max_ongoing_requests"}, "wait in the router",
    ),
    "KV cache full": (
        view(Settings(app="continuous"), samples=BUSY | {"kv_cache_share": 0.97}, engine_queue_s=1.6),
        "kv_cache_full", {"kv_cache_tokens", "max_new_tokens", "num_replicas"},
        "engine queue (1.60 s): the KV cache is 97% full",
    ),
    "slots full": (
        view(Settings(app="continuous", max_num_seqs=16),
             samples=BUSY | {"running_sequences": 15.9}, engine_queue_s=1.6),
        "slots_full", {"max_num_seqs", "num_replicas"}, "15.9 sequences run of max_num_seqs = 16",
    ),
    "engine queue": (
        view(Settings(app="continuous"), samples=BUSY | {"running_sequences": 9,
             "kv_cache_share": 0.1}, engine_queue_s=1.6),
        "queueing", {"num_replicas"}, "8.0 requests in flight per replica",
    ),
    "way in": (
        view(router_s=1.6), "entrance", {"proxy"},
        "replicas have room (4.0 of max_ongoing_requests = 64)"
    ),
    # Inference.
    "throttled": (
        view(samples={"gpu:1 throttle_reasons": 0x20, "gpu:1 sm_clock_mhz": 900}, **LONG),
        "throttled", set(), "at 900 MHz in 100% of the readings",
    ),
    "KV pressure": (
        view(Settings(app="continuous"),
             samples={"preemptions": np.arange(119), "kv_cache_share": 0.98,
             "running_sequences": 40}, **LONG),
        "kv_pressure", {"max_num_seqs", "kv_cache_tokens", "max_new_tokens", "num_replicas"},
        "39 preemptions in 20 s",
    ),
    "mixed lengths": (
        view(output_tokens=np.where(np.arange(200) % 4, 20.0, 400.0), **LONG),
        "mixed_lengths", {"app", "max_new_tokens"}, "only 29% of the token slots",
    ),
    "mixed lengths, routed": (
        view(Settings(app="routed"), route="long", output_tokens=np.where(np.arange(200) % 4, 20.0,
             400.0), **LONG),
        "mixed_lengths", {"route_threshold_tokens", "max_new_tokens"},
        "route_threshold_tokens (now 256)",
    ),
    "batch too large": (
        view(**LONG), "batch_too_large", {"max_batch_size", "num_replicas"},
        "E2E p95 is 2.12 s (promised: 1.5 s). Inference is 99% of the mean latency of 2.12 s, nearly all "
        "of it decode (2.00 s): batches of 4.0 of 8 take 2.10 s at p95.",
    ),
    "many sequences": (
        view(Settings(app="continuous", engine="vllm", num_cpus=1.0),
             samples={"running_sequences": 40}, **LONG),
        "many_sequences", {"max_num_seqs", "max_new_tokens", "num_replicas"},
        "40.0 sequences share each step",
    ),
    "long prompts": (
        view(Settings(app="continuous"), samples={"running_sequences": 40}, prefill_s=2.0),
        "prefill", {"max_num_batched_tokens", "num_replicas"}, "8,192 tokens a step",
    ),
    "slow alone": (
        view(Settings(app="unbatched"), **SOLO, **LONG), "device_too_slow", {"max_new_tokens",
        "accelerator"},
        "requests of 50 output tokens on average take 2.10 s",
    ),
    "slow image": (
        view(Settings(app="resnet50", engine="torch"), slo={"e2e_p95_s": 0.015}, **SOLO),
        "device_too_slow", {"num_cpus", "num_gpus"}, "an image takes 0.50 s at p95",
    ),
    # Neither.
    "postprocessing": (
        view(Settings(postprocess=True), postprocess_s=2.0), "postprocessing", {"postprocess"},
        "Postprocessing is 79%"
    ),
    "plumbing": (view(rest_s=2.0), "plumbing", {"time_scale"}, "The way back is 79%"),
    "nothing promised": (
        view(slo={}, samples=BUSY, **SLOW), "saturated", {"num_replicas"}, "Queueing is 76%"
    ),
    # Well.
    "well": (
        view(), "well", set(),
        "All promises hold at 10.0 requests/s: E2E p95 is 0.53 s (promised: 1.5 s), queueing p95 is 20 "
        "ms (promised: 0.2 s). Inference is 95% of the mean latency of 0.53 s",
    ),
    "too many replicas": (
        view(Settings(num_replicas=4), samples={"accelerator_busy_share": 0.1,
             "target_replicas": 4, "running_replicas": 4}),
        "well", {"num_replicas"}, "busy 10% of the time: 1 of 4 replicas would do",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_first_finding_is_the_cause_with_its_figures_and_knobs(name: str) -> None:
    seen, rule, knobs, text = CASES[name]
    first = advise.findings(seen)[0]
    assert (first.rule, set(first.knobs)) == (rule, knobs), first.text
    assert text in first.text
    assert advise.sentence(seen) == first.text


@pytest.mark.parametrize("name", CASES)
def test_every_finding_has_figures_and_names_knobs_of_the_app_only(name: str) -> None:
    seen = CASES[name][0]
    app = seen.settings.app
    batch_only = {"max_batch_size", "batch_wait_timeout_s", "hold_while_busy", "max_batch_tokens"}
    strange = {
        **dict.fromkeys(("unbatched", "resnet50", "continuous"), batch_only),
        "resnet50-batched": {"max_batch_tokens", "max_new_tokens"},
    }
    for found in advise.findings(seen):
        said = {k for k in settings.BY_NAME if re.search(rf"\b{k}\b", found.text)} - {
            "app",
            "model",
        }
        assert re.search(r"\d", found.text)
        assert "nan" not in found.text
        assert set(found.knobs) <= set(settings.BY_NAME)
        assert not (set(found.knobs) | said) & strange.get(app, set()), found.text
        if app != "continuous":
            assert not {"max_num_seqs", "max_num_batched_tokens"} & (set(found.knobs) | said)
        if found.severity == "trouble" and found.rule not in ("replicas_stuck", "saturated"):
            missing = {k for k in found.knobs if k not in found.text} - {"accelerator", "proxy"}
            assert not missing, f"{missing} not in: {found.text}"


WELL = {
    "batched": Settings(),
    "unbatched": Settings(app="unbatched"),
    "routed": Settings(app="routed"),
    "continuous": Settings(app="continuous"),
    "images": Settings(app="resnet50"),
    "batched images": Settings(app="resnet50-batched"),
    "auto": auto(),
    "two replicas": Settings(num_replicas=2),
}


@pytest.mark.parametrize("name", WELL)
@pytest.mark.parametrize("busy", [0.3, 0.99])
def test_while_promises_hold_nothing_else_comes_first(name: str, busy: float) -> None:
    route = "short" if name == "routed" else "-"
    seen = view(WELL[name], samples={"accelerator_busy_share": busy}, route=route)
    assert [f.rule for f in advise.findings(seen)] == ["well"]
    assert advise.findings(seen)[0].severity == "well"


def test_what_may_be_better_comes_behind_what_is_well() -> None:
    two = {"target_replicas": 2, "running_replicas": 2}
    thin = view(auto(target_ongoing_requests=2.0), samples=two)
    assert [f.rule for f in advise.findings(thin)] == ["well", "spread_thin"]
    assert "Try one of 8 to 16" in advise.findings(thin)[1].text
    coming = view(auto(), samples={"target_replicas": np.where(HALVES < 50, 1, 2)})
    assert [f.rule for f in advise.findings(coming)] == ["well", "replicas_coming"]


@pytest.mark.parametrize(
    ("promise", "rule"),
    [
        ({"queueing_p95_s": 0.2}, "batch_never_fills"),
        ({"queueing_p95_s": 0.2, "e2e_p95_s": 0.8}, "batch_never_fills"),  # inference fits
        ({"queueing_p95_s": 0.2, "e2e_p95_s": 0.45}, "batch_too_large"),
        ({"queueing_p95_s": None, "e2e_p95_s": 0.8}, "batch_too_large"),
        ({"ttft_p95_s": 0.3}, "batch_never_fills"),
        ({"tpot_p95_s": 0.01}, "batch_too_large"),
    ],
)
def test_the_missed_promise_decides_which_part_is_explained(
    promise: dict[str, float | None], rule: str
) -> None:
    seen = view(
        Settings(batch_wait_timeout_s=0.5), slo=promise, batch_wait_s=0.4, tpot_s=0.02, ttft_s=0.5
    )
    first = advise.findings(seen)[0]
    assert (first.rule, first.severity) == (rule, "trouble")


def test_a_promise_without_a_figure_is_neither_kept_nor_missed() -> None:
    seen = view(slo={"ttft_p95_s": 0.1, "e2e_p95_s": None})
    assert [f.rule for f in advise.findings(seen)] == ["batch_too_large"]
    assert advise.findings(seen)[0].severity == "hint"


def test_new_replicas_that_come_one_by_one_are_not_stuck() -> None:
    running = 1 + HALVES // 20
    seen = view(auto(), samples={"target_replicas": 4, "running_replicas": running})
    assert "replicas_stuck" not in [f.rule for f in advise.findings(seen)]
    loads = Settings(num_replicas=2, load_time_s=40.0)
    assert advise.findings(view(loads, samples={"target_replicas": 2}))[0].rule == "well"


def test_a_target_that_follows_the_load_does_not_oscillate() -> None:
    waves = 1 + (HALVES // 10) % 2
    moving = {"target_replicas": waves, "running_replicas": 2, "users": 8 * waves}
    assert advise.findings(view(auto(), samples=moving))[0].rule == "well"


@pytest.mark.parametrize("lacking", ["samples", "parts", "both"])
def test_what_is_not_observed_is_not_said(lacking: str) -> None:
    """A foreign app tells nothing of its replicas, and no parts of its latency."""
    seen = view(**SLOW)
    if lacking != "samples":
        unseen = ["queueing_s", "inference_s", "batch_id", "batch_size", "replica_id"]
        unseen += list(measures.PARTS)
        seen = replace(seen, recent=seen.recent.assign(**dict.fromkeys(unseen, np.nan)))
    if lacking != "parts":
        seen = replace(seen, samples=seen.samples.iloc[:0])
    for found in advise.findings(seen):
        assert "nan" not in found.text, found.text
        assert "2.12 s" in found.text


@pytest.mark.parametrize("n", [0, 1, 400])
def test_a_run_is_explained_by_the_same_rules(n: int) -> None:
    run = fake_run(400)
    run = replace(run, requests=run.requests.iloc[:n])
    said = explain.dominant(run)
    assert re.search(r"\d", said)
    if n == 400:
        assert "queueing p95 is 0.3" in said.lower()
        assert "of 16" in said, "the settings after the change count"


def test_a_change_back_to_auto_is_read_from_its_text() -> None:
    run = fake_run(400)
    changes = run.changes.assign(knob="num_replicas", to="auto", **{"from": "1"})
    assert explain.dominant(replace(run, changes=changes))
