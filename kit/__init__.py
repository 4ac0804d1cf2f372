"""Tune Ray Serve deployments while they run: see the README for a first experiment.

Names load on first use, so that `import kit` starts nothing and imports neither Ray nor Locust.
"""

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
        measures,
        phases,
        report,
        saturation,
        summary,
        theory,
        validity,
    )
    from kit.experiment import SLOS, Change, Experiment, Slo, run, run_many
    from kit.live_panel import panel
    from kit.presets import PRESETS
    from kit.serving import attach, start
    from kit.settings import Settings, knobs
    from kit.store import load
    from kit.workload import Stage, Workload

_HOMES = {
    "Change": "experiment", "Experiment": "experiment", "Slo": "experiment", "SLOS": "experiment",
    "run": "experiment", "run_many": "experiment", "panel": "live_panel", "attach": "serving",
    "start": "serving",
    "PRESETS": "presets", "Settings": "settings", "knobs": "settings", "load": "store",
    "Stage": "workload", "Workload": "workload", "breakdown": "", "compare": "", "explain": "",
    "explain_apps": "", "export": "", "figures": "", "figures_apps": "", "measures": "", "report": "",
    "phases": "", "summary": "", "validity": "", "agreement": "", "theory": "", "saturation": "",
    "figures_load": "",
}  # fmt: skip

__all__ = [  # noqa: RUF022  grouped as people use them
    "Settings", "knobs", "PRESETS", "Workload", "Stage", "Experiment", "Change", "Slo", "SLOS",
    "start", "attach", "panel", "run", "run_many", "load", "measures", "breakdown", "figures",
    "figures_apps", "explain", "explain_apps", "phases", "summary", "validity", "agreement", "theory",
    "saturation", "figures_load", "compare",
    "export",
    "report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    home = _HOMES[name]
    if not home:
        return importlib.import_module(f"kit.{name}")
    value = getattr(importlib.import_module(f"kit.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
