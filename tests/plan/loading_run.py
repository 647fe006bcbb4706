"""Load a model, train one step with transformers' Trainer and save it, on each rank; for `test_loading`.

Every rank prints the peaks of tensors until the first step, and while the model is saved beside what training holds.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.zero_ops import leave_out_shm


def main(folder: str, order: str) -> None:
    """Args: a folder with a model and the Trainer's `args.json`; whether the arguments come `first` or `after`."""
    import transformers

    from shardkit.memory.tracing.tracker import TensorTracker

    leave_out_shm()
    torch.set_num_threads(1)
    given: dict[str, Any] = json.loads((Path(folder) / "args.json").read_text())
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "max_steps": 1}
    tracker = TensorTracker()

    class Begun(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            tracker.mark("step")

    with tracker:
        tracker.mark("loading")
        args = transformers.TrainingArguments(**given, **quiet) if order == "first" else None
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        tracker.see([*model.parameters(), *model.buffers()])
        args = args or transformers.TrainingArguments(**given, **quiet)
        tokens = [torch.randint(0, 100, (16,)) for _ in range(8)]
        data = [{"input_ids": one, "labels": one} for one in tokens]
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[Begun()])
        del model
        trainer.train()
        gc.collect()
        held = {device: tracker.current(device) for device in ("cpu", "cuda")}
        tracker.mark("saving")
        trainer.save_model(given["output_dir"])
        found = {phase: {device: tracker.peak(device, phase) for device in held} for phase in ("loading", "saving")}
    print(json.dumps({"rank": int(os.environ.get("RANK", "0")), "held": held, **found}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
