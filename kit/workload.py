"""What is asked of a server: how long the requests are, and how many users send them when.

A workload is a pure value. The same seed gives the same requests, each with a prompt of its own, so
that no cache can answer for the model.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kit import prompts
from kit.accelerator import DATA
from kit.knobs import describe, explain

if TYPE_CHECKING:
    import pandas as pd

_BLOCK = 4096  # requests are drawn in blocks of this many, so that any one can be reached directly


class WorkloadError(ValueError):
    """A workload that cannot be; the text names the value and what was allowed."""


@functools.cache
def _data() -> dict[str, Any]:
    return dict(json.loads((DATA / "workloads.json").read_text())["workloads"])


def length_names() -> list[str]:
    """Names of the traces whose request lengths can be drawn."""
    return list(_data())


def source(lengths: str) -> str:
    """Where the lengths come from, with the licence."""
    return str(_data()[lengths]["source"])


def _field(default: Any, unit: str, text: str, **bounds: Any) -> Any:
    return Field(
        default, description=text, json_schema_extra={"unit": unit, "cost": "live"}, **bounds
    )


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        fields = type(self).model_fields
        for name in values:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, 1, 0.0)
                raise WorkloadError(f"{name}: no such field; did you mean {near[0]!r}?")
        try:
            super().__init__(**values)
        except ValidationError as error:
            known = {n: describe(type(self), n) for n in fields}
            raise WorkloadError(explain(error, known)) from None


class Stage(_Checked):
    """From `at_s` on, this many users; reached evenly within `ramp_s` (0 is a step)."""

    at_s: float = _field(0.0, "s", "When the stage begins", ge=0, le=86_400)
    users: int = _field(1, "users", "Users from then on", ge=0, le=10_000)
    ramp_s: float = _field(0.0, "s", "How long the change takes", ge=0, le=3600)


class Workload(_Checked):
    """Closed-loop users: each sends a request, waits for the answer, thinks, sends the next."""

    kind: Literal["text", "image"] = _field(
        "text", "", "What is asked: to continue a text, or to classify an image"
    )
    lengths: str = _field("azure-2023-conv", "", "Trace whose request lengths are drawn")
    mix_lengths: str = _field("", "", "A second trace to mix in; empty means none")
    mix_share: float = _field(
        0.0, "", "Share of the requests whose lengths are drawn from mix_lengths", ge=0, le=1
    )
    prompt_tokens: int | None = _field(
        None, "tokens", "Length of every prompt; empty means drawn", ge=1, le=131_072
    )
    output_tokens: int | None = _field(
        None, "tokens", "Length of every output; empty means drawn", ge=1, le=131_072
    )
    users: int = _field(8, "users", "Users at the start", ge=0, le=10_000)
    think_time_s: float = _field(
        0.0, "s", "Mean pause of a user between answer and next request (exponential)",
        ge=0, le=3600,
    )  # fmt: skip
    stages: tuple[Stage, ...] = _field((), "", "Later changes of the number of users", strict=False)
    duration_s: float = _field(60.0, "s", "How long load is sent", gt=0, le=86_400)
    max_prompt_tokens: int = _field(
        8192, "tokens", "Longer prompts of the trace are cut to this", ge=1, le=131_072
    )
    max_output_tokens: int = _field(
        2048, "tokens", "Longer outputs of the trace are cut to this", ge=1, le=131_072
    )
    seed: int = _field(1, "", "Seed of the lengths, prompts and pauses", ge=0, le=2**31)
    timeout_s: float = _field(60.0, "s", "A user gives up on a request after this", gt=0, le=3600)
    stream: bool = _field(
        False, "", "Ask for the output token by token, so that TTFT, TPOT and ITL are measured"
    )
    leave_after_tokens: int | None = _field(
        None, "chunks", "Streaming users leave after so many pieces of the output (0: before the "
        "first); empty means they stay", ge=0, le=131_072,
    )  # fmt: skip
    leave_share: float = _field(
        1.0, "", "Share of the requests that leave_after_tokens concerns", ge=0, le=1
    )
    temperature: float = _field(
        0.0, "", "Randomness of the sampling; 0 takes the likeliest token", ge=0, le=2
    )
    ignore_eos: bool = _field(
        True, "", "Generate as many tokens as asked for, so that loads compare; this hides where "
        "the model would have stopped by itself",
    )  # fmt: skip
    retry: Literal["none", "honour", "storm"] = _field(
        "none", "", "What a user does when rejected (429, 503): give up, wait as long as "
        "Retry-After says (1 s without one) plus up to half of that, or try again within 5 ms",
    )  # fmt: skip
    max_attempts: int = _field(
        10, "attempts", "Tries of one request, the first included, unless retry is 'none'",
        ge=1, le=1000,
    )  # fmt: skip

    @model_validator(mode="after")
    def _known(self) -> Self:
        named = {"lengths": self.lengths}
        if self.mix_lengths:
            named["mix_lengths"] = self.mix_lengths
        for field, name in named.items():
            if name not in length_names():
                near = difflib.get_close_matches(name, length_names(), 1, 0.0)
                raise WorkloadError(
                    f"{field} = {name!r}: no such workload; did you mean {near[0]!r}? "
                    f"Known: {', '.join(length_names())}"
                )
        if self.mix_share and not self.mix_lengths:
            raise WorkloadError(
                f"mix_share = {self.mix_share:g} has nothing to draw from: name it in mix_lengths"
            )
        streams = self.stream and self.kind == "text"
        if self.leave_after_tokens is not None and not streams:
            raise WorkloadError(
                f"leave_after_tokens = {self.leave_after_tokens} needs a stream to leave: set "
                "stream = True and kind = 'text'"
            )
        times = [s.at_s for s in self.stages]
        if times != sorted(times) or (times and times[-1] >= self.duration_s):
            raise WorkloadError(
                f"stages at {times} s: must be in order of time and before the end at "
                f"duration_s = {self.duration_s:g}"
            )
        return self

    def requests(self, n: int) -> pd.DataFrame:
        """The first n requests: `prompt_tokens`, `max_tokens`, one row each."""
        import pandas as pd

        lengths = Lengths(self)
        rows = [lengths[i] for i in range(n)]
        return pd.DataFrame(rows, columns=["prompt_tokens", "max_tokens"])

    def prompt(self, index: int, tokens: int) -> str:
        """A prompt of exactly `tokens` words for request `index`, unlike any other's."""
        return prompts.text(self.seed, index, tokens)

    def leaves(self, index: int) -> bool:
        """Whether the user leaves the stream of request `index` in mid-way; evenly spread."""
        if self.leave_after_tokens is None:
            return False
        return int((index + 1) * self.leave_share) > int(index * self.leave_share)


class Lengths(Sequence[tuple[int, int]]):
    """Endless sequence of (prompt_tokens, output_tokens), drawn from percentiles or as fixed."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._caps = (workload.max_prompt_tokens, workload.max_output_tokens)
        self._fixed = (workload.prompt_tokens, workload.output_tokens)
        self._blocks: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: Any) -> Any:
        block, at = divmod(index, _BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block)
        return self._blocks[block][at]

    def _draw(self, block: int) -> list[tuple[int, int]]:
        w = self._workload
        columns = self._columns(w.lengths, [w.seed, 0, block])
        if w.mix_share:
            others = self._columns(w.mix_lengths, [w.seed, 2, block])
            other = np.random.default_rng([w.seed, 3, block]).random(_BLOCK) < w.mix_share
            pairs = zip(columns, others, strict=True)
            columns = [np.where(other, theirs, ours) for ours, theirs in pairs]
        columns = [
            c if fixed is None else np.full(_BLOCK, fixed)
            for c, fixed in zip(columns, self._fixed, strict=True)
        ]
        return [(int(p), int(o)) for p, o in zip(*columns, strict=True)]

    def _columns(self, name: str, seed: list[int]) -> list[Any]:
        table = _data()[name]
        percents = [*range(100), *table.get("tail_percents", []), 100]
        rng = np.random.default_rng(seed)
        columns = []
        for kind, cap in zip(("prompt_tokens", "output_tokens"), self._caps, strict=True):
            values = table[f"{kind}_percentiles"]
            values = [*values[:100], *table.get(f"{kind}_tail", []), values[100]]
            drawn = np.interp(rng.uniform(0, 100, _BLOCK), percents, values)
            columns.append(np.clip(np.rint(drawn), 1, cap))
        return columns
