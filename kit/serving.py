"""Ray and Serve: start or attach, deploy, update in place, shut down what was started.

Everything after the start goes through Serve's declarative REST interface, so that a change of
knobs is an in-place update, and through the monitor app of `kit.apps`, which tells what each
replica really runs. Nothing of this needs to be on the cluster's machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
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
from kit.connection import Applied as Applied
from kit.connection import Connection, Plan, described, others, serve_url
from kit.foreign import Foreign
from kit.progress import waiting
from kit.settings import Settings, knobs
from kit.status import Status, read_status

MONITOR_APP: dict[str, Any] = {
    "name": MONITOR_NAME,
    "route_prefix": "/kit",
    "import_path": "kit.apps:monitor",
    "args": {},
    "deployments": [{"name": "Monitor", "ray_actor_options": {"num_cpus": 0}}],
}
_MINE = (APP_NAME, JOBS_NAME, MONITOR_NAME)


class Serving(Connection):
    """A connection to Serve, with the settings that it runs. Made by `start` and `attach`."""

    title = "the kit's app"
    revival = "deploy(settings) starts it again"

    def __init__(self, dashboard_url: str, url: str | None, owned: bool, start: Settings) -> None:
        super().__init__(dashboard_url)
        self.url = url or serve_url(dashboard_url, self.details(), None)
        self.owned = owned
        self._monitor = requests.Session()
        self._start = start
        self._deployed = False
        self._broker: broker.Broker | None = None

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

    def read_only(self, knob_name: str) -> str | None:
        """Why this knob cannot be changed on this app, in one sentence; None when it can."""
        if described(knob_name).level != "start":
            return None
        again = "shutdown() and start again" if self.owned else "only who started it can change it"
        return f"fixed since Ray started; {again}"

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
                    kept = others(self.details(), _MINE)
                    self._client.deploy_applications({"applications": kept})
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

    def config(self, settings: Settings) -> dict[str, Any]:
        """The full declarative config, as `serve deploy` takes it."""
        queue = [self._job_queue()] if settings.job_queue else []
        return declarative(settings, self.url, [*queue, *others(self.details(), _MINE)])

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

    def _plan(self, settings: Settings, now: Settings | None) -> Plan:
        wanted = {d["name"]: d for d in application(settings)["deployments"]}
        return self.config(settings), wanted

    def _confirmed(self, settings: Settings, status: Status) -> bool:
        """Whether every running replica reports the new values; refused ones are an error."""
        sent = settings.user_config()
        states = {s["replica_id"]: s for s in self.replicas()}
        helpers = [r for r in status.helpers if r.state == "RUNNING"]
        mine = [states.get(r.replica_id, {}) for r in (*status.running, *helpers)]
        for refused in filter(None, (s.get("refused") for s in mine)):
            if refused["user_config"] == sent:
                raise ServingError(f"the replicas refused it: {refused['why']}")
        applied = all(s.get("user_config") == sent and not s["refused"] for s in mine)
        return applied and self._queue_runs(settings)

    def _queue_runs(self, settings: Settings) -> bool:
        """Whether the job queue is as asked: running, or gone."""
        app = self.details().get("applications", {}).get(JOBS_NAME)
        if settings.job_queue and app and app["status"] == "DEPLOY_FAILED":
            raise ServingError(f"the job queue failed to start: {app['message']}")
        return bool(app) is settings.job_queue and (app or {}).get("status") in (None, "RUNNING")


def declarative(
    settings: Settings, url: str = f"http://{LOOPBACK}:8000", beside: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Serve's declarative config of settings, answering at `url`, with other apps `beside`."""
    at = urlsplit(url)
    return {
        "proxy_location": "HeadOnly",
        "http_options": {
            "host": at.hostname,
            "port": at.port,
            "request_timeout_s": settings.request_timeout_s,
        },
        "applications": [application(settings), MONITOR_APP, *beside],
    }


def _first_replicas(settings: Settings) -> int:
    auto = autoscaling_config(settings)
    first = auto["min_replicas"] if auto["initial_replicas"] is None else auto["initial_replicas"]
    return int(first) * len(model_names(settings))


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


def attach(
    dashboard_url: str, url: str | None = None, app: str = APP_NAME, deployment: str | None = None
) -> Serving | Foreign:
    """Use a cluster that already runs; `shutdown` will leave it running.

    Args:
        dashboard_url: of its head node, for example `http://127.0.0.1:8265`.
        url: where its Serve answers; default: as the cluster itself says.
        app: name of the application to tune; one that someone else deployed is changed only where
            that needs no restart, see `kit.foreign`.
        deployment: which of that application's deployments; needed only where it is not plain.

    Raises:
        ServingError: when nothing answers there, it wants a token, or there is no such app or
            deployment.
    """
    if app != APP_NAME:
        return Foreign(dashboard_url, url, app, deployment)
    if deployment is not None:
        raise ServingError(
            f"deployment = {deployment!r}: the kit's own app is tuned as a whole; leave it out"
        )
    serving = Serving(dashboard_url, url, False, Settings())
    apps = serving.details().get("applications", {})
    mine = apps.get(APP_NAME, {}).get("deployed_app_config")
    if mine:
        serving.settings = from_application(mine).replace(job_queue=JOBS_NAME in apps)
    return serving
