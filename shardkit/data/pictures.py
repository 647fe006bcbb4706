"""Pictures to train on, and their crops; each crop is a function of (seed, split, sample index)."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import DataError, importing
from .loader import generator_of
from .rows import held_out

Pixels = npt.NDArray[np.uint8]
"""[height, width, 3], RGB."""

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")
"""Formats that Pillow may take a file for, whatever its name is: for PostScript it would start a program."""
MAX_PIXELS = 89_478_485
"""Most pixels of a picture, Pillow's own limit: a GiB while it is decoded."""
SHIPPED = (
    "astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry", "retina", "camera",
    "coins", "moon", "brick", "grass", "gravel",
)  # fmt: skip
"""Photographs in scikit-image's wheel: nothing is downloaded."""


@dataclass(frozen=True)
class Picture:
    """A picture: `name` is its path below the directory, or its name in scikit-image; `label` is its class."""

    name: str
    source: str
    label: int
    is_file: bool


def shipped_pictures() -> list[Picture]:
    """scikit-image's pictures, each its own class."""
    _need("skimage", "scikit-image")
    return [Picture(name, name, label, False) for label, name in enumerate(SHIPPED)]


def find_pictures(path: str) -> list[Picture]:
    """Every picture below a directory, sorted by path; label 0."""
    root = _directory(path)
    files = sorted(file for file in root.rglob("*") if _is_picture(file.relative_to(root)))
    if not files:
        raise DataError(f"data.path={path} holds no pictures", f"put {', '.join(sorted(SUFFIXES))} files there")
    return [Picture(file.relative_to(root).as_posix(), str(file), 0, True) for file in files]


def find_classes(path: str) -> tuple[list[Picture], list[str]]:
    """Pictures of a directory that holds one directory per class, and the classes' names, sorted."""
    root = _directory(path)
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(names) < 2:
        raise DataError(
            f"data.path={path} has {len(names)} subdirectories, one per class is expected",
            "arrange the pictures as CLASS/NAME.png, two classes or more",
        )
    pictures: list[Picture] = []
    for label, name in enumerate(names):
        below = sorted(file for file in (root / name).rglob("*") if _is_picture(file.relative_to(root)))
        if not below:
            raise DataError(f"class {name} of data.path={path} has no pictures", "add some, or remove the directory")
        pictures += [Picture(file.relative_to(root).as_posix(), str(file), label, True) for file in below]
    return pictures, names


def split_pictures(pictures: list[Picture], val_fraction: float) -> tuple[list[Picture], list[Picture]]:
    """Training and validation pictures, by the hash of their names: a picture keeps its split when others are added."""
    val_names = held_out([picture.name for picture in pictures], val_fraction)
    return [p for p in pictures if p.name not in val_names], [p for p in pictures if p.name in val_names]


def read(picture: Picture) -> Pixels:
    """Decode a picture to RGB."""
    if not picture.is_file:
        return _read_shipped(picture.source)
    image = _need("PIL.Image", "pillow")
    try:
        with image.open(picture.source, formats=FORMATS) as opened:
            if math.prod(opened.size) > MAX_PIXELS:
                raise ValueError(f"it has {opened.size[0]} × {opened.size[1]} pixels, at most {MAX_PIXELS:,} are read")
            return np.asarray(opened.convert("RGB"))
    # PIL raises SyntaxError for a broken PNG
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise DataError(f"{picture.source} cannot be decoded: {error}", "replace it or move it away") from error


@lru_cache(maxsize=len(SHIPPED))
def _read_shipped(name: str) -> Pixels:
    load: Callable[[], Any] = getattr(_need("skimage.data", "scikit-image"), name)
    pixels = np.asarray(load(), dtype=np.uint8)
    return np.repeat(pixels[:, :, None], 3, axis=2) if pixels.ndim == 2 else pixels[:, :, :3]


def _need(module: str, package: str) -> Any:
    with importing(f"pictures need {package}", "pip install shardkit[vision]"):
        return importlib.import_module(module)


def _directory(path: str) -> Path:
    root = Path(os.path.expanduser(path))
    if not root.is_dir():
        raise DataError(
            f"data.path={path} is not a directory", "name a directory of pictures, or leave data.path unset"
        )
    return root


def _is_picture(relative: Path) -> bool:
    return relative.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in relative.parts)


AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Share of the picture's area and aspect ratio of a random crop (Szegedy et al. 2015, section 6)."""
MEAN = STD = 0.5
"""They map pixels from [0, 1] to [-1, 1]."""


class LabelledCrops:
    """For classification: {"pixels": fp32 [3, size, size] in [-1, 1], "label": int64}.

    Sample i is crop i // n of picture i % n. Augmented: a random part, resized, mirrored half of the time; otherwise
    the largest square in the centre, resized. Crops come from the part `rows` of each picture's height, (start, end) in
    [0, 1].
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
    mirrored and turned; otherwise crops are evenly spaced along the picture's diagonal.
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
            row, column = (int(draws.integers(0, room + 1)) for room in space)
            high = np.rot90(pixels[row : row + size, column : column + size], k=int(draws.integers(0, 4)))
            high = high[:, ::-1] if draws.random() < 0.5 else high
        else:
            row, column = (round(room * (nth + 0.5) / self.per_picture) for room in space)
            high = pixels[row : row + size, column : column + size]
        return {"low": _to_tensor(resize(high, size // self.scale)), "high": _to_tensor(high)}


def resize(pixels: Pixels, size: int) -> Pixels:
    """Resize to size × size by bicubic interpolation with antialiasing."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC))


def _checked(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(f"sample {index} of {length}")
    return index


def _random_part(pixels: Pixels, draws: Any) -> Pixels:
    """A part of random area and aspect ratio; the centre if ten attempts do not fit."""
    height, width = pixels.shape[:2]
    for _ in range(10):
        area = height * width * draws.uniform(*AREA)
        ratio = math.exp(draws.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            row, column = int(draws.integers(0, height - h + 1)), int(draws.integers(0, width - w + 1))
            return pixels[row : row + h, column : column + w]
    return _middle(pixels)


def _middle(pixels: Pixels) -> Pixels:
    height, width = pixels.shape[:2]
    side = min(height, width)
    row, column = (height - side) // 2, (width - side) // 2
    return pixels[row : row + side, column : column + side]


def _to_tensor(pixels: Pixels) -> torch.Tensor:
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous().float() / 255
