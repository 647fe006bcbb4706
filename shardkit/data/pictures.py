"""Pictures to train on: those that come with scikit-image, or the files of a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, DataError
from .sources import held_out

Pixels = npt.NDArray[np.uint8]
"""[height, width, 3], RGB."""

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}
SHIPPED = (
    "astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry", "retina", "camera",
    "coins", "moon", "brick", "grass", "gravel",
)  # fmt: skip
"""Photographs in scikit-image's wheel: nothing is downloaded."""


@dataclass(frozen=True)
class Picture:
    """A picture: `name` is its path below the directory, or which of scikit-image's it is; `label` its class."""

    name: str
    source: str
    label: int
    is_file: bool


def shipped_pictures() -> list[Picture]:
    """scikit-image's pictures, each a class of its own."""
    _need("skimage", "scikit-image")
    return [Picture(name, name, label, False) for label, name in enumerate(SHIPPED)]


def find_pictures(path: str) -> list[Picture]:
    """Every picture below a directory, sorted by path; label 0.

    Raises:
        DataError: the directory does not exist or holds no picture.
    """
    root = _directory(path)
    files = sorted(file for file in root.rglob("*") if _is_picture(file.relative_to(root)))
    if not files:
        raise DataError(f"data.path={path} holds no pictures", f"put {', '.join(sorted(SUFFIXES))} files there")
    return [Picture(file.relative_to(root).as_posix(), str(file), 0, True) for file in files]


def find_classes(path: str) -> tuple[list[Picture], list[str]]:
    """Pictures of a directory that holds one directory per class, and the classes' names, sorted.

    Raises:
        DataError: there are fewer than two classes, or one without pictures.
    """
    root = _directory(path)
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(names) < 2:
        raise DataError(
            f"data.path={path} has {len(names)} subdirectories, one per class is expected",
            "arrange the pictures as CLASS/NAME.png, two classes or more",
        )
    found: list[Picture] = []
    for label, name in enumerate(names):
        below = sorted(file for file in (root / name).rglob("*") if _is_picture(file.relative_to(root)))
        if not below:
            raise DataError(f"class {name} of data.path={path} has no pictures", "add some, or remove the directory")
        found += [Picture(file.relative_to(root).as_posix(), str(file), label, True) for file in below]
    return found, names


def split_pictures(pictures: list[Picture], val_fraction: float) -> tuple[list[Picture], list[Picture]]:
    """Training and validation pictures, by the hash of their names: a picture stays where it is when others come."""
    held = held_out([picture.name for picture in pictures], val_fraction)
    return [p for p in pictures if p.name not in held], [p for p in pictures if p.name in held]


def read(picture: Picture) -> Pixels:
    """Decode a picture to RGB.

    Raises:
        DataError: the file is not a picture, or damaged.
    """
    return _read_file(picture.source) if picture.is_file else _read_shipped(picture.source)


def _read_file(path: str) -> Pixels:
    image = _need("PIL.Image", "pillow")
    try:
        with image.open(path) as opened:
            return np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # PIL raises SyntaxError for a broken PNG
        raise DataError(f"{path} cannot be decoded: {error}", "replace it or move it away") from error


@lru_cache(maxsize=len(SHIPPED))
def _read_shipped(name: str) -> Pixels:
    load: Callable[[], Any] = getattr(_need("skimage.data", "scikit-image"), name)
    pixels = np.asarray(load(), dtype=np.uint8)
    return np.repeat(pixels[:, :, None], 3, axis=2) if pixels.ndim == 2 else pixels[:, :, :3]


def _need(module: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"pictures need {package}, which does not import: {error}", "pip install shardkit[vision]"
        ) from error


def _directory(path: str) -> Path:
    root = Path(os.path.expanduser(path))
    if not root.is_dir():
        raise DataError(
            f"data.path={path} is not a directory", "name a directory of pictures, or leave data.path unset"
        )
    return root


def _is_picture(relative: Path) -> bool:
    return relative.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in relative.parts)
