"""Run a job of `benchmarks.other_loops` as the tool's user writes it; each rank prints its peaks.

`… -m benchmarks.other_loops_run FOLDER` is a rank; the files of the job and `request.json` lie in the folder.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

STEPS = 3
MICRO = 2


def one_rank(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cpu = request["on"] == "cpu"
    tracker: Any = nullcontext()
    if cpu:
        import deepspeed.ops as ops

        from shardkit.memory.tracing.tracker import TensorTracker

        ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes minutes
        tracker = TensorTracker()
    run = {"trainer": trainer, "accelerate": accelerate, "deepspeed": deepspeed}[request["tool"]]
    run(folder, request, tracker)
    if cpu:
        peaks = {"allocated": tracker.peak("cpu")}
    else:
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print("\n" + json.dumps(peaks), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def network(folder: Path, request: dict[str, Any]) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.AutoModelForMaskedLM if request["masked"] else transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=config.dtype or torch.float32)
    if request["peft"]:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig.from_pretrained(str(folder)))
    return model


def samples(model: Any, request: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    tokens = [torch.randint(0, model.config.vocab_size, (request["seq_len"],)) for _ in range(64)]
    return [{"input_ids": row, "labels": row} for row in tokens]


def see(tracker: Any, model: Any) -> None:
    if hasattr(tracker, "see"):
        shards = [param.ds_tensor for param in model.parameters() if hasattr(param, "ds_tensor")]
        tracker.see([*model.parameters(), *model.buffers(), *shards])


def trainer(folder: Path, request: dict[str, Any], tracker: AbstractContextManager[Any]) -> None:
    import transformers

    arguments: dict[str, Any] = json.loads((folder / "args.json").read_text())
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    args = transformers.TrainingArguments(**arguments, **quiet, max_steps=STEPS)
    model = network(folder, request)
    job = transformers.Trainer(model=model, args=args, train_dataset=samples(model, request))
    with tracker:
        see(tracker, model)
        job.train()


def accelerate(folder: Path, request: dict[str, Any], tracker: AbstractContextManager[Any]) -> None:
    from accelerate import Accelerator

    config: dict[str, Any] = json.loads((folder / "accelerate.yaml").read_text())
    job = Accelerator(cpu=True, mixed_precision=config["mixed_precision"]) if request["on"] == "cpu" else Accelerator()
    model = network(folder, request)
    data = torch.utils.data.DataLoader(samples(model, request), batch_size=MICRO)
    with tracker:
        see(tracker, model)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, data = job.prepare(model, optimizer, data)
        for step, batch in enumerate(data):
            if step == STEPS:
                break
            loss = model(**batch).loss
            job.backward(loss)
            job.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def deepspeed(folder: Path, request: dict[str, Any], tracker: AbstractContextManager[Any]) -> None:
    import deepspeed as tool

    config: dict[str, Any] = json.loads((folder / "ds_config.json").read_text())
    if request["on"] != "cpu":  # it formats all weights for a line of its log, and these have no values
        torch.Tensor.__repr__ = lambda tensor, **_: f"tensor {tuple(tensor.shape)}"  # type: ignore[method-assign]
    tool.init_distributed()
    model = network(folder, request)
    data = torch.utils.data.DataLoader(samples(model, request), batch_size=MICRO)
    with tracker:
        see(tracker, model)
        engine, *_ = tool.initialize(model=model, model_parameters=model.parameters(), config=config)
        for step, batch in enumerate(data):
            if step == STEPS * config.get("gradient_accumulation_steps", 1):
                break
            loss = engine(**{key: tensor.to(engine.device) for key, tensor in batch.items()}).loss
            engine.backward(loss)
            engine.step()


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))
