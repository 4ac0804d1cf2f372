"""The HTTP contract without a cluster: what bodies mean, how answers and streams are worded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from kit.api import make_api
from kit.contract import (
    Answer,
    Call,
    ChatRequest,
    CompletionRequest,
    PlainRequest,
    read,
)
from kit.postprocess import StreamCleaner, check_schema, compile_schema, policy
from kit.refusal import BadRequest, Overloaded
from kit.settings import Settings


class Echo:
    """A backend that answers with what it was asked."""

    model_name = "echo"

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.error: Exception | None = None

    async def answer(self, call: Call, arrived_s: float) -> Answer:
        self.calls.append(call)
        if self.error:
            raise self.error
        return Answer(f"<{call.prompt}>", "length", 2, 3, headers={"X-Served-By": "me"})

    async def stream(self, call: Call, arrived_s: float) -> AsyncIterator[str | Answer]:
        if self.error:
            raise self.error
        for piece in ("uno ", "dos"):
            yield piece
        yield Answer("", "stop", 2, 2, headers={"X-Served-By": "me", "Server-Timing": "t"})


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def client(echo: Echo) -> TestClient:
    return TestClient(make_api(echo), raise_server_exceptions=False)


def events(text: str) -> list[dict[str, Any]]:
    blocks = [b.removeprefix("data: ") for b in text.strip().split("\n\n")]
    assert blocks[-1] == "[DONE]"
    return [json.loads(b) for b in blocks[:-1]]


def test_every_route_words_the_same_answer_its_way(client: TestClient) -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    plain = client.post("/", json={"prompt": "a"})
    assert plain.json() == {"text": "<a>", "usage": usage, "finish_reason": "length"}
    assert plain.headers["X-Served-By"] == "me"
    completion = client.post("/v1/completions", json={"prompt": "a", "model": "echo"}).json()
    assert completion["object"] == "text_completion"
    assert completion["choices"][0]["text"] == "<a>"
    assert completion["usage"] == usage
    chat = client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}
    ).json()
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert client.get("/v1/models").json()["data"][0]["id"] == "echo"


def test_a_stream_ends_with_usage_durations_and_done(client: TestClient) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    answer = client.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, end, last = events(answer.text)
    assert "".join(p["choices"][0]["text"] for p in pieces) == "uno dos"
    assert end["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert last["kit"] == {"server_timing": "t", "served_by": "me"}


def test_a_chat_stream_names_its_role_once(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    *pieces, end = events(client.post("/v1/chat/completions", json=body).text)
    deltas = [p["choices"][0]["delta"] for p in pieces]
    assert deltas == [{"role": "assistant", "content": "uno "}, {"content": "dos"}]
    assert end["choices"][0]["finish_reason"] == "stop"
    assert end["kit"]["served_by"] == "me"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [(BadRequest("no", 422), 422, None), (Overloaded("full", 429, 1.2), 429, "2"),
     (Overloaded("gone", 503, None), 503, None)],
)  # fmt: skip
def test_errors_have_a_status_also_before_a_stream(
    client: TestClient, echo: Echo, stream: bool, error: Exception, status: int, retry_after: str
) -> None:
    echo.error = error
    answer = client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert answer.status_code == status
    assert answer.headers.get("Retry-After") == retry_after
    assert answer.json()["error"]["message"] == str(error)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_another_model_and_another_path_are_404_in_the_same_shape(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "model": "gpt"})
    assert answer.status_code == 404
    assert "this app serves 'echo'" in answer.json()["error"]["message"]
    assert client.get("/nowhere").json()["error"]["code"] == 404
    assert client.get("/v1/completions").status_code == 405


def test_the_document_names_every_error(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for path in ("/", "/v1/completions", "/v1/chat/completions"):
        assert {"200", "400", "413", "429", "503"} <= set(
            document["paths"][path]["post"]["responses"]
        )


@pytest.mark.parametrize(
    ("model", "body", "text"),
    [
        (PlainRequest, {"prompt": 7}, "prompt = 7: must be text"),
        (PlainRequest, {}, "prompt is missing"),
        (PlainRequest, {"prompt": "a", "top_p": 0.5}, "top_p = 0.5: not offered .* only be 1"),
        (PlainRequest, {"prompt": "a", "nonsense": 1}, "nonsense = 1: not offered"),
        (CompletionRequest, {"prompt": ["a", "b"]}, "prompt = "),
        (CompletionRequest, {"prompt": [1, -2]}, "token id"),
        (ChatRequest, {"messages": []}, "messages"),
        (ChatRequest, {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        (PlainRequest, {"prompt": "a", "stop": ["x"] * 17}, "at most 16"),
        (PlainRequest, {"prompt": "a", "stop": [""]}, "empty text"),
        (PlainRequest, {"prompt": "a", "response_format": {"type": "json_schema"}}, "json_schema"),
    ],
)  # fmt: skip
def test_bad_bodies_name_the_field_and_what_it_takes(
    model: type[Any], body: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadRequest, match=text):
        read(model, body).call()


def test_what_asks_for_nothing_is_taken(client: TestClient) -> None:
    neutral = {"n": 1, "logprobs": None, "repetition_penalty": 1.0, "user": "me", "best_of": 1}
    assert client.post("/v1/completions", json={"prompt": "a"} | neutral).status_code == 200


def test_a_chat_may_use_the_newer_name_of_max_tokens() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    call = read(ChatRequest, body | {"max_completion_tokens": 9}).call()
    assert call.max_tokens == 9
    assert call.messages == ({"role": "user", "content": "a"},)
    assert read(ChatRequest, body).call().max_tokens is None


def knob_values(**changes: object) -> dict[str, Any]:
    return Settings(**changes).user_config()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    "changes",
    [{}, {"blocked_words": "ipsum, dolor"}, {"max_output_chars": 9}, {"strip_output": False},
     {"blocked_words": "lorem", "max_output_chars": 20, "strip_output": False}],
    ids=str,
)  # fmt: skip
def test_a_stream_in_pieces_reads_as_the_whole(size: int, changes: dict[str, object]) -> None:
    text = "  lorem ipsum, dolorous Dolor\n\n ipsum lorem.  "
    rules = policy(knob_values(**changes))
    cleaner = StreamCleaner(rules)
    pieces = [cleaner.feed(text[k : k + size]) for k in range(0, len(text), size)]
    assert "".join(pieces) + cleaner.feed("", last=True) == rules.clean(text)


def test_blocked_words_are_whole_words_in_any_case() -> None:
    rules = policy(knob_values(blocked_words="Rust, c++"))
    assert rules.clean("rust rusty C++ trust") == "*** rusty *** trust"


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def test_structured_output_is_checked_and_a_miss_says_what_and_where() -> None:
    check_schema('{"age": 3}', SCHEMA)
    for text, why in (('{"age": "x"}', "integer.*at age"), ("{}", "age"), ("lorem", "not JSON")):
        with pytest.raises(BadRequest, match=why) as caught:
            check_schema(text, SCHEMA)
        assert caught.value.status == 422


@pytest.mark.parametrize(
    "schema",
    [{"type": "nope"}, {"$ref": "http://elsewhere.invalid/schema"}, {"pattern": "("},
     {"description": "x" * 200_000}],
    ids=["no such type", "elsewhere", "bad pattern", "huge"],
)  # fmt: skip
def test_schemas_that_cannot_be_used_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="schema"):
        compile_schema(schema)


def test_patterns_that_explode_elsewhere_are_checked_in_linear_time() -> None:
    with pytest.raises(BadRequest, match="does not meet"):
        check_schema(json.dumps("a" * 5000 + "!"), {"type": "string", "pattern": "^(a+)+$"})
