"""What answers and streams say, read from bytes; no network."""

from __future__ import annotations

import json
import random

import pytest

from kit import answers
from kit.sse import Events, Stream

TIMING = "batch_wait;dur=10, engine_queue;dur=20, prefill;dur=30, decode;dur=400, postprocess;dur=5"
SERVED = "r1 7 4 here 100.010000 100.475000 short"


def chunk(text: str, **more: object) -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": None} | more]}


def wire(*events: object) -> bytes:
    texts = (e if isinstance(e, str) else json.dumps(e) for e in events)
    return "".join(f"data: {t}\n\n" for t in texts).encode()


WHOLE = wire(
    chunk(""), chunk("é "), chunk("日本 "), chunk("c", finish_reason="length"),
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5},
     "kit": {"server_timing": TIMING, "served_by": SERVED}},
    "[DONE]",
)  # fmt: skip


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_events_are_the_same_wherever_the_bytes_are_split(size: int, newline: bytes) -> None:
    data = WHOLE.replace(b"\n", newline)
    events = Events()
    found = [e for i in range(0, len(data), size) for e in events.feed(data[i : i + size])]
    assert found == Events().feed(WHOLE)
    assert len(found) == 6
    assert found[-1] == b"[DONE]"


def test_comments_other_fields_and_torn_ends_are_no_events() -> None:
    events = Events()
    assert events.feed(b": ping\n\nevent: x\nid: 3\ndata:a\ndata: b\n\ndata: torn") == [b"a\nb"]
    assert events.feed(b"\n") == []
    assert events.feed(b"\n") == [b"torn"]


def test_a_stream_gives_ttft_tpot_and_gaps() -> None:
    stream = Stream(sent_s=10.0)
    for k, data in enumerate(Events().feed(WHOLE)):
        stream.take(data, 10.5 + 0.1 * k)
    assert stream.done
    row = stream.row(99.0)
    assert row["ttft_s"] == pytest.approx(0.6)  # the first piece is empty
    assert row["e2e_s"] == pytest.approx(0.8)  # usage and [DONE] come later and do not count
    assert row["tpot_s"] == pytest.approx(0.2 / 4)  # by tokens, of which pieces hold several
    assert row["itl_ms"] == "100.00 100.00"
    assert (row["prompt_tokens"], row["output_tokens"]) == (3, 5)
    assert row["finish_reason"] == "length"


def test_a_stream_without_tokens_or_sense_has_no_made_up_figures() -> None:
    empty = Stream(0.0)
    row = empty.row(2.0)
    assert row["e2e_s"] == 2.0
    assert not {"ttft_s", "tpot_s", "itl_ms", "output_tokens"} & set(row)
    for data, text in (
        (b'{"error": {"message": "engine dead"}}', "engine dead"), (b"{", "not a completion event"),
        (b"[1]", "not a completion event"),
    ):  # fmt: skip
        broken = Stream(0.0)
        broken.take(data, 1.0)
        assert text in broken.error
    one = Stream(0.0)
    one.take(json.dumps(chunk("a")).encode(), 1.0)
    one.take(b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}', 1.1)
    assert one.row(2.0)["itl_ms"] == ""
    assert "tpot_s" not in one.row(2.0)


def test_the_servers_parts_add_up_with_the_clients_time() -> None:
    row = answers.parts(TIMING, SERVED, "here", sent_s=100.0, finished_s=100.48)
    assert row["router_s"] == pytest.approx(0.01)
    assert row["rest_s"] == pytest.approx(0.005)
    assert row["queueing_s"] == pytest.approx(0.04)
    assert row["inference_s"] == pytest.approx(0.43)
    assert row["route"] == "short"
    total = row["queueing_s"] + row["inference_s"] + row["postprocess_s"] + row["rest_s"]
    assert total == pytest.approx(0.48)


def test_two_clocks_leave_the_rest_empty() -> None:
    row = answers.parts(TIMING, SERVED, "elsewhere", sent_s=5.0, finished_s=5.6)
    assert "rest_s" not in row
    assert row["router_s"] == pytest.approx(0.6 - 0.465)


@pytest.mark.parametrize(
    ("timing", "served"),
    [(None, None), (TIMING, None), (TIMING, "r1 7"), ("total;dur=3", SERVED), ("x", SERVED)],
)
def test_answers_of_other_servers_leave_the_parts_empty(
    timing: str | None, served: str | None
) -> None:
    row = answers.parts(timing, served, "here", 0.0, 1.0)
    assert set(row) == {"error"}
    assert "X-Served-By" in row["error"]


def test_plain_completions() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    body = {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": usage}
    row = answers.completion(json.dumps(body).encode())
    assert row == {"prompt_tokens": 3, "output_tokens": 5, "finish_reason": "stop"}
    for other in (b"hello", b"[]", b"{}", b'{"usage": 3}', b'{"scores": [0.1]}'):
        assert answers.completion(other) == {}


def test_failures_have_an_outcome_each() -> None:
    outcomes = {s: answers.failure(s, b"why")["outcome"] for s in (429, 503, 408, 504, 400, 500)}
    assert list(outcomes.values()) == [
        "rejected", "rejected", "timeout", "timeout", "invalid", "error",
    ]  # fmt: skip


def test_pauses_follow_the_policy() -> None:
    dice = random.Random(1)
    honour = [answers.pause_s("honour", "4", dice) for _ in range(200)]
    assert 4 <= min(honour) < 4.1
    assert 5.9 < max(honour) <= 6
    for untold in (None, "", "Wed, 21 Oct 2026 07:28:00 GMT"):
        assert 1 <= answers.pause_s("honour", untold, dice) <= 1.5
    assert answers.pause_s("storm", "4", dice) <= 0.005
