"""Moves, sliders and controls as plain functions; what serves is a stand-in that takes its time."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from kit import ladder
from kit.cluster import ServingError
from kit.controls import Control
from kit.mover import Move, Mover
from kit.serving import Applied
from kit.settings import BY_NAME, Settings, SettingsError, knobs
from kit.shapes import SHAPES, users_at


class Stand:
    """Serves `settings`; an update takes `takes_s`, or fails as told."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.settings: Settings | None = Settings()
        self.takes_s = takes_s
        self.updates: list[Settings] = []
        self.begun = threading.Event()
        self.fail: Exception | None = None

    def update(self, settings: Settings) -> Applied:
        assert self.settings
        self.updates.append(settings)
        self.begun.set()
        before, asked_s = self.settings, time.monotonic()
        time.sleep(self.takes_s)
        if self.fail:
            raise self.fail
        self.settings = settings
        return Applied(before.diff(settings), asked_s, time.monotonic(), 0)


def mover(stand: Stand, spacing_s: float = 0.0) -> tuple[Mover, list[Move]]:
    told: list[Move] = []
    return Mover(stand, told.append, spacing_s), told


def test_moves_while_an_update_is_under_way_are_sent_together_and_the_last_wins() -> None:
    stand = Stand(takes_s=0.2)
    moves, told = mover(stand)
    moves.move(max_batch_size=9)
    stand.begun.wait(5)
    for size in range(10, 30):
        moves.move(max_batch_size=size)
    moves.move(batch_wait_timeout_s=0.05)
    assert moves.wait(5)
    moves.close()
    assert [(s.max_batch_size, s.batch_wait_timeout_s) for s in stand.updates] == [
        (9, 0.01),
        (29, 0.05),
    ]
    assert [m.state for m in told] == ["applying", "applied"] * 2
    assert told[-1].knobs == {"max_batch_size": (9, 29), "batch_wait_timeout_s": (0.01, 0.05)}
    assert told[-1].text.startswith("applied in 0.")


def test_o9_a_dragged_slider_sends_one_update_a_spacing_and_the_last_value() -> None:
    stand = Stand()
    moves, _ = mover(stand, spacing_s=0.2)
    begun_s = time.monotonic()
    for size in range(10, 60):
        moves.move(max_batch_size=size)
        time.sleep(0.02)
    assert moves.wait(5)
    took_s = time.monotonic() - begun_s
    moves.close()
    assert moves.sent == len(stand.updates) <= took_s / 0.2 + 1
    assert stand.settings
    assert stand.settings.max_batch_size == 59


def test_what_serves_already_is_not_sent() -> None:
    stand = Stand()
    moves, told = mover(stand, spacing_s=0.2)
    moves.move(max_batch_size=8)
    assert [m.state for m in told] == ["unchanged"]
    moves.move(max_batch_size=16)
    moves.wait(5)
    moves.move(max_batch_size=32)  # within the spacing, so it waits …
    moves.move(max_batch_size=16)  # … and goes back before it is sent
    assert not moves.busy
    time.sleep(0.3)
    moves.close()
    assert len(stand.updates) == 1


def test_impossible_moves_are_refused_at_once_and_the_rest_goes_on() -> None:
    stand = Stand()
    moves, told = mover(stand)
    with pytest.raises(SettingsError, match="min_replicas = 3 is above max_replicas = 1"):
        moves.move(min_replicas=3)
    with pytest.raises(SettingsError, match="from 1 to 512"):
        moves.move(max_batch_size="eight")
    moves.move(max_replicas=5, min_replicas=3)
    moves.wait(5)
    moves.close()
    assert told[-1].state == "applied"
    assert len(stand.updates) == 1


@pytest.mark.parametrize("error", [ServingError("the replicas refused it"), RuntimeError("boom")])
def test_o23_a_failed_update_is_told_with_the_values_before(error: Exception) -> None:
    stand = Stand()
    stand.fail = error
    moves, told = mover(stand)
    moves.move(max_batch_size=16)
    assert moves.wait(5)
    assert told[-1].state == "refused"
    assert str(error) in told[-1].text
    assert told[-1].knobs == {"max_batch_size": (8, 16)}
    stand.fail = None
    moves.move(max_batch_size=12)  # the thread lives on
    assert moves.wait(5)
    moves.close()
    assert told[-1].state == "applied"


def test_a_closed_mover_leaves_no_thread_and_sends_nothing_more() -> None:
    stand = Stand(takes_s=0.1)
    moves, _ = mover(stand)
    moves.move(max_batch_size=16)
    stand.begun.wait(5)
    moves.move(max_batch_size=32)
    moves.close()
    assert len(stand.updates) == 1
    assert "kit-mover" not in {t.name for t in threading.enumerate()}


# Sliders.


@pytest.mark.parametrize("knob", [k for k in knobs() if k.low is not None], ids=lambda k: k.name)
def test_every_slider_has_valid_steps_in_order_within_its_bounds(knob: Any) -> None:
    values = ladder.steps(knob)
    assert 2 <= len(values) <= 80
    assert len(set(values)) == len(values)
    numbers = [v for v in values if isinstance(v, (int, float))]
    assert numbers == sorted(numbers)
    for value in values:  # each by itself, since some pairs exclude each other
        with_others = {"max_replicas": 1000} if "replicas" in knob.name else {}
        with_others |= {"min_replicas": 0} if knob.name == "initial_replicas" else {}
        settings = Settings(**{**with_others, knob.name: value})
        assert ladder.parse(knob, ladder.text(knob, value)) == getattr(settings, knob.name)
    assert knob.default in ladder.with_value(values, knob.default)


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("batch_wait_timeout_s", "20 ms", 0.02), ("batch_wait_timeout_s", "0.02", 0.02),
        ("upscale_delay_s", "2 min", 120.0), ("max_batch_size", "13", 13),
        ("max_batch_size", "13 requests", 13), ("max_queued_requests", "no limit", -1),
        ("retry_after_s", "none", None), ("num_replicas", "auto", "auto"),
        ("num_replicas", "3", 3), ("max_new_tokens", "4,096", 4096), ("hold_while_busy", "no", False),
    ],
)  # fmt: skip
def test_values_are_read_as_people_write_them(name: str, written: str, value: Any) -> None:
    found = ladder.parse(BY_NAME[name], written)
    assert (found, type(found)) == (value, type(value))


def test_bounds_are_said_briefly_with_their_unit() -> None:
    said = {name: ladder.bounds(knob) for name, knob in BY_NAME.items()}
    assert said["max_batch_size"] == "1 to 512 requests"
    assert said["max_queued_requests"] == "0 to 1,000,000 requests or no limit"
    assert said["retry_after_s"] == "0 to 3,600 s or none"
    assert said["num_replicas"] == "1 to 1,000 replicas or auto"
    assert said["upscaling_factor"] == "above 0 to 100 x"
    assert said["app"] == ""
    assert said["model"] == "text"


@pytest.mark.parametrize("written", ["eight", "5 apples", "1.5", "nan", "-3", "", "1e99"])
def test_what_cannot_be_read_is_named_by_validation(written: str) -> None:
    value = ladder.parse(BY_NAME["max_batch_size"], written)
    with pytest.raises(
        SettingsError, match="max_batch_size = .*: must be a whole number from 1 to 512"
    ):
        Settings(max_batch_size=value)


def test_log_steps_grow_evenly() -> None:
    sizes = [v for v in ladder.steps(BY_NAME["max_batch_size"]) if v >= 4]
    ratios = [b / a for a, b in itertools.pairwise(sizes)]
    assert all(1.15 < r < 1.4 for r in ratios)


# Controls.


def control(name: str, ask: Any, **options: Any) -> Control:
    return Control(BY_NAME[name], getattr(Settings(), name), ask, **options)


def test_a_control_shows_unit_bounds_cost_and_help() -> None:
    for knob in knobs():
        c = Control(knob, knob.default, print)
        assert ladder.bounds(knob) in c._line.value
        assert knob.help in c._main.tooltip
        cost = {"live": "at once", "next batch": "next batch", "restart": "restarts"}[knob.cost]
        assert cost in c._line.value


def test_a_released_control_asks_once_and_a_shown_value_never() -> None:
    asked: list[Any] = []
    c = control("max_batch_size", lambda name, value: asked.append((name, value)))
    assert c._main.continuous_update is False
    c.show(32)
    assert asked == []
    c._main.index = c._values.index(16)
    assert asked == [("max_batch_size", 16)]
    assert c._text.value == "16 requests"  # type: ignore[union-attr]
    c.written("13")
    assert asked[-1] == ("max_batch_size", 13)


def test_o23_what_asking_raises_is_shown_and_the_value_goes_back() -> None:
    def ask(name: str, value: Any) -> None:
        raise ServingError("nothing <answers>")

    c = control("max_batch_size", ask)
    c._main.index = c._values.index(16)
    assert (c.said, c.mood, c.served) == ("nothing <answers>", "bad", 8)
    assert c._values[c._main.index] == 8
    assert "nothing &lt;answers&gt;" in c._line.value


def test_a_knob_that_restarts_replicas_asks_first() -> None:
    asked: list[Any] = []
    c = control("num_cpus", lambda name, value: asked.append(value))
    c.written("1")
    assert asked == []
    assert "restarts the replicas" in c.said
    c.kept()
    assert c._text.value == "0.1 CPUs"  # type: ignore[union-attr]
    c.written("1")
    c._yes.click()
    assert asked == [1.0]


def test_a_knob_that_is_fixed_says_why() -> None:
    c = control("max_batch_size", print, fixed="deployed by serve.run")
    assert c._main.disabled
    assert "deployed by serve.run" in c._line.value


def test_a_moved_back_control_asks_while_the_first_move_is_under_way() -> None:
    asked: list[Any] = []
    c = control("max_batch_size", lambda name, value: asked.append(value))
    c.moved(16)
    c.moved(8)
    assert asked == [16, 8]


# Shapes of the load.


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_stay_between_one_and_all_users(shape: str) -> None:
    over_time = [users_at(shape, 40, t / 2) for t in range(600)]
    assert min(over_time) >= 1
    assert max(over_time) == 40
    assert users_at(shape, 0, 5) == 0
