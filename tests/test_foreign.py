"""An app that someone else deployed, read and changed through `attach(app=…)`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import BASE, ask

import kit
from kit import foreign
from kit.cluster import ServingError
from kit.foreign import Foreign
from kit.live_panel import Panel
from kit.load import Load
from kit.sampler import Sampler, read_samples
from kit.serving import Serving, attach
from kit.settings import Settings, SettingsError, knobs
from kit.workload import Workload

AUTO = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 7.0}
EFFECTIVE: dict[str, Any] = {
    "name": "Completer",
    "max_ongoing_requests": 5,
    "max_queued_requests": -1,
    "user_config": {"max_batch_size": 2, "motto": "a"},
    "backpressure_config": {"status_code": 503, "retry_after_s": None},
    "autoscaling_config": AUTO
    | {"initial_replicas": None, "target_ongoing_requests": 2.0, "look_back_period_s": 30.0}
    | {"upscaling_factor": None, "smoothing_factor": 0.5, "policy": {"policy_function": "x:y"}},
    "ray_actor_options": {"num_cpus": 0.0},
}
"""As Serve tells it, cut to what matters here."""


def fixed(**more: Any) -> dict[str, Any]:
    """The same without autoscaling."""
    config = {k: v for k, v in EFFECTIVE.items() if k != "autoscaling_config"}
    return config | {"num_replicas": 3} | more


def told(effective: dict[str, Any], declared: dict[str, Any] | None) -> dict[str, Any]:
    """An application's details with one deployment; `declared` None is one of serve.run."""
    config = None if declared is None else {"name": "x", "deployments": [declared]}
    return {
        "deployed_app_config": config,
        "source": "imperative" if declared is None else "declarative",
        "deployments": {"Completer": {"deployment_config": effective}},
    }


def test_values_are_read_at_every_level_and_unknown_ones_stay_at_their_defaults() -> None:
    settings, odd = foreign.accepted(foreign.values(EFFECTIVE, {"request_timeout_s": 9.0}))
    assert odd == {}
    assert settings.max_batch_size == 2
    assert settings.batch_wait_timeout_s == Settings().batch_wait_timeout_s
    assert (settings.num_replicas, settings.max_replicas) == ("auto", 2)
    assert settings.upscale_delay_s == 7.0
    assert settings.upscaling_factor == 0.5  # by its older name
    assert settings.retry_after_s is None
    assert settings.num_cpus == 0.0
    assert settings.request_timeout_s == 9.0
    assert settings.accelerator == "none"
    assert foreign.accepted(foreign.values(fixed(), {}))[0].num_replicas == 3


def test_a_value_that_the_kit_does_not_take_makes_its_knob_read_only() -> None:
    odd_one = fixed(user_config={"max_batch_size": "8", "batch_wait_timeout_s": 0.5})
    settings, odd = foreign.accepted(foreign.values(odd_one, {}))
    assert list(odd) == ["max_batch_size"]
    assert "'8'" in odd["max_batch_size"]
    assert "a whole number from 1 to 512" in odd["max_batch_size"]
    assert settings.batch_wait_timeout_s == 0.5


@pytest.mark.parametrize(
    ("named", "found"),
    [("Front", "Front"), (None, "Completer"), ("Nope", "no deployment 'Nope'.*'Front'")],
)
def test_the_deployment_is_the_one_named_or_the_only_one_with_something_to_tune(
    named: str | None, found: str
) -> None:
    both = {"Front": {"deployment_config": {}}, "Completer": {"deployment_config": EFFECTIVE}}
    if named == "Nope":
        with pytest.raises(ServingError, match=found):
            foreign.choose("x", both, named)
    else:
        assert foreign.choose("x", both, named) == found


def test_of_several_deployments_that_could_be_meant_the_error_lists_them() -> None:
    twins = {name: {"deployment_config": EFFECTIVE} for name in ("A", "B")}
    plain = {name: {"deployment_config": {}} for name in ("A", "B")}
    for several in (twins, plain):
        with pytest.raises(ServingError, match=r"name one of 'A', 'B' in attach\(deployment=…\)"):
            foreign.choose("x", several, None)
    assert foreign.choose("x", {"A": {"deployment_config": {}}}, None) == "A"


LISTED = {"name": "Completer", "autoscaling_config": AUTO}
REASONS: list[tuple[str, dict[str, Any], dict[str, Any] | None, str | None]] = [
    ("max_batch_size", EFFECTIVE, LISTED, None),
    ("batch_wait_timeout_s", EFFECTIVE, LISTED, "user_config has no batch_wait_timeout_s"),
    ("max_ongoing_requests", EFFECTIVE, LISTED, None),
    ("retry_after_s", EFFECTIVE, LISTED, None),
    ("upscale_delay_s", EFFECTIVE, LISTED, None),
    ("num_replicas", EFFECTIVE, LISTED, None),
    ("num_replicas", fixed(), {"name": "Completer"}, None),
    ("upscale_delay_s", fixed(), {"name": "Completer"}, "no autoscaling_config"),
    ("upscale_delay_s", EFFECTIVE, {"name": "Completer"}, "not in its Serve config"),
    ("num_replicas", EFFECTIVE, {"name": "Completer"}, "not in its Serve config"),
    ("num_cpus", EFFECTIVE, LISTED, "would restart"),
    ("engine", EFFECTIVE, LISTED, "engine belongs to the kit's own apps, and 'x' is not one"),
    ("request_timeout_s", EFFECTIVE, LISTED, "fixed since Ray started"),
]


@pytest.mark.parametrize(("name", "effective", "declared", "reason"), REASONS)
def test_a_knob_can_be_changed_or_a_sentence_says_why_not(
    name: str, effective: dict[str, Any], declared: dict[str, Any] | None, reason: str | None
) -> None:
    why = foreign.why_not(name, "x", told(effective, declared), "Completer")
    assert (why is None) == (reason is None)
    assert (reason or "") in (why or "")


def test_an_app_of_serve_run_is_read_only_throughout() -> None:
    app = told(EFFECTIVE, None)
    reasons = [foreign.why_not(k.name, "x", app, "Completer") for k in knobs()]
    assert all(reasons)
    assert sum("deployed by serve.run" in (r or "") for r in reasons) > 20
    with pytest.raises(SettingsError, match="did you mean 'max_batch_size'"):
        foreign.why_not("max_batchsize", "x", app, "Completer")


def test_o6_a_change_leaves_every_other_key_as_it_was() -> None:
    before, _ = foreign.accepted(foreign.values(EFFECTIVE, {}))
    after = before.replace(max_batch_size=4, target_ongoing_requests=3.0, reject_status=429)
    declared = LISTED | {"max_ongoing_requests": 5}
    kept = copy.deepcopy(declared)
    part = foreign.changed(before, after, is_auto=True)
    entry = foreign.merged(declared, EFFECTIVE, part)
    assert declared == kept
    assert entry["user_config"] == {"max_batch_size": 4, "motto": "a"}
    assert entry["backpressure_config"] == {"status_code": 429, "retry_after_s": None}
    assert entry["max_ongoing_requests"] == 5
    assert entry["autoscaling_config"] == AUTO | {
        "initial_replicas": None, "target_ongoing_requests": 3.0, "look_back_period_s": 30.0,
        "upscaling_factor": None,
    }  # fmt: skip


def test_a_fixed_number_is_pinned_where_there_is_autoscaling_and_set_where_there_is_none() -> None:
    auto, _ = foreign.accepted(foreign.values(EFFECTIVE, {}))
    three = {"min_replicas": 3, "max_replicas": 3, "initial_replicas": 3}
    part = foreign.changed(auto, auto.replace(num_replicas=3), is_auto=True)
    assert part == {"autoscaling_config": three}
    one, _ = foreign.accepted(foreign.values(fixed(), {}))
    assert foreign.changed(one, one.replace(num_replicas=4), False) == {"num_replicas": 4}


def declarative(name: str, args: dict[str, Any], *deployments: dict[str, Any]) -> dict[str, Any]:
    """An application as its owner writes it into a Serve config."""
    return {
        "name": name,
        "route_prefix": f"/{name}",
        "import_path": "foreign_app:build",
        "runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
        "args": args,
        "deployments": list(deployments),
    }


FIXED = declarative("theirs", {})
SCALED = declarative("scaled", {"front": True}, {"name": "Completer", "autoscaling_config": AUTO})


def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def states(serving: Serving) -> dict[str, str]:
    return {name: a["status"] for name, a in serving.details()["applications"].items()}


def declared(serving: Serving) -> dict[str, Any]:
    apps = serving.details()["applications"]
    return {name: a["deployed_app_config"] for name, a in apps.items()}


@pytest.fixture(scope="module")
def deployed(_cluster: Serving) -> Iterator[Serving]:
    """Two foreign apps beside the kit's, and one of serve.run."""
    import foreign_app
    from ray import serve

    own = [c for c in declared(_cluster).values() if c]
    _cluster._client.deploy_applications({"applications": [*own, FIXED, SCALED]})
    serve.run(foreign_app.build({}), name="run", route_prefix="/run")
    wait(lambda: set(states(_cluster).values()) == {"RUNNING"})
    yield _cluster
    if "run" in states(_cluster):
        serve.delete("run")
    own = [c for n, c in declared(_cluster).items() if c and n not in ("theirs", "scaled")]
    _cluster._client.deploy_applications({"applications": own})
    wait(lambda: not {"theirs", "scaled"} & set(states(_cluster)))


@pytest.fixture
def connect(deployed: Serving, serving: Serving) -> Callable[..., Foreign]:
    def go(app: str, **given: Any) -> Foreign:
        guest = attach(serving._client._address, app=app, **given)
        assert isinstance(guest, Foreign)
        return guest

    return go


def complete(guest: Foreign) -> dict[str, Any]:
    answer = requests.post(f"{guest.url}/v1/completions", json={"prompt": "hello"}, timeout=30)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def pids(guest: Foreign | Serving) -> dict[str, int | None]:
    return {r.replica_id: r.pid for r in guest.status().running}


def test_it_is_read_as_it_runs(connect: Callable[..., Foreign], serving: Serving) -> None:
    theirs, scaled = connect("theirs"), connect("scaled")
    assert (theirs.deployment, scaled.deployment) == ("Completer", "Completer")
    assert theirs.url == f"{serving.url}/theirs"
    assert connect("theirs", url="http://there:1/").url == "http://there:1/theirs"
    assert theirs.settings is not None
    assert theirs.settings.max_batch_size == 2
    assert theirs.settings.request_timeout_s == BASE.request_timeout_s
    assert theirs.replicas() == []
    assert (theirs.status().target, len(theirs.status().helpers)) == (1, 0)
    assert len(scaled.status().helpers) == 1
    assert not theirs.owned
    theirs.shutdown()
    assert complete(theirs)["pid"] in pids(theirs).values()


def test_o2_o8_changes_are_in_place_and_leave_the_other_apps_as_they_are(
    connect: Callable[..., Foreign], serving: Serving
) -> None:
    guest = connect("scaled")
    settings = guest.settings
    assert settings is not None
    first, mine, kit_pids = pids(guest), declared(serving), pids(serving)
    for change in (
        {"max_batch_size": 4},
        {"target_ongoing_requests": 3.0, "max_ongoing_requests": 9},
        {"num_replicas": 2},
        {"num_replicas": "auto", "max_queued_requests": 50},
    ):
        settings = settings.replace(**change)
        applied = guest.update(settings)
        assert set(change) == set(applied.changes)
        assert applied.restarted_replicas == 0
        assert first.items() <= pids(guest).items()
        if change == {"num_replicas": 2}:
            assert len(pids(guest)) == 2
    effective = guest.status().configs["Completer"]
    assert effective["user_config"] == {"max_batch_size": 4, "motto": "a"}
    assert (
        effective["autoscaling_config"].items() >= (AUTO | {"target_ongoing_requests": 3}).items()
    )
    assert effective["max_ongoing_requests"] == 9
    assert {complete(guest)["max_batch_size"] for _ in range(4)} == {4}
    now = declared(serving)
    assert {n: c for n, c in now.items() if n != "scaled"} == {
        n: c for n, c in mine.items() if n != "scaled"
    }
    assert pids(serving) == kit_pids
    assert ask(serving).status_code == 200


def test_the_kits_own_updates_keep_the_other_apps(
    connect: Callable[..., Foreign], serving: Serving
) -> None:
    guest = connect("theirs")
    before = pids(guest)
    serving.update(BASE.replace(max_batch_size=5))
    serving.update(BASE)
    assert pids(guest) == before


def test_without_autoscaling_a_number_is_taken_and_auto_is_not(
    connect: Callable[..., Foreign],
) -> None:
    guest = connect("theirs")
    settings, before = guest.settings, pids(guest)
    assert settings is not None
    for change, why in (
        ({"num_replicas": "auto"}, "num_replicas = 'auto': .*restart its replicas; give a number"),
        ({"upscale_delay_s": 3.0}, "upscale_delay_s = 3.0: this app has no autoscaling_config"),
        ({"batch_wait_timeout_s": 0.5}, "user_config has no batch_wait_timeout_s"),
        ({"app": "continuous"}, "belongs to the kit's own apps"),
    ):
        with pytest.raises(ServingError, match=why):
            guest.update(settings.replace(**change))
    assert guest.update(settings.replace(num_replicas=2)).restarted_replicas == 0
    assert guest.status().configs["Completer"]["num_replicas"] == 2
    assert before.items() <= pids(guest).items()
    assert guest.update(settings).restarted_replicas == 0


def test_an_app_of_serve_run_is_refused_and_keeps_running(connect: Callable[..., Foreign]) -> None:
    guest = connect("run")
    before = pids(guest)
    assert guest.settings is not None
    with pytest.raises(ServingError, match="'run' was deployed by serve.run"):
        guest.update(guest.settings.replace(max_batch_size=4))
    assert pids(guest) == before
    assert complete(guest)["max_batch_size"] == 2


def test_o4_a_reconfigure_that_raises_is_undone_and_said_beside_its_control(
    connect: Callable[..., Foreign], tmp_path: Path
) -> None:
    guest = connect("theirs")
    before = guest.settings
    assert before is not None
    panel = kit.panel(guest, Workload(users=2), moves=[], folder=tmp_path / "run")
    assert isinstance(panel, Panel)
    try:
        panel.load.toggle()
        size, wait_s = panel.controls["max_batch_size"], panel.controls["batch_wait_timeout_s"]
        assert "user_config has no batch_wait_timeout_s" in wait_s._line.value
        assert wait_s._main.disabled
        size.written("13")
        wait(lambda: size.mood == "bad")
        assert "bad luck" in size.said
        assert "before it are serving again" in size.said
        assert "File " not in size.said
        assert size.served == 2
        assert guest.settings == before
        assert complete(guest)["max_batch_size"] == 2
        size.written("3")
        wait(lambda: size.mood == "good")
        assert "restarted" not in size.said
        assert complete(guest)["max_batch_size"] == 3
        ended = len(panel.run.requests)
        wait(lambda: panel.run.requests["outcome"].iloc[ended:].eq("ok").any())
        wait(lambda: panel._plot.value)
        assert panel.session.trouble == ""
        path = panel._records.save().removeprefix("saved: ")
        assert "max_batch_size: 3" in Path(path).read_text()
    finally:
        panel.close()
    assert "bad luck" in panel.run.changes["error"].iloc[1]


def test_a_change_by_somebody_else_is_noticed_before_anything_is_sent(
    connect: Callable[..., Foreign],
) -> None:
    guest, other = connect("theirs"), connect("theirs")
    assert guest.settings is not None
    assert other.settings is not None
    other.update(other.settings.replace(max_batch_size=6))
    with pytest.raises(ServingError, match="changed by someone else: max_batch_size = 6;"):
        guest.update(guest.settings.replace(max_ongoing_requests=8))
    assert guest.settings == other.settings
    guest.update(guest.settings.replace(max_ongoing_requests=8))
    assert complete(guest)["max_batch_size"] == 6


def test_load_and_samples_of_an_app_that_tells_nothing_of_itself(
    connect: Callable[..., Foreign], tmp_path: Path
) -> None:
    guest = connect("theirs")
    load = Load(Workload(users=2, duration_s=5.0), guest.url, tmp_path)
    sampler = Sampler(guest, load.status, tmp_path / "samples.csv")
    try:
        t0_s = time.monotonic()
        load.begin(t0_s)
        sampler.start(t0_s)
        wait(lambda: len(load.rows()) > 10)
    finally:
        sampler.stop()
        load.stop()
    rows = load.rows()
    assert set(rows["outcome"]) <= {"ok", "cut"}
    assert (rows["outcome"] == "ok").sum() > 10
    assert rows["queueing_s"].isna().all()
    assert rows["output_tokens"].max() == 1
    samples = read_samples(tmp_path / "samples.csv")
    running = samples[samples["metric"] == "running_replicas"]
    assert set(running["value"]) == {1.0}


def test_what_is_not_there_is_named_with_what_is(
    connect: Callable[..., Foreign], serving: Serving
) -> None:
    with pytest.raises(ServingError, match="no app 'thiers' .* there are: .*'theirs'"):
        connect("thiers")
    with pytest.raises(ServingError, match="no deployment 'Front'; there are: 'Completer'"):
        connect("theirs", deployment="Front")
    assert connect("scaled", deployment="Front").deployment == "Front"
    with pytest.raises(ServingError, match="tuned as a whole"):
        attach(serving._client._address, deployment="Model")


def test_of_the_kits_own_app_only_what_ray_was_started_with_is_read_only(
    serving: Serving,
) -> None:
    guest = attach(serving._client._address)
    for one in (serving, guest):
        reasons = {k.name: one.read_only(k.name) for k in knobs()}
        assert {n for n, why in reasons.items() if why} == {k.name for k in knobs("start")}
        assert one.settings is not None
        with pytest.raises(ServingError, match="request_timeout_s = 5.0: fixed since Ray started"):
            one.update(one.settings.replace(request_timeout_s=5.0))


def test_a_dashboard_that_is_gone_is_one_sentence(
    connect: Callable[..., Foreign], serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = connect("theirs")
    for one in (guest, serving):
        assert one.settings is not None
        address = one._client._address
        monkeypatch.setattr(one._client, "_address", "http://127.0.0.1:9")
        with pytest.raises(ServingError, match=f"^nothing answers at {address}: [^\n]*$"):
            one.update(one.settings.replace(max_batch_size=7))
        monkeypatch.undo()


def test_apps_that_are_gone_are_said_to_be_and_only_deploy_brings_the_kits_back(
    connect: Callable[..., Foreign], serving: Serving
) -> None:
    """Last: nothing that others deployed is left after it."""
    from ray import serve

    guest = connect("theirs")
    assert guest.settings is not None
    serve.shutdown()
    with pytest.raises(ServingError, match="app 'theirs' is not running: Serve says NOT_STARTED"):
        guest.update(guest.settings.replace(max_batch_size=7))
    with pytest.raises(
        ServingError,
        match=r"the kit's app is not running: .* NOT_STARTED; deploy\(settings\) starts",
    ):
        serving.update(BASE.replace(max_batch_size=7))
    assert set(serving.details()["applications"]) == set()
    serving.deploy(BASE)
    assert ask(serving).status_code == 200
    assert serving.update(BASE.replace(max_batch_size=7)).restarted_replicas == 0
