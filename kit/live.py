"""A session's growing files → `View`s: only what was appended is read, and old rows are let go.

`Recent` follows a run that is under way; `view_of` takes the same view of a stored one, straight
from its tables. Requests are summed up by windows of `WINDOW_S`: a window is shown once it is over.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd

from kit import measures
from kit.rows import REQUEST_COLUMNS, TEXT_COLUMNS
from kit.sampler import SAMPLE_TYPES
from kit.settings import Settings
from kit.store import Run
from kit.view import RECENT_S, SPAN_S, View
from kit.windows import window_of, window_row

WINDOW_S = 2.0
"""Width of a window. One point of the plots; at least two fit between a change and its effect."""
KEEP_S = 2 * RECENT_S
"""How long rows of requests are kept: those of `recent`, and of windows that may still grow."""
MAX_REQUESTS = 50_000
MAX_SAMPLES = 200_000
"""At most so many rows are kept, the newest, whatever the rate."""
LEAST_S = 1.0
"""A rate over less time than this is noise, and not told."""
_CHUNK_BYTES = 8_000_000

_REQUEST_TYPES = {c: "str" if c in TEXT_COLUMNS else "float64" for c in REQUEST_COLUMNS}


class Recent:
    """Follows `requests.csv` and `samples.csv` of a run; files that are not there yet are empty.

    Args:
        folder: of the run.
        span_s: how far back the views reach, in seconds.
    """

    def __init__(self, folder: Path, span_s: float = SPAN_S) -> None:
        self._files = (
            _Tail(folder / "requests.csv", _REQUEST_TYPES),
            _Tail(folder / "samples.csv", SAMPLE_TYPES),
        )
        self._span_s = span_s
        self._forget()

    def _forget(self) -> None:
        self._requests = empty(_REQUEST_TYPES)
        self._samples = empty(SAMPLE_TYPES)
        self._windows: dict[int, dict[str, Any]] = {}
        self._whole_from = 0  # requests of this window and later ones are all kept
        self._running: tuple[float, float] | None = None
        self._replica_seconds = 0.0

    def view(
        self,
        now_s: float,
        settings: Settings,
        slo: Mapping[str, float | None],
        changes: pd.DataFrame,
    ) -> View:
        """The session at `now_s`, in seconds since its start; the rest as `View` has it."""
        requests, samples = self._files
        if requests.replaced or samples.replaced:
            # Another run has begun in the same folder.
            requests.offset = samples.offset = 0
            self._forget()
        for table in requests.read():
            self._take_requests(table, now_s)
        for table in samples.read():
            self._take_samples(table, now_s)
        self._drop(now_s)
        running = math.nan
        if self._running is not None:
            since_s, count = self._running
            running = self._replica_seconds + count * max(0.0, now_s - since_s)
        numbers = sorted(k for k in self._windows if (k + 1) * WINDOW_S <= now_s)
        rows = [self._windows[k] for k in numbers]
        return _view(
            now_s, self._span_s, settings, slo, changes,
            windows=pd.DataFrame(rows, columns=_WINDOW_COLUMNS),
            requests=self._requests, known_from_s=self._whole_from * WINDOW_S,
            samples=self._samples, replica_seconds=running,
        )  # fmt: skip

    def _take_requests(self, new: pd.DataFrame, now_s: float) -> None:
        new = new[measures.finished_s(new).notna()]
        self._requests = pd.concat([self._requests, new], ignore_index=True)
        # A window is summed up anew when rows came in, so once it is over it stays as it is.
        first = max(self._whole_from, int((now_s - self._span_s) // WINDOW_S))
        grown = [k for k in window_of(new, WINDOW_S).unique() if k >= first]
        kept = window_of(self._requests, WINDOW_S)
        touched = kept.isin(grown)
        for k, inside in self._requests[touched].groupby(kept[touched]):
            number = int(str(k))
            self._windows[number] = window_row(inside, number, WINDOW_S)
        # Of a long file read at once, too, no more is kept than its end.
        from_window = int((min(now_s, measures.finished_s(new).max()) - KEEP_S) // WINDOW_S)
        if len(self._requests) > MAX_REQUESTS:
            from_window = max(from_window, int(kept.sort_values().iloc[-MAX_REQUESTS]) + 1)
        if from_window > self._whole_from:
            self._whole_from = from_window
            self._requests = self._requests[kept >= from_window].reset_index(drop=True)

    def _take_samples(self, new: pd.DataFrame, now_s: float) -> None:
        running = new[(new["source"] == "serve") & (new["metric"] == "running_replicas")]
        for time_s, count in zip(running["time_s"], running["value"], strict=True):
            if self._running is not None:
                self._replica_seconds += self._running[1] * (time_s - self._running[0])
            self._running = (float(time_s), float(count))
        recent = new[new["time_s"] >= now_s - self._span_s]
        self._samples = pd.concat([self._samples, recent], ignore_index=True)

    def _drop(self, now_s: float) -> None:
        """Let go what lies before the span."""
        first_s = now_s - self._span_s
        for k in [k for k in self._windows if (k + 1) * WINDOW_S <= first_s]:
            del self._windows[k]
        table = self._samples[self._samples["time_s"] >= first_s]
        self._samples = table.iloc[-MAX_SAMPLES:].reset_index(drop=True)


def view_of(run: Run, until_s: float | None = None) -> View:
    """The view that a live one gave at `until_s`, from a stored run; by default at the load's end.

    The settings are those that served then, as far as the changes tell.
    """
    end_s = float(run.experiment["workload"]["duration_s"]) if until_s is None else until_s
    ended = run.requests[measures.finished_s(run.requests) <= end_s]
    samples = run.samples[run.samples["time_s"] <= end_s]
    changes = run.changes[run.changes["asked_s"] <= end_s]
    window = window_of(ended, WINDOW_S)
    shown = ((window + 1) * WINDOW_S > end_s - SPAN_S) & ((window + 1) * WINDOW_S <= end_s)
    rows = [
        window_row(inside, int(str(k)), WINDOW_S)
        for k, inside in ended[shown].groupby(window[shown])
    ]
    running = measures.series(run, "serve", "running_replicas")
    return _view(
        end_s, SPAN_S, _settings_at(run, changes), run.experiment["slo"],
        changes.reset_index(drop=True), windows=pd.DataFrame(rows, columns=_WINDOW_COLUMNS),
        requests=ended, known_from_s=0.0, samples=samples[samples["time_s"] >= end_s - SPAN_S],
        replica_seconds=measures.replica_seconds_until(running, end_s),
    )  # fmt: skip


def numbers(view: View) -> dict[str, float]:
    """What the row of numbers shows, over `view.recent`; NaN where nothing was observed.

    Keys: `e2e_p50_s`, `e2e_p95_s`, `queueing_share` (of mean end-to-end latency, 0 to 1),
    `throughput_rps` (successful requests), `output_tokens_per_s`, `good_fraction` (0 to 1, under
    the SLO), `running_replicas` (now) and `replica_seconds` (since the start).
    """
    good = measures.ok(view.recent)
    split = good[["queueing_s", "e2e_s"]].dropna()
    # No request in 20 s is an observation once there was one; before, nothing is known.
    begun = len(view.recent) + len(view.windows) > 0 and view.recent_s >= LEAST_S
    width_s = view.recent_s if begun else math.nan
    running = measures.series(view, "serve", "running_replicas")
    running = running[running.index >= view.now_s - RECENT_S]
    return {
        "e2e_p50_s": measures.percentile(good["e2e_s"], 50),
        "e2e_p95_s": measures.percentile(good["e2e_s"], 95),
        "queueing_share": (
            float(split["queueing_s"].sum() / split["e2e_s"].sum()) if len(split) else math.nan
        ),
        "throughput_rps": len(good) / width_s,
        "output_tokens_per_s": float(good["output_tokens"].sum()) / width_s,
        "good_fraction": measures.good_fraction_of(view.recent, view.slo),
        "running_replicas": float(running.iloc[-1]) if len(running) else math.nan,
        "replica_seconds": view.replica_seconds,
    }


_TILES: dict[str, tuple[str, Callable[[float], str]]] = {
    "e2e_p50_s": ("E2E p50", lambda v: f"{v:.2f} s"),
    "e2e_p95_s": ("E2E p95", lambda v: f"{v:.2f} s"),
    "queueing_share": ("queueing", lambda v: f"{v:.0%}"),
    "throughput_rps": ("requests/s", lambda v: f"{v:.1f}"),
    "output_tokens_per_s": ("tokens/s", lambda v: f"{v:,.0f}"),
    "good_fraction": ("good", lambda v: f"{v:.0%}"),
    "running_replicas": ("replicas", lambda v: f"{v:.0f}"),
    "replica_seconds": ("cost (replica-seconds)", lambda v: f"{v:,.0f}"),
}


def written(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """`numbers` as people read them: name and value with its unit, a dash where there is none."""
    return [
        (name, "–" if math.isnan(figures[key]) else show(figures[key]))
        for key, (name, show) in _TILES.items()
    ]


def empty(types: Mapping[str, str]) -> pd.DataFrame:
    """A table without rows."""
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in types.items()})


_WINDOW_COLUMNS = list(window_row(empty(_REQUEST_TYPES), 0, WINDOW_S))


class _Tail:
    """A CSV file that grows: each reading gives the whole lines that came since the last."""

    def __init__(self, path: Path, types: Mapping[str, str]) -> None:
        self._path = path
        self._types = types
        self.offset = 0

    @property
    def replaced(self) -> bool:
        """Whether the file is shorter than what was read of it."""
        try:
            return self._path.stat().st_size < self.offset
        except OSError:
            return self.offset > 0

    def read(self) -> Iterator[pd.DataFrame]:
        """Tables of whole lines, in pieces of bounded size."""
        while lines := self._lines():
            first = self.offset == 0
            self.offset += len(lines)
            table = pd.read_csv(
                BytesIO(lines), dtype=dict(self._types), keep_default_na=False, na_values=[""],
                header=0 if first else None, names=list(self._types),
            )  # fmt: skip
            if len(table):
                yield table

    def _lines(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self.offset)
                text = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return b""
        return text[: text.rfind(b"\n") + 1]


def _view(
    now_s: float, span_s: float, settings: Settings, slo: Mapping[str, float | None],
    changes: pd.DataFrame, *, windows: pd.DataFrame, requests: pd.DataFrame, known_from_s: float,
    samples: pd.DataFrame, replica_seconds: float,
) -> View:  # fmt: skip
    """What live and stored views have in common: what counts as recent."""
    applied_s = measures.took_effect(changes)["applied_s"].max()
    from_s = max(0.0, now_s - RECENT_S, known_from_s)
    if applied_s <= now_s:  # never of NaN
        from_s = max(from_s, float(applied_s))
    recent = requests[measures.finished_s(requests) >= from_s]
    return View(
        now_s=now_s,
        span_s=span_s,
        settings=settings,
        slo=slo,
        windows=windows,
        recent=recent.sort_values("sent_s", kind="stable", ignore_index=True),
        recent_s=now_s - from_s,
        samples=samples.reset_index(drop=True),
        changes=changes,
        replica_seconds=replica_seconds,
    )


def _settings_at(run: Run, changes: pd.DataFrame) -> Settings:
    """The settings that the changes led to."""
    settings = {k: v for k, v in run.experiment["settings"].items() if k in Settings.model_fields}
    for change in measures.records(measures.took_effect(changes)):
        if change["knob"] in settings:
            settings[change["knob"]] = _value(change["to"], settings[change["knob"]])
    return Settings(**settings)


def _value(text: str, was: Any) -> Any:
    """A knob's value from its text in a table of changes."""
    if isinstance(was, str) and was != "auto":
        return text
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
