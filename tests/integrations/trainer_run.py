"""Train with transformers' Trainer under shardkit's callback; for `test_transformers`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.zero_ops import leave_out_shm


def main(settings: str) -> None:
    """Args: JSON of `args` (the Trainer's), `model` (keys of a Llama config), `watch` (the callback's), `lora`."""
    import transformers

    from shardkit.integrations.transformers import watch

    given: dict[str, Any] = json.loads(Path(settings).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    if "deepspeed" in given["args"]:
        leave_out_shm()
    args = transformers.TrainingArguments(**{**quiet, **given["args"]})
    network: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given["model"]))
    if given.get("lora"):
        import peft

        network = peft.get_peft_model(network, peft.LoraConfig(**given["lora"]))
    tokens = [torch.randint(0, given["model"]["vocab_size"], (given["seq_len"],)) for _ in range(64)]
    data = [{"input_ids": one, "labels": one} for one in tokens]
    trainer = transformers.Trainer(model=network, args=args, train_dataset=data)
    with watch(trainer, **given["watch"]):
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
