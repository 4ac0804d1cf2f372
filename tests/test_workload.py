"""Requests drawn from traces: the right lengths, the same every time, no prompt twice."""

from __future__ import annotations

import numpy as np
import pytest

from kit.accelerator import profile
from kit.workload import Stage, Workload, WorkloadError, length_names, source


@pytest.mark.parametrize("name", length_names())
def test_lengths_follow_the_percentiles_of_the_trace(name: str) -> None:
    from kit.workload import _data

    table = _data()[name]
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
    assert len({p[:12] for p in prompts}) == 500
    assert w.prompt(7, 1).split() == [w.prompt(7, 1)]


def test_a_workload_survives_its_way_to_the_load_generator() -> None:
    w = Workload(users=4, duration_s=20.0, stages=(Stage(at_s=5, users=20), Stage(at_s=6, users=2)))
    assert Workload.model_validate_json(w.model_dump_json()) == w


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"lengths": "azure-conv"}, "no such workload; did you mean 'azure-2023-conv'"),
        ({"users": "8"}, "users = '8': must be a whole number from 0"),
        ({"duration": 3.0}, "did you mean 'duration_s'"),
        ({"think_time_s": float("nan")}, "think_time_s = nan: must be a number"),
        ({"stages": (Stage(at_s=99, users=1),)}, "before the end at duration_s = 60"),
    ],
)
def test_wrong_workloads_say_what_is_wrong(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        Workload(**wrong)
