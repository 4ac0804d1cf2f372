"""An app that knows nothing of the kit, as somebody else would write one: `tests/test_foreign.py`."""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from starlette.requests import Request


@serve.deployment(
    ray_actor_options={"num_cpus": 0}, user_config={"max_batch_size": 2, "motto": "a"}
)
class Completer:
    """Answers any POST as an OpenAI completion; raises on the unlucky batch size."""

    def __init__(self) -> None:
        self.size, self.motto = 0, ""

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        if user_config["max_batch_size"] == 13:
            raise ValueError("thirteen brings bad luck")
        self.size, self.motto = user_config["max_batch_size"], user_config["motto"]
        self.complete.set_max_batch_size(self.size)

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.01)
    async def complete(self, prompts: list[str]) -> list[dict[str, Any]]:
        choice = {"index": 0, "text": self.motto, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        told = {"pid": os.getpid(), "max_batch_size": self.size}
        return [told | {"choices": [choice], "usage": usage} for _ in prompts]

    async def __call__(self, request: Request) -> dict[str, Any]:
        answer: dict[str, Any] = await self.complete((await request.json())["prompt"])
        return answer


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Front:
    """Passes on; has nothing to tune."""

    def __init__(self, completer: Any) -> None:
        self.completer = completer

    async def __call__(self, request: Request) -> dict[str, Any]:
        answer: dict[str, Any] = await self.completer.complete.remote(
            (await request.json())["prompt"]
        )
        return answer


def build(args: dict[str, Any]) -> serve.Application:
    """Completer alone, or with `front` behind a second deployment."""
    completer = Completer.bind()
    return Front.bind(completer) if args.get("front") else completer
