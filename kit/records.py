"""What a person takes away from a session: marks, comparisons, the settings as a file, a report."""

from __future__ import annotations

import html
import io
import threading
from collections.abc import Callable

import ipywidgets as w

from kit import compare, export, measures, report, store
from kit.compare import Stretch
from kit.session import Session
from kit.view import View

_RUNS_LISTED = 20


class Records:
    """The *Record* section of a panel.

    Args:
        session: the session that is recorded.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._line = w.HTML()
        self._note = w.Text(
            placeholder="a note at this time", description="mark", tooltip="shows in the plots"
        )
        self._a, self._b = (w.Dropdown(description=d, options=[]) for d in ("compare", "with"))
        for part in (self._note, self._a, self._b):
            part.layout.width, part.layout.flex = "auto", "1 1 16em"
        self._table, self._figure = w.HTML(), w.Image(format="png")
        self._figure.layout.display = "none"
        self._figure.add_class("kit-plot")
        self._buttons = [
            self._button("Mark", self.mark),
            self._button("Compare", self.compare),
            self._button("Save settings", self.save),
            self._button("Make report", self.report),
        ]
        row = {"flex_flow": "row wrap"}
        self.widget = w.VBox(
            [
                w.HBox([self._note, self._buttons[0]], layout=row),
                w.HBox([self._a, self._b, self._buttons[1]], layout=row),
                w.HBox(self._buttons[2:], layout=row),
                self._line, self._table, self._figure,
            ]
        )  # fmt: skip
        self._changes = -1
        self._threads: list[threading.Thread] = []

    def follow(self, view: View) -> None:
        """Offer the stretches there are now; called with each view."""
        if len(view.changes) != self._changes:
            self._changes = len(view.changes)
            self.offer()

    def offer(self) -> list[str]:
        """Fill both choices with this session's stretches and the newest runs; returns their names."""
        outline = self._session.outline(self._session.changes())  # rows would take their time
        moves = measures.moves(outline).dropna(subset="applied_s")
        mine = ["start", *moves["label"]]
        names = [f"{n}  {label}" for n, label in enumerate(mine)]
        place = self._session.folder.parent
        others = sorted(
            (p.parent.name for p in place.glob("*/run.json") if p.parent != self._session.folder),
            reverse=True,
        )  # fmt: skip
        names += [f"run {name}" for name in others[:_RUNS_LISTED]]
        for box, chosen in ((self._a, max(0, len(mine) - 2)), (self._b, max(0, len(mine) - 1))):
            before = box.value
            box.options = names
            box.value = before if before in names and before.startswith("run ") else names[chosen]
        return names

    def mark(self) -> str:
        """Write the note down at this time."""
        note = self._note.value.strip()
        if not note:
            return "Write a note first"
        self._session.mark(note)
        self._note.value = ""
        return f"marked: {note}"

    def compare(self) -> str:
        """Show the two chosen stretches side by side."""
        a, b = self._chosen(self._a.value), self._chosen(self._b.value)
        self._table.value = compare.table(a, b).to_html(border=0)
        file = io.BytesIO()
        compare.figure(a, b).savefig(file, format="png", dpi=100)
        self._figure.value = file.getvalue()
        self._figure.layout.display = None
        return f"{a.label} against {b.label}"

    def save(self) -> str:
        """Write what serves as a config for `serve deploy`."""
        path = self._session.folder / "serve-config.yaml"
        export.write_serve_config(self._session.serving, path)
        return f"saved: {path}"

    def report(self) -> str:
        """Run the report notebook on what is recorded so far."""
        self._session.run()
        return f"report: {report.of(self._session.folder, progress=False)}"

    def close(self) -> None:
        """Wait for what was begun."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1)

    def _chosen(self, name: str) -> Stretch:
        if name.startswith("run "):
            folder = self._session.folder.parent / name.removeprefix("run ")
            return compare.whole(store.load(folder))
        run, label = self._session.run(), name.split("  ", 1)[1]
        found = [s for s in compare.stretches(run) if s.label == label]
        if not found:
            raise ValueError(f"{label}: too short a stretch to compare")
        return found[-1]

    def _button(self, name: str, act: Callable[[], str]) -> w.Button:
        button = w.Button(description=name, layout={"width": "auto"})
        button.on_click(lambda _: self.do(button, act))
        return button

    def do(self, button: w.Button, act: Callable[[], str]) -> None:
        """Do it beside the widgets' own thread, which must stay free; say what came of it."""

        def work() -> None:
            try:
                said, mood = act(), "good"
            except Exception as error:  # in a thread nobody else would see it
                said, mood = str(error) or type(error).__name__, "bad"
            button.disabled = False
            self._line.value = f'<div class="kit-line kit-{mood}">{html.escape(said)}</div>'

        button.disabled = True
        self._line.value = f'<div class="kit-line kit-busy">{button.description} …</div>'
        thread = threading.Thread(target=work, name="kit-record", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()
