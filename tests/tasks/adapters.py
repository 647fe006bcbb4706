"""Runs that train LoRA on small transformers models, and the same by peft in a plain loop."""

from __future__ import annotations

import gc
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardkit.checkpoint import frozen_base
from shardkit.errors import ShardkitError
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.strategies.cases import count_before_update, on_cpus
from tests.texts import write_words

STEPS, GLOBAL_BATCH, LENGTH, RANK, ALPHA = 4, 8, 24, 4, 12
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH,
             "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "phi3": {
        "model_type": "phi3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0,
    },
}  # fmt: skip
TARGETS: dict[str, Any] = {
    "llama": ["q_proj", "v_proj", "mlp.down_proj"],
    "gpt2": "all-linear",
    "phi3": ["qkv_proj", "gate_up_proj"],
}


def write_models(folder: Path) -> None:
    """A folder of weights for each model, as transformers saves it, and a text."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, keys in MODELS.items():
        torch.manual_seed(7)
        config = AutoConfig.for_model(**{**keys, "vocab_size": 256, "tie_word_embeddings": name != "phi3"})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    write_words(folder)


def settings(model: str, root: str, strategy: str = "single", world: int = 1, **extra: Any) -> dict[str, Any]:
    return {
        "task.name": "hf_causal_lm", "model.hf_config": f"{root}/{model}", "model.init_from": f"{root}/{model}",
        "adapter.type": "lora", "adapter.r": RANK, "adapter.alpha": ALPHA, "adapter.targets": TARGETS[model],
        **on_cpus(strategy), "run.dir": f"{root}/{model}-{strategy}-{world}", "run.overwrite": True,
        "train.max_steps": STEPS, "train.micro_batch_size": GLOBAL_BATCH // 2 // world, "train.grad_accum_steps": 2,
        "train.seq_len": LENGTH, "data.path": f"{root}/text.txt", "data.cache_dir": f"{root}/cache",
        "data.shuffle": False, "train.eval_samples": 0, "optim.lr": 2e-2, "optim.schedule": "constant",
        "logging.tensorboard": False, "model.loss_chunk_size": 50, "checkpoint.at_end": False, **extra,
    }  # fmt: skip


Curve = list[tuple[float, float]]


def curves(cases: list[tuple[str, str]], root: str, **extra: Any) -> dict[tuple[str, str], Curve]:
    """(model, strategy) → (loss, gradient norm) of each step."""
    out = {}
    for model, strategy in cases:
        with start(None, settings(model, root, strategy, dist.get_world_size(), **extra)) as job:
            out[model, strategy] = [(r["loss"], r["grad_norm"]) for r in Trainer(job).recorded_steps()]
        gc.collect()
    return out


def peft_alone(model: str, root: str, **more: Any) -> Curve:
    """The same training by peft and torch alone: the run's samples, and its initial values of the adapter.

    Args:
        more: of `peft.LoraConfig`.
    """
    import peft
    from transformers import AutoModelForCausalLM

    from shardkit.config.load import load_config
    from shardkit.parallel.weights import Weights
    from shardkit.tasks.load import load_task

    task: Any = load_task(load_config(None, settings(model, root)).config)
    weights, samples = Weights(0, task.init_parameter), task.dataset("train")
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=TARGETS[model], task_type="CAUSAL_LM", fan_in_fan_out=model == "gpt2",
        **more,
    )  # fmt: skip
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(f"{root}/{model}"), config).train()
    trained = {name.removeprefix("base_model.model."): p for name, p in adapted.named_parameters() if p.requires_grad}
    for name, param in trained.items():
        weights.fill(name, param.shape, param.data.view(-1))

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = adapted(input_ids=batch["tokens"], use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
        return losses.double().sum()  # the sum of 192 losses in fp32 alone would be off by 1e-6

    return plain_loop(trained.values(), samples, loss, STEPS, GLOBAL_BATCH)


def plain_loop(trained: Collection[torch.nn.Parameter], samples: Any, loss: Any, steps: int, size: int) -> Curve:
    """Losses per target and norms of a loop in torch alone, over `size` samples a step."""
    optimizer = torch.optim.AdamW(trained, lr=2e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    curve = []
    for step in range(steps):
        batch = torch.utils.data.default_collate([samples[step * size + i] for i in range(size)])
        total, n_targets = loss(batch), int((batch["targets"] != -100).sum())
        (total * (1 / n_targets)).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        curve.append((total.item() / n_targets, norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return curve


def stopped(root: str, strategy: str, **more: Any) -> list[tuple[int, float]]:
    """A whole run of 4 steps that saves each."""
    extra = {"run.dir": f"{root}/stopped", "checkpoint.every_steps": 1, "checkpoint.keep_last": None, **more}
    return _losses(settings("llama", root, strategy, dist.get_world_size(), **extra))


def stopped_by_version_02(root: str, strategy: str) -> list[tuple[int, float]]:
    """As `stopped`, with the checksums of checkpoints before 0.3."""
    taken_as_then = patch.multiple(frozen_base, CHECKSUM=1, WordSums=lambda: frozen_base.element_sum)
    with taken_as_then:
        return stopped(root, strategy)


def resumed(root: str, strategies: list[str], source: str, others: bool = False, **more: Any) -> dict[str, Any]:
    """The steps after a checkpoint under each engine, and with `others` the settings that do not suit it."""
    out: dict[str, Any] = {}
    for strategy in strategies:
        extra = {"run.resume": source, "run.dir": f"{root}/resumed-{strategy}", **more}
        out[strategy] = _losses(settings("llama", root, strategy, dist.get_world_size(), **extra))
        gc.collect()
    return {**out, **(_refused(root, source) if others else {})}


def _losses(keys: dict[str, Any]) -> list[tuple[int, float]]:
    with start(None, keys) as job:
        return [(int(record["step"]), record["loss"]) for record in Trainer(job).recorded_steps()]


def _refused(root: str, source: str) -> dict[str, tuple[str, str]]:
    """Cause and fix of each resume that does not suit the checkpoint."""
    from safetensors.torch import load_file, save_file

    other = Path(root) / "other"
    other.mkdir(exist_ok=True)
    weights = load_file(f"{root}/llama/model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    found = {}
    own = {"adapter.type": "none", "adapter.r": 8, "adapter.alpha": 8, "adapter.targets": "all-linear"}
    cases: dict[str, dict[str, Any]] = {
        "base": {"model.init_from": str(other)}, "alpha": {"adapter.alpha": 5},
        "targets": {"adapter.targets": ["q_proj"]}, "none": {**own, "model.init_from": None},
        "bf16": {"precision.mode": "bf16"},
    }  # fmt: skip
    for name, keys in cases.items():
        try:
            _losses(settings("llama", root, **{"run.resume": source, "run.dir": f"{root}/refused", **keys}))
        except ShardkitError as error:
            found[name] = error.cause, error.fix or ""
        gc.collect()
    return found


def some_tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))


def trained_logits(root: str, model: str, run: str) -> torch.Tensor:
    """Logits of a model whose adapter was trained for 4 steps and saved."""
    with start(None, settings(model, root, **{"run.dir": run, "checkpoint.at_end": True})) as job:
        Trainer(job).fit()
        with torch.no_grad():
            logits: torch.Tensor = job.model.eval()(some_tokens())
            return logits.clone()


def in_bf16(strategies: list[str], root: str) -> dict[str, tuple[Curve, dict[str, int]]]:
    """Strategy → (curve, bytes of each kind of state after a step's last backward) of the Llama under bf16."""
    out = {}
    for strategy in strategies:
        out[strategy] = _measured(
            settings("llama", root, strategy, dist.get_world_size(), **{"precision.mode": "bf16"})
        )
        gc.collect()
    return out


def offloaded(root: str) -> tuple[Curve, dict[str, int]]:
    """Curve and bytes of state of the Llama under ZeRO-3 in fp32, with all state on the host."""
    return _measured(settings("llama", root, "zero3+param+optimizer", dist.get_world_size()))


def _measured(keys: dict[str, Any]) -> tuple[Curve, dict[str, int]]:
    with start(None, keys) as job:
        trainer, counted = Trainer(job), count_before_update(job)
        return [(r["loss"], r["grad_norm"]) for r in trainer.recorded_steps()], counted


POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"activation.policy": name} for name in ("full", "every_k", "selective", "selective_op")},
    "offload": {"activation.policy": "full", "activation.offload": "cpu", "activation.offload_min_bytes": 0},
}


def under_policies(strategies: list[str], root: str) -> dict[tuple[str, str], Curve]:
    """(strategy, policy) → curve of the Llama, whose blocks' first input needs no gradient."""
    found = {}
    for policy, keys in POLICIES.items():
        for (_, strategy), curve in curves([("llama", name) for name in strategies], root, **keys).items():
            found[strategy, policy] = curve
    return found


def write_chat(folder: Path, sizes: dict[str, Any] = MODELS["llama"]) -> None:
    """A model folder with a tokenizer and a chat template, and conversations."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.data import chats

    torch.manual_seed(7)
    words = {"vocab_size": 512, "tie_word_embeddings": False, "eos_token_id": [0, 2]}
    config = AutoConfig.for_model(**{**sizes, **words})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "chat")
    chats.write_tokenizer(folder / "chat")
    rows = ({"messages": chats.conversation(number)} for number in range(200))
    chats.write_lines(folder / "talks.jsonl", rows)


def chatting(strategies: list[str], root: str) -> dict[str, list[float]]:
    """Losses of each engine on packed conversations, with texts written at the end."""
    out = {}
    for strategy in strategies:
        keys = settings("llama", root, strategy, dist.get_world_size())
        keys |= {
            "model.hf_config": None, "model.init_from": f"{root}/chat", "data.path": f"{root}/talks.jsonl",
            "data.packing": "packed", "train.seq_len": 128, "train.eval_samples": 8, "checkpoint.at_end": True,
            "train.sample_prompts": ["ask 3"], "train.sample_tokens": 4, "run.dir": f"{root}/chat-{strategy}",
            "data.tokenize_workers": 1,
        }  # fmt: skip
        with start(None, keys) as job:
            out[strategy] = [record["loss"] for record in Trainer(job).recorded_steps()]
        gc.collect()
    return out
