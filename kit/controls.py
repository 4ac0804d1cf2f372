"""A knob as widgets: a slider or a choice, its value as text, and a line that says what happens.

A control asks for what a person released, never for what passes under a dragged handle. Whatever
`ask` raises is shown beside the control, which then goes back to what serves.
"""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import ipywidgets as w

from kit import ladder
from kit.knobs import Knob

Mood = Literal["", "busy", "good", "bad"]
COST_WORDS = {
    "live": "at once",
    "next batch": "from the next batch on",
    "restart": "restarts the replicas",
}


class Control:
    """The widgets of one knob; `widget` is what to show.

    Args:
        knob: from a registry.
        value: what serves now.
        ask: called with name and value when a person wants another; may raise, the text is shown.
        high: where the slider ends, below the knob's own bound: what the cluster holds.
        fixed: why the knob cannot be changed here; None when it can.
    """

    def __init__(
        self,
        knob: Knob,
        value: Any,
        ask: Callable[[str, Any], None],
        high: float | None = None,
        fixed: str | None = None,
    ) -> None:
        self.knob = knob
        self.served = value
        self.fixed = fixed
        self._ask = ask
        self._own: int | None = None
        self.said, self.mood = "", ""
        self._bounds = ladder.bounds(knob, high)
        self._steps = None if knob.low is None else ladder.steps(knob, high)
        self._values: list[Any] = []
        self._text: w.Text | None = None
        options: dict[str, Any] = {
            "description": knob.name,
            "tooltip": f"{knob.help}. Takes {knob.allowed}; {COST_WORDS[knob.cost]}",
            "style": {"description_width": "13.5em"},
            "layout": {"flex": "1 1 14em", "min_width": "14em", "width": "auto"},
        }
        if self._steps is not None:
            self._main: Any = w.SelectionSlider(
                options=[""], continuous_update=False, readout=False, **options
            )
            self._text = w.Text(
                continuous_update=False, layout={"width": "8.5em"}, tooltip=knob.allowed
            )
        elif knob.choices:
            choices = [(ladder.text(knob, c), c) for c in knob.choices]
            self._main = w.Dropdown(options=choices, value=value, **options)
        else:
            self._main = w.Text(value=str(value), continuous_update=False, **options)
        for part in filter(None, (self._main, self._text)):
            part.disabled = fixed is not None
        self._line = w.HTML(layout={"width": "100%"})
        small = {"width": "5.5em"}
        self._yes = w.Button(description="Apply", button_style="warning", layout=small)
        self._no = w.Button(description="Keep", layout=small)
        self._question = w.HBox([self._yes, self._no], layout={"display": "none"})
        row = [self._main, *([self._text] if self._text else [])]
        self.widget = w.Box(
            [*row, self._line, self._question],
            layout={"display": "flex", "flex_flow": "row wrap", "align_items": "center"},
        )
        self.widget.add_class("kit-control")
        self.show(value)
        self.say("")
        if self._text is None:
            self._main.observe(lambda change: self.moved(change["new"]), "value")
        else:
            self._main.observe(lambda change: self.moved(self._values[change["new"]]), "index")
            self._text.observe(lambda change: self.written(change["new"]), "value")
        self._yes.on_click(lambda _: self.confirmed())
        self._no.on_click(lambda _: self.kept())
        self._wanted: Any = None

    def moved(self, value: Any) -> None:
        """A person released the slider, or chose."""
        if self._by_us:
            return
        if value == self.served and not self.waiting:
            self.show(value)
            return
        self._wanted = value
        if not isinstance(value, str):
            self._display(value)  # slider and text agree while it is being applied
        unread = isinstance(value, str) and self.knob.kind in ("whole number", "number")
        if self.knob.cost == "restart" and not unread:
            self.say(f"{ladder.text(self.knob, value)}: this restarts the replicas. Sure?", "busy")
            self._question.layout.display = "flex"
        else:
            self.confirmed()

    def written(self, text: str) -> None:
        """A person wrote a value."""
        if not self._by_us:
            self.moved(ladder.parse(self.knob, text))

    def confirmed(self) -> None:
        """A person wants the value."""
        self._question.layout.display = "none"
        try:
            self.say("asked", "busy")
            self._ask(self.knob.name, self._wanted)
        except Exception as error:  # in a callback nobody else would see it
            self.refused(str(error) or type(error).__name__)

    def kept(self) -> None:
        """A person thought better of it."""
        self.say("")
        self.show(self.served)

    def refused(self, text: str) -> None:
        """Say why not, and go back to what serves."""
        self.show(self.served)
        self.say(text, "bad")

    def show(self, value: Any) -> None:
        """Have the widgets show what serves, without asking for it."""
        self.served = value
        self._question.layout.display = "none"
        self._display(value)

    def _display(self, value: Any) -> None:
        with self._silently():
            if self._text is None:
                self._main.value = value
                return
            # By position, since the slider takes no None for a value.
            self._values = ladder.with_value(self._steps or [], value)
            labels = tuple(ladder.text(self.knob, v) for v in self._values)
            if self._main.options != labels:
                self._main.options = labels
            self._main.index = self._values.index(value)
            self._text.value = ladder.text(self.knob, value)

    def say(self, text: str, mood: Mood = "") -> None:
        """What happens, before bounds and cost."""
        if (text, mood) == (self.said, self.mood) and self._line.value:
            return
        self.said, self.mood = text, mood
        known = self.fixed or " · ".join(filter(None, (self._bounds, COST_WORDS[self.knob.cost])))
        state = f'<b class="kit-{mood}">{html.escape(text)}</b> · ' if text else ""
        self._line.value = (
            f'<div class="kit-line" aria-live="polite">{state}{html.escape(known)}</div>'
        )

    @property
    def waiting(self) -> bool:
        """Whether what it shows is not what serves yet, or a question is open."""
        return self.mood == "busy"

    @property
    def _by_us(self) -> bool:
        return self._own == threading.get_ident()

    @contextlib.contextmanager
    def _silently(self) -> Iterator[None]:
        # By thread: a person's move that comes in meanwhile on another one must not be lost.
        self._own = threading.get_ident()
        try:
            yield
        finally:
            self._own = None
