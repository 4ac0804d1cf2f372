"""One Ray cluster for all tests that need one; tests that start their own come before it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from kit.experiment import Change, Experiment, run
from kit.serving import Serving, start
from kit.settings import Settings
from kit.store import Run
from kit.workload import Workload

BASE = Settings(time_scale=0.15, look_back_period_s=2.0, upscale_delay_s=1.0)
"""What the shared cluster runs between tests."""


def pytest_configure() -> None:
    # A shell that starts the tests in the background lets them ignore Ctrl-C, which some test.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")
    # Two clusters at a time would share two cores.
    items.sort(key=lambda item: "_cluster" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Serving]:
    with start(BASE, port=int(os.environ.get("KIT_TEST_PORT", "8000"))) as serving:
        serving.deploy(BASE)
        yield serving


@pytest.fixture
def serving(_cluster: Serving) -> Serving:
    """The shared cluster with `BASE` deployed and one replica running."""
    if _cluster.settings != BASE:
        _cluster.deploy(BASE)
    return _cluster


@pytest.fixture
def as_left(_cluster: Serving) -> Serving:
    """The shared cluster as the test before left it, for tests that deploy what they need."""
    return _cluster


@pytest.fixture
def measure(_cluster: Serving, tmp_path: Path) -> Callable[..., Run]:
    """Run some seconds of load on the shared cluster, which deploys the settings first."""

    def go(settings: Settings, *timeline: Change, **workload: object) -> Run:
        given = {"users": 8, "duration_s": 5.0} | workload
        experiment = Experiment(settings, Workload(**given), tuple(timeline))
        return run(experiment, _cluster, tmp_path / "run", progress=False)

    return go


def ask(serving: Serving, **kwargs: object) -> requests.Response:
    """One request to the app, by default a good one."""
    good = {"prompt": "one two three", "max_tokens": 4}
    if "data" not in kwargs:
        kwargs.setdefault("json", good)
    return requests.post(serving.url, timeout=30, **kwargs)  # type: ignore[arg-type]
