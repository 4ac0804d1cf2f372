"""What computed the answers of a run, in words for its figures."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kit import validity
from kit.accelerator import any_profile
from kit.store import Run


def accelerator_note(run: Run) -> str:
    """What computed the answers; of an emulated accelerator also how far it can be trusted."""
    settings = run.experiment["settings"]
    engine = settings.get("engine", "emulated")
    if engine != "emulated":
        return " · ".join([_engine_name(run, engine), *_model(settings), _hardware(run)])
    p = any_profile(settings["accelerator"])
    scale = settings["time_scale"]
    clock = "" if scale == 1 else f" · times × {scale:g} of the real accelerator's"
    return f"{p.label}{clock}\n{textwrap.fill('evidence: ' + p.evidence, 130)}"


def title(run: Run) -> str:
    """What stands above a run's figures: what computed the answers and, where it is, *invalid: why*."""
    why = validity.invalid(run)
    warning = [textwrap.fill(f"INVALID: {why}", 110)] if why else []
    return "\n".join([*warning, accelerator_note(run)])


def _engine_name(run: Run, engine: str) -> str:
    packages = run.environment.get("packages", {})
    names = {"vllm": "vLLM", "torch": "PyTorch"}
    version = packages.get(engine) or packages.get(f"{engine}-cpu", "")
    return f"{names.get(engine, engine)} {version.split('+')[0]}".strip()


def _model(settings: Mapping[str, Any]) -> list[str]:
    model = str(settings.get("model") or "")
    return [model.rstrip("/").rsplit("/", 1)[-1]] if model else []


def _hardware(run: Run) -> str:
    gpus = run.environment.get("gpus") or []
    used = run.experiment["settings"].get("num_gpus", 0)
    if not (gpus and used):
        return "CPU"
    # Runs of before recorded UUIDs instead of models.
    models = Counter(g for g in gpus if not g.startswith(("GPU-", "MIG-")))
    named = [f"{n} × {model}" if n > 1 else model for model, n in models.items()]
    return ", ".join(named) or f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}"
