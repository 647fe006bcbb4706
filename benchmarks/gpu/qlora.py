"""LoRA over a base in 4 bits: shardkit beside peft with bitsandbytes in a plain loop, the same weights and batches."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .. import common
from ..models import llama
from .cases import Case, Cases, Figures, Where
from .target import settings

ARMS = ("shardkit", "peft + bitsandbytes")
IN_TURNS, ALONE = "in turns", "shardkit alone"
START = {"cpu": "start on the CPU", "cuda": "start on the GPU"}
START_ARMS = ("shardkit", "read", "quantize_4bit")
TURNS, STEPS, WARMUP = 8, 3, 2
_STARTS, _BUFFER = 5, 2**25
R, ALPHA, LR, CHUNK = 16, 32, 1e-3, 512
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_UNTIED = {"positions": 2048, "tie_word_embeddings": False}
SIZES = llama(2048, 5632, depth=22, heads=32, kv_heads=4, vocab=32000, **_UNTIED)
DRY_SIZES = llama(128, 256, depth=2, heads=4, kv_heads=4, vocab=512, **_UNTIED)


def cases(dry: bool) -> Cases:
    """Both arms in turns; then shardkit once more: as far as its losses move, kernels add in another order; starts."""
    return {
        IN_TURNS: Case(partial(_measure, ARMS)), ALONE: Case(partial(_measure, ARMS[:1])),
        **{name: Case(partial(_time_starts, device)) for device, name in START.items()},
    }  # fmt: skip


def overrides(model: Path, tokens: str, run: Path, dry: bool) -> list[str]:
    seq, micro = (64, 2) if dry else (1024, 8)
    return [
        "task.name=hf_causal_lm", f"model.hf_config={model}", f"model.init_from={model}", "parallel.strategy=single",
        'model.quantize={"bits": 4, "double": true}', "adapter.type=lora", f"adapter.r={R}", f"adapter.alpha={ALPHA}",
        f"adapter.targets={json.dumps(TARGETS)}", "adapter.dropout=0", "precision.mode=bf16", f"data.path={tokens}",
        "data.shuffle=false", f"run.dir={run}", "train.eval_samples=0", f"train.max_steps={(TURNS + WARMUP) * STEPS}",
        "checkpoint.at_end=false", "memory.plan=false", f"train.seq_len={seq}", f"train.micro_batch_size={micro}",
        f"optim.lr={LR}", "optim.betas=[0.9, 0.999]", "optim.schedule=constant", "optim.weight_decay=0",
        "train.max_norm=1.0", f"model.loss_chunk_size={CHUNK}",
    ]  # fmt: skip


def _measure(arms: tuple[str, ...], where: Where) -> Figures:
    """Seconds a step of each arm, turn by turn, and the losses."""
    from shardkit.launch.ranks.gpus import grow_segments

    grow_segments(os.environ)  # as `shardkit.train` does, before torch is imported
    import torch

    from ..overhead import Ours, write_tokens
    from .mfu_arms import taken_of, timed

    device = torch.device("cpu" if where.on_cpu else "cuda")
    model, tokens = where.folder / "model", write_tokens(where.folder)
    write_model(model, DRY_SIZES if where.dry else SIZES, device)
    run_settings = settings(where, overrides(model, tokens, where.folder / "run", where.dry))
    gc.collect()
    steps: dict[str, Iterator[float]] = {}
    initial: dict[str, torch.Tensor] = {}
    ours = Ours(run_settings) if ARMS[0] in arms else None
    if ours is not None:
        ours.trainer.loop.first_update.is_checked = False  # it looks whether the weights move
        named = ours.trainer.job.model.named_parameters()
        initial = {name: param.detach().float().clone() for name, param in named if param.requires_grad}
        steps[ARMS[0]] = iter(ours.step, None)
    if ARMS[1] in arms:
        steps[ARMS[1]] = _peft_steps(run_settings, model, device, initial)
    times, losses = timed({arm: partial(taken_of, each, device) for arm, each in steps.items()}, TURNS, STEPS)
    if ours is not None:
        ours.close()
    different = [abs(a - b) for a, b in zip(*losses.values(), strict=True)] if len(arms) > 1 else []
    return {"outcome": "ok", "step_s": times, "losses": losses, "loss_differences": different}


def write_model(folder: Path, sizes: dict[str, Any], device: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def _peft_steps(run_settings: list[str], model: Path, device: Any, initial: dict[str, Any]) -> Iterator[float]:
    """The losses of a plain loop over the same samples, from the same adapter if there is one."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from shardkit.config.load import load_config
    from shardkit.models.cross_entropy import attach_loss
    from shardkit.tasks.load import load_task

    config = load_config(None, run_settings).config
    task: Any = load_task(config)
    samples, micro = task.dataset("train"), config.train.micro_batch_size
    packing = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=packing, dtype=torch.bfloat16, device_map={"": device}
    )
    lora = peft.LoraConfig(r=R, lora_alpha=ALPHA, target_modules=list(TARGETS))
    adapted = attach_loss(peft.inject_adapter_in_model(lora, base), CHUNK).train()
    trained = {name: param for name, param in adapted.named_parameters() if param.requires_grad}
    for name, param in trained.items():
        param.data = initial[name].to(device) if initial else param.data.float()
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.999), weight_decay=0, fused=True)
    for step in itertools.count():
        rows = [samples[step * micro + index] for index in range(micro)]
        batch = torch.utils.data.default_collate(rows)
        n_targets = task.n_targets(batch)
        batch = torch.utils._pytree.tree_map(lambda part: part.to(device, non_blocking=True), batch)
        with torch.autocast(device.type, torch.bfloat16):
            loss = task.loss(adapted, batch)
        (loss.float() / n_targets).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item() / n_targets


def _time_starts(device_type: str, where: Where) -> Figures:
    """Seconds of reading and packing a base; its files read alone, and `quantize_4bit` alone, take turns with it."""
    import torch

    from ..overhead import Ours, write_tokens

    device = torch.device("cpu" if where.on_cpu else device_type)
    model, tokens = where.folder / "model", write_tokens(where.folder)
    write_model(model, DRY_SIZES if where.dry else SIZES, device)
    run_settings = settings(where, overrides(model, tokens, where.folder / "run", where.dry))
    run_settings = settings(
        where, run_settings, [f"run.device={device.type}", "model.quantize={bits: 4}", "run.overwrite=true"]
    )

    def ours() -> float:
        with _timed_packing(device) as seconds:
            Ours(run_settings).close()
        return seconds[0]

    arms = dict(zip(START_ARMS, (ours, partial(_read, model), partial(_quantize, model, device)), strict=True))
    return {"outcome": "ok", "start_s": common.in_turns(arms, _STARTS)}


@contextmanager
def _timed_packing(device: Any) -> Iterator[list[float]]:
    import torch

    from shardkit.run import resume

    seconds: list[float] = []
    fill = resume.fill_quantized

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        sums = fill(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        return sums

    with patch.object(resume, "fill_quantized", timed):
        yield seconds


def _read(model: Path) -> float:
    """Seconds of reading the files into a buffer that is there already."""
    buffer = bytearray(b"x" * _BUFFER)
    began = time.perf_counter()
    for path in model.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def _quantize(model: Path, device: Any) -> float:
    """Seconds of `quantize_4bit` of the same layers' weights, those of a GPU copied to it first."""
    import torch
    from bitsandbytes.functional import quantize_4bit
    from safetensors.torch import load_file

    weights = [
        tensor.clone()
        for path in sorted(model.glob("*.safetensors"))
        for fqn, tensor in load_file(path).items()
        if tensor.dim() == 2 and ".layers." in fqn
    ]
    began = time.perf_counter()
    for weight in weights:
        quantize_4bit(weight.to(device), blocksize=64, quant_type="nf4")
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
