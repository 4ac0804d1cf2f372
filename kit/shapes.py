"""How users, or a rate, go over time around what is set: pure functions of time."""

from __future__ import annotations

import math
from collections.abc import Callable

SHAPES: dict[str, tuple[Callable[[float], float], str]] = {
    "steady": (lambda t: 1.0, "the same number all the time"),
    "ramp": (lambda t: min(1.0, t / 60), "from none evenly up within 60 s"),
    "steps": (lambda t: (0.25, 0.5, 1.0, 0.5)[int(t // 30) % 4], "a quarter, half, all, half; 30 s each"),
    "wave": (lambda t: 0.6 - 0.4 * math.cos(2 * math.pi * t / 120), "a fifth to all and back in 120 s"),
    "spikes": (lambda t: 1.0 if t % 40 >= 30 else 0.25, "a quarter, and all for 10 s in every 40 s"),
}  # fmt: skip
"""Name → (share of them at a time in seconds since the load began, words for people)."""


def users_at(shape: str, users: int, t_s: float) -> int:
    """Users of a shape `t_s` seconds after the load began: never more than `users`, at least one.

    Raises:
        KeyError: for an unknown shape.
    """
    return min(users, max(1, round(users * share_at(shape, t_s))))


def share_at(shape: str, t_s: float) -> float:
    """The share (0 to 1) of a shape `t_s` seconds after the load began.

    Raises:
        KeyError: for an unknown shape.
    """
    return SHAPES[shape][0](max(0.0, t_s))
