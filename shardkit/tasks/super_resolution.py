"""Super-resolution with Swin2SR, or another image-to-image model of transformers."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..config.schema import RunConfig
from ..data.pictures import ScaledCrops, find_pictures, shipped_pictures, split_pictures
from ..errors import ConfigError
from ..models.hf import HFModel

CROPS = 64
VAL_CROPS = 8


class SuperResolution:
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
        pictures = shipped_pictures() if data.path is None else find_pictures(data.path)
        if data.val_path is None:
            self._train, self._val = split_pictures(pictures, data.val_fraction)
        else:
            self._train, self._val = pictures, find_pictures(data.val_path)

    def build_model(self) -> nn.Module:
        return self.hf.build()

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        self.hf.init_parameter(fqn, full, generator)

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

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.measure(model, batch)["loss"]

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
