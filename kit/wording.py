"""How answers are worded: the plain contract, and completions and chats of the OpenAI API.

A `Shape` makes the bodies of one answer, whole or in pieces; the models describe them in the OpenAPI
document.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from pydantic import BaseModel

from kit.contract import Answer


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


class Shape:
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


class Completion(Shape):
    """A text completion of the OpenAI API."""


class Plain(Shape):
    """The answer of `POST /`."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        return {
            "text": answer.text,
            "usage": answer.usage(),
            "finish_reason": answer.finish_reason,
        }


class Chat(Shape):
    """A chat completion of the OpenAI API."""

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
