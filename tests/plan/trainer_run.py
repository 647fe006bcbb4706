"""Train with transformers' Trainer for three steps and print the peak of tensors on rank 0; for `test_other_loops`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.zero_ops import leave_out_shm


def main(arguments: str, model: str, seq_len: int) -> None:
    """Args: the Trainer's arguments as a JSON file, the model's folder, tokens of a sample."""
    import transformers

    from shardkit.memory.tracing.tracker import TensorTracker

    torch.set_num_threads(1)
    torch.manual_seed(0)
    given: dict[str, Any] = json.loads(Path(arguments).read_text())
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "max_steps": 3}
    if "deepspeed" in given:
        leave_out_shm()
    args = transformers.TrainingArguments(**given, **quiet)
    config = transformers.AutoConfig.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    tokens = [torch.randint(0, config.vocab_size, (seq_len,)) for _ in range(64)]
    data = [{"input_ids": one, "labels": one} for one in tokens]
    trainer = transformers.Trainer(model=network, args=args, train_dataset=data)
    tracker = TensorTracker()
    with tracker:
        tracker.see([*network.parameters(), *network.buffers()])
        trainer.train()
    if os.environ.get("RANK", "0") == "0":
        print(f"peak {tracker.peak('cpu')}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
