"""vLLM itself, with a tiny random model: one engine in a process of its own, asked everything."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Asked

from kit import models
from kit.models import ModelError, resolve
from kit.vllm_meter import Meter


def test_models_are_found_by_name_path_or_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MODELS", tmp_path)
    for name in ("", models.SMALL):
        with pytest.raises(ModelError, match="not prepared.*make setup"):
            resolve(name)
    with pytest.raises(ModelError, match="folder with a config.json"):
        resolve(str(tmp_path))
    for folder in (tmp_path / models.SMALL, tmp_path / "mine"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    assert resolve("") == resolve(models.SMALL) == str(tmp_path / models.SMALL)
    assert resolve(str(tmp_path / "mine")) == str(tmp_path / "mine")
    assert resolve("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (tmp_path / ".model-killed").mkdir()

    def interrupted() -> None:
        with models._whole(folder) as unfinished:
            (unfinished / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_importing_the_engine_imports_no_vllm() -> None:
    code = "import kit.vllm_engine, sys; assert not {'vllm', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_meter_counts_what_vllm_tells() -> None:
    meter = Meter()
    assert meter.figures()["prefix_cache_hit_share"] == 0.0
    cache = types.SimpleNamespace(queries=64, hits=16)
    scheduler = types.SimpleNamespace(
        num_running_reqs=3, num_waiting_reqs=1, num_skipped_waiting_reqs=1, kv_cache_usage=0.5,
        prefix_cache_stats=cache,
    )  # fmt: skip
    meter.record(scheduler, types.SimpleNamespace(num_preempted_reqs=2, finished_requests=["a"]))
    assert (meter.steps, meter.sequences, meter.running) == (1, 4, 3)
    assert meter.figures() == {
        "running_sequences": 3, "waiting_sequences": 2, "kv_cache_share": 0.5, "preemptions": 2,
        "prefix_cache_hit_share": 0.25, "prefix_cache_queried_tokens": 64,
        "prefix_cache_hit_tokens": 16,
    }  # fmt: skip


@pytest.fixture(scope="module")
def told(vllm_asked: Asked) -> dict[str, Any]:
    """What `tests/ask_vllm.py` found out in one engine's life, by the names used below."""
    process, said = vllm_asked
    process.wait(200)
    text = said.read_text()
    answer = [line for line in text.splitlines() if line.startswith("TOLD ")]
    assert answer, text[-3000:]
    found: dict[str, Any] = json.loads(answer[-1].removeprefix("TOLD "))
    return found


@pytest.mark.cluster
def test_the_split_is_ordered_on_this_machines_clock(told: dict[str, Any]) -> None:
    assert told["sizes"] == [512, 1024]  # window, KV cache
    for d in told["eight"]["done"]:
        instants = [
            told["eight"]["sent_s"], d["queued_s"], d["started_s"], d["first_token_s"], d["done_s"],
            told["eight"]["back_s"],
        ]  # fmt: skip
        assert instants == sorted(instants)
        assert (d["output_tokens"], d["finish_reason"]) == (24, "length")
    assert max(d["batch_size"] for d in told["eight"]["done"]) == 8


@pytest.mark.cluster
def test_eight_at_once_take_less_than_eight_in_turn(told: dict[str, Any]) -> None:
    assert told["eight"]["took_s"] < 0.7 * told["in_turn_s"]


@pytest.mark.cluster
def test_a_static_batch_comes_back_as_one(told: dict[str, Any]) -> None:
    first, second = told["static"][:3], told["static"][3]
    assert {(d["batch_id"], d["batch_size"]) for d in first} == {(0, 3)}
    assert (second["batch_id"], second["batch_size"]) == (1, 1)
    assert [d["output_tokens"] for d in first] == [4, 8, 16]
    assert len({d["done_s"] for d in first}) == len({d["started_s"] for d in first}) == 1
    assert second["queued_s"] >= first[0]["done_s"]


@pytest.mark.cluster
def test_streams_read_the_same_and_stop_works(told: dict[str, Any]) -> None:
    assert told["streamed"]["text"] == told["streamed"]["sunk"] == told["plain"]["text"]
    assert told["streamed"]["sunk_tokens"] == 24
    assert told["ids"]["text"] == told["plain"]["text"]
    stopped = told["stopped"]
    assert stopped["finish_reason"] == "stop"
    assert told["plain"]["text"].startswith(stopped["text"])
    assert len(stopped["text"]) < len(told["plain"]["text"])


@pytest.mark.cluster
def test_who_leaves_frees_slot_and_cache(told: dict[str, Any]) -> None:
    assert told["leaving"]["before"]["running_sequences"] == 2
    assert told["leaving"]["before"]["kv_cache_share"] > 0
    assert told["leaving"]["after"]["running_sequences"] == 0
    assert told["leaving"]["after"]["kv_cache_share"] == 0
    assert told["leaving"]["took_s"] < 2


@pytest.mark.cluster
def test_prefixes_are_counted_and_messages_become_a_prompt(told: dict[str, Any]) -> None:
    assert 0 < told["stats"]["prefix_cache_hit_share"] < 1
    assert told["chat"] == "<|user|>hi<|end|><|assistant|>"
    assert told["chat_tokens"] == 5
    assert "window of 512" in told["too_long"]
    assert told["bad_sampling"]


@pytest.mark.cluster
def test_a_dead_engine_is_told_and_nothing_hangs(told: dict[str, Any]) -> None:
    assert "dead" in told["killed"]["running"]
    assert "dead" in told["killed"]["next"]
    assert "dead" in told["killed"]["health"]


@pytest.mark.cluster
def test_a_killed_owner_takes_its_engine_along() -> None:
    # The name that the guard looks for stands in the command line, as it does in vLLM's.
    engine_code = "import os, time; os.write(1, b'up'); time.sleep(60)  # spawn_main"
    owner_code = (
        "import subprocess, sys, time; from kit.guard import watch_over_this_process as watch;"
        "guard = watch();"
        "engine = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE);"
        "engine.stdout.read(2); time.sleep(2.5); print(engine.pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", owner_code, engine_code], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout
    engine = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    engine.wait(timeout=10)  # raises when it lives on
