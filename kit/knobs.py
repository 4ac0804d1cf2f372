"""What a knob is: a field of a pydantic model, with unit, bounds, help and what a change costs.

Models declare fields with `knob`; `describe` reads one back for widgets, tables and error texts, and
`explain` says in those words what pydantic found wrong.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import PydanticUndefined

Level = Literal["app", "batching", "deployment", "autoscaling", "start"]
Cost = Literal["live", "next batch", "restart"]
PLACES: dict[Level, str] = {
    "app": "the application's args",
    "batching": "user_config",
    "deployment": "the deployment itself",
    "autoscaling": "autoscaling_config",
    "start": "what is set before Ray starts",
}
"""Where in what Serve is given the knobs of a level stand."""


def knob(
    default: Any,
    level: Level,
    cost: Cost,
    unit: str,
    text: str,
    only: Mapping[str, tuple[Any, ...]] | None = None,
    **bounds: Any,
) -> Any:
    """A pydantic field that is a knob; `bounds` are pydantic's `ge`, `gt`, `le`.

    `only` says where it matters: other knobs → the values of theirs with which it does something.
    """
    extra: dict[str, Any] = {"level": level, "cost": cost, "unit": unit, "only": dict(only or {})}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


@dataclass(frozen=True)
class Knob:
    """One knob as widgets, tables and error texts see it. `None` bounds are open."""

    name: str
    level: Level
    cost: Cost
    unit: str
    help: str
    default: Any
    kind: Literal["whole number", "number", "choice", "text"]
    low: float | None
    high: float | None
    low_open: bool
    choices: tuple[Any, ...]
    nullable: bool
    only: Mapping[str, tuple[Any, ...]]

    def matters(self, settings: BaseModel) -> bool:
        """Whether this knob does anything beside those settings."""
        return all(getattr(settings, other) in values for other, values in self.only.items())

    @property
    def allowed(self) -> str:
        """What the knob takes, in words: `a whole number from 1 to 512 (requests)`."""
        words = []
        if self.kind in ("whole number", "number"):
            start = f"above {self.low:.9g}" if self.low_open else f"from {self.low:.9g}"
            words.append(f"a {self.kind} {start} to {self.high:.9g}")
            if self.unit:
                words[-1] += f" ({self.unit})"
        elif self.kind == "text":
            words.append("text")
        words += [repr(c) for c in self.choices]
        return " or ".join(words + (["None"] if self.nullable else []))


def describe(model: type[BaseModel], name: str) -> Knob:
    """Read one field of a pydantic model whose `json_schema_extra` has level, cost and unit."""
    field = model.model_fields[name]
    hint = typing.get_type_hints(model, include_extras=True)[name]
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    annotated = typing.get_args(hint) if is_union else (hint,)
    parts = [getattr(p, "__origin__", p) if hasattr(p, "__metadata__") else p for p in annotated]
    metadata = [*field.metadata, *(m for p in annotated for m in getattr(p, "__metadata__", ()))]
    choices = tuple(c for p in parts if typing.get_origin(p) is Literal for c in typing.get_args(p))
    if bool in parts:
        choices = (True, False)
    kinds = {int: "whole number", float: "number", str: "text"}
    kind = next((kinds[p] for p in parts if p in kinds), "choice")
    bounds = {k: getattr(m, k) for m in metadata for k in ("ge", "gt", "le") if hasattr(m, k)}
    extra = typing.cast(dict[str, Any], field.json_schema_extra or {})
    return Knob(
        name=name,
        level=extra.get("level", "app"),
        cost=extra.get("cost", "restart"),
        unit=extra.get("unit", ""),
        help=field.description or "",
        default=None if field.default is PydanticUndefined else field.default,
        kind=typing.cast(Any, kind),
        low=bounds.get("ge", bounds.get("gt")),
        high=bounds.get("le"),
        low_open="gt" in bounds,
        choices=choices,
        nullable=type(None) in parts,
        only=extra.get("only", {}),
    )


def explain(error: ValidationError, known: dict[str, Knob]) -> str:
    """A pydantic error in our words: a line for each wrong field."""
    return explain_errors(typing.cast(list[dict[str, Any]], error.errors()), known)


def explain_errors(errors: Iterable[Mapping[str, Any]], known: dict[str, Knob]) -> str:
    """The same for errors as pydantic lists them."""
    lines: dict[str, str] = {}
    for e in errors:
        name = str(e["loc"][0]) if e["loc"] else ""
        if name in known:
            value = e["input"]
            if e["type"] == "missing":
                lines[name] = f"{name} is missing: must be {known[name].allowed}"
            else:
                lines[name] = f"{name} = {value!r}: must be {known[name].allowed}"
        else:
            place = ".".join(str(part) for part in e["loc"])
            text = str(e["msg"]).removeprefix("Value error, ")
            lines[place] = f"{place}: {text[0].lower()}{text[1:]}" if place else text
    return "\n".join(lines.values())


def unknown(name: str, level: Level | None, known: Mapping[str, Knob]) -> str:
    """Why `name` is not accepted at `level`, with the nearest right name and where it belongs."""
    here = f" in {PLACES[level]}" if level else ""
    if name in known:
        return f"{name}{here}: belongs in {PLACES[known[name].level]}; Serve would ignore it"
    near = difflib.get_close_matches(name, known, 1, 0.5)
    if near:
        place = PLACES[known[near[0]].level]
        return f"{name}{here}: no such knob; did you mean {near[0]!r} (in {place})?"
    return f"{name}{here}: no such knob; there are: {', '.join(known)}"
