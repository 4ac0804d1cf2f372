"""Plans of arrivals: their rates and moments, whatever changes on the way; traces as they came."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from fakes import ks_distance

from kit import traces
from kit.arrivals import Arrivals, factors
from kit.lengths import Lengths, factors_of_day
from kit.rates import Rate
from kit.workload import Stage, Workload, WorkloadError

LONG_S = 20_000.0


def plan(until_s: float = LONG_S, **workload: object) -> np.ndarray:
    return Arrivals(Workload(duration_s=until_s, **workload)).times(until_s)


def test_a_rate_and_its_integral_are_inverse_of_each_other() -> None:
    rate = Rate(
        [(0, 2.0), (10, 2.0), (10, 0.0), (20, 0.0), (20, 1.0), (30, 5.0)], [(15, 2.0), (25, 0.5)]
    )
    assert [rate.at(t) for t in (0, 9.9, 10, 19, 20, 25, 40)] == [2, 2, 0, 0, 2, 1.5, 2.5]
    # By hand: 20, nothing, 2 · (1 + 3) / 2 · 5, then halves of (3 + 5) / 2 · 5 and of 5 · 10.
    assert rate.units(40) == pytest.approx(20 + 20 + 10 + 25)
    grid = np.linspace(0.01, 74.9, 997)
    back = [rate.units(t) for t in rate.times(grid)]
    assert back == pytest.approx(grid)
    assert not ((rate.times(grid) > 10.001) & (rate.times(grid) < 19.999)).any()
    assert Rate([(0, 0.0)]).times(np.array([1.0]))[0] == np.inf


def test_a_changed_rate_keeps_what_was_before() -> None:
    rate = Rate([(0, 1.0), (10, 1.0), (20, 11.0)])
    later = rate.changed(15.0, 3.0, ramp_s=4.0)
    assert later.units(15.0) == pytest.approx(rate.units(15.0))
    assert (rate.at(15.0), later.at(14.9), later.at(19.0), later.at(99.0)) == pytest.approx(
        (6.0, 5.9, 3.0, 3.0)
    )
    assert later.units(19.0) - later.units(15.0) == pytest.approx(4 * (6 + 3) / 2)


@pytest.mark.parametrize(
    ("workload", "cv"),
    [
        ({"arrivals": "poisson"}, 1.0),
        ({"arrivals": "gamma", "burstiness": 0.25}, 2.0),
        ({"arrivals": "gamma", "burstiness": 4.0}, 0.5),
        ({"arrivals": "constant"}, 0.0),
    ],
)
def test_gaps_have_the_stated_moments(workload: dict[str, object], cv: float) -> None:
    gaps_s = np.diff(plan(rate_rps=10.0, **workload))
    assert 1 / gaps_s.mean() == pytest.approx(10.0, rel=0.01)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.02, abs=1e-9)


def test_poisson_gaps_are_exponential_and_unclipped() -> None:
    gaps_s = np.diff(plan(rate_rps=10.0, arrivals="poisson"))
    assert ks_distance(gaps_s) * np.sqrt(len(gaps_s)) < 1.36  # Kolmogorov's 5 % point
    assert gaps_s.min() < 1e-4
    counts = np.bincount(plan(rate_rps=10.0, arrivals="poisson").astype(int))
    assert counts.var() / counts.mean() == pytest.approx(1, rel=0.05)


def test_spells_have_the_stated_lengths_and_the_mean_rate() -> None:
    w = {"arrivals": "on-off", "rate_rps": 4.0, "burstiness": 0.207, "on_s": 2.0, "off_s": 5.0}
    steps = factors(Workload(duration_s=86_400.0, **w))
    lengths_s = np.diff([t for t, _ in steps])
    assert {f for _, f in steps} == {0.0, 3.5}
    assert lengths_s[::2].mean() == pytest.approx(2.0, rel=0.05)
    assert lengths_s[1::2].mean() == pytest.approx(5.0, rel=0.05)
    # The pauses of the Azure 2023 code trace: mean 43.2 s, median 25.1 s.
    assert np.median(lengths_s[1::2]) / 5.0 == pytest.approx(25.1 / 43.2, rel=0.05)
    assert len(plan(86_400.0, **w)) / 86_400 == pytest.approx(4.0, rel=0.05)
    # Within spells: gaps of the CV that was asked for, at the rate of a spell.
    w |= {"on_s": 2000.0, "off_s": 5.0}
    times = plan(86_400.0, **w)
    spell = np.searchsorted([t for t, _ in factors(Workload(duration_s=86_400.0, **w))], times)
    gaps_s = np.diff(times)[np.diff(spell) == 0]
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1 / np.sqrt(0.207), rel=0.05)


@pytest.mark.parametrize("day", ["azure-2024-code", "azure-2024-conv"])
def test_a_day_goes_by_as_fast_as_asked(day: str) -> None:
    times = plan(2400.0, arrivals="constant", rate_rps=50.0, diurnal=day, day_s=240.0)
    counts = np.bincount((times % 240 // 10).astype(int), minlength=24) / 10 / 10
    assert counts / 50 == pytest.approx(factors_of_day(day), rel=0.02)


def test_stages_and_ramps_are_part_of_the_plan() -> None:
    stages = (Stage(at_s=100.0, rate_rps=50.0, ramp_s=100.0), Stage(at_s=300.0, rate_rps=0.0))
    counts = np.histogram(
        plan(400.0, arrivals="poisson", rate_rps=10.0, stages=stages), [0, 100, 200, 300, 400]
    )[0]
    assert counts / 100 == pytest.approx([10, 30, 50, 0], rel=0.1)
    assert counts[3] == 0


@pytest.mark.parametrize("shares", [2, 5])
@pytest.mark.parametrize("arrivals", ["poisson", "trace"])
def test_any_number_of_processes_send_one_and_the_same_plan(shares: int, arrivals: str) -> None:
    more = {"trace": "azure-2023-code"} if arrivals == "trace" else {"rate_rps": 20.0}
    w = Workload(arrivals=arrivals, duration_s=600.0, **more)
    whole = Arrivals(w).times(math.inf)
    parts = [Arrivals(w, k, shares) for k in range(shares)]
    found: list[tuple[int, float]] = []
    for part in parts:
        while (due_s := part.peek_s()) < math.inf:
            found.append((part.pop(), due_s))
    assert [p for p, _ in sorted(found)] == list(range(len(whole)))
    assert [t for _, t in sorted(found)] == pytest.approx(whole.tolist())
    assert sum(p.planned(600.0) for p in parts) == len(whole)
    assert sum(p.planned(700.0) for p in parts) == len(whole)
    assert (
        max(whole)
        <= 600.0
        < Arrivals(w.model_copy(update={"duration_s": 900.0})).times(math.inf)[-1]
    )


def test_a_plan_changes_from_the_moment_on_that_it_is_told() -> None:
    arrivals = Arrivals(Workload(arrivals="constant", rate_rps=10.0))

    def taken(count: int) -> list[float]:
        return [(arrivals.peek_s(), arrivals.pop())[0] for _ in range(count)]

    assert taken(50) == pytest.approx(np.arange(1, 51) / 10)
    arrivals.change(5.05, 100.0)
    assert arrivals.planned(5.05) == 50
    # Half of the next gap was over when the rate rose: the other half goes ten times as fast.
    assert taken(50) == pytest.approx(5.055 + np.arange(50) / 100)
    arrivals.change(6.0, 0.0)
    assert arrivals.peek_s() == np.inf or arrivals.peek_s() <= 6.0
    arrivals.change(7.0, 10.0)
    assert arrivals.planned(8.0) - arrivals.planned(7.0) == 10


@pytest.mark.parametrize("name", ["azure-2023-code", "azure-2023-conv"])
def test_the_kits_traces_come_as_they_were_recorded(name: str) -> None:
    table = traces.read(name)
    with gzip.open(traces.path_of(name), "rt") as file:
        rows = file.read().splitlines()
    assert len(table) == len(rows) - 1
    first, last = (np.datetime64(rows[k].split(",")[0][:26].replace(" ", "T")) for k in (1, -1))
    assert table["time_s"].max() == pytest.approx((last - first) / np.timedelta64(1, "s"), abs=1e-3)
    w = Workload(arrivals="trace", trace=name, speed_up=4.0, duration_s=9e3, max_prompt_tokens=500)
    times = Arrivals(w).times(math.inf)
    assert times == pytest.approx(table["time_s"].to_numpy() / 4)
    lengths = [Lengths(w)[k] for k in range(5)]
    expected = table[["prompt_tokens", "output_tokens"]].clip(upper=[500, 2048], axis=1).head(5)
    assert lengths == [tuple(row) for row in expected.to_numpy().tolist()]
    assert Arrivals(w).planned(1e9) == len(table)


def test_mooncakes_and_a_plain_form_are_read_too(tmp_path: Path) -> None:
    mooncake = tmp_path / "conversation_trace.jsonl"
    rows = [
        {"timestamp": t, "input_length": 5, "output_length": 7, "hash_ids": [1]}
        for t in (27_482, 30_000)
    ]
    mooncake.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert traces.read(str(mooncake)).to_numpy().tolist() == [[0.0, 5, 7], [2.518, 5, 7]]
    plain = tmp_path / "ours.csv.gz"
    with gzip.open(plain, "wt") as file:
        file.write("time_s,prompt_tokens,output_tokens,user\n5.5,3,4,b\n5,1,2,a\n")
    assert traces.read(str(plain)).to_numpy().tolist() == [[0.0, 1, 2], [0.5, 3, 4]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time_s,prompt_tokens\n1,2\n", "has the columns time_s, prompt_tokens: must be TIMESTAMP"),
        ("time_s,prompt_tokens,output_tokens\n", "has no requests"),
        (
            "time_s,prompt_tokens,output_tokens\n1,2,3\n2,0,3\n",
            "request 2: prompt_tokens = 0: must be",
        ),
        ("time_s,prompt_tokens,output_tokens\n1,2,3\nx,2,3\n", "request 2: time_s = x: must be"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,2,3\n", "TIMESTAMP = soon"),
    ],
)
def test_a_trace_that_cannot_be_says_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(traces.TraceError, match=words):
        traces.read(str(path))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"arrivals": "trace"}, "trace = '': no such file, and no trace of the kit .azure"),
        ({"trace": "azure-2023-code"}, "trace = 'azure-2023-code' needs arrivals = 'trace', not 'users'"),
        ({"arrivals": "trace", "trace": "nowhere.csv"}, "no such file, and no trace of the kit .azure"),
        ({"arrivals": "poisson", "burstiness": 0.5}, "burstiness = 0.5 needs arrivals = 'gamma'"),
        ({"diurnal": "azure-2024-code"}, "diurnal = 'azure-2024-code' needs arrivals = 'poisson'"),
        ({"arrivals": "poisson", "diurnal": "sunday"}, "diurnal = 'sunday': not known"),
        ({"max_concurrency": 3}, "max_concurrency = 3 needs arrivals = 'poisson' or .*, not 'users'"),
        ({"stages": (Stage(at_s=1.0, rate_rps=3.0),)}, "the stage at 1 s has rate_rps: .* must be users"),
        ({"arrivals": "poisson", "stages": (Stage(at_s=1.0, users=3),)}, "must be rate_rps"),
        ({"arrivals": "poisson", "stages": (Stage(at_s=1.0),)}, "has nothing"),
        ({"arrivals": "poisson", "rate_rps": -1.0}, "rate_rps = -1.0: must be a number from 0"),
        ({"join_address": "here"}, "join_address = 'here': must be host:port"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        Workload(**wrong)
