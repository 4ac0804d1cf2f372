"""Requests drawn from traces: the right lengths, the same every time, no prompt twice."""

from __future__ import annotations

import numpy as np
import pytest

from kit.accelerator import profile
from kit.lengths import length_names, source
from kit.prompts import WORDS
from kit.workload import Stage, Workload, WorkloadError


@pytest.mark.parametrize("name", length_names())
def test_lengths_follow_the_percentiles_of_the_trace(name: str) -> None:
    from kit.lengths import _file

    table = _file()["workloads"][name]
    wide = Workload(lengths=name, max_prompt_tokens=131_072, max_output_tokens=131_072)
    drawn = wide.requests(40_000)
    for column, kind in (("prompt_tokens", "prompt_tokens"), ("max_tokens", "output_tokens")):
        for q in (10, 25, 50, 75, 90):
            low, high = (table[f"{kind}_percentiles"][x] for x in (q - 2, q + 2))
            assert low - 1 <= np.percentile(drawn[column], q) <= high + 1
    assert source(name)


def test_static_saturation_matches_published_targets() -> None:
    """Rates of static batches of Azure conversation lengths on an H100, from the full trace."""
    p = profile("h100.llama-3.1-8b.bf16")
    drawn = Workload(max_prompt_tokens=131_072).requests(64_000).to_numpy()
    for n, expected_rps in ((16, 2.49), (32, 3.01), (64, 3.22)):
        batches = drawn.reshape(-1, n, 2)
        mean_s = np.mean([p.static_batch_s(b[:, 0], b[:, 1]) for b in batches])
        assert n / mean_s == pytest.approx(expected_rps, rel=0.05)


def test_same_seed_same_requests_other_seed_others() -> None:
    assert Workload(seed=3).requests(9000).equals(Workload(seed=3).requests(9000))
    assert not Workload(seed=3).requests(100).equals(Workload(seed=4).requests(100))


def test_prompts_have_their_length_and_are_unique() -> None:
    w = Workload()
    prompts = [w.prompt(i, 40) for i in range(500)]
    assert {len(p.split()) for p in prompts} == {40}
    assert len({" ".join(p.split()[:2]) for p in prompts}) == 500
    assert w.prompt(7, 1).split() == [w.prompt(7, 1)]
    assert len({w.prompt(i, 1) for i in range(256)}) == 256
    others = [Workload(seed=2).prompt(i, 40) for i in range(500)]
    assert len({" ".join(p.split()[:3]) for p in prompts + others}) == 1000


def test_words_are_distinct_and_need_no_escaping() -> None:
    assert len(set(WORDS)) == 256
    assert all(w.isascii() and w.isalpha() and w.islower() for w in WORDS)


def test_fixed_and_mixed_lengths() -> None:
    fixed = Workload(prompt_tokens=300, output_tokens=9).requests(5000)
    assert set(fixed["prompt_tokens"]) == {300}
    assert set(fixed["max_tokens"]) == {9}
    plain = Workload(lengths="short").requests(20_000)
    mixed = Workload(lengths="short", mix_lengths="long", mix_share=0.2).requests(20_000)
    far = mixed["prompt_tokens"] >= 512
    assert far.mean() == pytest.approx(0.2, abs=0.01)
    assert mixed[far]["max_tokens"].min() >= 256
    assert mixed[~far].equals(plain[~far])
    assert "synthetic" in source("short") and "synthetic" in source("long")  # noqa: PT018


def test_a_share_of_the_users_leaves() -> None:
    w = Workload(stream=True, leave_after_tokens=1, leave_share=0.25)
    assert sum(w.leaves(i) for i in range(1000)) == 250
    assert not any(Workload(stream=True).leaves(i) for i in range(100))


def test_a_workload_survives_its_way_to_the_load_generator() -> None:
    w = Workload(users=4, duration_s=20.0, stages=(Stage(at_s=5, users=20), Stage(at_s=6, users=2)))
    assert Workload.model_validate_json(w.model_dump_json()) == w


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"lengths": "azure-conv"}, "not known; did you mean 'azure-2023-conv'"),
        ({"mix_lengths": "shrt"}, "mix_lengths = 'shrt': not known; did you mean 'short'"),
        ({"mix_share": 0.2}, "mix_share = 0.2 has nothing to draw from"),
        ({"leave_after_tokens": 3}, "needs a stream to leave"),
        ({"retry": "often"}, "retry = 'often': must be 'none' or 'honour' or 'storm'"),
        ({"users": "8"}, "users = '8': must be a whole number from 0"),
        ({"duration": 3.0}, "did you mean 'duration_s'"),
        ({"think_time_s": float("nan")}, "think_time_s = nan: must be a number"),
        ({"stages": (Stage(at_s=99, users=1),)}, "before the end at duration_s = 60"),
    ],
)
def test_wrong_workloads_say_what_is_wrong(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        Workload(**wrong)
