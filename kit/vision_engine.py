"""Engines that classify images: an emulated accelerator, and a real ResNet-50 in torch.

Both run one batch at a time, and what has begun runs to its end even when its caller leaves, as on
a device. A classifier has no first token: all of its inference counts as decode, none as prefill.
"""

from __future__ import annotations

import asyncio
import time
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import requests

from kit.accelerator import vision_profile
from kit.busy import Busy
from kit.engine import Done
from kit.images import Pixels

CLASSES = 1000
_SEED = 0  # of random weights: the same in every replica
_HUB_ANSWERS_WITHIN_S = 3


@dataclass(frozen=True)
class Classified(Done):
    """What became of an image: beside the instants of `Done`, a score for each class."""

    scores: tuple[float, ...] = ()


class VisionEngine:
    """One device; `label` and `weights` say in words what it is."""

    label: str
    weights: str

    def __init__(self) -> None:
        self.busy = Busy()
        self._free = asyncio.Lock()

    async def classify(self, images: Sequence[Pixels]) -> list[tuple[float, ...]]:
        """The scores of each image; subclasses differ here."""
        raise NotImplementedError

    async def run(self, images: Sequence[Pixels]) -> list[Classified]:
        """Run one batch of n ≥ 1 images; it waits for the one before it."""
        async with self._free:
            batch = asyncio.ensure_future(self._run(images))
            try:
                return await asyncio.shield(batch)
            finally:
                if not batch.done():  # the caller left; the device is not free before its end
                    await asyncio.wait([batch])

    async def _run(self, images: Sequence[Pixels]) -> list[Classified]:
        n = len(images)
        with self.busy.working(n) as batch_id:
            started_s = time.monotonic()
            scores = await self.classify(images)
            done_s = time.monotonic()
        return [
            Classified("", batch_id, n, started_s, started_s, started_s, done_s, scores=s)
            for s in scores
        ]

    def stats(self) -> dict[str, float]:
        """Figures of the engine now, by the names they are sampled under."""
        return {}


class EmulatedVision(VisionEngine):
    """Takes the time of `kit.accelerator.VisionProfile`; its scores are made up from the pixels.

    Loading blocks for `load_time_s`, as reading weights does.
    """

    weights = "none: the scores are made up, the same for the same image"

    def __init__(self, accelerator: str, time_scale: float, load_time_s: float) -> None:
        super().__init__()
        self.profile = vision_profile(accelerator)
        self.label = self.profile.label
        self.time_scale = time_scale
        time.sleep(load_time_s)

    async def classify(self, images: Sequence[Pixels]) -> list[tuple[float, ...]]:
        until_s = time.monotonic() + self.profile.batch_s(len(images)) * self.time_scale
        scores = [_made_up(image) for image in images]  # within the time that is emulated
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))
        return scores


class TorchVision(VisionEngine):
    """ResNet-50 in torch on `cpus` (at least one thread), or on a GPU where there is one.

    Args:
        model: a folder or a name on the hub, for pretrained weights; empty for random ones, the
            same in every replica.
        cpus: CPUs that the replica has reserved.

    Raises:
        RuntimeError: when `model` is not there, or is no classifier of images.
    """

    def __init__(self, model: str, cpus: float) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # torch looks for NVML through `pynvml`, which says at import that it has a new name.
            warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
            import torch
        self._torch = torch
        # torch takes every core it sees unless told, however little the replica has reserved.
        self.threads = max(1, int(cpus))
        torch.set_num_threads(self.threads)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = _load(model).eval().to(self.device)
        self.weights = f"pretrained: {model}" if model else f"random (seed {_SEED})"
        where = torch.cuda.get_device_name() if self.device == "cuda" else f"CPU × {self.threads}"
        self.label = f"ResNet-50 in torch on {where} · weights {self.weights}"
        # One thread of its own: the replica's loop lives on while torch computes.
        self._thread = ThreadPoolExecutor(1, "torch")
        self._infer([np.zeros((3, 224, 224), np.float32)])  # the first call sets up kernels

    async def classify(self, images: Sequence[Pixels]) -> list[tuple[float, ...]]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._infer, images)

    def _infer(self, images: Sequence[Pixels]) -> list[tuple[float, ...]]:
        torch = self._torch
        with torch.inference_mode():
            batch = torch.from_numpy(np.stack(images)).to(self.device)
            scores = torch.softmax(self._model(batch).logits.float(), dim=-1)
            return [tuple(row) for row in scores.cpu().tolist()]

    def stats(self) -> dict[str, float]:
        return {"torch_threads": self.threads}


def _made_up(image: Pixels) -> tuple[float, ...]:
    odds = np.random.default_rng(zlib.crc32(image.tobytes())).exponential(size=CLASSES)
    return tuple((odds / odds.sum()).tolist())


def _load(model: str) -> Any:
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    if not model:
        torch.manual_seed(_SEED)
        return ResNetForImageClassification(ResNetConfig(num_labels=CLASSES))
    try:
        found = ResNetForImageClassification.from_pretrained(
            model, local_files_only=not _hub_answers()
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise RuntimeError(
            f"model = {model!r} cannot be loaded: {error}\nName a folder with its files, reach the "
            "hub, or leave model empty for random weights"
        ) from None
    if found.config.num_labels != CLASSES:
        raise RuntimeError(
            f"model = {model!r} tells {found.config.num_labels} classes apart; one with {CLASSES} "
            "is needed"
        )
    return found


def _hub_answers() -> bool:
    """Without a network the hub's client would try again and again for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        requests.head(constants.ENDPOINT, timeout=_HUB_ANSWERS_WITHIN_S)
    except requests.RequestException:
        return False
    return True
