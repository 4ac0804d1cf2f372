"""The HTTP face of an LLM app: FastAPI routes over a backend that answers calls.

A stream begins once its first token is there, so that its errors have a status too;
its last event before `[DONE]` carries the durations that a plain answer has in its headers.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from kit.clock import SERVED_BY
from kit.contract import (
    Answer,
    Call,
    ChatRequest,
    CompletionRequest,
    PlainRequest,
    Sampling,
    error_body,
    read,
)
from kit.door import arrival_s, new_api
from kit.refusal import BadRequest, Overloaded
from kit.wording import Chat, Completion, OpenAIAnswer, Plain, PlainAnswer, Shape


class Backend(Protocol):
    """What the routes need: an app that answers calls, at once or piece by piece."""

    model_name: str

    async def answer(self, call: Call, arrived_s: float) -> Answer:
        """The whole answer."""

    def stream(self, call: Call, arrived_s: float) -> AsyncIterator[str | Answer]:
        """Pieces of text as they come, then the answer, its `text` empty."""


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
        return await _serve(backend, body, request, Plain(backend.model_name))

    @api.post("/v1/completions", response_model=OpenAIAnswer, responses=streamed)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await _serve(backend, body, request, Completion(backend.model_name))

    @api.post("/v1/chat/completions", response_model=OpenAIAnswer, responses=streamed)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _serve(backend, body, request, Chat(backend.model_name))

    return api


async def complete(backend: Backend, body: dict[str, Any]) -> dict[str, Any]:
    """`POST /` for a caller with a Serve handle instead of HTTP.

    Raises:
        BadRequest, Overloaded: as over HTTP.
    """
    answer = await backend.answer(read(PlainRequest, body).call(), time.monotonic())
    return Plain(backend.model_name).whole(answer)


async def _serve(backend: Backend, body: Sampling, request: Request, shape: Shape) -> Response:
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
    first: str | Answer, pieces: AsyncIterator[str | Answer], shape: Shape, usage: bool
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


def _capped(answer: Answer) -> dict[str, str]:
    return {"X-Max-New-Tokens": str(answer.cap_tokens)} if answer.cap_tokens else {}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
