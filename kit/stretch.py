"""A stretch of recorded load: what served then, what was asked, and whether another compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from kit import measures, phases
from kit.settings import BY_NAME
from kit.store import Run
from kit.workload import Workload

ENGINE = ("engine", "accelerator", "model", "time_scale")
"""Knobs that say what computes, on which clock: what differs in them is not tuning."""

HARDWARE = ("processor", "cpus", "gpus")
_NOT_LOAD = (
    "duration_s", "seed", "stages", "processes", "remote_workers", "join_address",
)  # fmt: skip
"""Fields of a workload that may differ between equal loads; stages count by what they change."""


@dataclass(frozen=True, eq=False)
class Stretch:
    """The requests of a run that ended from `from_s` to before `to_s`, in seconds of its clock."""

    run: Run
    from_s: float
    to_s: float
    label: str

    def requests(self) -> pd.DataFrame:
        """Its attempts in order of their end, with `ended_s`; not those of users told to leave."""
        table = self.run.requests.assign(ended_s=measures.finished_s(self.run.requests))
        inside = (table["ended_s"] >= self.from_s) & (table["ended_s"] < self.to_s)
        rows = table[inside & (table["outcome"] != "left")]
        return rows.sort_values("ended_s", kind="stable", ignore_index=True)

    def settings(self) -> dict[str, str]:
        """The knobs in effect when it begins, as text."""
        known = {k: str(v) for k, v in self.run.experiment["settings"].items()}
        return known | {k: v for k, v in self._moved().items() if k in BY_NAME}

    def workload(self) -> dict[str, str]:
        """What was asked of the server when it begins, as text."""
        load = self.run.experiment["workload"]
        known = {k: str(v) for k, v in load.items() if k not in _NOT_LOAD}
        for stage in load.get("stages", []):
            if stage["at_s"] <= self.from_s:
                known |= {k: str(v) for k, v in stage.items() if k in known and v is not None}
        fields = Workload.model_fields
        return known | {k: v for k, v in self._moved().items() if k in fields}

    def _moved(self) -> dict[str, str]:
        changes = self.run.changes
        applied = changes[changes["applied_s"] <= self.from_s].sort_values(
            "applied_s", kind="stable"
        )
        return dict(zip(applied["knob"], applied["to"].astype(str), strict=True))


def stretches(run: Run) -> list[Stretch]:
    """What lies between a run's changes and marks, each in its steady state (`phases.stretches`)."""
    return [
        Stretch(run, p["from_s"], p["to_s"], p["label"])
        for p in measures.records(phases.stretches(run))
        if p["to_s"] > p["from_s"]
    ]


def whole(run: Run) -> Stretch:
    """All of a run, labelled with its name."""
    end_s = float(run.experiment["workload"]["duration_s"])
    return Stretch(run, 0.0, end_s, str(run.experiment["name"]))


def steady(run: Run) -> Stretch:
    """The steady part of where a run ended, labelled with its name; all of it where there is none."""
    last = stretches(run)[-1:]
    return replace(last[0], label=str(run.experiment["name"])) if last else whole(run)


def obstacles(a: Stretch, b: Stretch) -> list[str]:
    """What makes two stretches incomparable, a text each: machine, packages, engine; of two runs
    also the load. Differing knobs are what is compared."""
    return [
        *_differing(*_machines(a.run, b.run)),
        *_differing(_only(a.settings(), ENGINE), _only(b.settings(), ENGINE)),
        *(_differing(a.workload(), b.workload()) if a.run is not b.run else []),
    ]


def differences(a: Stretch, b: Stretch) -> list[str]:
    """What differs, in sentences: the knobs that are compared, and what else may be the reason."""
    knobs = _differing(a.settings(), b.settings())
    load = _differing(a.workload(), b.workload())
    machine = _differing(*_machines(a.run, b.run))
    promises = _differing(
        *({k: str(v) for k, v in s.run.experiment["slo"].items()} for s in (a, b))
    )
    texts = [f"Settings: {', '.join(knobs)}." if knobs else "No setting differs."]
    if load:
        texts.append(
            f"The load differs too ({', '.join(load)}): figures answer to that as much as to settings."
        )
    if machine:
        texts.append(f"So does where it ran ({', '.join(machine)}): its effect is in every figure.")
    if promises:
        texts.append(f"Promises differ ({', '.join(promises)}): both are judged by the first's.")
    for name, s in (("first", a), ("second", b)):
        within = s.run.changes["applied_s"].between(s.from_s, s.to_s, inclusive="neither")
        moved = s.run.changes.loc[within, "knob"]
        if len(moved := moved[moved != "mark"].drop_duplicates()):
            texts.append(f"Within the {name}, {', '.join(moved)} changed: it is a mean over both.")
    return texts


def _machines(a: Run, b: Run) -> tuple[dict[str, str], dict[str, str]]:
    """What each ran on. Runs of before recorded UUIDs of GPUs alone: the same cards are the same."""
    found = _machine(a), _machine(b)
    cards = [r.environment.get("gpu_uuids", r.environment.get("gpus")) for r in (a, b)]
    if cards[0] == cards[1]:
        found[0]["gpus"] = found[1]["gpus"]
    return found


def _machine(run: Run) -> dict[str, str]:
    here = run.environment
    known = {k: str(here.get(k)) for k in HARDWARE}
    # Kernels of one machine report a few pages more or less.
    known["memory"] = f"{here.get('memory_bytes', 0) / 2**30:.0f} GiB"
    known["python"] = str(here.get("python"))
    return known | {str(k): str(v) for k, v in here.get("packages", {}).items()}


def _only(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k in names}


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """`name: this → that` for every name in either."""
    names = [*a, *(k for k in b if k not in a)]
    return [f"{k} {a.get(k, 'none')} → {b.get(k, 'none')}" for k in names if a.get(k) != b.get(k)]
