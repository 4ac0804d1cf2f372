"""The panel on a real deployment, moved as a person would, but without a browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ipywidgets as w
import pytest
from conftest import BASE

import kit
from kit import live_panel, script
from kit.controls import Control
from kit.crowd import Crowd
from kit.live_panel import Panel
from kit.load import LoadError
from kit.mover import Move, timer_reset
from kit.sampler import Sampler
from kit.script import Script
from kit.serving import Serving
from kit.settings import Settings, SettingsError
from kit.status import Replica, Status
from kit.workload import Workload, WorkloadError


@pytest.fixture
def opened(serving: Serving, tmp_path: Path) -> Iterator[Callable[..., Panel]]:
    """Opens panels of the shared cluster; closes the last one."""

    def go(**workload: object) -> Panel:
        load = Workload(**{"users": 8, "prompt_tokens": 100, "output_tokens": 100} | workload)
        found = kit.panel(serving, load, moves=[], folder=tmp_path / f"{time.monotonic_ns()}")
        assert isinstance(found, Panel)
        return found

    yield go
    if live_panel._open is not None:
        live_panel._open.close()


def until(what: Callable[[], object], within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.02)


def moved(control: Control, written: str) -> str:
    """Write a value, as a person does, and wait for what becomes of it."""
    control.say("")
    control.written(written)
    until(lambda: control.mood in ("good", "bad"))
    return control.said


def reported(serving: Serving, knob: str) -> set[object]:
    """What the replicas that run say of a knob; those of before are told of for a minute."""
    running = {r.replica_id for r in serving.status().running}
    return {s["user_config"][knob] for s in serving.replicas() if s["replica_id"] in running}


def test_a_move_serves_on_the_same_replicas_and_is_a_row_of_the_run(
    serving: Serving, opened: Callable[..., Panel]
) -> None:
    panel = opened()
    pids = {r.pid for r in serving.status().running}
    panel.load.toggle()
    size = panel.controls["max_batch_size"]
    for written in ("4 requests", "16", "12"):
        assert moved(size, written).startswith("applied in ")
        assert reported(serving, "max_batch_size") == {int(written.split()[0])}
    assert moved(panel.load.controls["output_tokens"], "30").startswith("from each user's next")
    panel.load._shape.value = "spikes"
    panel.session.mark("half time")
    until(lambda: panel.run.requests["output_tokens"].eq(30).sum() > 8)
    assert {r.pid for r in serving.status().running} == pids
    panel.load.toggle()
    until(lambda: panel.session.crowd.status()["in_flight"] == 0)
    until(lambda: "no load" in panel.load._line.value)
    panel.close()
    run = panel.run
    assert run.status == "complete"
    applied = run.changes[run.changes["knob"] == "max_batch_size"]
    assert list(applied["to"]) == ["4", "16", "12"]
    assert (applied["applied_s"] > applied["asked_s"]).all()
    assert {"users", "output_tokens", "shape", "mark"} < set(run.changes["knob"])
    assert run.requests["outcome"].isin(["ok", "cut"]).all()
    assert run.requests["request"].is_unique


def test_o9_a_dragged_slider_sends_few_updates_and_the_autoscaler_still_scales(
    serving: Serving, opened: Callable[..., Panel]
) -> None:
    auto = {"num_replicas": "auto", "max_replicas": 2, "target_ongoing_requests": 2.0}
    serving.update(BASE.replace(**auto))
    panel = opened()
    panel.load.toggle()
    wait = panel.controls["batch_wait_timeout_s"]
    for k in range(100):
        wait.written(f"{10 + k} ms")
        time.sleep(0.1)
    sent = panel.session.mover.sent
    assert 2 <= sent <= 12
    until(lambda: not panel.session.mover.busy)
    assert serving.settings
    assert serving.settings.batch_wait_timeout_s == 0.109
    assert panel.session.mover.sent <= 12
    assert reported(serving, "batch_wait_timeout_s") == {0.109}
    until(lambda: len(serving.status().running) == 2)


def test_a_panel_opened_five_times_is_one_panel(
    serving: Serving, opened: Callable[..., Panel]
) -> None:
    counts = []
    for _ in range(5):
        panel = opened()
        until(lambda plot=panel._plot: plot.value)  # type: ignore[misc]
        counts.append((threading.active_count(), len(w.widgets.widget._instances)))
    assert counts[1:] == counts[:1] * 4
    before = serving.status().deployed_s
    assert moved(panel.controls["max_batch_size"], "16").startswith("applied")
    assert panel.session.mover.sent == 1
    assert len(panel.run.changes) == 1
    assert serving.status().deployed_s > before
    panel.close()
    names = [t.name for t in threading.enumerate()]
    assert not [n for n in names if n.startswith("kit-")]


def test_o22_o23_serve_goes_and_comes_back_under_the_panel(
    serving: Serving, opened: Callable[..., Panel]
) -> None:
    panel = opened()
    panel.load.toggle()
    size = panel.controls["max_batch_size"]
    serving._client.delete_applications()
    said = moved(size, "16")
    assert "is not running" in said
    assert size.mood == "bad"
    assert size.served == 8
    assert size._values[size._main.index] == 8
    until(lambda: "not running" in panel._trouble.value)
    assert panel.session.crowd.active
    serving.deploy(BASE)
    until(lambda: "not running" not in panel._trouble.value)
    assert moved(size, "16").startswith("applied")
    seen = panel.run.requests
    assert (
        len(seen) < 8 * 4 * panel.session.now_s
    )  # who finds nobody there waits before asking again
    until(lambda: panel.run.requests["outcome"].iloc[len(seen) :].eq("ok").any())
    assert panel.session.crowd.active
    assert panel.run.changes["error"].str.contains("is not running").sum() == 1


def test_a_panel_that_no_page_shows_ends_its_load(
    opened: Callable[..., Panel], monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = opened()
    panel.load.toggle()
    monkeypatch.setattr(live_panel, "UNSEEN_S", 1.0)
    monkeypatch.setattr(live_panel, "connections", lambda: None)  # no server tells: it may be seen
    time.sleep(2.5)
    assert panel.session.crowd.active
    monkeypatch.setattr(live_panel, "connections", lambda: 0)
    until(lambda: panel.session.ended)
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("kit-")])
    assert not panel.session.crowd.active
    assert panel.run.status == "complete"


def test_impossible_and_restarting_moves_are_said_beside_their_control(
    serving: Serving, opened: Callable[..., Panel]
) -> None:
    panel = opened()
    pids = {r.pid for r in serving.status().running}
    assert "min_replicas = 3 is above max_replicas = 1" in moved(
        panel.controls["min_replicas"], "3"
    )
    assert panel.controls["min_replicas"].served == 1
    assert "from 1 to 512" in moved(panel.controls["max_batch_size"], "eight")
    cpus = panel.controls["num_cpus"]
    cpus.written("0.2")
    assert "restarts the replicas" in cpus.said
    time.sleep(1.5)  # a redraw must not answer the question
    assert cpus._question.layout.display == "flex"
    assert {r.pid for r in serving.status().running} == pids
    cpus.kept()
    assert "500 times" in moved(panel.controls["num_cpus"], "500 times")
    assert serving.settings == BASE
    # Without enough CPUs it would never start: refused before anything stops.
    cpus.written("200")
    cpus.confirmed()
    until(lambda: cpus.mood == "bad")
    assert "this cluster has" in cpus.said
    assert {r.pid for r in serving.status().running} == pids


def test_another_app_gets_the_requests_that_it_takes(
    serving: Serving, opened: Callable[..., Panel]
) -> None:
    panel = opened()
    panel.load.toggle()
    app = panel.controls["app"]
    app.moved("resnet50-batched")
    assert "restarts the replicas" in app.said
    app.confirmed()
    until(lambda: app.mood in ("good", "bad"))
    assert "1 replicas restarted" in app.said
    assert serving.settings
    assert serving.settings.accelerator.startswith("resnet50.")
    begun = panel.session.now_s
    until(lambda: panel.run.requests.query(f"sent_s > {begun}")["outcome"].eq("ok").sum() > 20)
    until(lambda: panel.controls["max_new_tokens"].widget.layout.display == "none")
    assert panel.controls["max_batch_size"].widget.layout.display == "flex"
    assert panel.session.crowd.workload.kind == "image"
    assert panel.controls["accelerator"].served == serving.settings.accelerator
    until(lambda: "T4" in panel._note.value)


def test_presets_and_last_good(serving: Serving, opened: Callable[..., Panel]) -> None:
    panel = opened()
    assert "max_batch_size 32 requests" in panel.preset("throughput")
    assert panel.session.mover.wait()
    assert serving.settings
    assert (serving.settings.max_batch_size, serving.settings.batch_wait_timeout_s) == (32, 0.05)
    most = live_panel.most_replicas(serving)
    assert f"max_replicas {most} replicas" in panel.preset("auto")
    assert panel.session.mover.wait()
    assert "num_replicas 1 replica" in panel.preset("manual")
    panel.preset("last good")
    assert panel.session.mover.wait()
    assert serving.settings == panel.session.last_good == BASE
    assert panel.preset("last good") == "last good: serves already"


def test_what_a_person_takes_away(serving: Serving, opened: Callable[..., Panel]) -> None:
    panel = opened()
    panel.load.toggle()
    time.sleep(4)
    moved(panel.controls["max_batch_size"], "2")
    time.sleep(4)
    panel._records._note.value = "enough"
    assert panel._records.mark() == "marked: enough"
    names = panel._records.offer()
    assert [n for n in names if "max_batch_size 8 → 2" in n]
    panel._records._a.value, panel._records._b.value = names[1], names[2]
    assert "against" in panel._records.compare()
    assert "cannot tell" in panel._records._table.value or "worse" in panel._records._table.value
    assert bytes(panel._records._figure.value).startswith(b"\x89PNG")
    path = Path(panel._records.save().removeprefix("saved: "))
    assert "max_batch_size: 2" in path.read_text()
    button = panel._records._buttons[0]
    panel._records.do(button, panel._records.mark)
    until(lambda: not button.disabled)
    assert "Write a note first" in panel._records._line.value


def test_a_script_plays_its_moves_and_shows_pictures(serving: Serving, tmp_path: Path) -> None:
    moves = [[1.0, "max_batch_size", 2], [2.0, "users", 4], [3.0, "mark", "fewer users"]]
    load = Workload(users=8, prompt_tokens=100, output_tokens=100)
    played = kit.panel(serving, load, moves=moves, duration_s=6.0, folder=tmp_path / "run")
    assert isinstance(played, Script)
    changes = played.run.changes.sort_values("asked_s").set_index("knob")
    assert list(changes.index) == ["users", "max_batch_size", "users", "mark"]
    begun_s = changes["asked_s"].iloc[0]
    assert changes["asked_s"].iloc[1:].to_numpy() - begun_s == pytest.approx([1, 2, 3], abs=0.5)
    shown = played._repr_html_()
    assert "data:image/png;base64" in shown
    assert "requests/s" in shown
    assert played.run.status == "complete"
    assert played.run.experiment["workload"]["duration_s"] == pytest.approx(6.0, abs=2.0)


def test_a_load_that_cannot_start_says_so_until_it_does(
    serving: Serving, opened: Callable[..., Panel]
) -> None:
    panel = opened()
    url, panel.session.crowd._url = panel.session.crowd._url, "http://127.0.0.1:9"
    panel.load.toggle()
    time.sleep(2.5)
    assert "nothing answers at http://127.0.0.1:9" in panel.load._line.value
    panel.session.crowd._url = url
    panel.load.toggle()
    until(lambda: "8 users" in panel.load._line.value)


# As plain functions.


@pytest.mark.parametrize(
    ("moves", "text"),
    [
        ([[1, "max_batchsize", 8]], "did you mean 'max_batch_size'"),
        ([[9, "users", 8]], "from 0 to before the end of the session at 5 s"),
        ([[-1, "users", 8]], "at -1 s"),
    ],
)
def test_moves_that_cannot_be_played_are_refused_before_any_load(
    moves: list[list[object]], text: str
) -> None:
    with pytest.raises(SettingsError, match=text):
        script.check(moves, 5.0)


def test_o9_a_move_says_which_running_delay_it_began_anew() -> None:
    auto = Settings(num_replicas="auto", max_replicas=4, upscale_delay_s=5.0)
    move = Move("applied", {"max_batch_size": (8, 16)}, "", 0.0)
    said = timer_reset(auto, move, in_flight=8.0, target=1)
    assert said.startswith("the wait for more replicas (4 wanted, 1 the target) began anew")
    assert "upscale_delay_s = 5 s" in said
    assert "downscale_delay_s = 600 s" in timer_reset(auto, move, in_flight=1.0, target=3)
    assert timer_reset(auto, move, in_flight=8.0, target=4) == ""
    assert timer_reset(Settings(), move, in_flight=8.0, target=1) == ""
    switched = Move("applied", {"num_replicas": (1, "auto")}, "", 0.0)
    assert timer_reset(auto, switched, in_flight=8.0, target=1) == ""


class Told:
    """A connection whose controller tells of one replica; `heard` is what the replica tells."""

    heard: list[dict[str, object]]

    def status(self) -> Status:
        only = Replica("r1", "RUNNING", 1, "Model")
        return Status("RUNNING", "HEALTHY", "", 1, (only,), (), 0.0, {})

    def replicas(self) -> list[dict[str, object]]:
        return self.heard


def test_an_entrance_that_fell_silent_is_noticed_and_one_that_never_spoke_is_not(
    tmp_path: Path,
) -> None:
    told = Told()
    load = {"t_s": 0.0, "users": 0, "in_flight": 0}
    sampler = Sampler(told, lambda: load, tmp_path / "samples.csv")  # type: ignore[arg-type]
    state = {"replica_id": "r1", "t_s": 0.0, "busy_s": 0.0, "cpu_s": 0.0, "ongoing": 0}
    seen = []
    for heard in ([], [], [state], [], [], [state]):
        told.heard = [s | {"executing": 0, "engine": {}} for s in heard]
        sampler._read()
        seen.append(sampler.unheard)
    assert seen == [0, 0, 0, 1, 2, 0]


def test_a_crowd_without_a_server_says_so_and_can_try_again(tmp_path: Path) -> None:
    crowd = Crowd(Workload(), "http://127.0.0.1:9", tmp_path, 0.0, lambda changes: None)
    with pytest.raises(LoadError, match="nothing answers"):
        crowd.start()
    assert not crowd.active
    with pytest.raises(WorkloadError, match="shape = 'zigzag'"):
        crowd.change(shape="zigzag")
    crowd.change(users=3, stream=True)
    assert (crowd.workload.users, crowd.workload.stream) == (3, True)
