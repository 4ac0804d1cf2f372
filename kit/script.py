"""A session that follows a list of moves instead of a hand: for papermill, tests and demonstrations.

It goes through the same session as the panel's widgets do, and shows itself as pictures.
"""

from __future__ import annotations

import base64
import difflib
import html
import time
from collections.abc import Iterable, Sequence
from typing import Any

from kit import advise, live
from kit.experiment import Change
from kit.live_figure import LiveFigure
from kit.progress import seconds
from kit.session import Session
from kit.settings import BY_NAME, SettingsError
from kit.store import Run
from kit.workload import Workload

DEMO: tuple[tuple[float, str, Any], ...] = (
    (10, "max_batch_size", 16),
    (20, "batch_wait_timeout_s", 0.05),
    (30, "num_replicas", "auto"),
    (30, "max_replicas", 3),
    (30, "target_ongoing_requests", 8.0),
    (45, "mark", "load doubled"),
    (45, "users", 48),
)
"""What is played where nobody can move a slider: larger batches, longer waits, more replicas."""
SETTLE_S = 15.0
"""Seconds after the last move, unless told otherwise."""
TICK_S = 0.1
_LOAD = (*Workload.model_fields, "shape")


class Script:
    """A session played to its end; shows its plots, figures and sentence as a picture.

    Args:
        session: as made for it; it is ended.
        moves: (seconds, name, value) or `Change`: knobs, fields of the workload, `shape`, `mark`.
        duration_s: of the whole; default `SETTLE_S` after the last move.
        progress: whether to draw a progress bar.

    Raises:
        SettingsError: for a move that names nothing known, or not in time.
    """

    def __init__(
        self,
        session: Session,
        moves: Iterable[Change | Sequence[Any]],
        duration_s: float | None = None,
        progress: bool = True,
    ) -> None:
        self.session = session
        try:
            due = check(moves, duration_s)
            end_s = duration_s or SETTLE_S + max((m.at_s for m in due), default=0.0)
            session.crowd.start()
            self._play(due, end_s, progress)
            view = session.view
        finally:
            session.end()
        if view is None:
            raise SettingsError(f"a session of {end_s:g} s is over before there is anything to see")
        self._png = LiveFigure(900, 800).png(view)
        self._says, self._numbers = advise.sentence(view), live.numbers(view)

    @property
    def run(self) -> Run:
        """The session as a `Run`."""
        return self.session.run()

    def close(self) -> None:
        """Nothing is left to close."""

    def _play(self, due: list[Change], end_s: float, progress: bool) -> None:
        start_s = time.monotonic()
        with seconds(end_s, "session", progress) as bar:
            while (now_s := time.monotonic() - start_s) < end_s:
                bar.update(now_s - bar.n)
                knobs = {}
                while due and due[0].at_s <= now_s:
                    move = due.pop(0)
                    if move.knob in BY_NAME:
                        knobs[move.knob] = move.value
                    elif move.knob == "mark":
                        self.session.mark(str(move.value))
                    else:
                        self.session.crowd.change(**{move.knob: move.value})
                if knobs:
                    self.session.move(**knobs)
                time.sleep(TICK_S)
            bar.update(end_s - bar.n)

    def _repr_html_(self) -> str:
        tiles = "".join(
            f"<td style='padding-right:1em'>{html.escape(name)}<br><b>{html.escape(value)}</b></td>"
            for name, value in live.written(self._numbers)
        )
        picture = base64.b64encode(self._png).decode()
        return (
            f"<p>{html.escape(self._says)}</p><table><tr>{tiles}</tr></table>"
            f'<img alt="latency, throughput, replicas and accelerator over the session" '
            f'src="data:image/png;base64,{picture}">'
        )


def check(moves: Iterable[Change | Sequence[Any]], duration_s: float | None) -> list[Change]:
    """The moves in order of time.

    Raises:
        SettingsError: for one that names nothing known, or lies outside the session.
    """
    found = [m if isinstance(m, Change) else Change(*m) for m in moves]
    known = (*BY_NAME, *_LOAD, "mark")
    for move in found:
        if move.knob not in known:
            near = difflib.get_close_matches(move.knob, known, 1, 0.0)[0]
            raise SettingsError(f"move of {move.knob!r}: no such knob; did you mean {near!r}?")
        if move.at_s < 0 or (duration_s is not None and move.at_s >= duration_s):
            raise SettingsError(
                f"move of {move.knob} at {move.at_s:g} s: must be from 0 to before the end of the "
                f"session at {duration_s or 0:g} s"
            )
    return sorted(found, key=lambda m: m.at_s)
