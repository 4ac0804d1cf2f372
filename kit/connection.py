"""One application seen and changed through Serve's controller: read it, send a config, wait, go back.

What the kit's own app (`kit.serving`) and one that someone else deployed (`kit.foreign`) share. Serve
answers 200 to a config before it has looked at it: an update is over when the controller says so.
"""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import requests

from kit.cluster import LOOPBACK, ServingError
from kit.knobs import Knob, unknown
from kit.settings import BY_NAME, Settings, SettingsError
from kit.status import Status, brief, differences

POLL_S = 0.05
Plan = tuple[dict[str, Any], dict[str, Any]]
STALE_S = 3.0
"""So long a failure that was there before may still be about the config before."""


@dataclass(frozen=True)
class Applied:
    """One update that took effect, in monotonic seconds.

    `restarted_replicas` counts replicas that ran before and whose process is gone.
    """

    changes: dict[str, tuple[Any, Any]]
    asked_s: float
    applied_s: float
    restarted_replicas: int


class Connection(ABC):
    """A connection to one app on one cluster, with the settings that it runs.

    Raises:
        ServingError: when nothing answers at `dashboard_url`, or it wants a token.
    """

    owned: bool
    title: str
    """What the app is called in messages."""
    revival: str
    """What brings the app back when it is gone."""

    def __init__(self, dashboard_url: str) -> None:
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        self.url = ""
        self.settings: Settings | None = None
        self._dashboard_url = dashboard_url
        self._lock = threading.RLock()
        try:
            self._client = ServeSubmissionClient(dashboard_url)
        except (RuntimeError, ConnectionError, ValueError, requests.RequestException) as error:
            raise ServingError(f"cannot attach to {dashboard_url}: {_why(error)}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def details(self) -> dict[str, Any]:
        """All that Serve's controller tells (`ServeInstanceDetails`).

        Raises:
            ServingError: when nothing answers there any more, or it wants a token.
        """
        return dict(self._asked(self._client.get_serve_details))

    def metrics_urls(self) -> list[str]:
        """Where each node exports its Prometheus metrics; empty where the dashboard does not tell."""
        try:
            answer = self._client._do_request("GET", "/nodes?view=summary")
            nodes = [node["raylet"] for node in answer.json()["data"]["summary"]]
            return [
                f"http://{node['nodeManagerAddress']}:{node['metricsExportPort']}/metrics"
                for node in nodes if node.get("state") == "ALIVE"
            ]  # fmt: skip
        except (RuntimeError, ConnectionError, requests.RequestException, KeyError, ValueError):
            return []

    @abstractmethod
    def status(self) -> Status:
        """The deployment now."""

    @abstractmethod
    def replicas(self) -> list[dict[str, Any]]:
        """What each replica last reported of itself; empty when nothing tells."""

    @abstractmethod
    def read_only(self, knob_name: str) -> str | None:
        """Why this knob cannot be changed on this app, in one sentence; None when it can.

        Raises:
            SettingsError: for a name that is no knob.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the connection, and what belongs to it."""

    def update(self, settings: Settings, timeout_s: float = 120.0) -> Applied:
        """Change knobs of what runs, and wait until every running replica has the new values.

        Replicas that the autoscaler adds are not waited for; those that a larger fixed number adds
        are. A change of a `restart` knob replaces the replicas; the other costs leave them as they
        are. Without a difference nothing is sent: every config that Serve receives starts its
        autoscaling delays anew.

        Raises:
            ServingError: when the app is not there any more or a knob is read-only: nothing was
                sent; when it is refused, fails, or is not in effect after `timeout_s`: the
                settings before it are serving again.
        """
        with self._lock:
            before = self.settings
            if before is None:
                raise ServingError("nothing is deployed: call deploy(settings) first")
            asked_s = time.monotonic()
            status = self._look()
            if settings == before:
                return Applied({}, asked_s, asked_s, 0)
            for name, (_, value) in before.diff(settings).items():
                if reason := self.read_only(name):
                    raise ServingError(f"{name} = {value!r}: {reason}")
            self._fits(settings)
            running = {r.replica_id: r.pid for r in status.running}
            status = self._apply_or_go_back(settings, timeout_s, min(1, len(running)))
            applied_s = time.monotonic()
            self.settings = settings
            now = {r.replica_id: r.pid for r in status.replicas}
            # A replica that a smaller target stops is not a restart.
            gone = sum(now.get(name) != pid for name, pid in running.items())
            stopped = max(0, len(running) - (status.target or 0))
            return Applied(before.diff(settings), asked_s, applied_s, max(0, gone - stopped))

    def _look(self) -> Status:
        """The app as it is before an update; an error when it is not there."""
        return self._runs(self.status())

    def _runs(self, status: Status) -> Status:
        """The same status; an error when it is one of an app that is not there."""
        if status.app in ("NOT_STARTED", "DELETING") or not status.configs:
            raise ServingError(
                f"{self.title} is not running: Serve says {status.app}; {self.revival}"
            )
        return status

    @abstractmethod
    def _fits(self, settings: Settings) -> None:
        """Raise a ServingError for what cannot work here and would stop what serves now."""

    @abstractmethod
    def _plan(self, settings: Settings, now: Settings | None) -> Plan:
        """The full declarative config that turns `now` into `settings`, and the part of each
        deployment's config, by name, that must then be in effect."""

    def config(self, settings: Settings) -> dict[str, Any]:
        """The full declarative config, as `serve deploy` takes it."""
        return self._plan(settings, self.settings)[0]

    def _confirmed(self, settings: Settings, status: Status) -> bool:
        """Whether the replicas themselves say so too, where they can."""
        return True

    def _asked(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except (requests.ConnectionError, requests.Timeout):
            raise ServingError(
                f"nothing answers at {self._dashboard_url}: Ray has ended there, or is not reachable"
            ) from None
        except (RuntimeError, ConnectionError, ValueError, requests.RequestException) as error:
            raise ServingError(_why(error)) from None

    def _apply_or_go_back(self, settings: Settings, timeout_s: float, at_least: int) -> Status:
        """Send and wait; when that fails or is interrupted, what served before serves again."""
        before = self.settings
        plan, seen = self._plan(settings, before), self.status()
        try:
            return self._apply(settings, plan, seen, timeout_s, at_least)
        except (ServingError, KeyboardInterrupt) as error:
            if before is None:
                raise
            again = "The settings before it are serving again."
            try:
                plan = self._plan(before, settings)
                self._apply(before, plan, self.status(), timeout_s, min(1, at_least))
            except ServingError as second:
                again = f"Going back to the settings before it failed too: {second}"
            if isinstance(error, KeyboardInterrupt):
                raise
            raise ServingError(f"{error}\n{again}") from None

    def _apply(
        self, settings: Settings, plan: Plan, before: Status, timeout_s: float, at_least: int
    ) -> Status:
        """Send the config; poll until it and every running replica are as asked."""
        config, wanted = plan
        self._asked(self._client.deploy_applications, config)
        sent_s = time.monotonic()
        deadline_s = sent_s + timeout_s
        while True:
            status = self.status()
            if status.deployed_s == before.deployed_s and time.monotonic() < deadline_s:
                time.sleep(POLL_S)  # still about the config before
                continue
            is_new = _ailment(status) != _ailment(before) or time.monotonic() > sent_s + STALE_S
            if status.failed and is_new:
                raise ServingError(
                    f"Serve says {status.app}: {status.message or 'no reason given'}"
                )
            missing = differences(wanted, status.configs)
            confirmed = self._confirmed(settings, status)
            enough = len(status.running) >= at_least and status.app == "RUNNING"
            if not missing and confirmed and enough:
                return status
            if time.monotonic() > deadline_s:
                raise ServingError(
                    f"not applied after {timeout_s:g} s: application {status.app}, deployment "
                    f"{status.deployment}, {len(status.running)} of {status.target} replicas running"
                    f"{', differing: ' + ', '.join(missing) if missing else ''}. {status.message}"
                )
            time.sleep(POLL_S)


def _ailment(status: Status) -> tuple[str, str, str]:
    return status.app, status.deployment, status.message


def described(knob_name: str) -> Knob:
    """The knob of that name; a SettingsError when there is none."""
    if knob_name not in BY_NAME:
        raise SettingsError(unknown(knob_name, None, BY_NAME))
    return BY_NAME[knob_name]


def serve_url(dashboard_url: str, details: dict[str, Any], url: str | None) -> str:
    """Where Serve answers: `url`, or as the cluster itself says."""
    if url is not None:
        return url.rstrip("/")
    port = (details.get("http_options") or {}).get("port") or 8000
    return f"http://{urlsplit(dashboard_url).hostname or LOOPBACK}:{port}"


def others(details: dict[str, Any], but: tuple[str, ...]) -> list[dict[str, Any]]:
    """The apps, as they are, that a declarative config must hold so that Serve keeps them.

    Those of `serve.run` are not among them: Serve leaves them alone, and would restart one that a
    config names.
    """
    return [
        app["deployed_app_config"]
        for name, app in details.get("applications", {}).items()
        if name not in but and app.get("deployed_app_config") and app.get("status") != "DELETING"
    ]


def _why(error: Exception) -> str:
    text = str(error)
    if re.search(r"\b401\b", text) or "authentication" in text.lower():
        return (
            "the cluster wants a token (401). A local cluster's token is found by itself; for "
            "another, set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to its token before attaching"
        )
    return brief(text)
