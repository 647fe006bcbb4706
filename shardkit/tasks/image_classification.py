"""Image classification with ViT or another classifier of transformers."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..config.schema import RunConfig
from ..data.pictures import LabelledCrops, Picture, find_classes, shipped_pictures, split_pictures
from ..errors import DataError
from ..models.hf import HFModel

TRAIN_ROWS = 0.75
"""Share of each scikit-image picture, from the top, whose crops train; crops of the rest validate."""
SHIPPED_CROPS = 64


class ImageClassification:
    """The built-in task `image_classification`: cross-entropy of a picture's class; a target is a picture.

    Data: a directory with one directory per class, or the pictures that come with scikit-image, where each picture
    is a class. The number of classes comes from the data.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._train, self._val, self.classes = _pictures(config)
        self.hf = HFModel(config.model, "image_classification", num_labels=len(self.classes))
        self.block_classes = self.hf.block_classes

    def build_model(self) -> nn.Module:
        return self.hf.build()

    def init_parameter(self, fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        self.hf.init_parameter(fqn, full, generator)

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

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.measure(model, batch)["loss"]

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
        shipped = shipped_pictures()
        return shipped, shipped, [picture.source for picture in shipped]
    pictures, names = find_classes(data.path)
    if data.val_path is None:
        return *split_pictures(pictures, data.val_fraction), names
    val, val_names = find_classes(data.val_path)
    if val_names != names:
        odd = sorted(set(names) ^ set(val_names))
        raise DataError(
            f"data.path={data.path} and data.val_path={data.val_path} differ in their classes: {', '.join(odd[:5])}",
            "give both the same directories of classes",
        )
    return pictures, val, names
