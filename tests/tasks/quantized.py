"""Runs that train LoRA over a base in 4 bits, and the same by peft and bitsandbytes in a plain loop."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit.checkpoint.frozen_base import WordSums, as_checksum
from shardkit.errors import ShardkitError
from shardkit.models.quantized import QuantizedLinear
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.strategies.cases import PARTITION_ALL, count_storages
from tests.tasks.adapters import plain_loop
from tests.texts import write_words

STEPS, BATCH, LENGTH = 3, 8, 16
MODEL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip
PACKED = 2 * [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
PARTITIONED: dict[str, Any] = {"parallel.ds_config": PARTITION_ALL}
"""Small parameters are partitioned too, and freed after each module, as those of a large model are."""
N_PACKED = sum(rows * columns for rows, columns in PACKED)
N_UNPACKED = 2 * 256 * 64 + 5 * 64 + 2 * (64 + 32 + 32 + 64)


def write_model(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODEL)).save_pretrained(folder / "model")
    write_words(folder)


def settings(root: str, strategy: str = "single", world: int = 1, **extra: Any) -> dict[str, Any]:
    out = {
        "task.name": "hf_causal_lm", "model.hf_config": f"{root}/model", "model.init_from": f"{root}/model",
        "model.quantize": {"bits": 4}, "adapter.type": "lora", "adapter.r": 4, "adapter.alpha": 12,
        "adapter.targets": ["q_proj", "v_proj", "down_proj"], "run.device": "cpu",
        "run.dir": f"{root}/{strategy}-{world}", "run.overwrite": True, "parallel.strategy": strategy,
        "train.max_steps": STEPS, "train.micro_batch_size": BATCH // world, "train.seq_len": LENGTH,
        "data.path": f"{root}/text.txt", "data.cache_dir": f"{root}/cache", "data.shuffle": False,
        "train.eval_samples": 0, "optim.lr": 2e-2, "optim.schedule": "constant", "logging.tensorboard": False,
        "model.loss_chunk_size": 50, "checkpoint.at_end": False,
    }  # fmt: skip
    return out | {key.replace("__", "."): setting for key, setting in extra.items()}


def trained(root: str, strategy: str, **extra: Any) -> dict[str, Any]:
    """Losses and norms of a run, its digests before and after, the bytes that layers compute with, and its state."""
    with start(None, settings(root, strategy, dist.get_world_size(), **extra)) as job:
        trainer = Trainer(job)
        base: Any = trainer.start.base
        digests = [dict(base.about["base"])]
        seen = {}

        def note(module: Any, *_: object) -> None:
            for name in ("packed", "absmax", "nested") if module.doubled else ("packed", "absmax"):
                param = getattr(module, name).detach()
                whole = param.full_tensor() if isinstance(param, DTensor) else param
                seen[name] = as_checksum(WordSums()(whole.reshape(-1), 0))

        layer: Any = next(m for m in job.model.modules() if isinstance(m, QuantizedLinear))
        layer.register_forward_pre_hook(note)
        curve = [(record["loss"], record["grad_norm"]) for record in trainer.recorded_steps()]
        base.identify(job.strategy, trainer.checkpoints.group)
        digests.append(digests[0] | {"packed": base.about["base"]["packed"]})
        state = count_storages(job.strategy.state_tensors())
    gc.collect()
    return {"curve": curve, "digests": digests, "seen": seen, "state": state}


def under(root: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`trained` by the name of each case."""
    return {name: trained(root, name.partition(" ")[0], **extra) for name, extra in cases.items()}


def bnb_alone(root: str, kind: str = "nf4", double: bool = False) -> list[tuple[float, float]]:
    """The same training by peft and bitsandbytes alone, without `prepare_model_for_kbit_training`."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from shardkit.config.load import load_config
    from shardkit.models.cross_entropy import attach_loss
    from shardkit.parallel.weights import Weights
    from shardkit.tasks.load import load_task

    task: Any = load_task(load_config(None, settings(root)).config)
    weights, samples = Weights(0, task.init_parameter), task.dataset("train")
    packing = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=double,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(
        f"{root}/model", quantization_config=packing, dtype=torch.float32, device_map={"": "cpu"}
    )
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = attach_loss(peft.inject_adapter_in_model(config, base), 50).train()
    trained = {name: param for name, param in adapted.named_parameters() if param.requires_grad}
    assert all(".lora_" in name for name in trained)
    for name, param in trained.items():
        weights.fill(name, param.shape, param.data.view(-1))
    return plain_loop(trained.values(), samples, lambda batch: task.loss(adapted, batch), STEPS, BATCH)


def stopped(root: str, strategy: str) -> list[float]:
    """A run of 3 steps that saves each."""
    extra = {"run.dir": f"{root}/stopped", "checkpoint.every_steps": 1, "checkpoint.keep_last": None}
    with start(None, settings(root, strategy, dist.get_world_size(), **extra)) as job:
        return [record["loss"] for record in Trainer(job).recorded_steps()]


def resumed(root: str, source: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The losses after a checkpoint in each case, or cause and fix of a refusal."""
    out: dict[str, Any] = {}
    for name, extra in cases.items():
        keys = {"run.resume": source, "run.dir": f"{root}/resumed-{name.replace(' ', '-')}", **extra}
        try:
            with start(None, settings(root, name.partition(" ")[0], dist.get_world_size(), **keys)) as job:
                out[name] = [record["loss"] for record in Trainer(job).recorded_steps()]
        except ShardkitError as error:
            out[name] = error.cause, error.fix
        gc.collect()
    return out


def logits(root: str, run: str, tokens: Any, **extra: Any) -> torch.Tensor:
    """The logits of the trained model."""
    with start(None, settings(root, **{"run.dir": run, "checkpoint.at_end": True, **extra})) as job:
        trainer = Trainer(job)
        for _ in trainer.recorded_steps():
            pass
        task: Any = trainer.task
        with torch.no_grad():
            positions = torch.arange(tokens.numel())
            out: torch.Tensor = task.next_logits(job.model, tokens, positions)
    return out


def packing_error(weight: torch.Tensor) -> torch.Tensor:
    """The weight that bitsandbytes packs and unpacks, less the weight."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    return functional.dequantize_4bit(packed, state) - weight
