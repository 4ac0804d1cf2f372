"""Queueing theory against its textbooks, against itself, and against the emulated app."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from kit import figures_load, measures, saturation, theory
from kit.accelerator import profile
from kit.lengths import days
from kit.serving import Serving
from kit.settings import Settings
from kit.workload import Workload


@pytest.mark.parametrize(
    ("servers", "load", "waits"),
    # Of M/M/1 the load itself; of two servers 2ρ²/(1 + ρ); the last two are from tables of Erlang C.
    [(1, 0.3, 0.3), (2, 1.5, 2 * 0.75**2 / 1.75), (5, 4.0, 0.5541), (10, 8.0, 0.4092)],
)
def test_erlang_c(servers: int, load: float, waits: float) -> None:
    assert theory.erlang_c(servers, load) == pytest.approx(waits, abs=5e-5)
    assert theory.erlang_c(servers, servers + 0.1) == 1


def test_waits_of_single_servers() -> None:
    assert theory.mean_wait_s(0.5, 1.0) == pytest.approx(1.0)  # M/M/1: ρ/(1 − ρ)
    assert theory.mean_wait_s(0.5, 1.0, service_cv2=0.0) == pytest.approx(0.5)  # M/D/1: half of it
    # Pollaczek and Khinchine: λ E[S²] / 2 (1 − ρ).
    assert theory.mean_wait_s(0.4, 2.0, service_cv2=3.0) == pytest.approx(0.4 * 16 / 2 / 0.2)
    assert theory.mean_wait_s(1.0, 1.0) == math.inf


@pytest.mark.parametrize(("servers", "rho", "cv2"), [(1, 0.7, 1.0), (1, 0.7, 0.3), (3, 0.8, 1.0)])
def test_the_recursion_over_requests_has_the_mean_of_the_formula(
    servers: int, rho: float, cv2: float
) -> None:
    rng = np.random.default_rng(3)
    n = 400_000
    arrivals_s = np.cumsum(rng.exponential(1 / (rho * servers), n))
    services_s = rng.gamma(1 / cv2, cv2, n)
    mean_s = theory.waits_s(arrivals_s, services_s, servers).mean()
    expected_s = theory.mean_wait_s(rho * servers, 1.0, servers, cv2)
    assert mean_s == pytest.approx(expected_s, rel=0.05)


@pytest.mark.parametrize("arrival_cv2", [0.0, 0.25])
@pytest.mark.parametrize("rho", [0.3, 0.5, 0.7, 0.9])
def test_arrivals_more_even_than_poissons_wait_less(rho: float, arrival_cv2: float) -> None:
    # Without the factor of Krämer and Langenbach-Belz 14 times too much at 0.3, 1.5 times at 0.7.
    rng = np.random.default_rng(0)
    n = 200_000
    gaps = rng.gamma(1 / arrival_cv2, arrival_cv2, n) if arrival_cv2 else np.ones(n)
    services_s = rng.gamma(2.0, 0.5, n)
    mean_s = theory.waits_s(np.cumsum(gaps) / rho, services_s).mean()
    assert theory.mean_wait_s(rho, 1.0, 1, 0.5, arrival_cv2) == pytest.approx(mean_s, rel=0.2)
    assert theory.mean_wait_s(rho, 1.0, 1, 0.0, 0.0) == 0  # one by one, and never late


def test_the_recursion_by_hand() -> None:
    waits = theory.waits_s(np.array([0.0, 1.0, 1.5, 9.0]), np.array([3.0, 1.0, 1.0, 1.0]))
    assert waits.tolist() == [0.0, 2.0, 2.5, 0.0]
    two = theory.waits_s(np.array([0.0, 1.0, 1.5, 9.0]), np.array([3.0, 1.0, 1.0, 1.0]), 2)
    assert two.tolist() == [0.0, 0.0, 0.5, 0.0]


def test_what_theory_knows_of_each_app() -> None:
    w = Workload(arrivals="poisson", rate_rps=1.0)
    single = theory.of(Settings(app="unbatched", time_scale=0.1), w)
    services = theory.services_s(Settings(app="unbatched", time_scale=0.1), w)
    assert single.capacity_rps == pytest.approx(1 / services.mean())
    assert (single.formula, single.why) == ("M/G/1", "")
    curve = single.curve(np.array([0.5, 2.0]) * single.capacity_rps)
    assert curve["mean_response_s"].iloc[0] > services.mean()
    assert curve["in_system"].iloc[0] == pytest.approx(
        curve["rate_rps"].iloc[0] * curve["mean_response_s"].iloc[0]
    )
    assert math.isinf(curve["mean_wait_s"].iloc[1])
    # Published: static batches of 16 conversations on an H100 at saturation, 2.5 requests/s.
    batched = theory.of(
        Settings(max_batch_size=16), w.model_copy(update={"max_prompt_tokens": 131_072})
    )
    assert batched.capacity_rps == pytest.approx(2.5, rel=0.07)
    assert "no simple formula" in batched.why
    assert np.isnan(batched.curve(np.array([1.0]))["mean_wait_s"]).all()
    plumbing = Settings(app="unbatched", accelerator="none")
    for other, why in (
        (plumbing, "only plumbing"),
        (plumbing.replace(app="batched"), "only plumbing"),
        (Settings(app="unbatched", max_queued_requests=3), "max_queued_requests = 3 rejects"),
        (Settings(app="continuous"), "no closed form"),
        (Settings(app="unbatched", num_replicas="auto", max_replicas=3), "replicas changes"),
    ):
        assert why in theory.of(other, w).why
        assert np.isnan(theory.of(other, w).curve(np.array([1.0]))["mean_wait_s"]).all()
    by_day = Workload(arrivals="poisson", diurnal=days()[0])
    assert "hours of a day" in theory.of(Settings(app="unbatched"), by_day).why
    images = theory.of(
        Settings(app="resnet50", accelerator="resnet50.t4-tf20.06-amp-xla", num_replicas=3), w
    )
    assert images.service_cv2 == pytest.approx(0)
    assert images.formula == "M/G/3"


def test_full_batches_are_bounded_by_requests_tokens_and_what_a_replica_takes() -> None:
    w = Workload(arrivals="poisson", prompt_tokens=100, output_tokens=50)

    def rps(**knobs: object) -> float:
        return theory.of(Settings(**({"max_batch_size": 16} | knobs)), w).capacity_rps

    # 600 tokens are four such requests, and 100 not even one, which then goes alone.
    assert rps(max_batch_tokens=600) == pytest.approx(rps(max_batch_size=4))
    assert rps(max_batch_tokens=100) == pytest.approx(rps(max_batch_size=1))
    assert rps(max_batch_tokens=16 * 150) == pytest.approx(rps())
    assert rps(max_ongoing_requests=4) == pytest.approx(rps(max_batch_size=4))
    h100 = profile(Settings().accelerator)
    assert rps() == pytest.approx(16 / h100.static_batch_s([100] * 16, [50] * 16))
    assert theory.of(Settings(max_batch_tokens=600), w).formula == "full batches of 8 or 600 tokens"


def test_the_emulated_app_obeys_theory(as_left: Serving, tmp_path: Path) -> None:
    """One request at a time, at a third of the capacity, two thirds, and above it."""
    settings = Settings(app="unbatched", time_scale=0.03, max_ongoing_requests=500)
    workload = Workload(arrivals="poisson", seed=4)
    known = theory.of(settings, workload)
    rates = [share * known.capacity_rps for share in (0.3, 0.65, 1.6)]
    run = saturation.ramp(
        settings, workload, as_left, rates, step_s=8.0, folder=tmp_path / "run", progress=False
    )
    good = measures.ok(run.requests)
    before = good[good["intended_s"] < 16.0].sort_values("sent_s")
    # The very requests that came, each as long as the closed form says: their waits one by one.
    numbers = before["request"].astype(int)
    services_s = theory.services_s(
        settings, Workload(**run.experiment["workload"]), numbers.max() + 1
    )
    executed_s = before["inference_s"].to_numpy()
    assert np.quantile(np.abs(executed_s - services_s[numbers]), 0.9) < 0.003
    arrived_s = (before["sent_s"] + before["router_s"]).to_numpy()
    order = np.argsort(arrived_s)
    expected_s = theory.waits_s(arrived_s[order], executed_s[order])
    waited_s = (before["queueing_s"] - before["router_s"]).to_numpy()[order]
    formula_s = known.curve(np.array(rates[:2]))["mean_wait_s"].round(4).tolist()
    print(
        f"{len(before)} requests, capacity {known.capacity_rps:.1f}/s: wait {waited_s.mean():.4f} s, "
        f"by the recursion {expected_s.mean():.4f} s, by formula {formula_s} s"
    )
    # What the way into the replica and its event loop add is small beside what is served.
    assert np.median(np.abs(waited_s - expected_s)) < 0.1 * known.service_s
    assert waited_s.mean() == pytest.approx(expected_s.mean(), rel=0.15, abs=0.1 * known.service_s)
    table = saturation.curve(run)
    print(table.round(3).to_string())
    assert table["saturated"].tolist() == [False, False, True]
    law = table["throughput_rps"] * table["response_mean_s"]
    assert table["in_flight"][:2].to_numpy() == pytest.approx(law[:2].to_numpy(), rel=0.3)
    assert saturation.knee(table).capacity_rps == pytest.approx(known.capacity_rps, rel=0.2)
    figures_load.load_latency(run).savefig(tmp_path / "curve.png")
