"""Every LLM app on a real cluster: real clients, streams that break off, overload, fuzzing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import hypothesis
import numpy as np
import openai
import pandas as pd
import psutil
import pytest
import requests
import schemathesis
from conftest import BASE, ask
from schemathesis.specs.openapi.checks import positive_data_acceptance

from kit import breakdown, measures
from kit.clock import SERVED_BY
from kit.serving import Serving
from kit.store import Run

SMALL_WINDOW = BASE.replace(max_model_len=128)
CONTINUOUS = BASE.replace(app="continuous", max_ongoing_requests=400, max_num_seqs=256)
ROUTED = BASE.replace(
    app="routed", postprocess=True, route_threshold_tokens=100, response_cache_entries=8,
    prompt_template="say {prompt}",
)  # fmt: skip


def replica(serving: Serving) -> dict[str, Any]:
    """What the only model replica last reported of itself."""
    (running,) = serving.status().running
    return next(s for s in serving.replicas() if s["replica_id"] == running.replica_id)


def wait_until(what: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


def idle(serving: Serving) -> bool:
    state = replica(serving)
    engine = state["engine"]
    return bool(
        state["ongoing"] == 0
        and engine["kv_cache_share"] == 0
        and engine["running_sequences"] == engine["waiting_sequences"] == 0
    )


@pytest.fixture
def serving(_cluster: Serving) -> Serving:
    """The shared cluster as the test before left it: each test here deploys what it needs."""
    return _cluster


@pytest.fixture
def client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.mark.parametrize("app", ["unbatched", "continuous", "batched"])
def test_what_does_not_fit_the_window_never_reaches_the_engine(serving: Serving, app: str) -> None:
    serving.deploy(SMALL_WINDOW.replace(app=app))
    for tokens, status in ((127, 200), (128, 400), (129, 400), (5000, 400)):
        prompt = " ".join(["wörd"] * tokens)
        answer = ask(serving, json={"prompt": prompt, "max_tokens": 1})
        assert answer.status_code == status
        if status == 400:
            message = answer.json()["error"]["message"]
            assert f"prompt of {tokens} tokens + max_tokens of 1" in message


def test_the_output_cap_cuts_live_and_says_so(serving: Serving) -> None:
    serving.deploy(SMALL_WINDOW.replace(max_new_tokens=5))
    answer = ask(serving, json={"prompt": "a", "max_tokens": 50})
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert answer.headers["X-Max-New-Tokens"] == "5"
    assert "X-Max-New-Tokens" not in ask(serving, json={"prompt": "a", "max_tokens": 5}).headers
    chat = {"messages": [{"role": "user", "content": "a"}]}
    answer = requests.post(f"{serving.url}/v1/chat/completions", json=chat, timeout=30)
    assert answer.headers["X-Max-New-Tokens"] == "5", "a chat asks for all there is room for"
    wait_until(lambda: replica(serving)["engine"]["capped_requests"] >= 2, 3)


def test_a_batch_is_bounded_by_tokens(serving: Serving) -> None:
    for limit, biggest in ((None, 6), (40, 2)):
        serving.deploy(SMALL_WINDOW.replace(max_batch_tokens=limit, batch_wait_timeout_s=0.3))
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            body = {"prompt": "one two three four", "max_tokens": 16}
            answers = list(pool.map(lambda _: ask(serving, json=body), range(6)))  # noqa: B023
        assert {a.status_code for a in answers} == {200}
        assert max(int(a.headers[SERVED_BY].split()[2]) for a in answers) == biggest


def test_the_routed_app_parts_short_from_long_and_keeps_what_comes_again(
    serving: Serving, client: openai.OpenAI
) -> None:
    serving.deploy(ROUTED)

    def go(**body: Any) -> requests.Response:
        return ask(serving, json={"prompt": "one two", "max_tokens": 8, "temperature": 0} | body)

    first, again = go(), go()
    assert first.headers[SERVED_BY].split()[-1] == "short"
    assert first.json()["usage"]["prompt_tokens"] == 3, "the template adds a word"
    assert again.headers["X-Cache"] == "hit"
    assert again.headers["X-Cache-Key"] == first.headers["X-Cache-Key"]
    assert again.json() == first.json()
    assert go(temperature=1).headers.get("X-Cache") is None
    serving.update(ROUTED.replace(blocked_words="lorem"))
    assert go().json()["text"].startswith("*** ipsum"), "what was kept was not yet cleaned so"
    assert go(max_tokens=98).headers[SERVED_BY].split()[-1] == "long"
    restarted = serving.update(
        ROUTED.replace(
            route_threshold_tokens=5, prompt_template="{prompt}", blocked_words="ipsum",
            long_max_batch_size=2, max_batch_size=16,
        )
    ).restarted_replicas  # fmt: skip
    assert restarted == 0
    assert go().headers[SERVED_BY].split()[-1] == "long"
    assert go().json()["text"].startswith("lorem *** dolor")
    model = client.models.list().data[0].id
    with pytest.raises(openai.UnprocessableEntityError, match="the output is not JSON"):
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "a"}], max_tokens=4,
            response_format={"type": "json_schema",
                             "json_schema": {"name": "x", "schema": {"type": "object"}}},
        )  # fmt: skip
    pieces = client.completions.create(model=model, prompt="a b", max_tokens=9, stream=True)
    assert "".join(p.choices[0].text for p in pieces).split()[:2] == ["lorem", "***"]


BODY = {"prompt": "one two three", "max_tokens": 300, "stream": True, "temperature": 0}


async def _streams(url: str, n: int, left: int, max_tokens: int) -> list[int]:
    """Open n streams at once; the first `left` are left after their first event. Events of each."""

    async def one(session: aiohttp.ClientSession, k: int) -> int:
        seen = 0
        body = BODY | {"max_tokens": 4000 if k < left else max_tokens}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200
            async for line in answer.content:
                seen += line.startswith(b"data: {")
                if k < left and seen:
                    answer.close()
                    break
        return seen

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return await asyncio.gather(*(one(session, k) for k in range(n)))


def test_streams_that_clients_leave_free_their_slots_and_cache(serving: Serving) -> None:
    """A stream of 4,000 tokens lasts over half a minute here: only leaving it can free it."""
    serving.deploy(CONTINUOUS.replace(time_scale=1.0))
    seen = asyncio.run(_streams(serving.url, 200, 100, 20))
    ended_s = time.monotonic()
    assert seen[:100] == [1] * 100
    assert min(seen[100:]) > 1
    wait_until(lambda: idle(serving), 5)
    print(
        f"idle {time.monotonic() - ended_s:.1f} s after the last of 200 streams, 100 of them left"
    )


def test_clients_that_leave_in_any_phase_cost_nothing(serving: Serving) -> None:
    serving.deploy(CONTINUOUS.replace(time_scale=1.0, max_num_seqs=1))
    body = BODY | {"max_tokens": 4000}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        # One streams; the others wait in the engine's queue: for a first token, or the whole answer.
        for stream in (True, True, False, False):
            pool.submit(_leave_after, serving.url, body | {"stream": stream}, 1.0)
            time.sleep(0.2)
    at = urlsplit(serving.url)
    with socket.create_connection((at.hostname or "", at.port or 80)) as half:
        half.sendall(b'POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{"prompt')
    wait_until(lambda: idle(serving), 5)
    assert ask(serving).status_code == 200


def _leave_after(url: str, body: dict[str, Any], wait_s: float) -> None:
    with contextlib.suppress(requests.RequestException):
        requests.post(f"{url}/v1/completions", json=body, timeout=wait_s, stream=True).close()


def test_the_openai_client_works_unchanged(serving: Serving, client: openai.OpenAI) -> None:
    serving.deploy(CONTINUOUS)
    model = client.models.list().data[0].id
    assert model == "Llama-3.1-8B bfloat16"
    completion = client.completions.create(model=model, prompt="one two", max_tokens=5)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 5)
    messages: Any = [{"role": "user", "content": "one two three"}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
    assert chat.choices[0].message.content == "lorem ipsum dolor magna"
    stopped = client.chat.completions.create(
        model=model, messages=messages, max_tokens=9, stop=["dolor"]
    )
    assert stopped.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=40, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert len(text.split()) == 40
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 40
    assert "decode;dur=" in chunks[-1].kit["server_timing"]  # type: ignore[attr-defined]
    for kwargs, error, said in (
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens = -1"),
        ({"n": 3}, openai.BadRequestError, "n = 3: not offered"),
        ({"model": "gpt"}, openai.NotFoundError, "this app serves"),
        ({"max_tokens": 1_000_000, "prompt": "x " * 900_000}, openai.BadRequestError, "KV cache"),
    ):
        with pytest.raises(error, match=said):
            client.completions.create(**{"model": model, "prompt": "a"} | kwargs)


SLOW_READERS = 10


def test_memory_stays_flat_over_streams_and_slow_readers(serving: Serving) -> None:
    serving.deploy(CONTINUOUS)
    for _ in range(3):
        asyncio.run(_streams(serving.url, 200, 100, 10))  # what is made once is made
    process = psutil.Process(replica(serving)["pid"])
    sizes = [process.memory_full_info().uss]
    for _ in range(7):
        asyncio.run(_streams(serving.url, 200, 100, 10))
        sizes.append(process.memory_full_info().uss)
    print("replica, MiB after each 200 streams:", [s // 2**20 for s in sizes])
    # The median, for Ray loads some 200 MiB of its own once, at a time of its choosing.
    grown = statistics.median(b - a for a, b in itertools.pairwise(sizes))
    assert grown < 2 * 2**20
    # Who takes nothing is sent no more than fits the buffers on the way; others are served.
    slow = [
        requests.post(
            f"{serving.url}/v1/completions",
            json=BODY | {"max_tokens": 4000},
            stream=True,
            timeout=60,
        )
        for _ in range(SLOW_READERS)
    ]
    assert ask(serving).status_code == 200
    wait_until(lambda: idle(serving), 60)
    held = process.memory_full_info().uss - sizes[-1]
    print(f"{held / 2**20:.1f} MiB held for {SLOW_READERS} readers who take nothing")
    assert held < SLOW_READERS * 2 * 2**20
    assert all(s.raw.read(20).startswith(b"data: {") for s in slow)
    for s in slow:
        s.close()


def test_short_requests_wait_for_long_ones_unless_they_are_routed_apart(
    measure: Callable[..., Run],
) -> None:
    """80 % short, 20 % long, two accelerators either way."""
    mix: dict[str, Any] = {"lengths": "short", "mix_lengths": "long", "mix_share": 0.2}
    p95_s = {}
    for app in ("batched", "routed"):
        settings = BASE.replace(
            app=app, num_replicas=2 if app == "batched" else 1, max_batch_size=16,
            long_max_batch_size=16, batch_wait_timeout_s=0.01,
        )  # fmt: skip
        run = measure(settings, users=24, duration_s=8.0, **mix)
        good = measures.ok(run.requests)
        assert len(good) == len(run.requests)
        short = good[(good["prompt_tokens"] + good["output_tokens"] <= 256) & (good["sent_s"] > 3)]
        p95_s[app] = measures.percentile(short["e2e_s"], 95)
        if app == "routed":
            assert set(good["route"]) == {"short", "long"}
            assert set(short["route"]) == {"short"}
    print("p95 of short requests:", {k: f"{v:.2f} s" for k, v in p95_s.items()})
    assert p95_s["routed"] <= p95_s["batched"] / 2


def turns(run: Run) -> tuple[float, float]:
    """How many were served from the sending of a request to its answer, at p95, and the median time
    from one of them to the next: a machine that stands still for a while stretches neither."""
    good = measures.ok(run.requests)
    ended_s = np.sort(measures.finished_s(good))
    sent_s, done_s = good["sent_s"], measures.finished_s(good)
    served = ended_s.searchsorted(done_s, "right") - ended_s.searchsorted(sent_s)
    return measures.percentile(pd.Series(served), 95), float(np.median(np.diff(ended_s)))


def test_overload_is_shed_and_who_is_let_in_is_served_in_time(measure: Callable[..., Run]) -> None:
    """16 users fill the replica; 48 with pauses ask for about three times what is served.

    The queue is in the replica, in order of arrival: Serve's router looks for a free slot with
    growing pauses, so that among many who wait there, some wait far longer than others.
    """
    full = BASE.replace(
        app="unbatched", max_ongoing_requests=16, max_queued_requests=1, reject_status=429,
        retry_after_s=1.0,
    )  # fmt: skip
    fixed: dict[str, Any] = {"prompt_tokens": 60, "output_tokens": 60}
    # All begin at once.
    at_capacity = measure(full, users=16, retry="honour", duration_s=5.0, **fixed)
    most, each_s = turns(at_capacity)
    limit_s = 1.3 * measures.percentile(measures.ok(at_capacity.requests)["e2e_s"], 95)
    tries, served = {}, {}
    for retry in RETRIES:
        run = measure(
            full, users=48, think_time_s=1.4, retry=retry, max_attempts=50, timeout_s=20.0,
            duration_s=8.0 if retry == "honour" else 6.0, **fixed,
        )  # fmt: skip
        # No timeouts; what the end of the load cuts off had begun just before.
        assert set(run.requests["outcome"]) <= {"ok", "rejected", "cut"}
        assert set(run.requests[run.requests["outcome"] == "rejected"]["status"]) == {429}
        waited, took_s = turns(run)
        demands = breakdown.demands(run.requests)
        tries[retry] = demands["attempts"].mean()
        served[retry] = (demands["outcome"] == "ok").mean()
        print(f"{retry}: {served[retry]:.0%} served, {tries[retry]:.1f} attempts each, the "
              f"accepted wait {waited:.1f} turns of {took_s:.3f} s "
              f"(at capacity {most:.1f} of {each_s:.3f} s)")  # fmt: skip
        if retry != "storm":
            assert waited <= 1.3 * most
            assert took_s <= 1.3 * each_s
            assert measures.percentile(measures.ok(run.requests)["e2e_s"], 95) <= limit_s
        if retry == "none":
            assert served[retry] < 0.9
        if retry == "honour":
            early = demands[demands["first_sent_s"] < 2]
            assert (early["outcome"] == "ok").all(), early["outcome"].value_counts()
    assert tries["storm"] > 3 * tries["honour"]


RETRIES = ("none", "honour", "storm")


def test_o14_a_request_to_zero_replicas_waits_for_the_first_and_zero_is_seen_as_zero(
    serving: Serving, measure: Callable[..., Run]
) -> None:
    sleepy = BASE.replace(
        num_replicas="auto", min_replicas=0, max_replicas=1, upscale_delay_s=0.0,
        downscale_delay_s=1.0, downscale_to_zero_delay_s=1.0, load_time_s=1.0,
    )  # fmt: skip
    serving.deploy(sleepy)
    wait_until(lambda: not serving.status().replicas, 30)
    run = measure(sleepy, users=1, duration_s=9.0)
    first, *later = measures.ok(run.requests)["e2e_s"]
    assert first > 1.0 > measures.percentile(pd.Series(later), 50)
    running = measures.series(run, "serve", "running_replicas")
    assert running.iloc[0] == 0
    assert running.max() == 1


@pytest.mark.parametrize("app", ["continuous", "routed"])
def test_fuzzing_the_document_finds_no_5xx_and_loses_no_replica(serving: Serving, app: str) -> None:
    serving.deploy(
        (ROUTED if app == "routed" else CONTINUOUS).replace(max_model_len=4096, max_new_tokens=16)
    )
    before = {r.pid for r in serving.status().running}
    schema = schemathesis.openapi.from_url(f"{serving.url}/openapi.json")
    statuses: set[int] = set()
    for operation in schema.get_all_operations():

        @hypothesis.settings(
            max_examples=12, deadline=None, database=None, derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.ok().as_strategy())
        def fuzz(case: Any) -> None:
            answer = case.call(timeout=20)
            statuses.add(answer.status_code)
            assert answer.status_code < 500 or "Retry-After" in answer.headers, answer.content
            # What no schema can say (the model's window, say) makes valid bodies be refused too.
            case.validate_response(answer, excluded_checks=[positive_data_acceptance])

        fuzz()
    assert 200 in statuses
    assert 400 in statuses
    assert {r.pid for r in serving.status().running} == before
