"""The Serve deployments that classify images: one image per call, and dynamic batches of them.

`POST /classify` takes the bytes of a JPEG or PNG image and answers with a score for each of 1,000
classes; `GET /v1/models` says which engine and which weights they come from.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel, Field
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kit.batching import DynamicBatching
from kit.door import arrival_s, new_api
from kit.images import ImageError, Pixels, pixels
from kit.refusal import BadRequest
from kit.replica import Replica
from kit.vision_engine import CLASSES, Classified, EmulatedVision, TorchVision, VisionEngine


class Scores(BaseModel):
    """The answer of `POST /classify`."""

    scores: list[float] = Field(
        min_length=CLASSES, max_length=CLASSES, description="Probability of each class"
    )
    top: int = Field(ge=0, lt=CLASSES, description="The likeliest class")


_IMAGE = {"schema": {"type": "string", "format": "binary"}}
_BODY = {"required": True, "content": {"image/jpeg": _IMAGE, "image/png": _IMAGE}}


class _Vision(Replica):
    """What both apps do around their engine: read, refuse, time, answer."""

    engine: VisionEngine

    def __init__(
        self,
        app: str,
        engine: str,
        model: str,
        accelerator: str,
        time_scale: float,
        load_time_s: float,
    ) -> None:
        super().__init__()
        self.route = app
        if engine == "torch":
            cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
            self.engine = TorchVision(model, cpus)
        else:
            self.engine = EmulatedVision(accelerator, time_scale, load_time_s)

    async def execute(self, image: Pixels) -> Classified:
        """Have one image classified; subclasses differ here."""
        raise NotImplementedError

    def __serve_build_asgi_app__(self) -> FastAPI:
        api = new_api("Serve tuning kit: images", {})

        @api.get("/v1/models")
        async def models() -> dict[str, Any]:
            """The one model that is served."""
            card = {
                "id": "resnet-50",
                "object": "model",
                "engine": self.engine.label,
                "weights": self.engine.weights,
                "classes": CLASSES,
            }
            return {"object": "list", "data": [card]}

        @api.post(
            "/classify",
            response_model=Scores,
            openapi_extra={"requestBody": _BODY},
        )
        async def classify(request: Request) -> Response:
            """Classify one image, at most 4 MB."""
            return await self._classify(request)

        return api

    async def _classify(self, request: Request) -> Response:
        arrived_s = arrival_s(request)
        with self.counted(arrived_s):
            try:
                # In a thread, for a large image takes a while; before the batch, which it could spoil.
                image = await asyncio.to_thread(pixels, await request.body())
            except ImageError as error:
                raise BadRequest(str(error)) from None
            done = await self.execute(image)
        scores = done.scores
        answer = JSONResponse({"scores": scores, "top": scores.index(max(scores))})
        answer.headers.update(self.timing(arrived_s, done, done.done_s))
        return answer

    def work(self) -> dict[str, Any]:
        busy = self.engine.busy
        return {
            "executing": busy.executing,
            "batches": busy.batches,
            "busy_s": busy.busy_s,
            "engine": self.engine.stats(),
        }


@serve.ingress()
class ResNet50(_Vision):
    """One image per call; the others wait for the device inside the replica."""

    async def execute(self, image: Pixels) -> Classified:
        return (await self.engine.run([image]))[0]


@serve.ingress()
class BatchedResNet50(DynamicBatching[Pixels, Classified], _Vision):
    """Dynamic batches of images, one batch at a time."""

    def apply(self, values: dict[str, Any]) -> None:
        names = ("max_batch_size", "batch_wait_timeout_s", "hold_while_busy")
        self.set_batching(**{name: values[name] for name in names})

    async def execute(self, image: Pixels) -> Classified:
        return await self.in_batch(image)

    async def run_batch(self, items: list[Pixels]) -> list[Classified]:
        return await self.engine.run(items)

    async def check_health(self) -> None:
        """Unhealthy when the task that forms batches has died."""
        await self.check_batching()


_APPS = {"resnet50": ResNet50, "resnet50-batched": BatchedResNet50}
_ARGS = ("app", "engine", "model", "accelerator", "time_scale", "load_time_s")


def vision_app(args: dict[str, Any], name: str) -> serve.Application:
    """The app that `args` (the knobs of level `app`) name, as a deployment called `name`."""
    app = _APPS[args["app"]]
    return serve.deployment(app, name=name).bind(**{key: args[key] for key in _ARGS})
