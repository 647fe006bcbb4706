"""transformers' Trainer with its just-in-time checkpoints, as users write it: FOLDER STEPS WAIT [ZERO_STAGE]."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from tests.zero_ops import leave_out_shm

AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}


class Paced(TrainerCallback):
    """Steps so long that no rank is a step behind when the other one takes its signal."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        time.sleep(self.seconds)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        time.sleep(self.seconds)


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    steps, seconds = int(words[0]), float(words[1])
    engine: dict[str, Any] = {}
    if len(words) > 2:
        leave_out_shm()
        zero = {"stage": int(words[2]), "stage3_gather_16bit_weights_on_model_save": True}
        engine = {"deepspeed": {**AUTO, "zero_optimization": zero}}
        # DeepSpeed's update is part of backward: a checkpoint after it would hold one update more than its number.
        JITCheckpointCallback.on_pre_optimizer_step = lambda *_, **__: None
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder / "checkpoints"), max_steps=steps, per_device_train_batch_size=4, learning_rate=0.05,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, enable_jit_checkpoint=True, disable_tqdm=True,
        **engine,
    )  # fmt: skip
    trainer = Trainer(model=Model(), args=args, train_dataset=Data(), callbacks=[Paced(seconds)])
    whole = [path for path in (folder / "checkpoints").glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    saved = [path for path in whole if not (path / "checkpoint-is-incomplete.txt").exists()]
    newest = max(saved, key=lambda path: int(path.name.partition("-")[2]), default=None)
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    if trainer.is_world_process_zero():
        found = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
        (folder / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
