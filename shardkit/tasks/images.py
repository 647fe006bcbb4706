"""Tasks on pictures: image classification with ViT, super-resolution with Swin2SR, or other models of transformers."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..config.schema import RunConfig
from ..data import pictures
from ..data.pictures import LabelledCrops, Picture, ScaledCrops
from ..errors import ConfigError, DataError
from ..models.hf import HFModel

TRAIN_ROWS = 0.75
"""Share of each scikit-image picture, from the top, whose crops train; crops of the rest validate."""
SHIPPED_CROPS = 64
CROPS = 64
VAL_CROPS = 8


class OfPictures:
    """The part that tasks on pictures share: a model of transformers, and a loss that is one of their metrics."""

    hf: HFModel

    def build_model(self) -> nn.Module:
        return self.hf.build()

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        self.hf.init_parameter(fqn, full, generator)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.measure(model, batch)["loss"]

    def measure(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class ImageClassification(OfPictures):
    """The built-in task `image_classification`: cross-entropy of a picture's class; a target is a picture.

    Data: a directory with one directory per class, or the pictures that come with scikit-image, where each picture
    is a class. The number of classes comes from the data.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._train, self._val, self.classes = _pictures(config)
        self.hf = HFModel(config.model, "image_classification", num_labels=len(self.classes))
        self.block_classes = self.hf.block_classes

    def dataset(self, split: Literal["train", "val"]) -> LabelledCrops | None:
        data, shipped = self.config.data, self.config.data.path is None
        size, seed = self.hf.config.image_size, self.config.train.seed
        if split == "train":
            rows = (0.0, TRAIN_ROWS) if shipped else (0.0, 1.0)
            crops = data.crops_per_image or (SHIPPED_CROPS if shipped else 1)
            return LabelledCrops(self._train, size, crops, seed, split, data.augment, rows)
        if not self._val:
            return None
        # Crops of a shipped picture's lower part are random too: middle crops alone would give 14 samples.
        rows = (TRAIN_ROWS, 1.0) if shipped else (0.0, 1.0)
        return LabelledCrops(self._val, size, 8 if shipped else 1, seed, split, shipped, rows)

    def n_targets(self, batch: dict[str, torch.Tensor]) -> int:
        return len(batch["label"])

    def measure(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits = model(batch["pixels"]).logits.float()
        right = (logits.argmax(-1) == batch["label"]).sum()
        return {"loss": F.cross_entropy(logits, batch["label"], reduction="sum"), "accuracy": right}

    def describe(self) -> dict[str, float]:
        """The accuracy of guessing."""
        return {"accuracy_by_chance": 1 / len(self.classes)}


def _pictures(config: RunConfig) -> tuple[list[Picture], list[Picture], list[str]]:
    """Training and validation pictures, and the classes' names."""
    data = config.data
    if data.path is None:
        shipped = pictures.shipped_pictures()
        return shipped, shipped, [picture.source for picture in shipped]
    labelled, names = pictures.find_classes(data.path)
    if data.val_path is None:
        return *pictures.split_pictures(labelled, data.val_fraction), names
    val, val_names = pictures.find_classes(data.val_path)
    if val_names != names:
        odd = sorted(set(names) ^ set(val_names))
        raise DataError(
            f"data.path={data.path} and data.val_path={data.val_path} differ in their classes: {', '.join(odd[:5])}",
            "give both the same directories of classes",
        )
    return labelled, val, names


class SuperResolution(OfPictures):
    """The built-in task `super_resolution`: restore crops of pictures from their bicubic reduction; a target is a crop.

    The loss is the mean absolute error of a crop's RGB values in [0, 1] (Liang et al. 2021, section 3.2).
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.hf = HFModel(config.model, "super_resolution")
        self.scale = int(getattr(self.hf.config, "upscale", 1))
        self.block_classes = self.hf.block_classes
        data = config.data
        if data.crop_size % self.scale:
            raise ConfigError(
                f"data.crop_size={data.crop_size} is not a multiple of model.hf.upscale={self.scale}",
                f"set data.crop_size={data.crop_size // self.scale * self.scale or self.scale}",
            )
        of_path = pictures.shipped_pictures() if data.path is None else pictures.find_pictures(data.path)
        if data.val_path is None:
            self._train, self._val = pictures.split_pictures(of_path, data.val_fraction)
        else:
            self._train, self._val = of_path, pictures.find_pictures(data.val_path)

    def dataset(self, split: Literal["train", "val"]) -> ScaledCrops | None:
        data, seed = self.config.data, self.config.train.seed
        if split == "train":
            crops = data.crops_per_image or CROPS
            return ScaledCrops(self._train, data.crop_size, self.scale, crops, seed, split, data.augment)
        if not self._val:
            return None
        return ScaledCrops(self._val, data.crop_size, self.scale, VAL_CROPS, seed, split, augment=False)

    def n_targets(self, batch: dict[str, torch.Tensor]) -> int:
        return len(batch["high"])

    def measure(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made, high = model(batch["low"]).reconstruction.float(), batch["high"]
        error = F.l1_loss(made, high, reduction="none").flatten(1).mean(1).sum()
        return {"loss": error, "psnr": psnr(made.detach(), high).sum()}

    def describe(self) -> dict[str, float]:
        """The baseline a model must beat: mean PSNR of bicubic enlargement, in dB, over the validation crops."""
        val = self.dataset("val")
        if val is None:
            return {}
        total = 0.0
        for index in range(len(val)):
            sample = val[index]
            large = F.interpolate(sample["low"][None], scale_factor=self.scale, mode="bicubic", align_corners=False)
            total += psnr(large, sample["high"][None]).item()
        return {"psnr_of_bicubic": total / len(val)}


def psnr(made: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio over RGB of pictures [n, 3, height, width] in [0, 1]; returns dB, [n]."""
    error = (made.clamp(0, 1) - real).square().flatten(1).mean(1)
    return -10 * error.clamp_min(1e-10).log10()
