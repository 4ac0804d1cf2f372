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

    `replicas` are those of model deployments, `helpers` the others (router, postprocess); `configs`
    has the effective config of each deployment by name.
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
        return tuple(r for r in self.replicas if r.state == "RUNNING")

    @property
    def starting(self) -> tuple[Replica, ...]:
        return tuple(r for r in self.replicas if r.state in ("STARTING", "PENDING_ALLOCATION"))


def read_status(details: dict[str, Any]) -> Status:
    """The kit's app in what the controller tells (`ServeInstanceDetails`)."""
    app = details.get("applications", {}).get(APP_NAME, {})
    deployments = app.get("deployments", {})
    models = {name: d for name, d in deployments.items() if name in MODELS}
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
        message=" ".join(filter(None, texts)),
        target=sum(targets) if targets else None,
        replicas=tuple(r for r in replicas if r.deployment in models),
        helpers=tuple(r for r in replicas if r.deployment not in models),
        deployed_s=app.get("last_deployed_time_s", 0.0),
        configs={name: d.get("deployment_config", {}) for name, d in deployments.items()},
    )


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
