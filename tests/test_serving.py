"""What users of Ray Serve fall into, tried on a real cluster (the numbers are those of the traps)."""

from __future__ import annotations

import _thread
import concurrent.futures
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import requests
from conftest import BASE, ask

from kit import leftovers, store, summary
from kit import serving as serving_module
from kit.application import application
from kit.clock import SERVED_BY
from kit.cluster import ServingError, check_port
from kit.experiment import Change, Experiment
from kit.experiment import run as run_experiment
from kit.load import Load
from kit.serving import Serving, attach, start
from kit.settings import Settings
from kit.store import Run
from kit.workload import Workload


def pids(serving: Serving) -> dict[str, int | None]:
    return {r.replica_id: r.pid for r in serving.status().running}


def running_config(serving: Serving) -> dict[str, object]:
    """What the only running replica says that it runs."""
    (only,) = pids(serving)
    return next(s["user_config"] for s in serving.replicas() if s["replica_id"] == only)


def under_load(folder: Path, rows: int, act: Callable[[], object]) -> None:
    """Act as soon as the run in `folder` has so many rows, however long its start takes."""

    def wait() -> None:
        path = folder / "requests.csv"
        while not path.exists() or path.read_text().count("\n") <= rows:
            time.sleep(0.05)
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_o1_the_cluster_wants_a_token_and_the_kit_brings_it(serving: Serving) -> None:
    bare = requests.get(f"{serving._client._address}/api/serve/applications/", timeout=5)
    assert bare.status_code == 401
    assert serving.status().app == "RUNNING"


def test_attached_without_the_token_says_what_is_missing(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Request failed with status code 401: missing authentication token")

    monkeypatch.setattr("ray.dashboard.modules.dashboard_sdk.SubmissionClient._do_request", refuse)
    with pytest.raises(ServingError, match="RAY_AUTH_TOKEN"):
        attach(serving._client._address)


def test_o2_o8_changes_of_every_level_keep_the_process(serving: Serving) -> None:
    before = pids(serving)
    settings = BASE
    for change in (
        {"max_batch_size": 4},
        {"batch_wait_timeout_s": 0.05},
        {"max_ongoing_requests": 32, "max_queued_requests": 100},
        {"num_replicas": "auto", "max_replicas": 2, "target_ongoing_requests": 9.0},
        {"num_replicas": 1},
    ):
        settings = settings.replace(**change)
        applied = serving.update(settings)
        assert set(change) <= set(applied.changes)
        assert applied.restarted_replicas == 0
        assert applied.applied_s - applied.asked_s < 5
    assert pids(serving) == before
    assert running_config(serving) == settings.user_config()


def test_a_new_batch_size_shows_in_the_answers(serving: Serving) -> None:
    for size in (2, 4):
        serving.update(BASE.replace(max_batch_size=size, batch_wait_timeout_s=0.5))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: ask(serving), range(4)))
        assert {a.headers[SERVED_BY].split()[2] for a in answers} == {str(size)}


def test_manual_scaling_and_back_keeps_the_first_replica(serving: Serving) -> None:
    first = pids(serving)
    assert serving.update(BASE.replace(num_replicas=3)).restarted_replicas == 0
    serving.deploy(BASE.replace(num_replicas=3))
    assert len(pids(serving)) == 3
    assert serving.update(BASE).restarted_replicas == 0
    assert first.items() <= pids(serving).items() or len(pids(serving)) == 1


@pytest.mark.parametrize(
    "broken", [{"import_path": "kit.apps:nope"}, {"deployment": "Nope"}], ids=str
)
def test_o3_a_config_that_serve_takes_but_cannot_run_is_an_error_and_is_undone(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, broken: dict[str, str]
) -> None:
    real = serving_module.application

    def wrong(self: Settings) -> dict[str, object]:
        app = real(self)
        if self.max_batch_size == 5:
            app["import_path"] = broken.get("import_path", app["import_path"])
            app["deployments"][0]["name"] = broken.get("deployment", "Model")
        return app

    monkeypatch.setattr(serving_module, "application", wrong)
    with pytest.raises(ServingError, match=r"(?s)(nope|Nope).*before it are serving again"):
        serving.update(BASE.replace(max_batch_size=5))
    assert serving.settings == BASE
    assert ask(serving).status_code == 200


@pytest.mark.parametrize(
    "bad",
    [{"max_batch_size": v} for v in (0, -1, 2.5, "eight", None)]
    + [{"batch_wait_timeout_s": v} for v in ("0.05", None, -1.0)],
    ids=str,
)
def test_o4_o5_bad_values_that_reach_a_replica_are_refused_there(
    serving: Serving, bad: dict[str, object]
) -> None:
    """They skip the kit's own check, as a hand-written `serve deploy` would."""
    before = pids(serving)
    smuggled = BASE.model_copy(update=bad)
    with pytest.raises(
        ServingError, match=rf"(?s)refused it: {next(iter(bad))}.*serving again"
    ) as error:
        serving.update(smuggled)
    assert "must be" in str(error.value)
    assert pids(serving) == before
    assert ask(serving).status_code == 200
    assert serving.update(BASE.replace(max_batch_size=4)).restarted_replicas == 0
    assert ask(serving).status_code == 200


def test_o6_moving_the_target_alone_keeps_the_replicas_that_autoscaling_added(
    serving: Serving, tmp_path: Path
) -> None:
    auto = BASE.replace(
        num_replicas="auto", max_replicas=3, target_ongoing_requests=1.0, downscale_delay_s=600.0
    )
    serving.update(auto)
    load = Load(Workload(users=8, duration_s=60.0), serving.url, tmp_path)
    try:
        load.begin(time.monotonic())
        deadline = time.monotonic() + 40
        while len(pids(serving)) < 3 and time.monotonic() < deadline:
            time.sleep(0.25)
        three = pids(serving)
        assert len(three) == 3
        serving.update(auto.replace(target_ongoing_requests=4.0))
        time.sleep(3)
        assert pids(serving) == three
    finally:
        load.kill()
    effective = serving.status().configs["Model"]["autoscaling_config"]
    assert effective["max_replicas"] == 3
    assert effective["downscale_delay_s"] == 600


def test_o7_what_serve_drops_silently_is_found_by_comparing_with_what_it_runs(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = serving_module.application

    def misspelt(self: Settings) -> dict[str, object]:
        app = real(self)
        if self.max_batch_size == 5:
            app["deployments"][0]["max_batch_size"] = 5
        return app

    monkeypatch.setattr(serving_module, "application", misspelt)
    with pytest.raises(ServingError, match="differing: max_batch_size"):
        serving.update(BASE.replace(max_batch_size=5), timeout_s=2)


def test_o9_moves_that_change_nothing_are_not_sent(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    monkeypatch.setattr(serving._client, "deploy_applications", sent.append)
    for _ in range(10):
        assert serving.update(BASE.replace(max_batch_size=BASE.max_batch_size)).changes == {}
    assert sent == []


def test_o9_a_change_that_restarts_the_autoscalers_delays_is_said(
    measure: Callable[..., Run],
) -> None:
    auto = BASE.replace(num_replicas="auto", max_replicas=2, target_ongoing_requests=50.0)
    run = measure(auto, Change(2, "target_ongoing_requests", 51.0), users=1, duration_s=4.0)
    assert any("delays anew (upscale_delay_s = 1 s)" in note for note in run.notes)


@pytest.mark.parametrize(("max_ongoing", "filled"), [(3, 3), (16, 8)])
def test_o10_batches_fill_only_as_far_as_max_ongoing_requests_lets_them(
    measure: Callable[..., Run], max_ongoing: int, filled: int
) -> None:
    settings = BASE.replace(
        max_batch_size=8, batch_wait_timeout_s=0.5, max_ongoing_requests=max_ongoing
    )
    run = measure(settings, users=16, max_output_tokens=50)
    assert run.requests["batch_size"].median() == filled
    assert any("no batch will hold more than 3" in n for n in run.notes) == (max_ongoing == 3)


def test_plain_serve_batch_keeps_its_small_batches_where_the_gate_fills_them(
    measure: Callable[..., Run],
) -> None:
    """Ray 2.60 closes batches while another runs: under load they stay as small as they were."""
    sizes = {}
    for hold in (False, True):
        settings = BASE.replace(
            max_batch_size=2, batch_wait_timeout_s=0.02, hold_while_busy=hold, time_scale=0.15
        )
        run = measure(settings, Change(2, "max_batch_size", 16), users=16, duration_s=7.0)
        late = run.requests[run.requests["sent_s"] > 3.5]
        sizes[hold] = late["batch_size"].mean()
    print("mean batch:", {hold: f"{size:.1f}" for hold, size in sizes.items()})
    assert sizes[False] < 5
    assert sizes[True] > 8


BAD_BODIES: dict[str, tuple[dict[str, object], int, str]] = {
    "not JSON": ({"data": b"{prompt"}, 400, "not JSON"),
    "not UTF-8": ({"data": b'{"prompt": "\xff\xfe"}'}, 400, "not JSON"),
    "nested without end": ({"data": b"[" * 100_000}, 400, "not JSON"),
    "empty": ({"data": b""}, 400, "JSON object"),
    "a list": ({"json": [1]}, 400, "dictionary|object"),
    "no prompt": ({"json": {"max_tokens": 4}}, 400, "prompt"),
    "null prompt": ({"json": {"prompt": None}}, 400, "prompt = None: must be text"),
    "blank prompt": ({"json": {"prompt": " \n"}}, 400, "white space"),
    "number as prompt": ({"json": {"prompt": 7}}, 400, "prompt = 7: must be text"),
    "negative max_tokens": ({"json": {"prompt": "a", "max_tokens": -1}}, 400, "max_tokens = -1"),
    "text max_tokens": ({"json": {"prompt": "a", "max_tokens": "4"}}, 400, "max_tokens = '4'"),
    "NaN max_tokens": ({"data": b'{"prompt": "a", "max_tokens": NaN}'}, 400, "max_tokens = nan"),
    "huge max_tokens": ({"json": {"prompt": "a", "max_tokens": 10**9}}, 400, "to 1000000"),
    "misspelt key": ({"json": {"prompt": "a", "max_token": 4}}, 400, "max_token = 4: not offered"),
    "4,000 stop strings": ({"json": {"prompt": "a", "stop": ["x"] * 4000}}, 400, "at most 16"),
    "10 MB": ({"json": {"prompt": "word " * 2_000_000}}, 413, "4 MB"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_o11_a_bad_body_is_told_why_and_leaves_its_batch_mates_alone(
    serving: Serving, name: str
) -> None:
    kwargs, status, text = BAD_BODIES[name]
    serving.update(BASE.replace(batch_wait_timeout_s=0.2))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        good = [pool.submit(ask, serving) for _ in range(3)]
        time.sleep(0.05)
        bad = pool.submit(ask, serving, **kwargs).result()
        answers = [g.result() for g in good]
    assert bad.status_code == status
    message = bad.json()["error"]["message"]
    assert any(t in message for t in text.split("|")), message
    assert [a.status_code for a in answers] == [200, 200, 200]
    # The poison never reached the batch of the others.
    assert {a.headers[SERVED_BY].split()[2] for a in answers} == {"3"}


def test_o12_autoscaling_reacts_within_seconds_not_ten(serving: Serving, tmp_path: Path) -> None:
    serving.update(
        BASE.replace(
            num_replicas="auto", max_replicas=3, target_ongoing_requests=1.0, upscale_delay_s=0.0
        )
    )
    load = Load(Workload(users=8, duration_s=30.0), serving.url, tmp_path)
    try:
        began_s = time.monotonic()
        load.begin(began_s)
        while (serving.status().target or 0) < 2 and time.monotonic() - began_s < 20:
            time.sleep(0.05)
        assert time.monotonic() - began_s < 5  # Ray's default reporting makes it 8 to 10 s
    finally:
        load.kill()


def test_o15_more_than_the_cluster_holds_is_refused_at_once(serving: Serving) -> None:
    for change, text in (
        ({"num_replicas": 3, "num_cpus": 8.0}, "3 replicas with 8 CPUs each need 24"),
        ({"num_gpus": 1.0}, "1 replicas with 1 GPUs each need 1; this cluster has 0"),
    ):
        with pytest.raises(ServingError, match=text):
            serving.update(BASE.replace(**change))
    assert serving.status().app == "RUNNING"


def test_o16_shed_load_is_told_apart_and_does_not_flatter_the_percentiles(
    measure: Callable[..., Run],
) -> None:
    settings = BASE.replace(
        app="unbatched", time_scale=0.25, max_ongoing_requests=1, max_queued_requests=2
    )
    run = measure(settings, users=12, think_time_s=0.2, max_output_tokens=60, duration_s=6.0)
    shed = run.requests[run.requests["outcome"] == "rejected"]
    served = run.requests[run.requests["outcome"] == "ok"]
    assert len(shed) > len(served) > 20, "enough to tell a median"
    assert set(shed["status"]) == {503}

    found = summary.of(run)
    assert found["rejected_requests"] == len(shed)
    assert found["e2e_p50_s"] == pytest.approx(served["e2e_s"].median())
    assert found["e2e_p50_s"] > run.requests["e2e_s"].median()


def test_o25_ray_workers_import_pynvml_without_its_warning(serving: Serving) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def heard() -> list[str]:
        import warnings

        with warnings.catch_warnings(record=True) as found:
            import pynvml  # noqa: F401

            warnings.warn("another one", FutureWarning, stacklevel=1)
        return [str(w.message) for w in found]

    assert ray.get(heard.remote()) == ["another one"]


def test_o22_start_again_is_the_same_cluster_and_other_start_knobs_are_refused(
    serving: Serving,
) -> None:
    assert start(BASE) is serving
    with pytest.raises(ServingError, match=r"fixed since Ray started: request_timeout_s = 120"):
        start(BASE.replace(request_timeout_s=5.0))


def test_o22_leftovers_of_a_dead_owner_are_stopped_and_others_are_not() -> None:
    import subprocess

    owner = subprocess.Popen(["sleep", "60"])
    ours = subprocess.Popen(["sleep", "60"], start_new_session=True)
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        leftovers.record([ours.pid], owner=owner.pid)
        assert ours.pid not in leftovers.stop_all()  # its owner lives
        owner.kill()
        owner.wait()
        assert ours.pid in leftovers.stop_all()
        assert not leftovers.alive(ours.pid, 0.0)
        assert leftovers.alive(other.pid, leftovers._started_s(other.pid))
        assert other.poll() is None
    finally:
        for process in (owner, ours, other):
            process.kill()
            process.wait()


def test_a_taken_port_is_named_with_its_holder() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=rf"port {port} is taken .* process {os.getpid()}"):
            check_port(port, patience_s=0.1)


def test_ray_started_by_something_else_is_named(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_module, "_current", None)
    with pytest.raises(ServingError, match="Ray already runs in this process"):
        start(BASE)


def test_attach_reads_what_runs_and_leaves_it_running(serving: Serving) -> None:
    guest = attach(serving._client._address)
    assert guest.url == serving.url
    assert guest.settings is not None
    assert application(guest.settings) == application(BASE)
    assert guest.update(guest.settings.replace(max_batch_size=6)).restarted_replicas == 0
    assert running_config(serving)["max_batch_size"] == 6
    guest.update(BASE)
    guest.shutdown()
    assert ask(serving).status_code == 200
    with pytest.raises(ServingError, match="cannot attach to"):
        attach("http://127.0.0.1:9")


def test_an_interrupted_run_keeps_what_it_measured_and_says_so(
    serving: Serving, measure: Callable[..., Run], tmp_path: Path
) -> None:
    under_load(tmp_path / "run", 12, _thread.interrupt_main)
    run = measure(BASE, users=8, duration_s=30.0)
    assert run.status == "interrupted"
    assert "interrupted" in run.notes[-1]
    assert len(run.requests) > 8
    assert ask(serving).status_code == 200


def test_a_run_that_could_not_be_deployed_says_so_on_disk(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment(BASE.replace(num_gpus=1.0), Workload(duration_s=2.0))
    with pytest.raises(ServingError, match="this cluster has 0"):
        run_experiment(experiment, serving, tmp_path, progress=False)
    kept = store.load(tmp_path)
    assert kept.status == "failed"
    assert "this cluster has 0" in kept.notes[-1]


def test_a_killed_load_generator_marks_the_run_and_keeps_its_rows(
    measure: Callable[..., Run], tmp_path: Path
) -> None:
    def kill() -> None:
        (locust,) = [p for p in psutil.Process().children() if "locust" in " ".join(p.cmdline())]
        locust.kill()

    under_load(tmp_path / "run", 12, kill)
    run = measure(BASE, users=8, duration_s=30.0)
    assert run.status == "failed"
    assert "the load generator died" in run.notes[-1]
    assert "killed by signal 9" in run.notes[-1]
    assert len(run.requests) > 8


def test_a_killed_replica_is_marked_in_the_run_and_replaced(
    serving: Serving, tmp_path: Path, measure: Callable[..., Run]
) -> None:
    (pid,) = pids(serving).values()
    under_load(tmp_path / "run", 4, lambda: os.kill(pid or 0, 9))
    run = measure(BASE, users=4, duration_s=20.0)
    assert run.status == "complete"
    assert any("died" in note for note in run.notes)
    assert set(run.requests["outcome"]) - {"ok"}
    late = run.requests[run.requests["sent_s"] > 17]
    assert (late["outcome"] == "ok").any()
    assert run.requests["replica_id"].dropna().nunique() == 2
