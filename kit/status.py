"""The deployment as Serve's controller tells of it, and how that differs from what was asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kit.settings import APP_NAME, DEPLOYMENT_NAME


@dataclass(frozen=True)
class Replica:
    """One replica as Serve's controller knows it."""

    replica_id: str
    state: str
    pid: int | None


@dataclass(frozen=True)
class Status:
    """The deployment as Serve's controller sees it. `target` is None while there is none."""

    app: str
    deployment: str
    message: str
    target: int | None
    replicas: tuple[Replica, ...]
    deployed_s: float
    config: dict[str, Any] = field(repr=False)

    @property
    def running(self) -> tuple[Replica, ...]:
        return tuple(r for r in self.replicas if r.state == "RUNNING")

    @property
    def starting(self) -> tuple[Replica, ...]:
        return tuple(r for r in self.replicas if r.state in ("STARTING", "PENDING_ALLOCATION"))


def read_status(details: dict[str, Any]) -> Status:
    """The kit's deployment in what the controller tells (`ServeInstanceDetails`)."""
    app = details.get("applications", {}).get(APP_NAME, {})
    deployment = app.get("deployments", {}).get(DEPLOYMENT_NAME, {})
    return Status(
        app=app.get("status", "NOT_STARTED"),
        deployment=deployment.get("status", "NOT_STARTED"),
        message=" ".join(m for m in (app.get("message"), deployment.get("message")) if m),
        target=deployment.get("target_num_replicas"),
        replicas=tuple(
            Replica(r["replica_id"], r["state"], r.get("pid"))
            for r in deployment.get("replicas", [])
        ),
        deployed_s=app.get("last_deployed_time_s", 0.0),
        config=deployment.get("deployment_config", {}),
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
