"""Tune Ray Serve deployments while they run: see the README for a first experiment.

Names load on first use, so that `import kit` starts nothing and imports neither Ray nor Locust.
"""

# ruff: noqa: F401  (imported for type checkers only)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit import (
        agreement,
        breakdown,
        compare,
        explain,
        explain_apps,
        export,
        figures,
        figures_apps,
        figures_load,
        figures_sweep,
        measures,
        phases,
        repeats,
        report,
        saturation,
        summary,
        sweep,
        sweep_parameters,
        theory,
        validity,
    )
    from kit.experiment import SLOS, Change, Experiment, Slo, run, run_many
    from kit.live_panel import panel
    from kit.presets import PRESETS
    from kit.serving import attach, start
    from kit.settings import Settings, knobs
    from kit.store import load as read_run
    from kit.workload import Stage, Workload

_HOMES = {
    "Change": "experiment", "Experiment": "experiment", "Slo": "experiment", "SLOS": "experiment",
    "run": "experiment", "run_many": "experiment", "panel": "live_panel", "attach": "serving",
    "start": "serving", "PRESETS": "presets", "Settings": "settings", "knobs": "settings",
    "read_run": "store", "Stage": "workload", "Workload": "workload",
}  # fmt: skip
_THERE = {"read_run": "load"}  # `kit.load` is the module of the load generator
_MODULES = (
    "measures", "phases", "summary", "breakdown", "validity", "agreement", "theory", "saturation",
    "compare", "repeats", "sweep", "sweep_parameters", "figures", "figures_apps", "figures_load",
    "figures_sweep", "explain", "explain_apps", "export", "report",
)  # fmt: skip

__all__ = [
    "Settings", "knobs", "PRESETS", "Workload", "Stage", "Experiment", "Change", "Slo", "SLOS",
    "start", "attach", "panel", "run", "run_many", "read_run", *_MODULES,
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kit.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kit.{_HOMES[name]}"), _THERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
