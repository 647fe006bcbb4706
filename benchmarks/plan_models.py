"""Models as user tasks: a plain MLP and a small convolutional network."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.config.schema import RunConfig


class _Classes:
    """Random inputs, ten classes."""

    shape: tuple[int, ...] = ()

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def dataset(self, split: Literal["train", "val"]) -> None:
        return None

    def plan_batch(self, n: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(n, *self.shape), "y": torch.zeros(n, dtype=torch.int64)}

    def n_targets(self, batch: dict[str, torch.Tensor]) -> int:
        return len(batch["y"])

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="sum")


class MLP(_Classes):
    shape = (512,)

    def build_model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)]
        return nn.Sequential(nn.Sequential(*layers), nn.Linear(512, 10))


class CNN(_Classes):
    shape = (3, 64, 64)

    def build_model(self) -> nn.Module:
        def block(inputs: int, outputs: int, stride: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
            )

        body = [block(32, 32, 1) for _ in range(12)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
        return nn.Sequential(block(3, 32, 2), nn.Sequential(*body), block(32, 64, 2), *head)
