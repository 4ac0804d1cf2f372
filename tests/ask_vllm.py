"""Run by `test_vllm.py`: one vLLM engine, everything asked in its one life, told as JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil

from kit.engine import Job, Sink
from kit.vllm_engine import EngineDead, VllmEngine


def job(prompt: str, tokens: int, **more: Any) -> Job:
    more = {"temperature": 0.0, "ignore_eos": True} | more
    return Job(len(prompt), tokens, time.monotonic(), prompt, **more)


async def ask(engine: VllmEngine) -> dict[str, Any]:
    told: dict[str, Any] = {"sizes": [engine.window_tokens, engine.kv_cache_tokens]}
    await engine.submit(job("warm up", 4))

    jobs = [job(f"{i} is a number that comes first", 24) for i in range(8)]
    sent_s = time.monotonic()
    eight = await asyncio.gather(*(engine.submit(j) for j in jobs))
    back_s = time.monotonic()
    told["eight"] = {"sent_s": sent_s, "back_s": back_s, "took_s": back_s - sent_s, "done": eight}
    for j in jobs:
        await engine.submit(j)
    told["in_turn_s"] = time.monotonic() - back_s

    static = [job("one", 4), job("two", 8), job("three", 16)]
    batches = await asyncio.gather(engine.run(static), engine.run(static[:1]))
    told["static"] = [*batches[0], *batches[1]]

    prompt = "a prompt of more than one block of the cache, to be met again by the prefix cache"
    told["plain"] = await engine.submit(job(prompt, 24))
    told["ids"] = await engine.submit(job("", 24, prompt_token_ids=engine.tokenize(prompt)))
    sink = Sink()
    streaming = asyncio.create_task(engine.submit(job(prompt, 24, sink=sink)))
    parts = [part async for part in sink]
    told["streamed"] = dataclasses.asdict(await streaming) | {
        "sunk": "".join(text for text, _ in parts), "sunk_tokens": sum(n for _, n in parts)
    }  # fmt: skip
    end = told["plain"].text[10:12]
    told["stopped"] = await engine.submit(job(prompt, 24, stop=(end,)))

    told["chat"] = engine.chat_prompt([{"role": "user", "content": "hi"}])
    told["chat_tokens"] = engine.count_tokens(told["chat"])
    for name, bad in (
        ("too_long", job("x" * 500, 13)), ("bad_sampling", job("x", 4, min_tokens=5)),
    ):  # fmt: skip
        try:
            engine.check(bad)
        except ValueError as error:
            told[name] = str(error)
    told["stats"] = engine.stats()

    leaving = [asyncio.create_task(engine.submit(job(f"{i}", 400))) for i in range(2)]
    while engine.executing < 2:
        await asyncio.sleep(0.01)
    told["leaving"] = {"before": engine.stats()}
    for task in leaving:
        task.cancel()
    left_s = time.monotonic()
    while engine.executing and time.monotonic() < left_s + 5:
        await asyncio.sleep(0.01)
    told["leaving"] |= {"after": engine.stats(), "took_s": time.monotonic() - left_s}

    # Looked for before: on a busy machine that may take longer than the job.
    core = next(p for p in psutil.Process().children() if "EngineCore" in p.name())
    running = asyncio.create_task(engine.submit(job("z", 400)))
    while not engine.executing:
        await asyncio.sleep(0.01)
    os.kill(core.pid, signal.SIGKILL)
    told["killed"] = {
        "running": await _error(asyncio.wait_for(running, 30)),
        "next": await _error(asyncio.wait_for(engine.submit(job("z", 4)), 30)),
        "health": await _error(engine.check_health()),
    }
    return told


async def _error(awaited: Any) -> str:
    try:
        return f"no error: {await awaited}"
    except EngineDead as error:
        return str(error)


def make_model(folder: str) -> None:
    """In a process of its own: torch may be imported here only with the engine's environment."""
    code = "import sys, pathlib, kit.models as m; m.tiny_model(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, folder], check=True)


async def main() -> None:
    make_model(sys.argv[1])
    engine = VllmEngine(sys.argv[1], max_model_len=512, kv_cache_tokens=1024)
    print("TOLD " + json.dumps(await ask(engine), default=dataclasses.asdict), flush=True)
    engine.shutdown()


if __name__ == "__main__":  # vLLM's processes import this file again
    asyncio.run(main())
