"""Settings ↔ Serve's declarative config of one application: which deployments it has, with what.

Each app is one or more *model* deployments, the replicas of which are the accelerators that scale,
and *helpers* on CPU around them. All of them get the same complete `user_config`.
"""

from __future__ import annotations

from typing import Any

from kit.knobs import Level, unknown
from kit.settings import BY_NAME, Settings, SettingsError, knobs

APP_NAME = "kit"
MONITOR_NAME = "kit-monitor"
JOBS_NAME = "kit-jobs"
BESIDE = ("job_queue",)
"""Knobs of level `app` that are applications of their own: no argument of the model app."""
MODELS = ("Model", "Short", "Long")
"""Names of deployments whose replicas hold an accelerator; everything else of an app is a helper."""

VLLM_CPU_BYTES = 4 * 2**30
"""Memory reserved for a replica that runs vLLM on CPU: 3.2 GiB were measured, 1 of them KV cache."""

# A helper only passes requests on: limits of its own would hide those of the models behind it.
_HELPER: dict[str, Any] = {
    "max_ongoing_requests": 100_000,
    "ray_actor_options": {"num_cpus": 0},
}


def model_names(settings: Settings) -> tuple[str, ...]:
    """The model deployments of these settings' app."""
    return ("Short", "Long") if settings.app == "routed" else ("Model",)


def helper_names(settings: Settings) -> tuple[str, ...]:
    """The other deployments of these settings' app."""
    router = ("Router",) if settings.app == "routed" else ()
    return router + (("Postprocess",) if settings.postprocess else ())


def autoscaling_config(settings: Settings) -> dict[str, Any]:
    """Ray Serve's `autoscaling_config`, always complete.

    A missing key would fall back to Ray's default, and adding or removing the whole dict
    restarts every replica; so a fixed number of replicas is min = max = initial.
    """
    config = {k.name: getattr(settings, k.name) for k in knobs("autoscaling")}
    if settings.num_replicas != "auto":
        n = settings.num_replicas
        config |= {"min_replicas": n, "max_replicas": n, "initial_replicas": n}
    return config


def application(settings: Settings) -> dict[str, Any]:
    """One entry of `applications` in Serve's declarative config."""
    user_config = settings.user_config()
    model = {
        k.name: getattr(settings, k.name)
        for k in knobs("deployment")
        if k.name not in ("num_replicas", "num_cpus", "num_gpus", "reject_status", "retry_after_s")
    }
    model |= {
        "backpressure_config": {
            "status_code": settings.reject_status,
            "retry_after_s": settings.retry_after_s,
        },
        "user_config": user_config,
        "autoscaling_config": autoscaling_config(settings),
        "ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
    }
    if settings.engine == "vllm" and not settings.num_gpus:
        model["ray_actor_options"]["memory"] = VLLM_CPU_BYTES
    helper = _HELPER | {"user_config": user_config}
    return {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": "kit.apps:build",
        "args": {k.name: getattr(settings, k.name) for k in knobs("app") if k.name not in BESIDE},
        "deployments": [
            *({"name": name} | model for name in model_names(settings)),
            *({"name": name} | helper for name in helper_names(settings)),
        ],
    }


def from_application(config: dict[str, Any]) -> Settings:
    """The reverse of `application`, for a hand-written config; helpers are not looked at.

    Raises:
        SettingsError: also for a known knob at the wrong level, which Serve would ignore.
    """
    deployments = config.get("deployments") or [{}]
    deployment = dict(next((d for d in deployments if d.get("name") in MODELS), deployments[0]))
    places: list[tuple[Level, dict[str, Any]]] = [
        ("app", dict(config.get("args") or {})),
        ("batching", dict(deployment.pop("user_config", None) or {})),
        ("autoscaling", dict(deployment.pop("autoscaling_config", None) or {})),
    ]
    flat = dict(deployment.pop("ray_actor_options", None) or {})
    flat.pop("memory", None)  # follows from the engine
    rejection = dict(deployment.pop("backpressure_config", None) or {})
    if "status_code" in rejection:
        rejection["reject_status"] = rejection.pop("status_code")
    deployment.pop("name", None)
    places.append(("deployment", deployment | flat | rejection))
    values: dict[str, Any] = {}
    wrong = []
    for level, found in places:
        for name, value in found.items():
            if name in BY_NAME and BY_NAME[name].level == level:
                values[name] = value
            else:
                wrong.append(unknown(name, level, BY_NAME))
    if wrong:
        raise SettingsError("\n".join(wrong))
    low, high = values.get("min_replicas"), values.get("max_replicas")
    if low is not None and low == high == values.get("initial_replicas"):
        values["num_replicas"] = low
        values["initial_replicas"] = None
    elif low is not None:
        values["num_replicas"] = "auto"
    return Settings(**values)
