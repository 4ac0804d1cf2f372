"""The door of every HTTP app: bounded bodies, the instant of arrival, and errors in one shape.

Bad requests become 400 with a body as the OpenAI API shapes it, overload becomes 429 or 503 with
`Retry-After`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kit.contract import error_body, fields_of
from kit.knobs import Knob, explain_errors
from kit.refusal import BadRequest, Overloaded

MAX_BODY_BYTES = 4_000_000
_ARRIVED = "kit.arrived_s"


class ErrorDetail(BaseModel):
    """What is wrong, as the OpenAI API says it."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


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
