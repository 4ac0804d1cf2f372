"""Who sends the load, as widgets: start and stop, users and their shape, and what they ask for."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ipywidgets as w

from kit.controls import Control
from kit.crowd import Crowd
from kit.knobs import describe
from kit.lengths import length_names
from kit.shapes import SHAPES
from kit.workload import PLAN_ONLY, Workload

FIELDS = (
    "lengths", "stream", "think_time_s", "burstiness", "on_s", "off_s", "output_tokens", "prompt_tokens",
    "retry",
)  # fmt: skip
"""Fields of a workload that can be changed, beside who sends and how much."""
_HIGH = {
    "users": 512, "think_time_s": 60, "rate_rps": 200, "burstiness": 10, "on_s": 120, "off_s": 120,
}  # fmt: skip
"""Where sliders end; more can be written."""


class LoadControls:
    """The controls of a `Crowd`: `widget` to start it, `workload` for what it asks for."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        names = ("arrivals", "users", "rate_rps", *FIELDS)
        self.controls = {name: self._control(name) for name in names}
        self._start = button("Start load", self.toggle, "success")
        self._line = w.HTML()
        self._shape = w.Dropdown(
            options=list(SHAPES), value=crowd.shape, description="shape",
            tooltip="; ".join(f"{name}: {words}" for name, (_, words) in SHAPES.items()),
            style={"description_width": "13.5em"},
        )  # fmt: skip
        self._shape.observe(lambda _: tried(self._line, self._set_shape), "value")
        head = w.HBox([self._start, self._line])
        who = [self.controls[name].widget for name in ("arrivals", "users", "rate_rps")]
        self.widget = w.VBox([head, *who, self._shape])
        self.workload = w.VBox([self.controls[name].widget for name in FIELDS])
        self._show_what_matters()

    def _control(self, name: str) -> Control:
        knob = describe(Workload, name)
        if name == "lengths":
            knob = replace(knob, choices=tuple(length_names()))
        if name == "arrivals":  # a trace needs a file: the workload of a session may bring one
            now = self._crowd.workload.arrivals
            knob = replace(
                knob, choices=tuple(c for c in knob.choices if c != "trace" or now == "trace")
            )
        return Control(knob, getattr(self._crowd.workload, name), self.asked, _HIGH.get(name))

    def asked(self, name: str, value: Any) -> None:
        """A control wants another value of its field."""
        more: dict[str, Any] = {}
        if name == "arrivals":  # what the new ones make nothing of would be refused
            knobs = (describe(Workload, other) for other in PLAN_ONLY)
            more = {k.name: k.default for k in knobs if value not in k.only["arrivals"]}
        self._crowd.change(**{name: value}, **more)
        self._show_what_matters()
        self.controls[name].show(getattr(self._crowd.workload, name))
        whose = "the" if self._crowd.workload.open_loop else "each user's"
        self.controls[name].say(f"from {whose} next request on", "good")

    def _show_what_matters(self) -> None:
        for control in self.controls.values():
            matters = control.knob.matters(self._crowd.workload)
            control.widget.layout.display = "flex" if matters else "none"

    def toggle(self) -> None:
        """Start the load, or stop it; what prevents it is said beside the button."""
        self._start.disabled = True
        try:
            tried(self._line, self._crowd.stop if self._crowd.active else self._crowd.start)
        finally:
            self._start.disabled = False

    def follow(self) -> None:
        """Show how many users there are; to be called once a second."""
        on, status = self._crowd.active, self._crowd.status()
        self._start.description = "Stop load" if on else "Start load"
        self._start.button_style = "warning" if on else "success"
        if not on and "kit-bad" in self._line.value:
            return  # why it did not start stays until it does
        words = "no load"
        if on:
            who = f"{status['users']} users" if "users" in status else _plan_words(status)
            words = f"{who}, {status['in_flight']} requests under way"
        self._line.value = f'<div class="kit-line">{words}</div>'
        for name, control in self.controls.items():
            if control.served != (value := getattr(self._crowd.workload, name)):
                control.show(value)

    def _set_shape(self) -> str:
        self._crowd.change(shape=self._shape.value)
        return SHAPES[self._shape.value][1]


def _plan_words(status: dict[str, Any]) -> str:
    rate = f"{status['rate_rps']:.3g} requests/s, " if "rate_rps" in status else ""
    return f"{rate}{status.get('sent_requests', 0)} sent"


def tried(line: w.HTML, act: Callable[[], str | None]) -> None:
    """Do what a person asked; words or the error go into the line beside it."""
    try:
        said, mood = act() or "", "good"
    except Exception as error:  # in a callback nobody else would see it
        said, mood = str(error) or type(error).__name__, "bad"
    line.value = f'<div class="kit-line kit-{mood}">{html.escape(said)}</div>'


def button(name: str, act: Callable[[], None], style: str = "") -> w.Button:
    """A button that does `act` when it is clicked."""
    made = w.Button(description=name, button_style=style, layout={"width": "auto"})
    made.on_click(lambda _: act())
    return made
