"""The Router of the routed app, on CPU: template, length estimate, cache, and which side serves.

Short requests go to a deployment with large batches, long ones to another with small batches, so
that none waits for the longest of a mixed batch. The estimate is prompt tokens, counted by the
model's tokenizer, plus the output asked for.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from kit.api import complete, make_api
from kit.contract import Answer, Call
from kit.engine import Done
from kit.refusal import BadRequest, Overloaded, cause_of
from kit.replica import Replica
from kit.tokens import Tokenizer

OUTPUT_KNOBS = ("max_new_tokens", "strip_output", "max_output_chars", "blocked_words")
"""Knobs that make another output of the same call."""


class Router(Replica):
    """Answers calls by the side that fits them; counts what went where."""

    route = "router"

    def __init__(
        self, short: DeploymentHandle, long: DeploymentHandle, tokens: Tokenizer, model_name: str
    ) -> None:
        super().__init__()
        self.model_name = model_name
        self._sides = {"short": short, "long": long}
        self._tokens = tokens
        self._routed = {"short": 0, "long": 0, "cache": 0}
        self._cache: OrderedDict[str, Answer] = OrderedDict()
        self._values: dict[str, Any] = {}

    def __serve_build_asgi_app__(self) -> Any:
        return make_api(self)

    def apply(self, values: dict[str, Any]) -> None:
        self._values = values
        self._trim()

    def work(self) -> dict[str, Any]:
        stats = {f"{name}_requests": float(count) for name, count in self._routed.items()}
        return super().work() | {
            "engine": stats | {"response_cache_entries": float(len(self._cache))}
        }

    async def answer(self, call: Call, arrived_s: float) -> Answer:
        """The whole answer, from the cache or from one side."""
        call, side = self._prepare(call)
        key = self._key(call)
        if key in self._cache:
            return self._from_cache(key, arrived_s)
        self._routed[side] += 1
        try:
            with self.counted():
                answer: Answer = await self._sides[side].answer.remote(call)
        except (BadRequest, Overloaded) as error:
            raise cause_of(error) from None
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise _overloaded(error) from None
        if call.temperature == 0 and self._values["response_cache_entries"]:
            self._cache[key] = answer
            self._trim()
        return replace(answer, headers=answer.headers | {"X-Cache-Key": key})

    async def stream(self, call: Call, arrived_s: float) -> AsyncIterator[str | Answer]:
        """The answer as its side makes it; streams are not cached."""
        call, side = self._prepare(call)
        self._routed[side] += 1
        handle = self._sides[side].options(stream=True)
        pieces = handle.stream.remote(call)
        try:
            with self.counted():
                async for piece in pieces:
                    yield piece
        except (BadRequest, Overloaded) as error:
            raise cause_of(error) from None
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise _overloaded(error) from None
        finally:
            pieces.cancel()

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """`POST /` for callers with a handle."""
        return await complete(self, body)

    def _prepare(self, call: Call) -> tuple[Call, str]:
        """The call with its prompt in the template, and the side that serves it."""
        if call.messages is not None:
            prompt = self._tokens.chat_prompt(call.messages)
            call = replace(call, prompt=prompt, messages=None)
        elif call.prompt_token_ids is None:
            template = self._values["prompt_template"]
            call = replace(call, prompt=template.replace("{prompt}", call.prompt))
        ids = call.prompt_token_ids
        tokens = self._tokens.count_tokens(call.prompt) if ids is None else len(ids)
        cap = self._values["max_new_tokens"]
        wanted = min(call.max_tokens or cap, cap)
        is_long = tokens + wanted > self._values["route_threshold_tokens"]
        return call, "long" if is_long else "short"

    def _trim(self) -> None:
        while len(self._cache) > self._values["response_cache_entries"]:
            self._cache.popitem(last=False)

    def _key(self, call: Call) -> str:
        """The same for calls that must get the same answer: model, call, and what changes outputs."""
        what = [self.model_name, asdict(call), *(self._values[name] for name in OUTPUT_KNOBS)]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]

    def _from_cache(self, key: str, arrived_s: float) -> Answer:
        self._cache.move_to_end(key)
        self._routed["cache"] += 1
        known = self._cache[key]
        now_s = time.monotonic()
        done = Done(known.text, 0, 0, now_s, now_s, now_s, now_s)
        headers = self.timing(arrived_s, done, now_s, "cache")
        return replace(known, headers=headers | {"X-Cache": "hit", "X-Cache-Key": key})


def _overloaded(error: BackPressureError | DeploymentUnavailableError) -> Overloaded:
    if isinstance(error, BackPressureError):
        _, limit, status, retry_after_s = error.args
        return Overloaded(f"{limit} requests wait already: come again", status, retry_after_s)
    return Overloaded(f"no replica can serve this now: {error}")
