"""A U-Net for 256 x 256 pictures as a LightningModule, 16-bit mixed."""

from itertools import pairwise

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def double(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(8, n_out), nn.SiLU(),
        nn.Conv2d(n_out, n_out, 3, padding=1), nn.GroupNorm(8, n_out), nn.SiLU(),
    )  # fmt: skip


class UNet(lightning.LightningModule):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.down = nn.ModuleList(double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.join = nn.ModuleList(double(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = []
        for index, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if index else x)
            levels.append(x)
        for up, join, level in reversed(list(zip(self.up, self.join, levels, strict=False))):
            x = join(torch.cat([up(x), level], 1))
        return self.head(x)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


pictures = TensorDataset(torch.randn(48, 3, 256, 256))
trainer = lightning.Trainer(
    max_steps=3, precision="16-mixed", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(UNet(), DataLoader(pictures, batch_size=16))
