"""The split of latency, measured where the answer is known; and Little's law on a real run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import BASE

from kit import measures, phases
from kit.accelerator import NO_ACCELERATOR, profile
from kit.experiment import Change
from kit.store import Run

pytestmark = pytest.mark.cluster


def test_parts_are_measured_and_add_up_and_inference_follows_the_closed_form(
    measure: Callable[..., Run],
) -> None:
    run = measure(BASE, Change(5, "max_batch_size", 4), users=16, duration_s=12.0)
    good = measures.ok(run.requests)
    assert len(good) == len(run.requests) > 80
    assert (good[list(measures.PARTS)] >= 0).all().all()
    assert (good["postprocess_s"] == 0).all(), "nothing postprocesses here"
    assert measures.percentile(measures.identity_error_s(run.requests), 99) < 0.002

    p, scale = profile(BASE.accelerator), BASE.time_scale
    off = []
    for _, batch in good.groupby(["replica_id", "batch_id"]):
        if len(batch) == batch["batch_size"].iloc[0]:
            formula_s = scale * p.static_batch_s(batch["prompt_tokens"], batch["output_tokens"])
            off.append((abs(batch["inference_s"].iloc[0] - formula_s), formula_s))
    assert len(off) > 10
    miss_s, formula_s = np.median(off, axis=0)
    assert miss_s < max(0.005, 0.03 * formula_s)

    ended = measures.finished_s(good)
    assert good[ended.between(2, 5)]["batch_size"].mean() > 7  # they fill, at 16 users
    assert good[ended.between(7, 12)]["batch_size"].mean() > 3.5

    # Little's law: users who do not pause are in flight all the time.
    rate = measures.throughput_rps(run.requests)
    in_flight = rate * good["e2e_s"].mean()
    print(f"{in_flight:.2f} requests in flight")
    assert in_flight == pytest.approx(16, rel=0.1)


def test_one_user_waits_the_whole_batch_wait(measure: Callable[..., Run]) -> None:
    settings = BASE.replace(batch_wait_timeout_s=0.2)
    run = measure(settings, users=1, max_output_tokens=20)
    assert run.requests["batch_wait_s"].median() == pytest.approx(0.2, abs=0.01)
    assert run.requests["batch_size"].eq(1).all()


def test_a_second_user_waits_one_service_time_in_the_router(measure: Callable[..., Run]) -> None:
    settings = BASE.replace(app="unbatched", time_scale=1.0, max_ongoing_requests=1)
    run = measure(settings, users=2, max_output_tokens=30, max_prompt_tokens=50, duration_s=7.0)
    service_s = run.requests["inference_s"].median()
    router_s = run.requests["router_s"].iloc[2:].median()
    print(f"service {service_s:.3f} s, router {router_s:.3f} s")
    assert router_s == pytest.approx(service_s, rel=0.25)
    assert run.requests["batch_wait_s"].median() < 0.01


def test_a_no_op_has_next_to_no_queueing_and_inference(measure: Callable[..., Run]) -> None:
    settings = BASE.replace(accelerator=NO_ACCELERATOR, batch_wait_timeout_s=0.0)
    run = measure(settings, users=1)
    assert run.requests["queueing_s"].median() < 0.02
    assert run.requests["inference_s"].median() < 0.002
    assert run.experiment["settings"]["accelerator"] == "none"


def test_continuous_batching_tells_engine_queue_prefill_and_decode_apart(
    measure: Callable[..., Run],
) -> None:
    settings = BASE.replace(app="continuous", max_num_seqs=4)
    run = measure(settings, users=12, duration_s=8.0)
    good = measures.ok(run.requests)
    assert len(good) == len(run.requests) > 60
    assert measures.percentile(measures.identity_error_s(run.requests), 99) < 0.002
    assert (good[list(measures.PARTS)] >= 0).all().all()
    # 4 slots for 12 users: two thirds of the time is spent waiting for a slot.
    late = good[good["sent_s"] > 2]
    share = late["engine_queue_s"].mean() / late["e2e_s"].mean()
    print(f"share of the time spent waiting for a slot: {share:.3f}")
    assert share == pytest.approx(2 / 3, abs=0.08)
    assert run.samples.query("metric == 'running_sequences'")["value"].max() == 4
    assert run.samples.query("metric == 'kv_cache_share'")["value"].between(0, 1).all()


def test_continuous_batching_beats_static_batches_at_the_same_load(
    measure: Callable[..., Run],
) -> None:
    rates = {}
    for app in ("continuous", "batched"):
        settings = BASE.replace(app=app, max_batch_size=16, time_scale=0.3)
        run = measure(settings, users=16, duration_s=6.0)
        rates[app] = phases.stretches(run)["throughput_rps"].iloc[-1]
    print("requests/s:", {app: f"{rate:.1f}" for app, rate in rates.items()})
    assert rates["continuous"] > 1.5 * rates["batched"]
