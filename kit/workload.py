"""What is asked of a server: how long the requests are, and how many users send them when.

A workload is a pure value. The same seed gives the same requests, each with a prompt of its own, so
that no cache can answer for the model.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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
    return Field(default, description=text, json_schema_extra={"unit": unit}, **bounds)


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

    lengths: str = _field("azure-2023-conv", "", "Trace whose request lengths are drawn")
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

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.lengths not in length_names():
            near = difflib.get_close_matches(self.lengths, length_names(), 1, 0.0)
            raise WorkloadError(
                f"lengths = {self.lengths!r}: no such workload; did you mean {near[0]!r}? "
                f"Known: {', '.join(length_names())}"
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
        rng = np.random.default_rng([self.seed, 1, index])
        words = [f"q{self.seed}.{index}", *(_WORDS[k] for k in rng.integers(0, 256, tokens - 1))]
        return " ".join(words)


class Lengths(Sequence[tuple[int, int]]):
    """Endless sequence of (prompt_tokens, output_tokens), drawn from the trace's percentiles."""

    def __init__(self, workload: Workload) -> None:
        table = _data()[workload.lengths]
        tail = table.get("tail_percents", [])
        self._percents = [*range(100), *tail, 100]
        self._tables = [
            [*table[f"{kind}_percentiles"][:100], *table.get(f"{kind}_tail", []),
             table[f"{kind}_percentiles"][100]]
            for kind in ("prompt_tokens", "output_tokens")
        ]  # fmt: skip
        self._caps = (workload.max_prompt_tokens, workload.max_output_tokens)
        self._seed = workload.seed
        self._blocks: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: Any) -> Any:
        block, at = divmod(index, _BLOCK)
        if block not in self._blocks:
            rng = np.random.default_rng([self._seed, 0, block])
            columns = [
                np.clip(np.rint(np.interp(rng.uniform(0, 100, _BLOCK), self._percents, t)), 1, cap)
                for t, cap in zip(self._tables, self._caps, strict=True)
            ]
            self._blocks[block] = [(int(p), int(o)) for p, o in zip(*columns, strict=True)]
        return self._blocks[block][at]


_WORDS = [a + b + c for a in "bdgklmst" for b in "aeio" for c in "dklmnrst"]
