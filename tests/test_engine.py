"""The accelerator's closed form, the engine that paces by it, and the gate in front."""

from __future__ import annotations

import asyncio
import types

import pytest

from kit.accelerator import NO_ACCELERATOR, profile, profile_names
from kit.apps import Batched
from kit.engine import EmulatedEngine, Job
from kit.gate import Gate


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
    engine = EmulatedEngine("b200.llama-3.1-8b.bf16", time_scale=0.05, load_time_s=0.0)
    jobs = [Job(100, 40, 0.0), Job(50, 80, 0.0)]

    async def two_batches() -> list[list[object]]:
        return list(await asyncio.gather(engine.run(jobs), engine.run(jobs[:1])))

    first, second = asyncio.run(two_batches())
    assert [d.batch_size for d in first] == [2, 2]
    assert {d.batch_id for d in first} == {1}
    assert second[0].started_s >= first[0].done_s
    assert first[0].done_s - first[0].started_s >= engine.batch_s(jobs)
    assert len(first[1].text.split()) == 80
    assert engine.busy_s >= engine.batch_s(jobs) + engine.batch_s(jobs[:1])
    assert EmulatedEngine(NO_ACCELERATOR, 1.0, 0.0).batch_s(jobs) == 0


def test_o5_a_dead_batching_task_makes_the_replica_unhealthy() -> None:
    async def dead() -> bool:
        return False

    replica = object.__new__(Batched)
    replica._batch = types.SimpleNamespace(_is_batching_task_alive=dead)
    with pytest.raises(RuntimeError, match="must be replaced"):
        asyncio.run(replica.check_health())


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
