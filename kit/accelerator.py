"""Latency models of accelerators, and the closed forms of a batch.

A static batch of n requests is prefilled together, then decoded until its longest output is done;
all n return together. With I the prompt and O the output lengths in tokens:

    prefill = max(floor, a + b·n·max(I)) + c·n·max(I)²
    decode  = (max(O) − 1)·(d + e·n + h) + f·n·[(max(O) − 1)·max(I) + max(O)·(max(O) − 1)/2]

A batch of n images goes through a vision model in `max(floor, a + b·n)`.

The coefficients come from `data/accelerators.json`, which names the evidence of each profile.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"

NO_ACCELERATOR = "none"
"""A profile that takes no time: what is then measured is the plumbing around the model."""
VISION_APPS = ("resnet50", "resnet50-batched")
"""Apps that take images: their accelerators have profiles of their own."""


@dataclass(frozen=True)
class Profile:
    """One emulated accelerator serving one model. Coefficients in seconds and tokens."""

    name: str
    accelerator: str
    model: str
    evidence: str
    floor_s: float
    a_s: float
    b_s_per_token: float
    c_s_per_token2: float
    d_s: float
    e_s_per_sequence: float
    f_s_per_context_token: float
    host_overhead_s_per_step: float
    kv_capacity_tokens: int

    def prefill_s(self, prompt_tokens: Sequence[int]) -> float:
        """Seconds to prefill a static batch of prompts, padded to the longest."""
        n, longest = len(prompt_tokens), max(prompt_tokens)
        linear = max(self.floor_s, self.a_s + self.b_s_per_token * n * longest)
        return linear + self.c_s_per_token2 * n * longest**2

    def decode_s(self, prompt_tokens: Sequence[int], output_tokens: Sequence[int]) -> float:
        """Seconds to decode a static batch to its longest output; 0 where that is one token."""
        n, longest, steps = len(prompt_tokens), max(prompt_tokens), max(output_tokens) - 1
        step = self.d_s + self.e_s_per_sequence * n + self.host_overhead_s_per_step
        context = n * (steps * longest + (steps + 1) * steps / 2)
        return steps * step + self.f_s_per_context_token * context

    def static_batch_s(self, prompt_tokens: Sequence[int], output_tokens: Sequence[int]) -> float:
        """Seconds that a static batch takes. Both sequences have one entry a request, n ≥ 1."""
        return self.prefill_s(prompt_tokens) + self.decode_s(prompt_tokens, output_tokens)

    @property
    def label(self) -> str:
        """How figures name it: always with the word *emulated*."""
        if self.name == NO_ACCELERATOR:
            return "no accelerator (plumbing only)"
        return f"emulated {self.accelerator} · {self.model}"


@dataclass(frozen=True)
class VisionProfile:
    """One emulated accelerator serving one vision model. Coefficients in seconds and images."""

    name: str
    accelerator: str
    model: str
    software: str
    evidence: str
    floor_s: float
    a_s: float
    b_s_per_image: float

    def batch_s(self, images: int) -> float:
        """Seconds that a batch of `images` ≥ 1 takes."""
        return max(self.floor_s, self.a_s + self.b_s_per_image * images)

    @property
    def label(self) -> str:
        """How figures name it: always with the word *emulated*."""
        if self.name == NO_ACCELERATOR:
            return "no accelerator (plumbing only)"
        return f"emulated {self.accelerator} ({self.software}) · {self.model}"


@functools.cache
def _data(kind: str) -> dict[str, Any]:
    profiles = json.loads((DATA / "accelerators.json").read_text())["profiles"]
    return {name: p for name, p in profiles.items() if p["kind"] == kind}


def profile_names() -> list[str]:
    """Names that `profile` knows, apart from `none`: accelerators serving an LLM."""
    return list(_data("llm"))


def vision_names() -> list[str]:
    """Names that `vision_profile` knows, apart from `none`."""
    return list(_data("vision"))


def _look_up(kind: str, name: str) -> dict[str, Any]:
    try:
        return dict(_data(kind)[name])
    except KeyError:
        known = ", ".join([*_data(kind), NO_ACCELERATOR])
        raise KeyError(f"no accelerator {name!r}; known: {known}") from None


def profile(name: str) -> Profile:
    """Look an accelerator up.

    Raises:
        KeyError: for a name that is not in `profile_names()` and not `none`.
    """
    if name == NO_ACCELERATOR:
        return Profile(name, "none", "none", "takes no time", 0, 0, 0, 0, 0, 0, 0, 0, 2**31)
    p = _look_up("llm", name)
    prefill, decode = p["prefill"], p["decode"]
    return Profile(
        name=name,
        accelerator=p["accelerator"],
        model=f"{p['model']} {p['weights']}",
        evidence=p["evidence"],
        floor_s=prefill["floor_s"],
        a_s=prefill["a_s"],
        b_s_per_token=prefill["b_s_per_token"],
        c_s_per_token2=prefill["c_s_per_token2"],
        d_s=decode["d_s"],
        e_s_per_sequence=decode["e_s_per_sequence"],
        f_s_per_context_token=decode["f_s_per_context_token"],
        host_overhead_s_per_step=p["host_overhead_s_per_step"],
        kv_capacity_tokens=p["kv_capacity_tokens"],
    )


def vision_profile(name: str) -> VisionProfile:
    """Look up an accelerator that serves a vision model.

    Raises:
        KeyError: for a name that is not in `vision_names()` and not `none`.
    """
    if name == NO_ACCELERATOR:
        return VisionProfile(name, "none", "none", "", "takes no time", 0, 0, 0)
    p = _look_up("vision", name)
    latency = p["latency"]
    return VisionProfile(
        name=name,
        accelerator=p["accelerator"],
        model=p["model"],
        software=p["software"],
        evidence=p["evidence"],
        floor_s=latency["floor_s"],
        a_s=latency["a_s"],
        b_s_per_image=latency["b_s_per_image"],
    )


def any_profile(name: str) -> Profile | VisionProfile:
    """Look an accelerator up whatever it serves, for its label and evidence.

    Raises:
        KeyError: for a name that neither `profile` nor `vision_profile` knows.
    """
    return vision_profile(name) if name in _data("vision") else profile(name)
