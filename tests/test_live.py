"""Views of a session under way: the same from a growing file and a stored run; and their pictures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import fake_run, requests_table, samples_table
from PIL import Image

from kit import gpu, live, live_tables, measures, phases
from kit.live import WINDOW_S, Recent, numbers, view_of
from kit.live_figure import LiveFigure
from kit.settings import Settings
from kit.store import CHANGE_COLUMNS, Run
from kit.view import RECENT_S, SPAN_S, View

SLO = {"e2e_p95_s": 1.5, "queueing_p95_s": 0.2}
DURATION_S = 400.0


def session(n: int = 4000, duration_s: float = DURATION_S) -> Run:
    """A run whose rows stand in the order in which they ended, as a load generator writes them."""
    run = fake_run(n, duration_s=duration_s)
    table = run.requests.assign(ended_s=measures.finished_s(run.requests))
    table.loc[table["sent_s"] > 0.8 * duration_s, "outcome"] = "rejected"
    table = table.sort_values("ended_s", kind="stable", ignore_index=True)
    return replace(run, requests=table.drop(columns="ended_s"))


def no_changes() -> pd.DataFrame:
    return fake_run(1).changes.iloc[:0]


def fed(
    run: Run, folder: Path, times_s: list[float], torn: int = 0, recent: Recent | None = None
) -> Iterator[View]:
    """The run's rows appended to files up to each time, `torn` bytes of the next line with them."""
    files = {}
    for name, table, at_s in (
        ("requests", run.requests, measures.finished_s(run.requests)),
        ("samples", run.samples, run.samples["time_s"]),
    ):
        lines = table.to_csv(index=False).splitlines(keepends=True)
        files[name] = (folder / f"{name}.csv", lines, at_s.to_numpy())
    recent = recent or Recent(folder)
    written = dict.fromkeys(files, 0)
    for now_s in times_s:
        for name, (path, lines, at_s) in files.items():
            count = 1 + int(np.searchsorted(at_s, now_s, side="right"))
            text = "".join(lines[:count])
            if count < len(lines):
                text += lines[count][:torn]
            with path.open("a") as file:
                file.write(text[written[name] :])
            written[name] = len(text)
        changes = run.changes[run.changes["asked_s"] <= now_s]
        yield recent.view(now_s, Settings(), SLO, changes)


def assert_same(one: View, other: View) -> None:
    for table in ("windows", "recent", "samples"):
        pd.testing.assert_frame_equal(getattr(one, table), getattr(other, table))
    assert one.recent_s == other.recent_s
    assert one.replica_seconds == pytest.approx(other.replica_seconds)
    assert numbers(one) == pytest.approx(numbers(other), nan_ok=True)


@pytest.mark.parametrize("torn", [0, 20])
def test_a_file_fed_in_pieces_gives_the_view_of_the_stored_run(tmp_path: Path, torn: int) -> None:
    run = session()
    times_s = [0.3, 1.0, 7.5, 8.1, 60.0, 200.1, 200.5, 205.0, 333.3, 334.0, 399.9]
    for now_s, view in zip(times_s, fed(run, tmp_path, times_s, torn), strict=True):
        assert_same(view, view_of(run, now_s))
    assert len(view.samples) > 0


def test_windows_count_every_request_that_ended_in_them(tmp_path: Path) -> None:
    run = session()
    (view,) = fed(run, tmp_path, [250.0])
    counted = view.windows.filter(regex="_rps$").to_numpy().sum() * WINDOW_S
    assert counted == pytest.approx(measures.finished_s(run.requests).lt(250.0).sum())
    # Little's law over the span: in flight = rate × latency.
    good = view.windows["ok_rps"].mean()
    inside = run.requests[run.requests["sent_s"] < 250.0]
    in_flight = inside["e2e_s"].sum() / 250.0
    assert good * inside["e2e_s"].mean() == pytest.approx(in_flight, rel=0.05)


def test_a_row_that_comes_late_is_counted_in_its_own_window(tmp_path: Path) -> None:
    run = session()
    early = run.requests.iloc[[5]]
    late = replace(run, requests=run.requests.drop(index=5))
    views = fed(late, tmp_path, [20.0, 21.0])
    before = next(views)
    early.to_csv(tmp_path / "requests.csv", mode="a", header=False, index=False)
    recent = Recent(tmp_path)
    after = recent.view(20.0, Settings(), SLO, no_changes())
    gained = after.windows["ok_rps"].sum() - before.windows["ok_rps"].sum()
    assert gained * WINDOW_S == pytest.approx(1)


def test_an_hour_is_kept_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(session(36_000, 3600.0), samples=samples_table(3600.0))
    monkeypatch.setattr(live, "MAX_REQUESTS", 300)
    times_s = [float(t) for t in range(300, 3600, 300)]
    recent = Recent(tmp_path)
    for view in fed(run, tmp_path, times_s, recent=recent):
        assert len(view.recent) <= len(recent._requests) <= 300
        assert len(recent._windows) <= SPAN_S / WINDOW_S + 2
        assert len(recent._samples) <= SPAN_S * 2 * 6 + 12
    assert view.replica_seconds == pytest.approx(view_of(run, view.now_s).replica_seconds)
    pd.testing.assert_frame_equal(view.windows, view_of(run, view.now_s).windows)
    assert (tmp_path / "requests.csv").stat().st_size > 1e6
    assert recent._requests["sent_s"].min() > 3200


def test_more_rows_than_are_kept_shorten_what_is_recent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_REQUESTS", 60)  # at 10 requests/s, 6 s of the 20
    run = session()
    (view,) = fed(run, tmp_path, [150.0])
    assert view.recent_s <= 6.0
    assert numbers(view)["throughput_rps"] == pytest.approx(10, rel=0.4)
    whole = view_of(run, 150.0)
    pd.testing.assert_frame_equal(view.windows, whole.windows)


def test_what_is_recent_starts_with_the_last_change_that_took_effect() -> None:
    run = session()
    half_s = DURATION_S / 2
    assert view_of(run, half_s + 5.4).recent_s == pytest.approx(5.0)
    assert view_of(run, half_s + 60).recent_s == RECENT_S
    refused = ("max_replicas", "1", "900", half_s + 3, math.nan, 0.0, "no")
    note = ("mark", "", "lunch", half_s + 4, half_s + 4, 0.0, "")
    more = pd.DataFrame([refused, note], columns=list(CHANGE_COLUMNS))
    noted = replace(run, changes=pd.concat([run.changes, more], ignore_index=True))
    view = view_of(noted, half_s + 5.4)
    assert view.recent_s == pytest.approx(5.0)
    assert view.settings.max_batch_size == 16
    assert measures.moves(view)["label"].tolist()[-1] == "mark: lunch"
    assert [len(phases.stretches(r)) for r in (run, noted)] == [2, 3]  # a note begins a stretch


def test_numbers_are_those_of_the_recent_rows_and_nan_where_nothing_was_seen(
    tmp_path: Path,
) -> None:
    view = view_of(session(), 100.0)
    found = numbers(view)
    good = view.recent
    assert found["throughput_rps"] * RECENT_S == pytest.approx(len(good))
    assert found["output_tokens_per_s"] == pytest.approx(50 * found["throughput_rps"])
    assert found["queueing_share"] == pytest.approx(
        good["queueing_s"].mean() / good["e2e_s"].mean()
    )
    assert (found["running_replicas"], found["replica_seconds"]) == (1, pytest.approx(100.0))
    nothing = Recent(tmp_path / "not there").view(5.0, Settings(), SLO, no_changes())
    assert all(math.isnan(v) for v in numbers(nothing).values())
    shed = view_of(session(), DURATION_S)
    assert numbers(shed)["throughput_rps"] == 0
    assert math.isnan(numbers(shed)["e2e_p50_s"])
    assert numbers(shed)["good_fraction"] == 0


def test_another_run_in_the_same_folder_starts_anew(tmp_path: Path) -> None:
    list(fed(session(), tmp_path, [300.0]))
    recent = Recent(tmp_path)
    recent.view(300.0, Settings(), SLO, no_changes())
    requests_table(20, 10.0).to_csv(tmp_path / "requests.csv", index=False)
    samples_table(10.0).to_csv(tmp_path / "samples.csv", index=False)
    view = recent.view(10.0, Settings(), SLO, no_changes())
    assert len(view.recent) == 20
    assert view.samples["time_s"].max() < 10


def drawn(view: View, width_px: int = 520, height_px: int = 600) -> tuple[LiveFigure, np.ndarray]:
    figure = LiveFigure(width_px, height_px)
    return figure, np.asarray(Image.open(BytesIO(figure.png(view))))


@pytest.mark.parametrize("now_s", [0.0, 1.0, 50.0, DURATION_S])
def test_pictures_have_the_size_asked_for_and_units_on_every_axis(now_s: float) -> None:
    figure, picture = drawn(view_of(session(), now_s))
    assert picture.shape == (600, 520, 3)
    left_s, right_s = live_tables.limits_s(now_s, SPAN_S)
    assert left_s <= now_s <= right_s
    assert right_s - left_s <= SPAN_S
    labels = [ax.get_ylabel() for ax in figure._axes]
    assert all("(" in label or label == "replicas" for label in labels)


def test_a_picture_shows_its_view_and_nothing_of_the_one_before() -> None:
    one, other = view_of(session(), 100.0), view_of(session(), 390.0)
    figure = LiveFigure(520, 600)
    first, second = figure.png(one), figure.png(other)
    assert first != second
    assert figure.png(one) == first
    counts = [len(ax.lines) + len(ax.collections) + len(ax.texts) for ax in figure._axes]
    for _ in range(3):
        figure.png(one)
    assert counts == [len(ax.lines) + len(ax.collections) + len(ax.texts) for ax in figure._axes]


def test_long_gaps_break_the_layers_and_short_ones_are_bridged() -> None:
    run = session()
    ended = measures.finished_s(run.requests)
    gaps = ended.between(100, 105) | ended.between(200, 240)
    view = view_of(replace(run, requests=run.requests[~gaps]), 300.0)
    grid = live_tables.on_grid(view)
    assert (grid["time_s"].diff().dropna() == WINDOW_S).all()
    assert grid[grid["time_s"].between(202, 238)]["ok_rps"].eq(0).all()
    table = live_tables.bridged(grid)
    assert table[table["time_s"].between(202, 238)]["p50_decode_s"].isna().all()
    assert table[table["time_s"].between(98, 108)]["p50_decode_s"].notna().all()


def test_numbers_over_crowded_lines_are_shared_and_never_overlap() -> None:
    moves = [
        {"n": n, "asked_s": at_s, "error": "", "mark": False}
        for n, at_s in enumerate([10.0, 100.0, *np.arange(150, 160, 0.5), 280.0], 1)
    ]
    flags = live_tables.flags(moves, px_per_s=1.0)
    assert [text for text, _, _ in flags] == ["23", "3–22", "2", "1"]
    for _, at_s, _ in live_tables.flags(moves, px_per_s=0.3)[:-1]:
        assert at_s >= 10.0
    for px_per_s in (0.3, 1.0, 3.0, 10.0):
        flags = live_tables.flags(moves, px_per_s)
        for (a, a_s, _), (b, b_s, _) in itertools.pairwise(flags):
            assert (a_s - b_s) * px_per_s >= 7 * (len(a) + len(b)) / 2


def test_peoples_words_are_drawn_as_they_are(recwarn: pytest.WarningsRecorder) -> None:
    run = session()
    notes = [("mark", "", text, 50.0 + k, math.nan, 0.0, "")
             for k, text in enumerate(["$x_", "中\nzwei", "w" * 400, ""])]  # fmt: skip
    changes = pd.DataFrame(notes, columns=list(CHANGE_COLUMNS))
    figure, _ = drawn(view_of(replace(run, changes=changes), 100.0))
    texts = [t.get_text() for t in figure._figure.texts]
    assert texts[:2] == ["1  mark: $x_", "2  mark: □ zwei"]
    assert len(texts[2]) < 120
    assert not [w for w in recwarn if "lyph" in str(w.message)]


REAL = {"app": "continuous", "engine": "vllm", "model": "x"}


def test_more_than_one_core_stays_in_the_picture() -> None:
    view = view_of(session(), 50.0)
    used = [(t, "replica:r1", "cpu_cores", 1.7) for t in np.arange(0, 50, 0.5)]
    samples = pd.DataFrame(used, columns=view.samples.columns)
    figure, _ = drawn(replace(view, settings=Settings(num_cpus=1.0, **REAL), samples=samples))
    assert figure._axes[4].get_ylim()[0] == 0
    assert figure._axes[4].get_ylim()[1] > 1.7


def accelerator(settings: Settings, rows: list[tuple[str, str, float]]) -> tuple[str, list[str]]:
    """The label and the legend of the accelerator's panel for readings that stay the same."""
    view = view_of(session(), 50.0)
    samples = pd.DataFrame(
        [(t, *row) for t in np.arange(0, 50, 0.5) for row in rows], columns=view.samples.columns
    )
    figure, _ = drawn(replace(view, settings=settings, samples=samples))
    ax = figure._axes[4]
    legend = ax.get_legend()
    assert legend
    words = [legend.get_title().get_text(), *(t.get_text() for t in legend.get_texts())]
    return ax.get_ylabel(), [" ".join(w.split()) for w in words]


def test_the_accelerator_is_what_it_is() -> None:
    label, words = accelerator(Settings(), [("replica:r1", "accelerator_busy_share", 0.5)])
    assert "busy (%)" in label
    assert "emulated NVIDIA H100" in words[0]
    label, words = accelerator(Settings(num_cpus=1.0, **REAL), [("replica:r1", "cpu_cores", 0.9)])
    assert "cores" in label
    assert words == ["CPU (vllm), replica", "r1"]
    card = [("sm_percent", 90.0), ("memory_used_bytes", 4e10), ("memory_total_bytes", 8e10),
            ("power_w", 600.0), ("throttle_reasons", 4.0)]  # fmt: skip
    rows = [("gpu:GPU-1", metric, value) for metric, value in card]
    _, words = accelerator(Settings(num_gpus=1.0, **REAL), rows)
    assert words == ["GPU", "SM", "memory used", "throttled: power cap", "power (right)"]


def test_throttling_is_named_and_idling_is_none() -> None:
    assert gpu.throttling(0x1) == gpu.throttling(0x2) == gpu.throttling(0) == ()
    assert gpu.throttling(0x1 | 0x4 | 0x40) == ("power cap", "heat (hardware)")


def test_sizes_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="300 × 600 px: must be at least 440"):
        LiveFigure(300, 600)
