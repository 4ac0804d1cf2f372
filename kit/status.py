"""The app as Serve's controller tells of it, and how that differs from what was asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kit.application import APP_NAME, MODELS


@dataclass(frozen=True)
class Replica:
    """One replica as Serve's controller knows it."""

    replica_id: str
    state: str
    pid: int | None
    deployment: str


@dataclass(frozen=True)
class Status:
    """The app as Serve's controller sees it; `target` is None while there is none.

    `replicas` are those of the deployments that are tuned, `helpers` the others (router,
    postprocess); `configs` has the effective config of each deployment by name.
    """

    app: str
    deployment: str
    message: str
    target: int | None
    replicas: tuple[Replica, ...]
    helpers: tuple[Replica, ...]
    deployed_s: float
    configs: dict[str, dict[str, Any]] = field(repr=False)

    @property
    def running(self) -> tuple[Replica, ...]:
        # One that takes new values goes on serving meanwhile.
        return tuple(r for r in self.replicas if r.state in ("RUNNING", "UPDATING"))

    @property
    def starting(self) -> tuple[Replica, ...]:
        return tuple(r for r in self.replicas if r.state in ("STARTING", "PENDING_ALLOCATION"))

    @property
    def failed(self) -> bool:
        """Whether Serve has given the last config up, or replicas are ill."""
        return self.app == "DEPLOY_FAILED" or self.deployment == "UNHEALTHY"


def read_status(
    details: dict[str, Any], app_name: str = APP_NAME, tuned: tuple[str, ...] = MODELS
) -> Status:
    """One app in what the controller tells (`ServeInstanceDetails`), by default the kit's.

    Args:
        details: as `GET /api/serve/applications/` answers.
        app_name: which of its apps; one that is not there is NOT_STARTED.
        tuned: names of the deployments whose replicas count as its replicas.
    """
    app = details.get("applications", {}).get(app_name, {})
    deployments = app.get("deployments", {})
    models = {name: d for name, d in deployments.items() if name in tuned}
    states = [d.get("status", "NOT_STARTED") for d in deployments.values()]
    targets = [d["target_num_replicas"] for d in models.values() if "target_num_replicas" in d]
    replicas = [
        Replica(r["replica_id"], r["state"], r.get("pid"), name)
        for name, d in deployments.items()
        for r in d.get("replicas", [])
    ]
    # What ails one deployment is what ails the app.
    ailing = [s for s in states if s != "HEALTHY"]
    texts = [app.get("message"), *(d.get("message") for d in deployments.values())]
    return Status(
        app=app.get("status", "NOT_STARTED"),
        deployment=(sorted(ailing, key=lambda s: s != "UNHEALTHY") or states or ["NOT_STARTED"])[0],
        message=" ".join(brief(text) for text in texts if text),
        target=sum(targets) if targets else None,
        replicas=tuple(r for r in replicas if r.deployment in models),
        helpers=tuple(r for r in replicas if r.deployment not in models),
        deployed_s=app.get("last_deployed_time_s", 0.0),
        configs={name: d.get("deployment_config", {}) for name, d in deployments.items()},
    )


def brief(text: str) -> str:
    """A message of Serve's in which a traceback is cut to its last line: what was raised."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not any(line.lstrip().startswith(("Traceback", 'File "')) for line in lines):
        return text
    return f"{lines[0]} … {lines[-1]}"


def differences(wanted: dict[str, Any], effective: dict[str, Any]) -> list[str]:
    """Names that the effective config lacks or has otherwise: Serve drops what it does not know."""
    found = []
    for name, value in wanted.items():
        have = effective.get(name)
        if isinstance(value, dict) and isinstance(have, dict):
            found += differences(value, have)
        elif have != value:
            found.append(name)
    return found
