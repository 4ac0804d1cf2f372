"""What happens to an output after the model: format, length, blocked words, a JSON schema.

`Policy` and `check_schema` are pure; `Postprocess` is the deployment on CPU that applies them to
whole answers. Streams are cleaned piece by piece where they are made (`StreamCleaner`): a call to
another replica for each piece would cost more than the piece.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from kit.refusal import BadRequest
from kit.replica import Replica

MAX_SCHEMA_CHARS = 100_000
MASK = "***"


@dataclass(frozen=True)
class Policy:
    """How outputs are cleaned; made from the knobs by `policy`."""

    strip: bool = True
    max_chars: int | None = None
    blocked: re.Pattern[str] | None = None

    def clean(self, text: str) -> str:
        """The text as it may go out."""
        if self.blocked:
            text = self.blocked.sub(MASK, text)
        if self.strip:
            text = text.strip()
        return text[: self.max_chars]


def policy(values: dict[str, Any]) -> Policy:
    """The policy that the knobs ask for; blocked words count as whole words, in any case."""
    words = [re.escape(w) for w in re.split(r"[,\s]+", values["blocked_words"]) if w]
    blocked = re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", re.IGNORECASE) if words else None
    return Policy(values["strip_output"], values["max_output_chars"], blocked)


class StreamCleaner:
    """Cleans a text that comes in pieces: the pieces joined read as `Policy.clean` of the whole.

    What might still change is held back: the last word, and white space that may be the end.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._raw = ""
        self._sent_chars = 0

    def feed(self, piece: str, last: bool = False) -> str:
        """What may go out now that `piece` has come; `last` lets go of all that is held back."""
        self._raw += piece
        raw = self._raw
        if not last:
            cut = max((m.start() for m in re.finditer(r"\s+\S*$", raw)), default=0)
            raw = raw[:cut]
        clean = self._policy.clean(raw)
        if not last and not self._policy.strip:
            clean = clean.rstrip()
        new = clean[self._sent_chars :]
        self._sent_chars += len(new)
        return new


def compile_schema(schema: dict[str, Any]) -> Any:
    """A validator of a JSON schema; it fetches nothing, and its patterns run in linear time.

    Raises:
        BadRequest: when it is no schema, refers to other documents, or is too large.
    """
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise BadRequest(
            f"the schema has over {MAX_SCHEMA_CHARS} characters", param="response_format"
        )
    try:
        return jsonschema_rs.validator_for(
            schema, offline=True, pattern_options=jsonschema_rs.RegexOptions()
        )
    except ValueError as error:
        why = str(error).splitlines()[0]
        raise BadRequest(f"not a usable JSON schema: {why}", param="response_format") from None


def check_schema(text: str, schema: dict[str, Any]) -> None:
    """Check a structured output.

    Raises:
        BadRequest: with status 422, when the output is not JSON or not what the schema says.
    """
    validator = compile_schema(schema)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadRequest(
            f"the output is not JSON ({error}); it begins {text[:80]!r}", 422, "response_format"
        ) from None
    fault = next(iter(validator.iter_errors(value)), None)
    if fault is not None:
        place = "/".join(str(part) for part in fault.instance_path) or "the whole"
        raise BadRequest(
            f"the output does not meet the schema: {fault.message} (at {place})", 422,
            "response_format",
        )  # fmt: skip


class Postprocess(Replica):
    """The deployment: cleans and checks whole outputs, on CPU."""

    route = "postprocess"

    def __init__(self) -> None:
        super().__init__()
        self._policy = Policy()

    def apply(self, values: dict[str, Any]) -> None:
        self._policy = policy(values)

    async def finish(self, text: str, schema: dict[str, Any] | None) -> str | BadRequest:
        """The clean output, or why it may not go out."""
        text = self._policy.clean(text)
        if schema is not None:
            try:
                check_schema(text, schema)
            except BadRequest as refusal:
                return refusal
        return text
