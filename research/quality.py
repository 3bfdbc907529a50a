"""Photos spoilt by rule, as cameras and hands spoil them: the data of the demo task `quality`.

Every fault is made at the size the model sees, so that a person can name it there too. Strengths
are drawn anew for each photo, from "plainly visible" to "hopeless". Faint faults are left out:
their label would be ambiguous.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

Light = npt.NDArray[np.float32]  # [height, width, 3], linear, 0 to 1
SHORT_SIDE: Final = 256


def prepared(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A part of a photo with the same proportions, its short side 256 pixels."""
    photo = photo.convert("RGB")
    share = rng.uniform(0.7, 1.0) if min(photo.size) > 1.3 * SHORT_SIDE else 1.0
    wide, high = (round(edge * share) for edge in photo.size)
    left = int(rng.integers(0, photo.width - wide + 1))
    top = int(rng.integers(0, photo.height - high + 1))
    photo = photo.crop((left, top, left + wide, top + high))
    scale = SHORT_SIDE / min(photo.size)
    size = (round(photo.width * scale), round(photo.height * scale))
    return photo.resize(size, Image.Resampling.LANCZOS)


def to_light(photo: Image.Image) -> Light:
    values = np.asarray(photo, dtype=np.float32) / 255
    light: Light = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return light.astype(np.float32)


def to_photo(light: Light) -> Image.Image:
    light = np.clip(light, 0, 1)
    values = np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)
    return Image.fromarray((values * 255 + 0.5).astype(np.uint8))


def good(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    """As it is, a little brighter or darker."""
    return to_photo(to_light(photo) * np.float32(rng.uniform(0.75, 1.25)))


def out_of_focus(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Every point becomes a disc."""
    radius = rng.uniform(3.0, 8.0)
    reach = int(np.ceil(radius))
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    return _spread(photo, np.clip(radius + 0.5 - np.hypot(x, y), 0, 1))


def motion_blur(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Every point becomes a line, slightly bent as a hand bends it."""
    length, angle, bend = rng.uniform(14, 40), rng.uniform(0, np.pi), rng.uniform(-0.5, 0.5)
    reach = int(np.ceil(length / 2)) + 1
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    for step in np.linspace(-0.5, 0.5, 400):
        turned = angle + bend * step
        x, y = reach + length * step * np.cos(turned), reach + length * step * np.sin(turned)
        left, top = int(x), int(y)
        for down, across in ((0, 0), (0, 1), (1, 0), (1, 1)):
            share = (1 - abs(x - left - across)) * (1 - abs(y - top - down))
            kernel[top + down, left + across] += share
    return _spread(photo, kernel)


def too_dark(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Little light, and the grain that comes with it."""
    light = to_light(photo)
    target = np.exp(rng.uniform(np.log(0.004), np.log(0.035)))  # the mean; well exposed: about 0.2
    light = light * np.float32(min(target / max(float(light.mean()), 1e-4), 0.2))
    grain = rng.normal(0, rng.uniform(0, 0.004), light.shape).astype(np.float32)
    return to_photo(light + grain)


def overexposed(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    """So much light that much of it is white."""
    light = to_light(photo)
    target = rng.uniform(0.75, 1.6)  # the mean before what is above white is cut off
    return to_photo(light * np.float32(max(target / max(float(light.mean()), 1e-4), 2.5)))


def noisy(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Coarse coloured grain, as of a small sensor at night."""
    values = np.asarray(photo, dtype=np.float32)
    strength, coarse = rng.uniform(28, 70), rng.uniform(1.0, 2.0)
    high, wide = (int(np.ceil(edge / coarse)) for edge in values.shape[:2])
    colour, grey = rng.normal(0, 1, (high, wide, 3)), rng.normal(0, 1, (high, wide, 1))
    grain = _enlarged((colour + grey).astype(np.float32), photo.size)
    grain *= strength / max(float(grain.std()), 1e-6)
    return Image.fromarray(np.clip(values + grain, 0, 255).astype(np.uint8))


def _enlarged(values: Light, size: tuple[int, int]) -> Light:
    planes = [Image.fromarray(values[..., i]) for i in range(3)]
    return np.stack([np.asarray(p.resize(size, Image.Resampling.BICUBIC)) for p in planes], axis=-1)


def _spread(photo: Image.Image, kernel: npt.NDArray[np.float64]) -> Image.Image:
    """The light of every point spread as the kernel says, without dark edges."""
    light = to_light(photo)
    reach = kernel.shape[0] // 2
    wide = np.pad(light, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    shape = wide.shape[:2]
    turned = np.fft.rfft2(kernel / kernel.sum(), shape)
    spread = np.fft.irfft2(np.fft.rfft2(wide, axes=(0, 1)) * turned[..., None], shape, axes=(0, 1))
    return to_photo(spread[2 * reach :, 2 * reach :].astype(np.float32))


FAULTS: Final[dict[str, Callable[[Image.Image, np.random.Generator], Image.Image]]] = {
    "sharp and well exposed": good,
    "out of focus": out_of_focus,
    "motion blur": motion_blur,
    "too dark": too_dark,
    "overexposed": overexposed,
    "noisy": noisy,
}
