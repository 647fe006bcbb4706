"""Crops of pictures as training samples; each a function of (seed, split, sample index)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import DataError
from .draws import generator_of
from .pictures import Picture, Pixels, read

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Share of the picture's area and aspect ratio of a random crop (Szegedy et al. 2015, section 6)."""
MEAN = STD = 0.5
"""Pixels in [0, 1] are brought to [-1, 1]."""


class LabelledCrops:
    """For classification: {"pixels": fp32 [3, size, size] in [-1, 1], "label": int64}.

    Sample i is crop i // n of picture i % n. Augmented: a random part, resized, mirrored half of the time; otherwise
    the largest square in the middle, resized.

    Args:
        per_picture: crops of each picture.
        rows: the share of each picture's height, from and to, that crops come from.
    """

    def __init__(
        self, pictures: Sequence[Picture], size: int, per_picture: int, seed: int, split: str, augment: bool,
        rows: tuple[float, float] = (0.0, 1.0),
    ) -> None:  # fmt: skip
        self.pictures, self.size, self.per_picture = list(pictures), size, per_picture
        self.seed, self.split, self.augment, self.rows = seed, split, augment, rows

    def __len__(self) -> int:
        return len(self.pictures) * self.per_picture

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        picture = self.pictures[_checked(index, len(self)) % len(self.pictures)]
        pixels = read(picture)
        height = len(pixels)
        pixels = pixels[int(height * self.rows[0]) : max(1, int(height * self.rows[1]))]
        if self.augment:
            draws = generator_of(self.seed, "crop", self.split, index)
            cut = resize(_random_part(pixels, draws), self.size)
            cut = cut[:, ::-1] if draws.random() < 0.5 else cut
        else:
            cut = resize(_middle(pixels), self.size)
        return {"pixels": (_to_tensor(cut) - MEAN) / STD, "label": torch.tensor(picture.label)}


class ScaledCrops:
    """For super-resolution: {"low": fp32 [3, size / scale, …], "high": fp32 [3, size, size]}, in [0, 1].

    `low` is `high` reduced by bicubic interpolation. Sample i is crop i // n of picture i % n: augmented, a random one,
    mirrored and turned; otherwise one at even distances along the picture's diagonal.

    Raises:
        DataError: (from `__getitem__`) a picture is smaller than a crop.
    """

    def __init__(
        self, pictures: Sequence[Picture], size: int, scale: int, per_picture: int, seed: int, split: str, augment: bool
    ) -> None:
        self.pictures, self.size, self.scale, self.per_picture = list(pictures), size, scale, per_picture
        self.seed, self.split, self.augment = seed, split, augment

    def __len__(self) -> int:
        return len(self.pictures) * self.per_picture

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        nth, which = divmod(_checked(index, len(self)), len(self.pictures))
        picture = self.pictures[which]
        pixels, size = read(picture), self.size
        space = pixels.shape[0] - size, pixels.shape[1] - size
        if min(space) < 0:
            raise DataError(
                f"{picture.source} has {pixels.shape[1]} × {pixels.shape[0]} pixels, less than data.crop_size={size}",
                "lower data.crop_size, or leave small pictures out",
            )
        if self.augment:
            draws = generator_of(self.seed, "crop", self.split, index)
            top, left = (int(draws.integers(0, room + 1)) for room in space)
            high = np.rot90(pixels[top : top + size, left : left + size], k=int(draws.integers(0, 4)))
            high = high[:, ::-1] if draws.random() < 0.5 else high
        else:
            top, left = (round(room * (nth + 0.5) / self.per_picture) for room in space)
            high = pixels[top : top + size, left : left + size]
        return {"low": _to_tensor(resize(high, size // self.scale)), "high": _to_tensor(high)}


def resize(pixels: Pixels, size: int) -> Pixels:
    """To size × size by bicubic interpolation with antialiasing."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC))


def _checked(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(f"sample {index} of {length}")
    return index


def _random_part(pixels: Pixels, draws: Any) -> Pixels:
    """A part of random area and aspect ratio; the middle after ten that do not fit."""
    height, width = pixels.shape[:2]
    for _ in range(10):
        area = height * width * draws.uniform(*AREA)
        ratio = math.exp(draws.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(draws.integers(0, height - h + 1)), int(draws.integers(0, width - w + 1))
            return pixels[top : top + h, left : left + w]
    return _middle(pixels)


def _middle(pixels: Pixels) -> Pixels:
    height, width = pixels.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[top : top + side, left : left + side]


def _to_tensor(pixels: Pixels) -> torch.Tensor:
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous().float() / 255
