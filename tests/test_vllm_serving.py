"""vLLM behind Ray Serve: two replicas on this machine, real clients, the split of its latency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from conftest import BASE, ask

from kit import measures, repeats, store, sweep
from kit.clock import SERVED_BY
from kit.models import tiny_model
from kit.serving import Serving
from kit.settings import Settings, SettingsError
from kit.store import Run
from kit.sweep import Sweep
from kit.workload import Workload


def test_vllm_computes_on_whole_cores() -> None:
    with pytest.raises(
        SettingsError, match=r"num_cpus = 0.1 with engine = 'vllm': .*num_cpus of 1"
    ):
        Settings(app="continuous", engine="vllm")


@pytest.fixture(scope="module")
def settings(tiny: Path) -> Settings:
    """A tiny random model: what is tested is what is around it."""
    return BASE.replace(
        app="continuous", engine="vllm", model=str(tiny_model(tiny)), num_cpus=1.0, num_replicas=2,
        kv_cache_tokens=8192, max_num_seqs=16,
    )  # fmt: skip


def test_o26_two_replicas_start_serve_and_tell_the_split_of_their_latency(
    as_left: Serving, measure: Callable[..., Run], settings: Settings
) -> None:
    as_left.deploy(settings, timeout_s=240)
    for replica in as_left.status().running:
        processes = [p := psutil.Process(replica.pid), *p.children(recursive=True)]
        gib = sum(p.memory_full_info().pss for p in processes) / 2**30
        print(f"replica {replica.replica_id}: {gib:.1f} GiB")
        assert gib < 4
    _clients_are_answered(as_left)
    run = measure(
        settings, users=8, duration_s=6.0, stream=True, prompt_tokens=40, output_tokens=24
    )
    good = measures.ok(run.requests)
    assert len(good) == len(run.requests) > 16
    assert good["replica_id"].nunique() == 2
    assert (good["output_tokens"] == 24).all()
    assert (good[[p for p in measures.PARTS if p != "rest_s"]] >= 0).all().all()
    assert measures.percentile(measures.identity_error_s(run.requests), 99) < 0.005
    # A random model's text may be empty: such a stream has no first token that could be read.
    read = good.dropna(subset="ttft_s")
    assert len(read) > 8
    assert (read["ttft_s"] <= read["e2e_s"]).all()
    samples = run.samples.groupby("metric")["value"].max()
    assert 0 < samples["running_sequences"] <= 16
    assert 0 < samples["kv_cache_share"] <= 1
    assert 0 <= samples["prefix_cache_hit_share"] < 0.2, "prompts are unlike each other"


def _clients_are_answered(serving: Serving) -> None:
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=30)
    model = client.models.list().data[0].id
    ask_for: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(prompt="one two", extra_body={"ignore_eos": True}, **ask_for)
    assert whole.usage
    assert whole.usage.completion_tokens == 12
    stream = client.completions.create(
        prompt="one two", stream=True, extra_body={"ignore_eos": True}, **ask_for
    )
    assert "".join(c.choices[0].text for c in stream if c.choices) == whole.choices[0].text
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "hi"}], extra_body={"min_tokens": 3}, **ask_for
    )
    assert chat.usage
    assert chat.usage.completion_tokens >= 3
    served = set()
    for _ in range(8):
        served.add(ask(serving).headers[SERVED_BY].split()[0])
    assert served <= {r.replica_id for r in serving.status().running}
    for body, said in (
        ({"prompt": "x" * 2048, "max_tokens": 1}, "exceed the 2048 tokens"),
        ({"prompt": [1, 99999]}, "token id 99999"),
        ({"prompt": [], "max_tokens": 1}, "empty"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            client.completions.create(model=model, **body)  # type: ignore[arg-type]


def test_the_same_sweep_again_finds_no_answers_in_the_cache(
    as_left: Serving, settings: Settings, tmp_path: Path
) -> None:
    """Prompts differ between runs, or the second would win by what the first left in the KV cache."""
    # The same size as before, so that the replicas of the test before serve on.
    grid = Sweep(
        settings, Workload(users=4, duration_s=3.0, prompt_tokens=40, output_tokens=8),
        loads={"think_time_s": [0.0, 0.03, 0.06]},
    )  # fmt: skip
    sweep.run(replace(grid, loads={}), as_left, tmp_path / "warm", progress=False)
    first, second = (
        sweep.run(grid, as_left, tmp_path / name, progress=False) for name in ("first", "second")
    )
    for found in (first, second):
        print(found[["run", "e2e_p50_s", "prefix_cache_hit_share", "valid"]].to_string())
        assert (found["prefix_cache_hit_share"] < 0.05).all()
        assert found["valid"].all(), found["why"].tolist()
    pairs = ([store.load(tmp_path / s / n) for n in first["run"]] for s in ("first", "second"))
    verdicts = repeats.paired(*pairs)["verdict"]
    assert "better" not in set(verdicts[["e2e_p50_s", "throughput_rps"]]), verdicts
    # The same prompts again are answered from the cache, and such a run is called invalid. Few enough
    # of them that the KV cache of each replica holds all.
    few = Workload(
        arrivals="constant", rate_rps=6.0, duration_s=3.0, prompt_tokens=40, output_tokens=8,
        repeat_prompts=True,
    )  # fmt: skip
    again = Sweep(settings, few)
    sweep.run(again, as_left, tmp_path / "told", progress=False)
    cached = sweep.run(again, as_left, tmp_path / "told again", progress=False)
    share = float(cached["prefix_cache_hit_share"].iloc[0])
    print(f"prefix cache hits of repeated prompts: {share:.2f}")
    assert share > 0.2
    assert not cached["valid"].iloc[0]
    assert "came from the prefix cache" in cached["why"].iloc[0]
