"""Images: made here, seeded, so that nothing has to be downloaded; and read for a vision model.

Those made are coloured clouds with some grain, about as smooth as photographs, so that a JPEG of
them has the size of a photograph's.
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

SIDE = 224
MAX_PIXELS = 25_000_000

_JPEG_QUALITY = 85
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_STD = np.array([0.229, 0.224, 0.225], np.float32)
# Of an image scaled to 256 on its shorter side the middle 224 are looked at, as in training.
_BORDER_SHARE = (1 - SIDE / 256) / 2

Pixels = NDArray[np.float32]


class ImageError(ValueError):
    """Bytes that are no image which can be classified; the text says why."""


def image(seed: int, index: int) -> bytes:
    """The image number `index` of a series as JPEG bytes: about 224 × 224, 10 to 20 kB.

    The same two numbers (≥ 0) always give the same bytes; other numbers give another image.
    """
    rng = np.random.default_rng([seed, index])
    width, height = (int(n) for n in rng.integers(208, 257, 2))
    cells = int(rng.integers(4, 12))
    coarse = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    clouds = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    grain = rng.integers(-12, 13, (height, width, 1), dtype=np.int16)
    pixels = np.clip(clouds + grain, 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=_JPEG_QUALITY)
    return out.getvalue()


def pixels(data: bytes) -> Pixels:
    """A JPEG or PNG as a vision model takes it: (3, 224, 224), by ImageNet's mean and deviation.

    Raises:
        ImageError: for anything else, and for images that are damaged or too large to decode.
    """
    if not data:
        raise ImageError("the body is empty: send the bytes of a JPEG or PNG image")
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
        size = image.width * image.height
    except UnidentifiedImageError:
        raise ImageError("the body is not a JPEG or PNG image") from None
    except Image.DecompressionBombError:
        size = 2 * MAX_PIXELS
    except Exception as error:
        raise ImageError(f"the image is damaged: {error}") from None
    if size > MAX_PIXELS:
        raise ImageError(f"the image has over {MAX_PIXELS / 1e6:g} million pixels, the most taken")
    try:
        image.draft("RGB", (256, 256))  # a large JPEG is scaled down while it is decoded
        if image.mode.startswith("I"):  # 16 bits a pixel, which conversion would cut off at 255
            image = image.point(lambda value: value / 256, "L")
        fitted = ImageOps.fit(
            image.convert("RGB"), (SIDE, SIDE), Image.Resampling.BICUBIC, bleed=_BORDER_SHARE
        )
    except Exception as error:  # Pillow raises a dozen kinds for damaged bytes
        raise ImageError(f"the image is damaged: {error}") from None
    scaled = (np.asarray(fitted, np.float32) / 255 - _MEAN) / _STD
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))
