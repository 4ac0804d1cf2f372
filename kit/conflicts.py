"""Combinations of knobs that cannot work; those that only surprise are `kit.doubts`."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from kit.accelerator import NO_ACCELERATOR, VISION_APPS, profile_names, vision_names

if TYPE_CHECKING:
    from kit.settings import Settings


def conflicts(settings: Settings) -> list[str]:
    """What cannot work, a sentence each, naming the values and what to do; empty when all can."""
    wrong = []
    for_images = settings.app in VISION_APPS
    known = vision_names() if for_images else profile_names()
    if settings.accelerator not in [*known, NO_ACCELERATOR]:
        near = difflib.get_close_matches(settings.accelerator, known, 1, 0.0)[0]
        wrong.append(
            f"accelerator = {settings.accelerator!r}: did you mean {near!r}? The {settings.app} app "
            f"knows: {', '.join([*known, NO_ACCELERATOR])}"
        )
    real = "torch" if for_images else "vllm"
    if settings.engine not in ("emulated", real):
        wrong.append(
            f"engine = {settings.engine!r} is not for the {settings.app} app: it takes 'emulated' or "
            f"{real!r}"
        )
    if settings.engine == "vllm" and settings.num_cpus < 1 and settings.num_gpus < 1:
        wrong.append(
            f"num_cpus = {settings.num_cpus:g} with engine = 'vllm': vLLM computes on whole cores, "
            "so give each replica num_cpus of 1 or more (or num_gpus of 1)"
        )
    if settings.prompt_template.count("{prompt}") != 1:
        wrong.append(
            f"prompt_template = {settings.prompt_template!r}: must hold {{prompt}} exactly once"
        )
    if settings.min_replicas > settings.max_replicas:
        wrong.append(
            f"min_replicas = {settings.min_replicas} is above max_replicas = {settings.max_replicas}: "
            "raise max_replicas or lower min_replicas"
        )
    first = settings.initial_replicas
    if first is not None and not settings.min_replicas <= first <= settings.max_replicas:
        wrong.append(
            f"initial_replicas = {first} must lie between min_replicas = {settings.min_replicas} "
            f"and max_replicas = {settings.max_replicas}"
        )
    return wrong
