"""Images: made, read, refused; the engines that classify them; the apps, with a real ResNet-50."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests
from conftest import BASE
from PIL import Image

from kit.accelerator import NO_ACCELERATOR, _data, profile_names, vision_names, vision_profile
from kit.application import application, from_application
from kit.doubts import doubts
from kit.images import ImageError, image, pixels
from kit.presets import PRESETS, RAY_AUTO
from kit.serving import Serving
from kit.settings import VISION_ACCELERATOR, Settings, SettingsError
from kit.vision_engine import EmulatedVision

TEXT = b"this is a text file, not an image\n"


@pytest.mark.parametrize("name", vision_names())
def test_a_profile_is_as_far_off_the_published_points_as_it_says(name: str) -> None:
    p, data = vision_profile(name), _data("vision")[name]
    published = zip(data["published"]["images"], data["published"]["latency_s"], strict=True)
    off = [abs(p.batch_s(n) / latency_s - 1) for n, latency_s in published]
    assert 100 * float(np.mean(off)) == pytest.approx(data["latency"]["fit_mape_percent"], abs=0.01)
    assert max(off) < 0.25
    assert p.label.startswith("emulated NVIDIA")
    assert "published" in p.evidence


def test_profiles_for_text_and_for_images_are_kept_apart() -> None:
    assert not set(profile_names()) & set(vision_names())
    assert {n.split(".")[1].split("-")[0] for n in vision_names()} == {"t4", "v100", "a100"}
    assert vision_profile(NO_ACCELERATOR).batch_s(8) == 0
    with pytest.raises(KeyError, match=VISION_ACCELERATOR):
        vision_profile("h100.llama-3.1-8b.bf16")


def test_settings_of_image_apps_need_no_accelerator_named() -> None:
    assert Settings(app="resnet50").accelerator == VISION_ACCELERATOR
    there = Settings().replace(app="resnet50-batched")
    assert there.accelerator == VISION_ACCELERATOR
    assert there.replace(app="batched") == Settings()
    classic = Settings(**PRESETS["resnet50"])
    assert {k: getattr(classic, k) for k in RAY_AUTO} == RAY_AUTO
    assert from_application(application(classic)) == classic


def test_settings_of_one_kind_of_app_are_refused_for_the_other() -> None:
    with pytest.raises(SettingsError, match=f"resnet50 app knows: .*{VISION_ACCELERATOR}"):
        Settings(app="resnet50", accelerator="h100.llama-3.1-8b.bf16")
    with pytest.raises(SettingsError, match="batched app knows: .*h100"):
        Settings(accelerator=VISION_ACCELERATOR)
    with pytest.raises(SettingsError, match="engine = 'torch' is not for the continuous app"):
        Settings(app="continuous", engine="torch")
    small = Settings(app="resnet50-batched", max_batch_size=16, max_ongoing_requests=8)
    assert any("max_batch_size = 16 is above" in text for text in doubts(small))


def test_images_are_the_same_for_the_same_numbers_and_no_two_alike() -> None:
    series = [image(7, i) for i in range(20)]
    assert series == [image(7, i) for i in range(20)]
    assert len({*series, *(image(8, i) for i in range(20))}) == 40
    assert all(5_000 < len(data) < 25_000 for data in series)


def _encoded(picture: Image.Image, kind: str) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_a_flat_image_becomes_flat_pixels_by_imagenets_figures(mode: str) -> None:
    picture = Image.new(mode, (300, 20), 65535 if mode == "I;16" else "white")
    read = pixels(_encoded(picture, "PNG"))
    assert read.shape == (3, 224, 224)
    assert read.dtype == np.float32
    white = (1 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225]
    assert np.allclose(read, white[:, None, None], atol=0.02)


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (4000, 3000)])
def test_any_shape_is_read(size: tuple[int, int]) -> None:
    assert np.isfinite(pixels(_encoded(Image.new("RGB", size, "red"), "JPEG"))).all()


def _zero_wide_png() -> bytes:
    data = bytearray(_encoded(Image.new("RGB", (8, 8)), "PNG"))
    data[16:20] = bytes(4)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (TEXT, "not a JPEG or PNG"),
        (_encoded(Image.new("RGB", (8, 8)), "GIF"), "not a JPEG or PNG"),
        (image(1, 1)[:4000], "damaged"),
        (image(1, 1)[:30], "not a JPEG or PNG|damaged"),
        (_encoded(Image.new("RGB", (99, 99)), "PNG")[:60], "not a JPEG or PNG|damaged"),
        (_zero_wide_png(), "not a JPEG or PNG|damaged"),
        (_encoded(Image.new("1", (8000, 8000)), "PNG"), "25 million pixels"),
        (_encoded(Image.new("1", (20_000, 20_000)), "PNG"), "25 million pixels"),
    ],
    ids=["empty", "text", "gif", "cut", "header", "png-cut", "zero", "large", "bomb"],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_no_image_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        pixels(data)


def test_broken_bytes_never_raise_anything_else() -> None:
    rng = np.random.default_rng(0)
    for good in (image(1, 0), _encoded(Image.open(io.BytesIO(image(1, 0))), "PNG")):
        for _ in range(60):
            data = bytearray(good)
            for at in rng.integers(0, min(len(data), 700), 8):
                data[at] = int(rng.integers(256))
            with contextlib.suppress(ImageError):
                pixels(bytes(data))


def test_the_emulated_device_runs_one_batch_at_a_time_in_order() -> None:
    async def go() -> None:
        engine = EmulatedVision(VISION_ACCELERATOR, 2.0, 0.0)
        one, two = pixels(image(1, 1)), pixels(image(1, 2))
        begun = [asyncio.create_task(engine.run(b)) for b in ([one], [one, two], [two])]
        left = asyncio.create_task(engine.run([two]))
        await asyncio.sleep(0)
        left.cancel()
        (a,), (b, c), (d,) = [await task for task in begun]
        assert [a.batch_id, b.batch_id, c.batch_id, d.batch_id] == [1, 2, 2, 3]
        assert [a.batch_size, b.batch_size, d.batch_size] == [1, 2, 1]
        assert a.done_s <= b.started_s <= b.done_s <= d.started_s
        for done in (a, b, d):
            assert done.done_s - done.started_s >= 2 * engine.profile.batch_s(done.batch_size)
        assert a.scores == b.scores != c.scores
        assert c.scores == d.scores
        assert sum(a.scores) == pytest.approx(1)
        assert engine.busy.batches == 3  # who left while waiting cost nothing
        assert engine.busy.busy_s == pytest.approx(
            sum(x.done_s - x.started_s for x in (a, b, d)), rel=0.05
        )

    asyncio.run(go())


def test_a_batch_that_has_begun_holds_the_device_to_its_end() -> None:
    async def go() -> None:
        engine = EmulatedVision(VISION_ACCELERATOR, 10.0, 0.0)
        picture = pixels(image(1, 1))
        first = asyncio.create_task(engine.run([picture]))
        await asyncio.sleep(0.03)
        first.cancel()
        begun_s = time.monotonic()
        (second,) = await engine.run([picture])
        assert second.started_s - begun_s > 0.03
        assert first.cancelled()

    asyncio.run(go())


def _classify(serving: Serving, data: bytes) -> requests.Response:
    return requests.post(f"{serving.url}/classify", data=data, timeout=30)


def _together(serving: Serving, bodies: list[bytes]) -> list[requests.Response]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda data: _classify(serving, data), bodies))


def _served_by(answer: requests.Response) -> tuple[str, str, int]:
    replica, batch, size, *_ = answer.headers["X-Served-By"].split()
    return replica, batch, int(size)


def test_o26_a_real_resnet_gives_the_same_scores_in_every_replica(as_left: Serving) -> None:
    settings = BASE.replace(app="resnet50", engine="torch", num_replicas=2, max_ongoing_requests=2)
    as_left.deploy(settings)
    by_replica: dict[str, set[tuple[float, ...]]] = {}
    for _ in range(3):
        for answer in _together(as_left, [image(5, 0)] * 6):
            assert answer.status_code == 200
            scores = answer.json()["scores"]
            assert len(scores) == 1000
            assert scores[answer.json()["top"]] == max(scores)
            by_replica.setdefault(_served_by(answer)[0], set()).add(tuple(scores))
    assert len(by_replica) == 2
    assert len(set.union(*by_replica.values())) == 1
    (other,) = _together(as_left, [image(5, 1)])
    assert tuple(other.json()["scores"]) not in set.union(*by_replica.values())

    (card,) = requests.get(f"{as_left.url}/v1/models", timeout=9).json()["data"]
    assert "random" in card["weights"]
    assert "torch on CPU × 1" in card["engine"]  # of 0.1 CPUs reserved
    engines = [r["engine"] for r in as_left.replicas() if r["replica_id"] in by_replica]
    assert [e["torch_threads"] for e in engines] == [1, 1]


def test_o11_a_text_file_among_images_is_refused_alone(as_left: Serving) -> None:
    settings = BASE.replace(
        app="resnet50-batched", max_batch_size=4, batch_wait_timeout_s=0.5, time_scale=1.0
    )
    as_left.deploy(settings)
    pictures = [image(5, i) for i in range(3)]
    for _ in range(2):
        *good, bad = _together(as_left, [*pictures, TEXT])
        assert [a.status_code for a in good] == [200] * 3
        assert len({_served_by(a)[:2] for a in good}) == 1
        assert [_served_by(a)[2] for a in good] == [3] * 3
        assert len({tuple(a.json()["scores"]) for a in good}) == 3
        assert bad.status_code == 400
        assert "not a JPEG or PNG" in bad.json()["error"]["message"]
    assert _classify(as_left, bytes(4_000_001)).status_code == 413

    as_left.update(settings.replace(max_batch_size=2, batch_wait_timeout_s=0.1))
    sizes = [_served_by(a)[2] for a in _together(as_left, [image(6, i) for i in range(6)])]
    assert max(sizes) == 2
    as_left.update(settings.replace(max_batch_size=6))
    assert [_served_by(a)[2] for a in _together(as_left, pictures * 2)] == [6] * 6
