"""One Ray cluster for all tests that need one; tests that start their own come before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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

Asked = tuple[subprocess.Popen[bytes], Path]


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
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model, to be made by `tiny_model`: only the first to ask makes it."""
    return tmp_path_factory.mktemp("models") / "tiny"


@pytest.fixture(scope="session", autouse=True)
def vllm_asked(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Asked | None]:
    """`tests/ask_vllm.py` beside the tests that come before those which want its answers.

    It takes half a minute and one core, which most of the others leave idle.
    """
    if not any("told" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    script, said = Path(__file__).with_name("ask_vllm.py"), tiny.with_name("said.txt")
    env = os.environ | {"PYTHONPATH": str(script.parents[1]), "VLLM_LOGGING_LEVEL": "WARNING"}
    with said.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(script), str(tiny)], stdout=out, stderr=subprocess.STDOUT, env=env
        )
    yield process, said
    process.kill()
    process.wait()


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Serving]:
    with start(BASE, port=int(os.environ.get("KIT_TEST_PORT", "8000"))) as serving:
        serving.deploy(BASE)
        yield serving


@pytest.fixture
def serving(_cluster: Serving) -> Serving:
    """The shared cluster with `BASE` deployed and one replica running."""
    if _cluster.settings != BASE or _cluster.status().app != "RUNNING":
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
