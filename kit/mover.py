"""Moves of knobs → updates of what runs: one at a time, the last value wins, nothing sent twice.

Whoever drags a slider makes many moves a second, and every config that Serve receives starts its
autoscaling delays anew. So moves are collected while an update is under way and for `SPACING_S`
after it was sent; a first move after a quiet second goes out at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kit.cluster import ServingError
from kit.connection import Applied
from kit.settings import Settings, SettingsError

SPACING_S = 1.0
"""Shortest time between two updates: what a person sees as *at once*, and at most 11 in 10 s."""


class Updatable(Protocol):
    """What a mover needs of a `Serving` or a `Foreign`."""

    settings: Settings | None

    def update(self, settings: Settings) -> Applied: ...


@dataclass(frozen=True)
class Move:
    """What became of some knobs, told as it happens. Times on the monotonic clock.

    `knobs` has name → (served before, asked for). `text` says it to a person.
    """

    state: Literal["applying", "applied", "refused", "unchanged"]
    knobs: dict[str, tuple[Any, Any]]
    text: str
    asked_s: float
    applied_s: float = float("nan")
    restarted_replicas: int = 0


class Mover:
    """A thread that applies moves to `serving`, from its making until `close`.

    Args:
        serving: what to update.
        tell: called with each `Move`, from the thread that made it happen; must not block.
        spacing_s: shortest time between the starts of two updates.
    """

    def __init__(
        self, serving: Updatable, tell: Callable[[Move], None], spacing_s: float = SPACING_S
    ) -> None:
        self._serving = serving
        self._tell = tell
        self._spacing_s = spacing_s
        self._changed = threading.Condition()
        self._waiting: dict[str, Any] = {}
        self._sending: dict[str, Any] = {}
        self._asked_s = 0.0
        self._closed = False
        self.sent = 0
        """Updates sent so far."""
        self._thread = threading.Thread(target=self._run, name="kit-mover", daemon=True)
        self._thread.start()

    def move(self, **knobs: Any) -> None:
        """Ask for other values; returns at once.

        Raises:
            SettingsError: when they cannot work with what serves and what was asked before; then
                nothing of it is asked for.
        """
        with self._changed:
            served = self._served()
            ahead = served.replace(**self._sending | self._waiting)
            ahead.replace(**knobs)
            if not self._waiting:
                self._asked_s = time.monotonic()
            self._waiting |= knobs
            back = {} if self._sending else served.replace(**self._waiting).diff(served)
            if not self._sending and not back:
                self._waiting = {}
                still = {k: (getattr(served, k), getattr(served, k)) for k in knobs}
                self._tell(Move("unchanged", still, "serves already", self._asked_s))
                return
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Whether anything is asked for that does not serve yet."""
        with self._changed:
            return bool(self._waiting or self._sending)

    def wait(self, timeout_s: float = 120.0) -> bool:
        """Until all that was asked for serves or was refused; False when that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._sending), timeout_s)

    def close(self) -> None:
        """Drop what waits, and wait for the update under way."""
        with self._changed:
            self._closed, self._waiting = True, {}
            self._changed.notify_all()
        self._thread.join(60)

    def _served(self) -> Settings:
        if self._serving.settings is None:
            raise SettingsError("nothing is deployed: call deploy(settings) first")
        return self._serving.settings

    def _run(self) -> None:
        next_s = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                while not self._closed and (left_s := next_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                if self._closed:
                    return
                self._sending, self._waiting = self._waiting, {}
                asked_s = self._asked_s
            if not self._sending:  # moved back meanwhile
                continue
            next_s = time.monotonic() + self._spacing_s
            try:
                self._send(self._sending, asked_s)
            finally:
                with self._changed:
                    self._sending = {}
                    self._changed.notify_all()

    def _send(self, values: dict[str, Any], asked_s: float) -> None:
        knobs = {k: (None, v) for k, v in values.items()}
        try:
            served = self._served()
            knobs = {k: (getattr(served, k), v) for k, v in values.items()}
            wanted = served.replace(**values)
            self._tell(Move("applying", knobs, "applying …", asked_s))
            self.sent += wanted != served
            done = self._serving.update(wanted)
        except (ServingError, SettingsError) as error:
            self._tell(Move("refused", knobs, str(error), asked_s))
        except (
            Exception
        ) as error:  # whatever Serve or the network throws belongs beside the control
            self._tell(Move("refused", knobs, f"{type(error).__name__}: {error}", asked_s))
        else:
            took_s = done.applied_s - asked_s
            again = f", {done.restarted_replicas} replicas restarted" * bool(
                done.restarted_replicas
            )
            self._tell(
                Move("applied", knobs, f"applied in {took_s:.1f} s{again}", asked_s,
                     done.applied_s, done.restarted_replicas)
            )  # fmt: skip


def timer_reset(settings: Settings, move: Move, in_flight: float, target: int | None) -> str:
    """What a move did to a delay that was running, in words; empty when none ran.

    Serve starts its autoscaling delays anew with every config that it receives. Requests in flight
    ÷ `target_ongoing_requests` is what the autoscaler wants (Ray's default policy, before factors).
    """
    if settings.num_replicas != "auto" or "num_replicas" in move.knobs or target is None:
        return ""
    wanted = math.ceil(in_flight / settings.target_ongoing_requests)
    wanted = min(max(wanted, settings.min_replicas), settings.max_replicas)
    if wanted == target:
        return ""
    way, name = ("more", "upscale_delay_s") if wanted > target else ("fewer", "downscale_delay_s")
    return (
        f"the wait for {way} replicas ({wanted} wanted, {target} the target) began anew: "
        f"{name} = {getattr(settings, name):g} s from now"
    )
