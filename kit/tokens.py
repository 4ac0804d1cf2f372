"""Tokenizers as apps need them: count a text, and put a conversation into one prompt."""

from __future__ import annotations

from typing import Any, Protocol


class Tokenizer(Protocol):
    """What routing, guards and chats need of a model's tokenizer."""

    def count_tokens(self, text: str) -> int:
        """Length of a text in tokens."""

    def chat_prompt(self, messages: tuple[dict[str, str], ...]) -> str:
        """A conversation (`role`, `content`) as the prompt that makes the model answer it."""


class Words:
    """The emulated model's tokenizer: a word is a token."""

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def chat_prompt(self, messages: tuple[dict[str, str], ...]) -> str:
        return "\n".join(m["content"] for m in messages)


class ModelTokens:
    """The tokenizer of a real model, from its folder or by its name."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def chat_prompt(self, messages: tuple[dict[str, str], ...]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        )
