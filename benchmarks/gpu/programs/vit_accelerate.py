"""timm's ViT-B/16 under Accelerate in bf16, with a DataLoader and an EMA of the weights."""

import timm
import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16")
images = TensorDataset(torch.randn(192, 3, 224, 224), torch.randint(1000, (192,)))
model = timm.create_model("vit_base_patch16_224", num_classes=1000, drop_path_rate=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(images, batch_size=64))
ema = ModelEmaV3(model, decay=0.999)
for pixels, labels in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.cross_entropy(model(pixels), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ema.update(model)
    print(f"loss {loss.item():.4f}")
