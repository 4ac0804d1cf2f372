"""An app that someone else deployed: its values read as `Settings`, changed where no replica restarts.

Serve updates an app in place only through the declarative config that deployed it, and only while
that config stays what its code version is made of: so a change is the whole config of the cluster as
it is, with this one deployment's changed keys merged into its complete dicts. What would restart
replicas is read-only here, and says why.
"""

from __future__ import annotations

import contextlib
from typing import Any

from kit.accelerator import NO_ACCELERATOR
from kit.application import autoscaling_config
from kit.cluster import ServingError
from kit.connection import Applied, Connection, Plan, described, others, serve_url
from kit.settings import Settings, SettingsError, knobs
from kit.status import Status, read_status

_AUTOSCALING = tuple(k.name for k in knobs("autoscaling"))
_REJECTION = {"reject_status": "status_code", "retry_after_s": "retry_after_s"}
"""Knobs of `backpressure_config`, by what Serve calls them there."""
_DICTS = ("user_config", "autoscaling_config", "backpressure_config")


class Foreign(Connection):
    """A connection to an app that is not the kit's, made by `kit.serving.attach`.

    It offers what `Serving` offers a tuning session, but for `deploy`. Its `settings` hold the app's
    own values of the knobs that it has, and defaults of the others; there is no monitor, so
    `replicas` is empty, and a change is in effect when Serve says so.

    Args:
        dashboard_url: of the cluster's head node.
        url: where its Serve answers, without the app's route; default: as the cluster says.
        app: name of the application.
        deployment: which of its deployments is tuned; default: see `choose`.

    Raises:
        ServingError: when nothing answers, or there is no such app or deployment.
    """

    owned = False
    revival = "whoever deployed it has to start it again"

    def __init__(
        self, dashboard_url: str, url: str | None, app: str, deployment: str | None = None
    ) -> None:
        super().__init__(dashboard_url)
        self.app = app
        self.title = f"app {app!r}"
        details = self.details()
        apps = details.get("applications", {})
        if app not in apps:
            there = ", ".join(map(repr, apps)) or "none"
            raise ServingError(f"no app {app!r} at {dashboard_url}; there are: {there}")
        self._runs(read_status(details, app, ()))
        self.deployment = choose(app, apps[app].get("deployments", {}), deployment)
        self._read(details)
        declared = self._app.get("deployed_app_config") or {}
        route = self._app.get("route_prefix") or declared.get("route_prefix") or ""
        self.url = serve_url(dashboard_url, details, url) + route.rstrip("/")

    def status(self) -> Status:
        """The app now; its replicas are those of the deployment that is tuned."""
        return read_status(self.details(), self.app, (self.deployment,))

    def replicas(self) -> list[dict[str, Any]]:
        """Empty: nothing in these replicas reports to the kit."""
        return []

    def read_only(self, knob_name: str) -> str | None:
        """Why this knob cannot be changed on this app, in one sentence; None when it can."""
        why = why_not(knob_name, self.app, self._app, self.deployment)
        return why or self._odd.get(knob_name)

    def update(self, settings: Settings, timeout_s: float = 120.0) -> Applied:
        """As `Serving.update`; only the keys that differ are changed in the app's config.

        Raises:
            ServingError: also when somebody else changed the app since: its values are then read
                again into `settings`, and nothing was sent.
        """
        with self._lock:
            applied = super().update(settings, timeout_s)
            if applied.changes:
                with contextlib.suppress(
                    ServingError, KeyError
                ):  # gone again: the next one says so
                    self._read(self.details())
                self.settings = settings
            return applied

    def shutdown(self) -> None:
        """Nothing: the app and its cluster belong to others, and keep running."""

    def _read(self, details: dict[str, Any]) -> None:
        """Take the app's values from what the controller tells."""
        self._app = details["applications"][self.app]
        effective = self._app["deployments"][self.deployment]["deployment_config"]
        self._values = values(effective, details.get("http_options") or {})
        self.settings, self._odd = accepted(self._values)

    def _look(self) -> Status:
        """The app as it is; an error also when somebody else moved a knob since the last look."""
        details = self.details()
        status = self._runs(read_status(details, self.app, (self.deployment,)))
        if self.deployment not in status.configs:
            there = ", ".join(map(repr, status.configs))
            raise ServingError(f"{self.title} has no {self.deployment!r} any more, but {there}")
        known, kept = self._values, self.settings
        self._read(details)
        moved = [n for n in known | self._values if known.get(n) != self._values.get(n)]
        if moved:
            what = ", ".join(f"{n} = {self._values.get(n)!r}" for n in moved)
            raise ServingError(
                f"{self.title} was changed by someone else: {what}; its values were read again, and "
                "nothing was sent"
            )
        self.settings = kept
        return status

    def _fits(self, settings: Settings) -> None:
        if settings.num_replicas == "auto" and not self._effective().get("autoscaling_config"):
            raise ServingError(
                "num_replicas = 'auto': this app has no autoscaling_config, and adding one would "
                "restart its replicas; give a number"
            )

    def _effective(self) -> dict[str, Any]:
        config: dict[str, Any] = self._app["deployments"][self.deployment]["deployment_config"]
        return config

    def _plan(self, settings: Settings, now: Settings | None) -> Plan:
        assert now is not None
        details = self.details()
        effective = self._effective()
        part = changed(now, settings, bool(effective.get("autoscaling_config")))
        config: dict[str, Any] = self._app["deployed_app_config"]
        entries = {d["name"]: d for d in config.get("deployments") or []}
        entry = merged(entries.get(self.deployment, {"name": self.deployment}), effective, part)
        listed = list((entries | {self.deployment: entry}).values())
        whole = {
            key: details[key]
            for key in ("proxy_location", "http_options", "grpc_options", "target_capacity")
            if details.get(key) is not None
        }
        apps = [*others(details, (self.app,)), config | {"deployments": listed}]
        return whole | {"applications": apps}, {self.deployment: _visible(entry, part)}


def choose(app: str, deployments: dict[str, Any], named: str | None) -> str:
    """The deployment that is tuned: the one named, or the only one, or the only one that has an
    `autoscaling_config` or a `user_config`.

    Raises:
        ServingError: when there is none such, or more than one.
    """
    there = ", ".join(map(repr, deployments)) or "none"
    if named is not None and named not in deployments:
        raise ServingError(f"app {app!r} has no deployment {named!r}; there are: {there}")
    configs = {name: d.get("deployment_config") or {} for name, d in deployments.items()}
    tunable = [n for n, c in configs.items() if c.get("autoscaling_config") or c.get("user_config")]
    for found in ([named] if named else [], list(deployments), tunable):
        if len(found) == 1:
            return found[0]
    raise ServingError(
        f"app {app!r} has several deployments: name one of {there} in attach(deployment=…)"
    )


def values(effective: dict[str, Any], http_options: dict[str, Any]) -> dict[str, Any]:
    """What an app says of the kit's knobs, by name: from its effective config, units as Serve's."""
    found: dict[str, Any] = {
        k.name: effective[k.name] for k in knobs("deployment") if k.name in effective
    }
    resources = effective.get("ray_actor_options") or {}
    found |= {n: float(resources[n]) for n in ("num_cpus", "num_gpus") if n in resources}
    rejection = effective.get("backpressure_config") or {}
    found |= {knob: rejection[key] for knob, key in _REJECTION.items() if key in rejection}
    user_config = effective.get("user_config") or {}
    found |= {k.name: user_config[k.name] for k in knobs("batching") if k.name in user_config}
    if auto := effective.get("autoscaling_config"):
        found |= {name: auto[name] for name in _AUTOSCALING if name in auto}
        for way in ("up", "down"):  # Ray falls back to the older names
            older = auto.get(f"{way}scale_smoothing_factor") or auto.get("smoothing_factor")
            found[f"{way}scaling_factor"] = auto.get(f"{way}scaling_factor") or older or 1.0
        is_fixed = auto.get("min_replicas") == auto.get("max_replicas")
        found["num_replicas"] = auto["max_replicas"] if is_fixed else "auto"
    if http_options.get("request_timeout_s") is not None:
        found["request_timeout_s"] = http_options["request_timeout_s"]
    return found


def accepted(found: dict[str, Any]) -> tuple[Settings, dict[str, str]]:
    """Settings of these values, and why the others among them cannot be held: name → sentence."""
    bounds = ("min_replicas", "max_replicas", "initial_replicas")  # valid only together
    trio = {str(n): found[n] for n in bounds if n in found}
    good: dict[str, Any] = {"accelerator": NO_ACCELERATOR}
    odd: dict[str, str] = {}
    groups: list[dict[str, Any]] = [trio, *({n: v} for n, v in found.items() if n not in trio)]
    for group in groups:
        try:
            Settings(**group)
            good |= group
        except SettingsError:
            odd |= {
                n: f"this app's {n} is {v!r}, which the kit does not take: it knows "
                f"{described(n).allowed}"
                for n, v in group.items()
            }
    return Settings(**good), odd


def why_not(knob_name: str, name: str, app: dict[str, Any], deployment: str) -> str | None:
    """Why a knob cannot be changed on an app without a restart, in one sentence; None when it can.

    Args:
        knob_name: which.
        name: of the application.
        app: what the controller tells of it.
        deployment: which of its deployments is tuned.

    Raises:
        SettingsError: for a name that is no knob.
    """
    level = described(knob_name).level
    config = app.get("deployed_app_config")
    effective = app["deployments"][deployment]["deployment_config"]
    listed = (config or {}).get("deployments") or []
    declared: dict[str, Any] = next((d for d in listed if d["name"] == deployment), {})
    if level == "start":
        return "fixed since Ray started; only who started it can change it"
    if level == "app":
        return f"{knob_name} belongs to the kit's own apps, and {name!r} is not one of them"
    if config is None or app.get("source") == "imperative":
        return f"{name!r} was deployed by serve.run: any change would restart its replicas"
    if knob_name in ("num_cpus", "num_gpus"):
        return "a change would restart this app's replicas"
    if level == "batching" and knob_name not in (effective.get("user_config") or {}):
        return f"this app's user_config has no {knob_name}"
    if knob_name in _REJECTION and "backpressure_config" not in effective:
        return "this cluster's Serve has no backpressure_config"
    is_auto = bool(effective.get("autoscaling_config"))
    if level == "autoscaling" and not is_auto:
        return "this app has no autoscaling_config, and adding one would restart its replicas"
    scales = is_auto and (level == "autoscaling" or knob_name == "num_replicas")
    # The code version counts the dicts in the config: one that only the code has is none of them.
    if scales and not isinstance(declared.get("autoscaling_config"), dict):
        return (
            "this app's autoscaling_config is not in its Serve config, and adding it there would "
            "restart its replicas"
        )
    return None


def changed(before: Settings, after: Settings, is_auto: bool) -> dict[str, Any]:
    """What differs, as a part of a deployment's config: only the keys that do."""
    moved = before.diff(after)
    part: dict[str, Any] = {key: {} for key in _DICTS}
    for name, (_, value) in moved.items():
        if described(name).level == "batching":
            part["user_config"][name] = value
        elif name in _REJECTION:
            part["backpressure_config"][_REJECTION[name]] = value
        elif described(name).level == "deployment" and not (is_auto and name == "num_replicas"):
            part[name] = value
    if is_auto:
        was = autoscaling_config(before)
        part["autoscaling_config"] = {
            key: value for key, value in autoscaling_config(after).items() if value != was[key]
        }
    return {key: value for key, value in part.items() if value != {}}


def merged(
    declared: dict[str, Any], effective: dict[str, Any], part: dict[str, Any]
) -> dict[str, Any]:
    """A deployment's entry of the declarative config with `part` in it.

    Serve replaces a dict as a whole and fills what it lacks with defaults, so each dict that is
    touched is complete: what is in effect, what was declared, what changes.
    """
    entry = declared | part
    for key in (k for k in _DICTS if k in part):
        now = effective.get(key) or {}
        if key == "autoscaling_config":
            # Not the policy: naming it would be a new code version.
            now = {name: now[name] for name in _AUTOSCALING if name in now}
        entry[key] = now | (declared.get(key) or {}) | part[key]
    return entry


def _visible(entry: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Of an entry, the touched keys, as the effective config must show them."""
    wanted = {key: entry[key] for key in part}
    if auto := wanted.get("autoscaling_config"):
        wanted["autoscaling_config"] = {k: v for k, v in auto.items() if k in _AUTOSCALING}
    return wanted
