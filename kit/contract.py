"""What LLM apps take and answer over HTTP: a subset of the OpenAI API, and the plain `POST /`.

Sampling parameters have vLLM's names (`ignore_eos`, `min_tokens`). A parameter that this subset does
not know is refused, unless its value asks for nothing: what is ignored in silence misleads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kit.knobs import Knob, describe, explain
from kit.refusal import BadRequest

MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 256

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False, 0), "top_p": (1,),
    "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "tools": ([],), "suffix": ("",),
    "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
}  # fmt: skip
"""Parameters of the OpenAI API that are not offered, with the values that ask for nothing."""
_HARMLESS = ("user", "metadata", "store", "service_tier", "safety_identifier")


def _param(default: Any, unit: str, text: str, **bounds: Any) -> Any:
    return Field(default, description=text, json_schema_extra={"unit": unit}, **bounds)


class StreamOptions(BaseModel):
    """What a stream tells beside the text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False


class JsonSchema(BaseModel):
    """The schema of structured output, as the OpenAI API wraps it."""

    model_config = ConfigDict(strict=True, populate_by_name=True)

    name: str = "output"
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """What the output must be: any text, or JSON that a schema describes."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("response_format: type 'json_schema' needs a json_schema")
        return self


class Sampling(BaseModel):
    """What all kinds of requests can ask for."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )  # fmt: skip

    model: str | None = _param(None, "", "Name of the model; this server has one")
    max_tokens: int | None = _param(
        None, "tokens", "Longest output; by default 16, for a chat what the model has room for",
        ge=1, le=1_000_000,
    )  # fmt: skip
    min_tokens: int | None = _param(None, "tokens", "Shortest output", ge=0, le=1_000_000)
    temperature: float | None = _param(
        None, "", "0 takes the likeliest token every time; 1 by default", ge=0, le=2
    )
    ignore_eos: bool | None = _param(False, "", "Go on to max_tokens though the model would end")
    stop: str | list[str] | None = _param(None, "", "Output ends before any of these texts")
    stream: bool | None = _param(False, "", "Send the output as it comes, as server-sent events")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _offered(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            known = _NEUTRAL.get(name, ())
            if value is None or name in _HARMLESS or any(value == v for v in known):
                continue
            hint = f"; it can only be {known[0]!r}" if known else ""
            raise ValueError(f"{name} = {_short(value)}: not offered by this app{hint}")
        return self

    def stops(self) -> tuple[str, ...]:
        """The stop strings.

        Raises:
            BadRequest: for more or longer ones than are bearable, and for empty ones.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOP_STRINGS:
            raise BadRequest(
                f"stop has {len(stops)} texts: at most {MAX_STOP_STRINGS} are taken", param="stop"
            )
        if any(not 0 < len(s) <= MAX_STOP_CHARS for s in stops):
            raise BadRequest(
                f"stop holds an empty text or one of over {MAX_STOP_CHARS} characters", param="stop"
            )
        return tuple(stops)

    def schema_asked(self) -> dict[str, Any] | None:
        """The JSON schema that the output must meet, if any."""
        wanted = self.response_format and self.response_format.json_schema
        return wanted.json_schema if wanted else None

    def call(self) -> Call:
        """The request as an app handles it."""
        raise NotImplementedError

    def _call(self, **what: Any) -> Call:
        return Call(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            ignore_eos=bool(self.ignore_eos),
            stop=self.stops(),
            schema=self.schema_asked(),
            **what,
        )


class PlainRequest(Sampling):
    """The body of `POST /`."""

    prompt: str = _param(..., "", "The text to continue", min_length=1)
    max_tokens: int | None = _param(16, "tokens", "Longest output", ge=1, le=1_000_000)

    def call(self) -> Call:
        return self._call(prompt=self.prompt)


class CompletionRequest(Sampling):
    """The body of `POST /v1/completions`: one prompt, as text or as token ids."""

    prompt: str | list[int] = _param(..., "", "The text, or its token ids, to continue")
    max_tokens: int | None = _param(16, "tokens", "Longest output", ge=1, le=1_000_000)

    def call(self) -> Call:
        if isinstance(self.prompt, str):
            return self._call(prompt=self.prompt)
        if not all(0 <= t < 2**31 for t in self.prompt):
            raise BadRequest(
                "prompt holds a token id that is not from 0 to 2³¹ − 1", param="prompt"
            )
        return self._call(prompt_token_ids=tuple(self.prompt))


class TextPart(BaseModel):
    """A part of a message's content; only text is taken."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(Sampling):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = _param(
        None, "tokens", "The newer name of max_tokens", ge=1, le=1_000_000
    )

    def call(self) -> Call:
        call = self._call(
            messages=tuple({"role": m.role, "content": m.text()} for m in self.messages)
        )
        call.max_tokens = self.max_completion_tokens or self.max_tokens
        return call


@dataclass
class Call:
    """One request on its way through an app; plain values, so that it travels between replicas.

    One of `prompt`, `prompt_token_ids` and `messages` is set. `max_tokens` None is as many as there
    is room for.
    """

    prompt: str = ""
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    schema: dict[str, Any] | None = None


@dataclass
class Answer:
    """What became of a call: lengths in tokens; `cap_tokens` is the output cap where it cut.

    `headers` tell which replica served it, and how long each part took (`kit.replica`).
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    cap_tokens: int | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def usage(self) -> dict[str, int]:
        """Token counts as the OpenAI API words them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
        }


def error_body(
    message: str, kind: str, param: str | None = None, code: Any = None
) -> dict[str, Any]:
    """An error as the OpenAI API shapes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def read(model: type[Sampling], body: dict[str, Any]) -> Sampling:
    """A body that came as a dict rather than over HTTP.

    Raises:
        BadRequest: when it is not as `model` says.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise why(model, error) from None


def why(model: type[BaseModel], error: ValidationError) -> BadRequest:
    """What pydantic found wrong with a body, in the words of the knobs."""
    return BadRequest(_shorter(explain(error, fields_of(model))))


def fields_of(model: type[BaseModel]) -> dict[str, Knob]:
    """The fields of a request model that error texts describe by type and bounds."""
    plain = [n for n, f in model.model_fields.items() if (f.json_schema_extra or {})]
    return {name: describe(model, name) for name in plain}


def _short(value: Any) -> str:
    return _shorter(repr(value), 60)


def _shorter(text: str, limit: int = 500) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
