"""Every knob once: what is refused, what is warned about, what Serve is sent."""

from __future__ import annotations

import math

import pytest
from ray.serve.schema import ServeDeploySchema

from kit.application import application, autoscaling_config, from_application
from kit.doubts import doubts
from kit.presets import PRESETS
from kit.settings import Settings, SettingsError, knobs

BAD = [0, -1, 2.5, "0.05", "eight", math.nan, None, True, [4], 10_000]


@pytest.mark.parametrize("value", BAD)
def test_bad_batch_size_is_refused_by_name_and_range(value: object) -> None:
    with pytest.raises(SettingsError, match="max_batch_size = .*whole number from 1 to 512"):
        Settings(max_batch_size=value)


@pytest.mark.parametrize("value", ["0.05", -0.1, math.nan, math.inf, None, True, 61])
def test_bad_batch_wait_is_refused(value: object) -> None:
    with pytest.raises(SettingsError, match="batch_wait_timeout_s = .*number from 0 to 60"):
        Settings(batch_wait_timeout_s=value)


@pytest.mark.parametrize("knob", knobs(), ids=lambda k: k.name)
def test_every_knob_refuses_nonsense_and_takes_its_default(knob) -> None:  # type: ignore[no-untyped-def]
    assert Settings(**{knob.name: knob.default}) == Settings()
    with pytest.raises(SettingsError, match=knob.name):
        Settings(**{knob.name: object()})
    assert knob.help
    assert knob.allowed


def test_o7_misplaced_and_misspelt_keys_name_the_right_place() -> None:
    app = application(Settings())
    deployment = app["deployments"][0]
    deployment["autoscaling_config"]["max_ongoing_requests"] = 3
    deployment["autoscaling_config"]["targt_ongoing_requests"] = 3
    deployment["max_batch_size"] = 4
    with pytest.raises(SettingsError) as error:
        from_application(app)
    assert "max_ongoing_requests in autoscaling_config: belongs in the deployment" in str(
        error.value
    )
    assert "did you mean 'target_ongoing_requests'" in str(error.value)
    assert "max_batch_size in the deployment itself: belongs in user_config" in str(error.value)


def test_unknown_knob_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'max_batch_size'"):
        Settings(max_batchsize=8)


def test_o3_impossible_combinations_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(SettingsError, match="min_replicas = 5 is above max_replicas = 3"):
        Settings(min_replicas=5, max_replicas=3)
    with pytest.raises(SettingsError, match="initial_replicas = 9 must lie between"):
        Settings(initial_replicas=9, max_replicas=3)
    with pytest.raises(SettingsError, match="did you mean 'h100"):
        Settings(accelerator="h100")


def test_o6_o8_the_autoscaling_dict_is_always_there_and_always_whole() -> None:
    every = {k.name for k in knobs("autoscaling")}
    for settings in (Settings(), Settings(num_replicas=3), Settings(**PRESETS["auto"])):
        config = application(settings)["deployments"][0]
        assert set(config["autoscaling_config"]) == every
        assert "num_replicas" not in config
    pinned = autoscaling_config(Settings(num_replicas=3))
    assert pinned["min_replicas"] == pinned["max_replicas"] == pinned["initial_replicas"] == 3


@pytest.mark.parametrize("preset", PRESETS)
def test_serve_itself_accepts_what_is_emitted(preset: str) -> None:
    settings = Settings(**PRESETS[preset])
    schema = ServeDeploySchema.model_validate({"applications": [application(settings)]})
    deployment = schema.applications[0].deployments[0]
    assert deployment.user_config == settings.user_config()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_replicas": 3},
        PRESETS["auto"],
        {"app": "unbatched", "num_gpus": 1.0},
        {"app": "routed", "postprocess": True},
        {"engine": "vllm", "num_cpus": 1.0},
    ],
)
def test_config_reads_back_to_the_same_settings(changes: dict[str, object]) -> None:
    once = from_application(application(Settings(**changes)))
    assert application(once) == application(Settings(**changes))
    assert from_application(application(once)) == once


def test_o10_batch_above_max_ongoing_requests_is_warned_about() -> None:
    text = " ".join(doubts(Settings(max_ongoing_requests=3, max_batch_size=8)))
    assert "no batch will hold more than 3 requests" in text
    assert not doubts(Settings())


def test_o12_look_back_not_above_the_push_interval_is_warned_about() -> None:
    auto = Settings(num_replicas="auto", max_replicas=3, target_ongoing_requests=8.0)
    assert not doubts(auto)
    slow = auto.replace(metrics_interval_s=10.0, look_back_period_s=2.0)
    assert "not above metrics_interval_s = 10 s" in " ".join(doubts(slow))


def test_doubtful_autoscaling_is_warned_about() -> None:
    auto = Settings(num_replicas="auto", max_replicas=3, max_ongoing_requests=5)
    assert "under one batch of 8" in " ".join(doubts(auto))
    stuck = auto.replace(max_replicas=1)
    assert "never add or remove" in " ".join(doubts(stuck))
    blind = auto.replace(proxy="haproxy", target_ongoing_requests=5.0)
    assert "behind HAProxy" in " ".join(doubts(blind))


def test_diff_names_what_changed() -> None:
    assert Settings().diff(Settings(max_batch_size=9)) == {"max_batch_size": (8, 9)}
