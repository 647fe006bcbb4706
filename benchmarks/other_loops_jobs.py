"""The jobs of `benchmarks.other_loops`: other_loops.txt names them, and the words of a name are its settings.

That list stood there before anything was measured, and every case stays in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .models import llama

Settings = dict[str, Any]
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
SIZES: dict[str, Settings] = {
    "llama": {**llama(256, 512, depth=4, heads=4, kv_heads=4, vocab=1024, positions=512), **_LLAMA},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4,
        "vocab_size": 2048, "n_positions": 512,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"], "model_type": "bert",
        **llama(256, 1024, depth=4, heads=4, vocab=2048, positions=512),
    },
    "llama-110m": {**llama(768, 2048, depth=8, heads=12, kv_heads=4, vocab=32000, positions=2048), **_LLAMA},
    "gpt2-124m": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
        "vocab_size": 50257, "n_positions": 1024,
    },
}  # fmt: skip
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["q_proj", "v_proj"]}  # fmt: skip
TRAINER: dict[str, Settings] = {
    "bf16": {"bf16": True},
    "bf16 weights": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "AdamW by parameter": {"optim": "adamw_torch"},
    "Adafactor": {"optim": "adafactor"},
    "SGD": {"optim": "sgd"},
    "FSDP2": {"fsdp": True},
    "kept": {"fsdp_config": {"reshard_after_forward": False}},
}
"""Words of a name → the Trainer's arguments; other words are of other files, or only tell jobs apart."""
DEEPSPEED: dict[str, Settings] = {
    "bf16": {"bf16": {"enabled": True}},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"gradient_clipping": 1.0},
}
"""The same in DeepSpeed's file, where there is no Trainer."""
MODEL: dict[str, Settings] = {"bf16 weights": {"dtype": "bfloat16"}}
"""The same in the model's config."""
OTHERWISE = {"trainer, accumulation": ({"gradient_accumulation_steps": 4}, {"vocab_size": 8192})}
"""Jobs whose words say other arguments of the Trainer, and keys of the model's config."""
_BUCKETS = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
"""They fit the small models."""
_AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
_ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}}
_WRAPPED = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True}


@dataclass(frozen=True)
class Loop:
    """A job: a tool, and the words of its name; Accelerate and DeepSpeed have a micro-batch of 2, and AdamW."""

    name: str
    model: str
    ranks: int
    on: str

    @property
    def tool(self) -> str:
        return self.name.partition(", ")[0]

    @property
    def words(self) -> list[str]:
        return self.name.split(", ")[1:]

    @property
    def seq_len(self) -> int:
        return 128 if self.on == "cpu" else 512

    @property
    def peft(self) -> Settings | None:
        return LORA if "LoRA" in self.words else None

    def trainer(self) -> Settings | None:
        """The Trainer's arguments, if it has the loop."""
        if self.tool != "trainer":
            return None
        arguments = OTHERWISE[self.name][0] if self.name in OTHERWISE else _joined(TRAINER, self.words)
        if {"FSDP2", "checkpointing"} <= set(self.words):
            del arguments["gradient_checkpointing"]
            arguments["fsdp_config"] = {"activation_checkpointing": True}
        return arguments

    def deepspeed(self) -> Settings | None:
        """DeepSpeed's file of a job of the Trainer or of its own."""
        stage = next((int(word[-1]) for word in self.words if word.startswith("ZeRO-")), None)
        if stage is None or self.tool == "accelerate":
            return None
        third = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        zero = {"zero_optimization": {"stage": stage, **_BUCKETS, **third}}
        if self.tool == "trainer":
            return {**_AUTO, **zero, "bf16": {"enabled": "auto"}}
        return {"train_micro_batch_size_per_gpu": 2, **zero, **_ADAMW, **_joined(DEEPSPEED, self.words)}

    def accelerate(self) -> Settings | None:
        """Accelerate's file."""
        if self.tool != "accelerate":
            return None
        common: Settings = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1}
        common["mixed_precision"] = "bf16" if "bf16" in self.words else "no"
        if self.on == "cpu":
            return {**common, "distributed_type": "NO" if self.ranks == 1 else "MULTI_CPU", "use_cpu": True}
        if "FSDP2" in self.words:
            loaded = {"fsdp_cpu_ram_efficient_loading": True} if "loaded by rank 0" in self.words else {}
            return {**common, "distributed_type": "FSDP", "fsdp_config": {**_WRAPPED, **loaded}}
        if "ZeRO-3" in self.words:
            config = {"zero_stage": 3, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
            return {**common, "distributed_type": "DEEPSPEED", "deepspeed_config": config}
        return {**common, "distributed_type": "MULTI_GPU"}

    def config(self) -> Settings:
        """The model's config."""
        changed = OTHERWISE[self.name][1] if self.name in OTHERWISE else _joined(MODEL, self.words)
        return {**SIZES[self.model], **changed}

    def files(self, folder: Path) -> list[str]:
        """Write the job's files and the model's config, as their user has them; returns the names for `--from`."""
        arguments, config = self.trainer(), self.deepspeed()
        if arguments is not None:
            device = {"use_cpu": True} if self.on == "cpu" else {}
            micro = {"per_device_train_batch_size": 2 if self.on == "cpu" else 4}
            arguments = {"output_dir": str(folder / "out"), **micro, **device, **arguments}
            if config is not None:
                arguments["deepspeed"] = str(folder / "ds_config.json")
        (folder / "config.json").write_text(json.dumps(self.config()))
        if self.peft is not None:
            (folder / "adapter_config.json").write_text(json.dumps(self.peft))
        files = {"args.json": arguments, "accelerate.yaml": self.accelerate(), "ds_config.json": config}
        for name, values in files.items():
            if values is not None:
                (folder / name).write_text(json.dumps(values))
        return [str(folder / name) for name, values in files.items() if values is not None]


def _joined(meaning: Mapping[str, Settings], words: Iterable[str]) -> Settings:
    return {key: value for word in words for key, value in meaning.get(word, {}).items()}


def listed() -> list[Loop]:
    cells = (line.split("; ") for line in Path(__file__).with_name("other_loops.txt").read_text().splitlines())
    return [Loop(name, model, int(ranks), on) for on, model, ranks, name in cells]


LOOPS = listed()
