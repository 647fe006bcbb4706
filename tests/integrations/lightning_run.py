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

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).pow(2).mean()
            losses.append(float(loss))
            return loss

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            steps.append(losses[:])
            losses.clear()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    given: dict[str, Any] = json.loads(words)
    losses: list[float] = []
    steps: list[list[float]] = []  # the losses of each step's micro-batches
    samples = given.pop("samples", 64)
    callback = ShardkitCallback(run_dir, every=2, tensorboard=False, cap=given.pop("cap", None))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings = {"accelerator": "cpu", "accumulate_grad_batches": 2, "max_steps": 3, **quiet, **given}
    trainer = Trainer(callbacks=[callback], **settings)
    growing = torch.linspace(0.5, 2, samples)[:, None]  # micro-batches have losses of their own
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(samples, SIZE) * growing), batch_size=4))
    print(f"losses {json.dumps(steps)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
