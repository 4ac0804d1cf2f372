"""What serves, as a file that `serve deploy` takes and that reads back as the same settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from kit import broker, export
from kit.application import APP_NAME, from_application
from kit.cluster import ServingError
from kit.experiment import Slo
from kit.presets import PRESETS
from kit.serving import Serving
from kit.settings import Settings, knobs
from kit.store import StoreError

APPS = get_args(Settings.model_fields["app"].annotation)


def written(source: Any, tmp_path: Path, **more: Any) -> tuple[str, dict[str, Any]]:
    """The file as text and as YAML reads it, checked by Serve's own schema."""
    path = export.write_serve_config(source, tmp_path / "made" / "serve.yaml", **more)
    text = path.read_text()
    config = yaml.safe_load(text)
    ServeDeploySchema.model_validate(config)
    return text, config


def of_the_app(config: dict[str, Any]) -> dict[str, Any]:
    return next(dict(a) for a in config["applications"] if a["name"] == APP_NAME)


def not_serving() -> Serving:
    """A connection as `start` makes it, to a cluster that is not there."""
    serving = object.__new__(Serving)
    serving.url, serving.owned, serving.settings = "http://127.0.0.1:8123", True, None
    serving._broker = None
    serving.details = dict
    return serving


@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_every_app_and_preset_reads_back_as_the_same_settings(
    app: str, preset: str | None, tmp_path: Path
) -> None:
    settings = Settings(app=app)
    if preset is not None:
        settings = settings.replace(**PRESETS[preset])
    _, config = written(settings, tmp_path)
    assert from_application(of_the_app(config)) == settings
    models = [d for d in of_the_app(config)["deployments"] if "autoscaling_config" in d]
    assert models
    for deployment in models:
        assert set(deployment["autoscaling_config"]) == {k.name for k in knobs("autoscaling")}


def test_odd_values_survive_the_yaml(tmp_path: Path) -> None:
    settings = Settings(
        app="routed", prompt_template="Answer: {prompt} # é\n- yes", blocked_words="no, off: 1",
        num_replicas=3, retry_after_s=None, upscale_delay_s=0.1, postprocess=True,
    )  # fmt: skip
    _, config = written(settings, tmp_path)
    back = from_application(of_the_app(config))
    # A fixed number is min = max, so the bounds that did not apply are not in the file.
    assert back == settings.replace(min_replicas=3, max_replicas=3)


def test_the_file_is_what_the_connection_sends_and_says_what_it_is(tmp_path: Path) -> None:
    serving = not_serving()
    with pytest.raises(ServingError, match="nothing is deployed"):
        export.serve_config(serving)
    serving.settings = Settings(app="continuous", num_replicas=2, request_timeout_s=7.0)
    slo = Slo(e2e_p95_s=1.5, queueing_p95_s=None)
    summary = {"e2e_p95_s": 1.234, "good_fraction": 0.98}
    text, config = written(serving, tmp_path, slo=slo, summary=summary)
    assert config == serving.config(serving.settings)
    assert config["http_options"]["port"] == 8123
    assert config["http_options"]["request_timeout_s"] == 7.0
    head = "".join(line for line in text.splitlines(True) if line.startswith("#"))
    for words in (
        "continuous app", "serve deploy", "revision", "Promise: e2e p95 ≤ 1.5 s, measured 1.23 s",
        "98.0%", "A fixed number of replicas (2)",
    ):  # fmt: skip
        assert words in head
    assert "queueing" not in head


def test_a_brokers_password_stays_here(tmp_path: Path) -> None:
    serving = not_serving()
    serving.settings = Settings(job_queue=True)
    serving._broker = broker.Broker("redis://me:secret@queue.example:6379/1", None, [])
    text, config = written(serving, tmp_path)
    assert "secret" not in text
    assert "redis://queue.example:6379/1" in text
    assert "left out" in text
    assert len(config["applications"]) == 3
    sent = serving.config(serving.settings)["applications"]
    assert any("secret" in str(a) for a in sent), "what is sent keeps it"


def test_a_folder_that_takes_no_file_is_named() -> None:
    with pytest.raises(StoreError, match="cannot write /proc/nowhere/serve.yaml"):
        export.write_serve_config(Settings(), Path("/proc/nowhere/serve.yaml"))
