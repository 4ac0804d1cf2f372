"""The live tuning panel: a session of `kit.session` as widgets in a notebook.

Everything a control knows comes from the registries of `Settings` and `Workload`; what it asks for
goes through the session, and what is shown comes from the session's view, once a second.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ipywidgets as w

from kit import advise, live, script
from kit.accelerator import DATA, NO_ACCELERATOR, profile_names, vision_names
from kit.connection import Connection
from kit.controls import Control
from kit.experiment import Change, Slo
from kit.knobs import Knob
from kit.ladder import text
from kit.live_figure import LiveFigure
from kit.load_controls import LoadControls, button, tried
from kit.mover import Move
from kit.page import connections, has_page
from kit.presets import PRESETS
from kit.provenance import accelerator_note
from kit.records import Records
from kit.script import DEMO, Script
from kit.session import Session
from kit.settings import BY_NAME
from kit.store import Run
from kit.view import View
from kit.workload import Workload

GROUPS: dict[str, tuple[str, ...]] = {
    "Batching": (
        "max_batch_size", "batch_wait_timeout_s", "max_new_tokens", "route_threshold_tokens",
        "long_max_batch_size", "long_batch_wait_timeout_s", "max_batch_tokens", "hold_while_busy",
        "max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens",
    ),
    "Capacity": (
        "max_ongoing_requests", "max_queued_requests", "reject_status", "retry_after_s",
        "graceful_shutdown_timeout_s", "num_cpus", "num_gpus",
    ),
    "Autoscaling": (
        "num_replicas", "min_replicas", "max_replicas", "target_ongoing_requests",
        "upscale_delay_s", "downscale_delay_s", "downscale_to_zero_delay_s", "upscaling_factor",
        "downscaling_factor", "look_back_period_s", "metrics_interval_s", "aggregation_function",
    ),
    "App": ("app", "engine", "accelerator", "time_scale", "load_time_s", "postprocess"),
}  # fmt: skip
"""Knobs as people think of them; a knob that the app has no use for is not shown."""
UNSEEN_S = 60.0
"""A panel that no page shows for so long ends its session."""
_MOODS: dict[str, Any] = {"applying": "busy", "applied": "good", "refused": "bad", "unchanged": ""}

_open: Panel | None = None


def panel(
    serving: Connection,
    workload: Workload | None = None,
    slo: Slo | None = None,
    moves: Iterable[Change | Sequence[Any]] | None = None,
    duration_s: float | None = None,
    **options: Any,
) -> Panel | Script:
    """Open the tuning panel of what `serving` runs; the one before is closed, and its run kept.

    Args:
        serving: deployed, from `kit.start` or `kit.attach`.
        workload: what to send when *Start load* is pressed.
        slo: what is promised.
        moves: (seconds, name, value) each, played in place of widgets and shown as pictures; where
            no page is connected, as in papermill, `script.DEMO` unless given. Empty: widgets.
        duration_s: how long to play the moves.
        options: as `Session` takes them: `name`, `folder`.

    Raises:
        ServingError: when nothing is deployed.
        SettingsError: for a move that names nothing known.
    """
    global _open
    if _open is not None:
        _open.close()
        _open = None
    if moves is None and not has_page():
        moves = DEMO
    if moves is not None and (moves := list(moves)):
        script.check(moves, duration_s)
        return Script(Session(serving, workload, slo, **options), moves, duration_s)
    _open = Panel(serving, workload, slo, **options)
    return _open


class Panel:
    """Widgets around a `Session`; shows itself as the last value of a cell."""

    def __init__(
        self, serving: Connection, workload: Workload | None, slo: Slo | None, **options: Any
    ) -> None:
        self._figure = LiveFigure(700, 640)
        self._seen_s = self._asked_pages_s = time.monotonic()
        self._ready = threading.Event()
        self.session = Session(
            serving, workload, slo, tell=self.told, on_tick=self.redraw, **options
        )  # fmt: skip
        self.controls = self._controls(serving)
        self.load = LoadControls(self.session.crowd)
        self._records = Records(self.session)
        self.widget = self._layout()
        self._ready.set()

    @property
    def run(self) -> Run:
        """All that the session has recorded so far, as a `Run`."""
        return self.session.run()

    def close(self) -> None:
        """End the session and take the widgets away; what serves goes on serving."""
        self.session.end()
        self._records.close()
        _close(self.widget)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)  # type: ignore[no-untyped-call]

    def _controls(self, serving: Connection) -> dict[str, Control]:
        most = most_replicas(serving)
        high = dict.fromkeys(("num_replicas", "min_replicas", "max_replicas"), most)
        return {
            name: Control(
                _offered(BY_NAME[name]), getattr(self.session.settings, name), self.asked, high.get(name),
                serving.read_only(name),
            )
            for names in GROUPS.values()
            for name in names
        }  # fmt: skip

    def _layout(self) -> w.Widget:
        self._preset_line = w.HTML()
        self._trouble, self._says, self._numbers, self._note = (w.HTML() for _ in range(4))
        self._plot = w.Image(format="png", layout={"width": "100%", "max_width": "1100px"})
        self._plot.add_class("kit-plot")
        presets = [
            button(name, partial(tried, self._preset_line, partial(self.preset, name)))
            for name in ("chat", "throughput", "manual", "auto", "last good")
        ]
        self._autoscaling_line = w.HTML()
        sections = {
            group: w.VBox(
                [*([self._autoscaling_line] if group == "Autoscaling" else []),
                 *(self.controls[n].widget for n in names)]
            )
            for group, names in GROUPS.items()
        }  # fmt: skip
        sections["Workload"] = self.load.workload
        sections["Record"] = self._records.widget
        left = w.VBox(
            [
                self.load.widget,
                w.HBox(presets, layout={"flex_flow": "row wrap"}),
                self._preset_line,
                w.Tab(children=list(sections.values()), titles=list(sections)),
            ],
            layout={"flex": "1 1 380px", "min_width": "320px"},
        )
        right = w.VBox(
            [self._trouble, self._says, self._numbers, self._plot, self._note],
            layout={"flex": "2 1 480px", "min_width": "320px"},
        )
        body = w.Box([left, right], layout={"display": "flex", "flex_flow": "row wrap"})
        css = w.HTML(f"<style>{(DATA / 'panel.css').read_text()}</style>")
        root = w.VBox([css, body])
        root.add_class("kit-panel")
        return root

    def asked(self, name: str, value: Any) -> None:
        """A control wants another value of its knob."""
        self.session.move(**{name: value})

    def told(self, move: Move) -> None:
        """What became of a move goes beside its controls; once it is over they show what serves."""
        self._ready.wait(10)
        for name in move.knobs:
            control = self.controls.get(name)
            if control is None:
                continue
            if move.state != "applying":
                control.show(getattr(self.session.settings, name))
            control.say(move.text, _MOODS[move.state])

    def preset(self, name: str) -> str:
        """Ask for a named set of values; returns in words what was asked for.

        Raises:
            SettingsError: when the values cannot work with the others that serve.
        """
        settings = self.session.settings
        if name == "last good":
            good = self.session.last_good
            wanted = {k: getattr(good, k) for k in settings.diff(good)}
        elif name == "manual":
            wanted = {"num_replicas": max(1, self.session.replicas)}
        else:
            wanted = dict(PRESETS[name])
            most = most_replicas(self.session.serving)
            if most and wanted.get("max_replicas", 0) > most:
                wanted["max_replicas"] = max(most, wanted["min_replicas"])
        wanted = {k: v for k, v in wanted.items() if BY_NAME[k].cost != "restart"}
        changed = {k: v for k, v in wanted.items() if getattr(settings, k) != v}
        if not changed:
            return f"{name}: serves already"
        self.session.move(**changed)
        return f"{name}: " + ", ".join(f"{k} {text(BY_NAME[k], v)}" for k, v in changed.items())

    def redraw(self, view: View) -> None:
        """Once a second: plots, figures, the sentence, and controls that something else moved."""
        self._ready.wait(10)
        if self._unseen():
            threading.Thread(target=self.close, name="kit-close", daemon=True).start()
            return
        trouble = html.escape(self.session.trouble)
        self._trouble.value = f'<div class="kit-trouble" role="alert">{trouble}</div>'
        self._plot.value = self._figure.png(view)
        self._numbers.value = _tiles(live.numbers(view))
        self._says.value = f'<div class="kit-says">{html.escape(advise.sentence(view))}</div>'
        trouble = html.escape(self.session.trouble)
        note = html.escape(accelerator_note(self.session.outline(view.changes)))
        self._note.value = f'<div class="kit-line">{note}</div>'
        self._trouble.value = f'<div class="kit-trouble" role="alert">{trouble}</div>'
        self.load.follow()
        self._records.follow(view)
        for name, control in self.controls.items():
            if not control.waiting:
                # What serves now: the view may be older than the last move.
                if control.served != (value := getattr(self.session.settings, name)):
                    control.show(value)
                    control.say("changed elsewhere", "good")
                matters = control.knob.matters(view.settings)
                control.widget.layout.display = "flex" if matters else "none"
        fixed = view.settings.num_replicas
        self._autoscaling_line.value = (
            "" if fixed == "auto" else f'<div class="kit-line">The number is fixed at {fixed}: what is '
            "below num_replicas takes effect once that is auto.</div>"
        )  # fmt: skip

    def _unseen(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._asked_pages_s > UNSEEN_S / 6:
            self._asked_pages_s = now_s
            if connections() != 0:
                self._seen_s = now_s
        return now_s - self._seen_s > UNSEEN_S


def _offered(knob: Knob) -> Knob:
    """The knob, with the names that it may take where these are known."""
    if knob.name != "accelerator":
        return knob
    return replace(knob, choices=(*profile_names(), *vision_names(), NO_ACCELERATOR))


def most_replicas(serving: Connection) -> int | None:
    """Replicas that the whole cluster can hold; None where it cannot be told from here."""
    if not serving.owned or serving.settings is None:
        return None
    import ray

    there = ray.cluster_resources()
    needs = {"CPU": serving.settings.num_cpus, "GPU": serving.settings.num_gpus}
    return min((int(there.get(k, 0) / need) for k, need in needs.items() if need), default=None)


def _tiles(numbers: dict[str, float]) -> str:
    tiles = "".join(f"<div>{name}<b>{value}</b></div>" for name, value in live.written(numbers))
    return f'<div class="kit-figures">{tiles}</div>'


def _close(widget: w.Widget) -> None:
    """Close a widget with all that belongs to it: by itself it closes nothing else."""
    for part in getattr(widget, "children", ()):
        _close(part)
    for name in ("layout", "style"):
        if (own := getattr(widget, name, None)) is not None:
            own.close()
    widget.close()
