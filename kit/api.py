"""The HTTP face of an LLM app: FastAPI routes over a backend that answers calls.

Bad requests become 400 with a body as the OpenAI API shapes it, overload becomes 429 or 503 with
`Retry-After`. A stream begins once its first token is there, so that its errors have a status too;
its last event before `[DONE]` carries the durations that a plain answer has in its headers.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kit.clock import SERVED_BY
from kit.contract import (
    Answer,
    BadRequest,
    Call,
    ChatRequest,
    CompletionRequest,
    Overloaded,
    PlainRequest,
    Sampling,
    error_body,
    fields_of,
    read,
)
from kit.knobs import Knob, explain_errors

MAX_BODY_BYTES = 4_000_000
_ARRIVED = "kit.arrived_s"


class Backend(Protocol):
    """What the routes need: an app that answers calls, at once or piece by piece."""

    model_name: str

    async def answer(self, call: Call, arrived_s: float) -> Answer:
        """The whole answer."""

    def stream(self, call: Call, arrived_s: float) -> AsyncIterator[str | Answer]:
        """Pieces of text as they come, then the answer, its `text` empty."""


class ErrorDetail(BaseModel):
    """What is wrong, as the OpenAI API says it."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class Usage(BaseModel):
    """Lengths in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PlainAnswer(BaseModel):
    """The answer of `POST /`."""

    text: str
    usage: Usage
    finish_reason: str


class OpenAIAnswer(BaseModel):
    """A completion, or a chat completion."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage


_TEXTS = {
    400: "The request cannot be served as it is",
    404: "No such model, or no such job",
    413: "The body is too large",
    422: "The output is not what response_format asks for",
    429: "Too many requests; Retry-After says when to come again",
    499: "The client left",
    503: "Too many requests, or no replica; Retry-After says when to come again",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _TEXTS.items()
}


def new_api(title: str, bodies: Mapping[str, type[BaseModel]]) -> FastAPI:
    """A FastAPI app whose errors have the shape of the OpenAI API's; bodies are bounded.

    Args:
        title: what its document is called.
        bodies: the model of the body of each path, whose fields error texts describe.
    """
    api = FastAPI(title=title, version="1", strict_content_type=False, responses=_ERRORS)
    fields = {path: fields_of(model) for path, model in bodies.items()}

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        return _invalid(error, fields.get(path, {}))

    api.add_middleware(_Door)
    api.add_exception_handler(RequestValidationError, invalid)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(BadRequest, _refused)
    api.add_exception_handler(Overloaded, overloaded)
    return api


def arrival_s(request: Request) -> float:
    """When a request's first byte of body reached this replica, on the monotonic clock."""
    return float(request.scope[_ARRIVED])


def make_api(backend: Backend) -> FastAPI:
    """The routes of one LLM app; serves `/openapi.json` and `/docs` too."""
    api = new_api(
        "Serve tuning kit",
        {
            "/": PlainRequest,
            "/v1/completions": CompletionRequest,
            "/v1/chat/completions": ChatRequest,
        },
    )
    streamed: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/event-stream": {}}, "description": "The answer"}
    }

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        card = {"id": backend.model_name, "object": "model", "created": 0, "owned_by": "kit"}
        return {"object": "list", "data": [card]}

    @api.post("/", response_model=PlainAnswer, responses=streamed)
    async def plain(body: PlainRequest, request: Request) -> Response:
        """Continue a text: the plain contract."""
        return await _serve(backend, body, request, _Plain(backend.model_name))

    @api.post("/v1/completions", response_model=OpenAIAnswer, responses=streamed)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await _serve(backend, body, request, _Completion(backend.model_name))

    @api.post("/v1/chat/completions", response_model=OpenAIAnswer, responses=streamed)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _serve(backend, body, request, _Chat(backend.model_name))

    return api


async def complete(backend: Backend, body: dict[str, Any]) -> dict[str, Any]:
    """`POST /` for a caller with a Serve handle instead of HTTP.

    Raises:
        BadRequest, Overloaded: as over HTTP.
    """
    answer = await backend.answer(read(PlainRequest, body).call(), time.monotonic())
    return _Plain(backend.model_name).whole(answer)


async def _serve(backend: Backend, body: Sampling, request: Request, shape: _Shape) -> Response:
    arrived_s = arrival_s(request)
    call = body.call()
    if body.model not in (None, "", backend.model_name):
        raise BadRequest(
            f"model = {body.model[:100]!r}: this app serves {backend.model_name!r}", 404, "model"
        )
    if not body.stream:
        answer = await backend.answer(call, arrived_s)
        return JSONResponse(shape.whole(answer), headers=answer.headers | _capped(answer))
    pieces = backend.stream(call, arrived_s)
    first = await anext(pieces)
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return StreamingResponse(
        _events(first, pieces, shape, usage), media_type="text/event-stream",
        headers={"Cache-Control": "no-cache"},
    )  # fmt: skip


async def _events(
    first: str | Answer, pieces: AsyncIterator[str | Answer], shape: _Shape, usage: bool
) -> AsyncIterator[str]:
    """Server-sent events; one piece is fetched after the one before it was taken."""
    piece = first
    try:
        while isinstance(piece, str):
            yield _event(shape.piece(piece))
            piece = await anext(pieces)
        last = shape.end(piece)
        timing = {
            "server_timing": piece.headers.get("Server-Timing", ""),
            "served_by": piece.headers.get(SERVED_BY, ""),
            **({"max_new_tokens": piece.cap_tokens} if piece.cap_tokens else {}),
        }
        if usage:
            yield _event(last)
            last = shape.piece(None) | {"usage": piece.usage()}
        yield _event(last | {"kit": timing})
    except (BadRequest, Overloaded) as error:
        yield _event(error_body(str(error), type(error).__name__, code=error.status))
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


class _Shape:
    """How one kind of route words its answers."""

    def __init__(self, model_name: str) -> None:
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model_name,
        }

    prefix, kind = "cmpl", "text_completion"

    def whole(self, answer: Answer) -> dict[str, Any]:
        """An answer in one piece."""
        choice = {"index": 0, "text": answer.text, "finish_reason": answer.finish_reason}
        return self.head | {"choices": [choice | {"logprobs": None}], "usage": answer.usage()}

    def piece(self, text: str | None) -> dict[str, Any]:
        """One piece of a stream; None is a chunk without any text."""
        if text is None:
            return self.head | {"choices": []}
        choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
        return self.head | {"choices": [choice]}

    def end(self, answer: Answer) -> dict[str, Any]:
        """The chunk that says why the output ended."""
        choice = {"index": 0, "text": answer.text, "finish_reason": answer.finish_reason}
        return self.head | {"choices": [choice | {"logprobs": None}]}


class _Completion(_Shape):
    pass


class _Plain(_Shape):
    def whole(self, answer: Answer) -> dict[str, Any]:
        return {
            "text": answer.text,
            "usage": answer.usage(),
            "finish_reason": answer.finish_reason,
        }


class _Chat(_Shape):
    prefix, kind = "chatcmpl", "chat.completion"

    def __init__(self, model_name: str) -> None:
        super().__init__(model_name)
        self._begun = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
        return self.head | {"choices": [choice], "usage": answer.usage()}

    def piece(self, text: str | None) -> dict[str, Any]:
        head = self.head | {"object": "chat.completion.chunk"}
        if text is None:
            return head | {"choices": []}
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        choice = {"index": 0, "delta": role | {"content": text}, "finish_reason": None}
        return head | {"choices": [choice]}

    def end(self, answer: Answer) -> dict[str, Any]:
        choice = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
        if answer.text:
            choice["delta"] = {"content": answer.text}
        return self.head | {"object": "chat.completion.chunk", "choices": [choice]}


def _capped(answer: Answer) -> dict[str, str]:
    return {"X-Max-New-Tokens": str(answer.cap_tokens)} if answer.cap_tokens else {}


class _Door:
    """Stamps the arrival of a request and reads its body, refusing it once it is too large."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[_ARRIVED] = time.monotonic()
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > MAX_BODY_BYTES:
                text = f"the body has over {MAX_BODY_BYTES // 1_000_000} MB: more than any request"
                refusal = JSONResponse(error_body(text, "invalid_request_error", code=413), 413)
                await refusal(scope, receive, send)
                return
        whole: list[Message] = [
            {"type": "http.request", "body": b"".join(parts), "more_body": False}
        ]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, again, send)


def _invalid(error: RequestValidationError, fields: dict[str, Knob]) -> Response:
    errors = [e | {"loc": e["loc"][1:]} for e in error.errors()]  # "body" comes first
    if any(e["type"] == "json_invalid" for e in errors):
        text, param = f"the body is not JSON: {errors[0]['ctx']['error']}", None
    elif not errors[0]["loc"] and errors[0]["type"] != "value_error":
        text, param = "the body must be a JSON object", None
    else:
        text = explain_errors(errors, fields)
        param = str(errors[0]["loc"][0]) if errors[0]["loc"] else None
    text = text if len(text) <= 500 else text[:500] + "…"
    return JSONResponse(error_body(text, "invalid_request_error", param, 400), 400)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = error.detail
    if error.status_code == 400 and "parsing the body" in text:
        text = "the body is not JSON: it cannot be read as such"
    kind = "invalid_request_error"
    return JSONResponse(error_body(text, kind, code=error.status_code), error.status_code)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    body = error_body(str(error), "invalid_request_error", error.param, error.status)
    return JSONResponse(body, error.status)


async def overloaded(_: Request, error: Exception) -> Response:
    """The answer to a request that cannot be served now."""
    assert isinstance(error, Overloaded)
    wait_s = error.retry_after_s
    headers = {} if wait_s is None else {"Retry-After": str(math.ceil(wait_s))}
    return JSONResponse(
        error_body(str(error), "overloaded", code=error.status), error.status, headers
    )
