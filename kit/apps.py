"""What Serve builds from a declarative config: `kit.apps:build`, and `kit.apps:monitor` beside it.

`build` puts together the deployments of the app that is named; the monitor gathers what their
replicas report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kit.accelerator import VISION_APPS, profile
from kit.clock import clock_id
from kit.continuous import ContinuousEngine
from kit.engine import Engine, StaticEngine
from kit.llm import Batched, Continuous, Unbatched
from kit.models import resolve
from kit.postprocess import Postprocess
from kit.router import Router
from kit.tokens import ModelTokens, Tokenizer, Words
from kit.vision import vision_app


class Monitor:
    """Collects what replicas report, so that a client anywhere can read it over HTTP."""

    def __init__(self) -> None:
        self._replicas: dict[str, dict[str, Any]] = {}

    async def report(self, state: dict[str, Any]) -> None:
        """Keep the newest state of one replica; forget those silent for a minute."""
        self._replicas[state["replica_id"]] = state
        for name, known in list(self._replicas.items()):
            if known["t_s"] < state["t_s"] - 60:
                del self._replicas[name]

    async def __call__(self, request: Request) -> Response:
        return JSONResponse({"clock": clock_id(), "replicas": list(self._replicas.values())})


def _engine(args: dict[str, Any], kind: type[StaticEngine] | type[ContinuousEngine]) -> Engine:
    """The engine that the knobs of level `app` ask for; made in the replica, for it may load."""
    if args["engine"] == "vllm":
        from kit.vllm_engine import VllmEngine

        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        engine: Engine = VllmEngine(
            model=args["model"],
            max_model_len=args["max_model_len"],
            max_num_seqs=args["max_num_seqs"],
            max_num_batched_tokens=args["max_num_batched_tokens"],
            kv_cache_tokens=args["kv_cache_tokens"],
            enable_prefix_caching=args["enable_prefix_caching"],
            cpus=max(1, int(cpus)),
        )
        return engine
    names = ["accelerator", "time_scale", "load_time_s", "kv_cache_tokens", "max_model_len"]
    if kind is ContinuousEngine:
        names += ["max_num_seqs", "max_num_batched_tokens"]
    emulated: Engine = kind(**{name: args[name] for name in names})
    return emulated


def _model(app: str, args: dict[str, Any], name: str, is_entrance: bool, *rest: Any) -> Any:
    """One model deployment; `is_entrance` gives it the HTTP routes."""
    base, kind = {
        "unbatched": (Unbatched, StaticEngine),
        "batched": (Batched, StaticEngine),
        "continuous": (Continuous, ContinuousEngine),
    }[app]

    class Deployed(base):  # type: ignore[misc, valid-type]
        def __init__(self, args: dict[str, Any], *rest: Any) -> None:
            route = app if is_entrance else name.lower()
            super().__init__(_engine(args, kind), route, *rest)

    cls = serve.ingress()(Deployed) if is_entrance else Deployed
    return serve.deployment(cls, name=name).bind(args, *rest)


def _tokenizer(args: dict[str, Any]) -> tuple[Tokenizer, str]:
    """The model's tokenizer, for where there is no engine, and the model's name."""
    if args["engine"] == "vllm":
        found = resolve(args["model"])
        return ModelTokens(found), args["model"] or Path(found).name
    return Words(), profile(args["accelerator"]).model


def build(args: dict[str, Any]) -> serve.Application:
    """The app that `args` names; what it takes are the knobs of level `app`."""
    if args["app"] in VISION_APPS:
        return vision_app(args, "Model")
    post = serve.deployment(Postprocess).bind() if args["postprocess"] else None
    if args["app"] != "routed":
        return _model(args["app"], args, "Model", True, post)
    short, long = (_model("batched", args, side, False, post) for side in ("Short", "Long"))

    class Entrance(Router):
        def __init__(self, short: DeploymentHandle, long: DeploymentHandle) -> None:
            super().__init__(short, long, *_tokenizer(args))

    return serve.deployment(serve.ingress()(Entrance), name="Router").bind(short, long)


def monitor(args: dict[str, Any]) -> serve.Application:
    """The app that gathers the replicas' reports."""
    return serve.deployment(Monitor, ray_actor_options={"num_cpus": 0}).bind()
