"""How long requests and their answers are: drawn from the percentiles of real traces, or as they came.

Also what else `data/workloads.json` knows of those traces: their sources, and how their rate goes
over a day.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kit import traces
from kit.accelerator import DATA

if TYPE_CHECKING:
    from kit.workload import Workload

_BLOCK = 4096  # requests are drawn in blocks of this many, so that any one can be reached directly


@functools.cache
def _file() -> dict[str, Any]:
    return dict(json.loads((DATA / "workloads.json").read_text()))


def length_names() -> list[str]:
    """Names of the traces whose request lengths can be drawn."""
    return list(_file()["workloads"])


def source(lengths: str) -> str:
    """Where the lengths come from, with the licence."""
    return str(_file()["workloads"][lengths]["source"])


def days() -> list[str]:
    """Names of the days whose hours `factors_of_day` knows."""
    return [k for k in _file()["diurnal"] if k != "source"]


def factors_of_day(name: str) -> list[float]:
    """The rate in each of a weekday's 24 hours (UTC), relative to the week's mean."""
    return [float(v) for v in _file()["diurnal"][name]]


class Lengths(Sequence[tuple[int, int]]):
    """Endless sequence of (prompt_tokens, output_tokens): drawn from percentiles, fixed, or a trace's."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._caps = (workload.max_prompt_tokens, workload.max_output_tokens)
        self._fixed = (workload.prompt_tokens, workload.output_tokens)
        self._blocks: dict[int, list[tuple[int, int]]] = {}
        self._recorded = self._of_trace() if workload.arrivals == "trace" else None

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: Any) -> Any:
        if self._recorded is not None:
            return self._recorded[index % len(self._recorded)]
        block, at = divmod(index, _BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block)
        return self._blocks[block][at]

    def _of_trace(self) -> list[tuple[int, int]]:
        table = traces.read(self._workload.trace)
        columns = [
            np.full(len(table), fixed) if fixed is not None else np.minimum(table[kind], cap)
            for kind, cap, fixed in zip(traces.COLUMNS[1:], self._caps, self._fixed, strict=True)
        ]
        return [(int(p), int(o)) for p, o in zip(*columns, strict=True)]

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
        table = _file()["workloads"][name]
        percents = [*range(100), *table.get("tail_percents", []), 100]
        rng = np.random.default_rng(seed)
        columns = []
        for kind, cap in zip(("prompt_tokens", "output_tokens"), self._caps, strict=True):
            values = table[f"{kind}_percentiles"]
            values = [*values[:100], *table.get(f"{kind}_tail", []), values[100]]
            drawn = np.interp(rng.uniform(0, 100, _BLOCK), percents, values)
            columns.append(np.clip(np.rint(drawn), 1, cap))
        return columns
