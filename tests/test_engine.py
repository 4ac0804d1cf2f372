"""The accelerator's closed form, the engine that paces by it, and the gate in front."""

from __future__ import annotations

import asyncio
import time
import types

import pytest

from kit.accelerator import NO_ACCELERATOR, profile, profile_names
from kit.batching import DynamicBatching, Entry, batch_size
from kit.continuous import ContinuousEngine, Scheduler, Sequence
from kit.engine import Job, Sink, StaticEngine, text_for
from kit.gate import Gate
from kit.lengths import Lengths
from kit.workload import Workload


def test_one_request_takes_the_sum_of_its_steps() -> None:
    p = profile("h100.llama-3.1-8b.bf16")
    steps = sum(
        p.d_s
        + p.e_s_per_sequence
        + p.host_overhead_s_per_step
        + p.f_s_per_context_token * (100 + k)
        for k in range(1, 50)
    )
    assert p.decode_s([100], [50]) == pytest.approx(steps)
    assert p.decode_s([100], [1]) == 0


@pytest.mark.parametrize("name", profile_names())
def test_profiles_are_sane(name: str) -> None:
    p = profile(name)
    one, many = p.static_batch_s([500], [200]), p.static_batch_s([500] * 16, [200] * 16)
    assert one < many < 16 * one  # batching pays
    assert p.prefill_s([16]) == pytest.approx(p.floor_s, rel=0.1)
    assert p.evidence
    assert p.label.startswith("emulated ")


def test_unknown_profile_lists_the_known() -> None:
    with pytest.raises(KeyError, match="no accelerator 'h1'.*l4"):
        profile("h1")


def test_engine_runs_one_batch_at_a_time_as_long_as_the_formula_says() -> None:
    engine = StaticEngine("b200.llama-3.1-8b.bf16", time_scale=0.05, load_time_s=0.0)
    jobs = [Job(100, 40, 0.0), Job(50, 80, 0.0)]

    async def two_batches() -> list[list[object]]:
        return list(await asyncio.gather(engine.run(jobs), engine.run(jobs[:1])))

    first, second = asyncio.run(two_batches())
    assert [d.batch_size for d in first] == [2, 2]
    assert {d.batch_id for d in first} == {1}
    assert second[0].started_s >= first[0].done_s
    p = engine.profile
    both_s, one_s = (
        0.05 * p.static_batch_s(*lengths) for lengths in (([100, 50], [40, 80]), ([100], [40]))
    )
    assert first[0].done_s - first[0].started_s >= both_s
    assert first[0].first_token_s - first[0].started_s >= 0.05 * p.prefill_s([100, 50])
    assert len(first[1].text.split()) == 80
    assert engine.busy_s >= both_s + one_s
    assert profile(NO_ACCELERATOR).static_batch_s([100], [40]) == 0


def test_o5_a_dead_batching_task_makes_the_replica_unhealthy() -> None:
    async def dead() -> bool:
        return False

    replica = object.__new__(DynamicBatching)
    replica._batch = types.SimpleNamespace(_is_batching_task_alive=dead)
    with pytest.raises(RuntimeError, match="must be replaced"):
        asyncio.run(replica.check_batching())


def test_gate_fills_the_next_batch_from_the_backlog_in_order() -> None:
    async def scenario() -> None:
        gate, inside, leave = Gate(), {}, asyncio.Event()
        gate.limit = 3

        async def request(name: int) -> None:
            async with gate.turn() as turn:
                inside[name] = turn
                await leave.wait()

        tasks = [asyncio.create_task(request(k)) for k in range(14)]
        await asyncio.sleep(0.01)
        assert list(inside) == [0, 1, 2]
        with gate.batch([inside[k] for k in (0, 1, 2)]):
            await asyncio.sleep(0.01)
            assert list(inside) == [0, 1, 2], "nobody enters while a batch runs"
        await asyncio.sleep(0.01)
        assert list(inside) == [0, 1, 2, 3, 4, 5], "a whole batch enters when one ends"

        with gate.batch([inside[k] for k in (3, 4)]):  # closed too early: 5 missed it
            pass
        await asyncio.sleep(0.01)
        assert 6 not in inside, "nobody fills up behind a batch that is closed already"
        with gate.batch([inside[5]]):
            pass
        await asyncio.sleep(0.01)
        assert list(inside)[6:] == [6, 7, 8], "after it, whole batches again"

        with gate.batch([inside[6]]):
            pass
        for k in (7, 8, 9):  # those left over and one waiting go away: no place is lost
            tasks[k].cancel()
        await asyncio.sleep(0.01)
        assert list(inside)[9:] == [10, 11, 12]
        gate.open = True
        gate.release()
        await asyncio.sleep(0.01)
        assert 13 in inside
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not gate._inside
        assert not gate._waiting

    asyncio.run(scenario())


H100 = profile("h100.llama-3.1-8b.bf16")


@pytest.mark.parametrize(("slots", "expected_rps"), [(16, 7.8), (64, 16.7), (128, 20.1)])
def test_continuous_saturation_matches_published_targets(slots: int, expected_rps: float) -> None:
    """Azure conversation lengths with a backlog that never ends; the clock is the model's own."""
    lengths = Lengths(Workload(max_prompt_tokens=131_072))
    scheduler = Scheduler(H100, slots, 8192, H100.kv_capacity_tokens)
    time_s, finished, drawn, begun = 0.0, 0, 0, (0.0, 0)
    while finished < 1200:
        while len(scheduler.waiting) < slots:
            scheduler.waiting.append(Sequence(*lengths[drawn]))
            drawn += 1
        step = scheduler.step()
        time_s += step.duration_s
        finished += len(step.finished)
        if finished < 200:
            begun = (time_s, finished)
    rate = (finished - begun[1]) / (time_s - begun[0])
    assert rate == pytest.approx(expected_rps, rel=0.15)


def test_one_sequence_takes_what_the_static_formula_says() -> None:
    scheduler = Scheduler(H100, 8, 8192, 100_000)
    scheduler.waiting.append(Sequence(700, 90))
    total_s = 0.0
    while scheduler.waiting or scheduler.running:
        total_s += scheduler.step().duration_s
    # The formula of a static batch has no host overhead in its prefill.
    overhead_s = H100.host_overhead_s_per_step
    assert total_s == pytest.approx(H100.static_batch_s([700], [90]) + overhead_s, rel=1e-6)


def test_when_the_cache_runs_out_the_newest_is_preempted_and_all_finish() -> None:
    scheduler = Scheduler(H100, 8, 512, kv_cache_tokens=1000)
    everyone = [Sequence(150, 200) for _ in range(8)]
    scheduler.waiting.extend(everyone)
    finished, peak = [], 0
    while scheduler.waiting or scheduler.running:
        finished += scheduler.step().finished
        peak = max(peak, scheduler.kv_used_tokens)
        assert scheduler.kv_used_tokens == sum(s.cached for s in scheduler.running)
        assert scheduler.kv_used_tokens <= 1000
    assert sorted(map(id, finished)) == sorted(map(id, everyone))
    assert finished[0] is everyone[0]
    assert scheduler.preemptions > 0
    assert peak > 900
    assert scheduler.kv_used_tokens == 0


def test_long_prompts_are_prefilled_in_chunks_beside_decodes() -> None:
    scheduler = Scheduler(H100, 8, 256, 100_000)
    first, long = Sequence(10, 50), Sequence(1000, 5)
    scheduler.waiting.append(first)
    scheduler.step()
    scheduler.waiting.append(long)
    for done in (255, 510, 765):
        scheduler.step()
        assert long.cached == done
    assert first.generated == 4, "decodes go on while the prompt is read"
    assert scheduler.step().first == [long]


def test_who_leaves_frees_slot_and_cache_at_once() -> None:
    async def scenario() -> None:
        engine = ContinuousEngine(H100.name, 0.05, 0.0, 4, 8192, None)
        tasks = [asyncio.create_task(engine.submit(Job(100, 400, 0.0))) for _ in range(6)]
        await asyncio.sleep(0.03)
        assert engine.stats()["running_sequences"] == 4
        assert engine.stats()["waiting_sequences"] == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        idle = {"running_sequences": 0, "waiting_sequences": 0, "kv_cache_share": 0}
        assert idle.items() <= engine.stats().items()
        done = await engine.submit(Job(100, 20, 0.0))
        assert len(done.text.split()) == 20
        assert done.queued_s <= done.started_s < done.first_token_s < done.done_s
        assert done.done_s <= time.monotonic(), "no instant may lie in the future"

    asyncio.run(scenario())


def test_the_gate_bounds_a_batch_by_tokens_but_lets_a_giant_pass_alone() -> None:
    async def scenario() -> None:
        gate, inside = Gate(), []
        gate.limit, gate.limit_tokens = 8, 100
        leave = asyncio.Event()

        async def request(name: int, tokens: int) -> None:
            async with gate.turn(tokens) as turn:
                inside.append((name, turn))
                await leave.wait()

        sizes = (60, 30, 20, 500, 10)
        tasks = [asyncio.create_task(request(k, size)) for k, size in enumerate(sizes)]
        seen = []
        for _ in range(3):
            await asyncio.sleep(0.01)
            seen.append([name for name, _ in inside])
            with gate.batch([turn for _, turn in inside]):
                inside.clear()
        assert seen == [[0, 1], [2], [3]]
        leave.set()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("tokens", "size"), [([], 0), ([500], 1), ([60, 40], 2), ([60, 41], 9), ([0, 0, 0], 3)]
)
def test_the_size_of_a_batch_is_in_requests_and_never_raises(tokens: list[int], size: int) -> None:
    gate = Gate()
    gate.limit, gate.limit_tokens = 8, 100
    assert batch_size([Entry(None, None, t, gate) for t in tokens]) == size  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stop", "min_tokens", "tokens", "reason"),
    [((), 0, 9, "length"), (("dolor",), 0, 2, "stop"), (("dolor",), 4, 6, "stop"),
     (("nowhere",), 0, 9, "length"), (("lorem",), 0, 1, "stop")],
)  # fmt: skip
def test_the_emulated_model_ends_at_a_stop_string(
    stop: tuple[str, ...], min_tokens: int, tokens: int, reason: str
) -> None:
    text = text_for(Job(5, 9, 0.0, min_tokens=min_tokens, stop=stop))
    assert (text.tokens, text.finish_reason) == (tokens, reason)
    assert not any(s in text.text[max(0, min_tokens * 6 - 1) :] for s in stop)


@pytest.mark.parametrize("kind", ["static", "continuous"])
def test_a_streamed_output_is_the_same_text_token_by_token(kind: str) -> None:
    async def scenario() -> None:
        if kind == "static":
            engine = StaticEngine(H100.name, 0.2, 0.0)
        else:
            engine = ContinuousEngine(H100.name, 0.2, 0.0, 4, 8192, None)
        jobs = [Job(10, n, 0.0, sink=Sink()) for n in (5, 12)]
        if kind == "static":
            tasks = [asyncio.create_task(engine.run(jobs))]
        else:
            tasks = [asyncio.create_task(engine.submit(j)) for j in jobs]

        async def read(sink: Sink) -> list[tuple[str, int]]:
            return [piece async for piece in sink]

        streams = await asyncio.gather(*(read(j.sink) for j in jobs))
        for job, pieces in zip(jobs, streams, strict=True):
            assert "".join(text for text, _ in pieces) == text_for(job).text
            assert sum(tokens for _, tokens in pieces) == job.output_tokens
            assert len(pieces) > 2
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_a_slow_reader_finds_what_it_missed_in_one_piece() -> None:
    async def scenario() -> None:
        sink = Sink()
        for _ in range(1000):
            sink.push(" x", 1)
        sink.close()
        assert [piece async for piece in sink] == [(" x" * 1000, 1000)]

    asyncio.run(scenario())
