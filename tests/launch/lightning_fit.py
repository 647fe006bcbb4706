"""Lightning's Trainer on Slurm, as its user writes it: lightning_fit.py FOLDER STEPS WAIT NODES.

The samples depend on the step alone: Lightning begins an epoch's data again when it resumes in the middle of it, unless
the data loader has a state_dict.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn


class Model(lightning.LightningModule):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.seconds = seconds
        self.losses: dict[int, float] = {}

    def training_step(self, _: torch.Tensor, __: int) -> torch.Tensor:
        time.sleep(self.seconds)
        seed = 2 * self.global_step + self.global_rank
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        loss = (self.linear(x).squeeze(-1) - x.sum(1)).square().mean()
        self.losses[self.global_step] = loss.item()
        print(f"step {self.global_step}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses = checkpoint["losses"]
        print(f"continues with {len(self.losses)} losses", flush=True)


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    steps, seconds, nodes = int(words[0]), float(words[1]), int(words[2])
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, num_nodes=nodes, strategy="ddp", max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=str(folder),
    )  # fmt: skip
    model = Model(seconds)
    trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(4096, 1)))
    if trainer.is_global_zero:
        (folder / "losses.json").write_text(json.dumps(model.losses))


if __name__ == "__main__":
    main()
