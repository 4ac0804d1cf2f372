"""Ray and Serve: start or attach, deploy, update in place, shut down what was started.

Everything after the start goes through Serve's declarative REST interface, so that a change of
knobs is an in-place update, and through the monitor app of `kit.apps`, which tells what each
replica really runs. Nothing of this needs to be on the cluster's machine.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import requests

from kit import broker, cluster
from kit.application import (
    APP_NAME,
    JOBS_NAME,
    MONITOR_NAME,
    application,
    autoscaling_config,
    from_application,
    model_names,
)
from kit.cluster import LOOPBACK, ServingError
from kit.progress import waiting
from kit.settings import Settings, knobs
from kit.status import Status, differences, read_status

MONITOR_APP: dict[str, Any] = {
    "name": MONITOR_NAME,
    "route_prefix": "/kit",
    "import_path": "kit.apps:monitor",
    "args": {},
    "deployments": [{"name": "Monitor", "ray_actor_options": {"num_cpus": 0}}],
}
POLL_S = 0.05


@dataclass(frozen=True)
class Applied:
    """One update that took effect, in monotonic seconds.

    `restarted_replicas` counts replicas that ran before and whose process is gone.
    """

    changes: dict[str, tuple[Any, Any]]
    asked_s: float
    applied_s: float
    restarted_replicas: int


class Serving:
    """A connection to Serve, with the settings that it runs. Made by `start` and `attach`."""

    def __init__(self, dashboard_url: str, url: str, owned: bool, start: Settings) -> None:
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        self.url = url
        self.owned = owned
        self.settings: Settings | None = None
        self._client = ServeSubmissionClient(dashboard_url)
        self._monitor = requests.Session()
        self._start = start
        self._deployed = False
        self._broker: broker.Broker | None = None
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def details(self) -> dict[str, Any]:
        """All that Serve's controller tells (`ServeInstanceDetails`)."""
        return dict(self._client.get_serve_details())

    def status(self) -> Status:
        """The deployment now."""
        return read_status(self.details())

    def replicas(self) -> list[dict[str, Any]]:
        """What each replica last reported of itself (`kit.apps`), also those gone within the last
        minute; empty when nothing answers."""
        with contextlib.suppress(requests.RequestException, ValueError, KeyError):
            return list(self._monitor.get(f"{self.url}/kit", timeout=2).json()["replicas"])
        return []

    def deploy(self, settings: Settings, timeout_s: float = 120.0) -> Serving:
        """Deploy, and wait until the replicas asked for run; with the same app, an update in place.

        Raises:
            ServingError: when the deployment fails or is not up in time; says what Serve says.
        """
        with self._lock:
            self._fits(settings)
            self._deployed = True
            with waiting(f"deploying the {settings.app} app"):
                self._apply_or_go_back(settings, timeout_s, _first_replicas(settings))
            self.settings = settings
        return self

    def update(self, settings: Settings, timeout_s: float = 120.0) -> Applied:
        """Change knobs of what runs, and wait until every running replica has the new values.

        Replicas that the autoscaler adds are not waited for; those that a larger fixed number adds
        are. A change of a `restart` knob replaces the replicas; the other costs leave them as they
        are. Without a difference nothing is sent: every config that Serve receives starts its
        autoscaling delays anew.

        Raises:
            ServingError: when it is refused, fails, or is not in effect after `timeout_s`; the
                settings before it are serving again.
        """
        with self._lock:
            before = self.settings
            if before is None:
                raise ServingError("nothing is deployed: call deploy(settings) first")
            asked_s = time.monotonic()
            if settings == before:
                return Applied({}, asked_s, asked_s, 0)
            self._fits(settings)
            running = {r.replica_id: r.pid for r in self.status().running}
            status = self._apply_or_go_back(settings, timeout_s, min(1, len(running)))
            applied_s = time.monotonic()
            self.settings = settings
            now = {r.replica_id: r.pid for r in status.replicas}
            # A replica that a smaller target stops is not a restart.
            gone = sum(now.get(name) != pid for name, pid in running.items())
            stopped = max(0, len(running) - (status.target or 0))
            return Applied(before.diff(settings), asked_s, applied_s, max(0, gone - stopped))

    def shutdown(self) -> None:
        """Stop what `start` started; on an attached cluster, remove only this kit's apps."""
        global _current
        with self._lock:
            if _current is self:
                _current = None
            self._monitor.close()
            if self.owned:
                cluster.stop_ray()
            elif self._deployed:
                with contextlib.suppress(Exception):
                    self._client.deploy_applications({"applications": self._others()})
            if self._broker is not None:
                self._broker.stop()
                self._broker = None
            self.settings = None

    def _fits(self, settings: Settings) -> None:
        fixed = [k.name for k in knobs("start")]
        changed = [n for n in fixed if getattr(settings, n) != getattr(self._start, n)]
        if not self.owned:
            return
        if changed:
            was = ", ".join(f"{n} = {getattr(self._start, n)!r}" for n in changed)
            raise ServingError(f"fixed since Ray started: {was}; shutdown() and start again")
        import ray

        # More than the whole cluster has would wait for ever, after stopping what serves now.
        n = max(1, _first_replicas(settings))
        model = application(settings)["deployments"][0]["ray_actor_options"]
        needs = [("CPU", settings.num_cpus, 1.0), ("GPU", settings.num_gpus, 1.0),
                 ("memory", model.get("memory", 0), 2.0**30)]  # fmt: skip
        for kind, each, unit in needs:
            there = ray.cluster_resources().get(kind, 0) / unit
            each = each / unit
            if each * n > there:
                what = "GiB of memory" if kind == "memory" else f"{kind}s"
                lower = (
                    "the replicas" if kind == "memory" else f"num_{kind.lower()}s or the replicas"
                )
                raise ServingError(
                    f"{n} replicas with {each:g} {what} each need {each * n:g}; this cluster has "
                    f"{there:.3g}: lower {lower}"
                )

    def _others(self) -> list[dict[str, Any]]:
        """Apps that others deployed here: a declarative config without them would delete them."""
        apps = self.details().get("applications", {})
        return [
            a["deployed_app_config"]
            for name, a in apps.items()
            if name not in (APP_NAME, JOBS_NAME, MONITOR_NAME) and a.get("deployed_app_config")
        ]

    def config(self, settings: Settings) -> dict[str, Any]:
        """The full declarative config, as `serve deploy` takes it."""
        at = urlsplit(self.url)
        return {
            "proxy_location": "HeadOnly",
            "http_options": {
                "host": at.hostname,
                "port": at.port,
                "request_timeout_s": settings.request_timeout_s,
            },
            "applications": [
                application(settings),
                MONITOR_APP,
                *([self._job_queue()] if settings.job_queue else []),
                *([] if self.owned else self._others()),
            ],
        }

    def _job_queue(self) -> dict[str, Any]:
        """The job queue's application; its broker is started on first use, until `shutdown`."""
        try:
            if self._broker is None:
                self._broker = broker.named() or (broker.start() if self.owned else None)
        except broker.BrokerError as error:
            raise ServingError(str(error)) from None
        if self._broker is None:
            raise ServingError(
                "job_queue = True on an attached cluster needs a Redis that all its machines reach: "
                f"name it in {broker.BROKER_URL}, here, before attaching"
            )
        from kit import jobs  # brings FastAPI and Celery

        return jobs.application(self._broker.url)

    def _apply_or_go_back(self, settings: Settings, timeout_s: float, at_least: int) -> Status:
        """`_apply`; when it fails or is interrupted, what was serving before serves again."""
        before = self.settings
        try:
            return self._apply(settings, timeout_s, at_least)
        except (ServingError, KeyboardInterrupt) as error:
            if before is None:
                raise
            again = "The settings before it are serving again."
            try:
                self._apply(before, timeout_s, min(1, at_least))
            except ServingError as second:
                again = f"Going back to the settings before it failed too: {second}"
            if isinstance(error, KeyboardInterrupt):
                raise
            raise ServingError(f"{error}\n{again}") from None

    def _apply(self, settings: Settings, timeout_s: float, at_least: int) -> Status:
        """Send the config; poll until it and every running replica are as asked."""
        before = self.status()
        try:
            self._client.deploy_applications(self.config(settings))
        except (RuntimeError, requests.RequestException) as error:
            raise ServingError(_why(error)) from None
        wanted = {d["name"]: d for d in application(settings)["deployments"]}
        sent = settings.user_config()
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status.deployed_s == before.deployed_s and time.monotonic() < deadline:
                time.sleep(POLL_S)  # still about the config before
                continue
            if status.app == "DEPLOY_FAILED" or status.deployment == "UNHEALTHY":
                raise ServingError(
                    f"Serve says {status.app}: {status.message or 'no reason given'}"
                )
            missing = differences(wanted, status.configs)
            states = {s["replica_id"]: s for s in self.replicas()}
            helpers = [r for r in status.helpers if r.state == "RUNNING"]
            mine = [states.get(r.replica_id, {}) for r in (*status.running, *helpers)]
            for refused in filter(None, (s.get("refused") for s in mine)):
                if refused["user_config"] == sent:
                    raise ServingError(f"the replicas refused it: {refused['why']}")
            applied = all(s.get("user_config") == sent and not s["refused"] for s in mine)
            enough = len(status.running) >= at_least and status.app == "RUNNING"
            if not missing and applied and enough and self._queue_runs(settings):
                return status
            if time.monotonic() > deadline:
                raise ServingError(
                    f"not applied after {timeout_s:g} s: application {status.app}, deployment "
                    f"{status.deployment}, {len(status.running)} of {status.target} replicas running"
                    f"{', differing: ' + ', '.join(missing) if missing else ''}. {status.message}"
                )
            time.sleep(POLL_S)

    def _queue_runs(self, settings: Settings) -> bool:
        """Whether the job queue is as asked: running, or gone."""
        app = self.details().get("applications", {}).get(JOBS_NAME)
        if settings.job_queue and app and app["status"] == "DEPLOY_FAILED":
            raise ServingError(f"the job queue failed to start: {app['message']}")
        return bool(app) is settings.job_queue and (app or {}).get("status") in (None, "RUNNING")


def _first_replicas(settings: Settings) -> int:
    auto = autoscaling_config(settings)
    first = auto["min_replicas"] if auto["initial_replicas"] is None else auto["initial_replicas"]
    return int(first) * len(model_names(settings))


def _why(error: Exception) -> str:
    text = str(error)
    if re.search(r"\b401\b", text) or "authentication" in text.lower():
        return (
            "the cluster wants a token (401). A local cluster's token is found by itself; for "
            "another, set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to its token before attaching"
        )
    return text


_current: Serving | None = None


def start(
    settings: Settings | None = None, port: int = 8000, num_cpus: int | None = None
) -> Serving:
    """Start Ray and Serve in this process, on the loopback interface; again: the running one.

    The knobs of level `start` are taken from `settings` and are fixed until `shutdown`. Whatever a
    killed process left behind is stopped first. At exit of this process all of it is stopped.

    Raises:
        ServingError: when the port is taken, Ray already runs in this process, or the running one
            was started with other `start` knobs.
    """
    global _current
    settings = settings or Settings()
    if _current is not None:
        _current._fits(settings)
        return _current
    with waiting("starting Ray"):
        dashboard_url = cluster.start_ray(settings, port, num_cpus)
    _current = Serving(dashboard_url, f"http://{LOOPBACK}:{port}", True, settings)
    return _current


def attach(dashboard_url: str, url: str | None = None) -> Serving:
    """Use a cluster that already runs; `shutdown` will leave it running.

    Args:
        dashboard_url: of its head node, for example `http://127.0.0.1:8265`.
        url: where its Serve answers; default: as the cluster itself says.

    Raises:
        ServingError: when nothing answers there, or it wants a token.
    """
    try:
        serving = Serving(dashboard_url, url or "", False, Settings())
        options = serving.details().get("http_options") or {}
    except (RuntimeError, ConnectionError, ValueError, requests.RequestException) as error:
        raise ServingError(f"cannot attach to {dashboard_url}: {_why(error)}") from None
    if url is None:
        host = urlsplit(dashboard_url).hostname or LOOPBACK
        serving.url = f"http://{host}:{options.get('port') or 8000}"
    mine = serving.details().get("applications", {}).get(APP_NAME, {}).get("deployed_app_config")
    if mine:
        queue = JOBS_NAME in serving.details().get("applications", {})
        serving.settings = from_application(mine).replace(job_queue=queue)
    return serving
