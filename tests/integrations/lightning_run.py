"""A loop of Lightning as its user writes it; for `test_lightning`."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

SIZE = 64
NUMEL = 2 * (SIZE * SIZE + SIZE)


def main(run_dir: str, words: str) -> None:
    """Args: the run directory; JSON of the Trainer's settings, and `cap`."""
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from shardkit.integrations.lightning import ShardkitCallback

    class Net(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    given: dict[str, Any] = json.loads(words)
    callback = ShardkitCallback(run_dir, every=2, tensorboard=False, cap=given.pop("cap", None))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings = {"accelerator": "cpu", "accumulate_grad_batches": 2, "max_steps": 3, **quiet, **given}
    trainer = Trainer(callbacks=[callback], **settings)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(64, SIZE)), batch_size=4))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
