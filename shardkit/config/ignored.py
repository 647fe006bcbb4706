"""Settings that would do nothing beside the others: each is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .schema import RunConfig, TaskName


@dataclass(frozen=True)
class Ignored:
    """A key that has no effect beside certain other settings."""

    key: str
    beside: Callable[[RunConfig], bool]
    reason: str

    def applies(self, config: RunConfig) -> bool:
        section, _, name = self.key.partition(".")
        model = getattr(config, section)
        return bool(getattr(model, name) != type(model).model_fields[name].default and self.beside(config))


def _cpu_adam(config: RunConfig) -> bool:
    offloaded = config.parallel.strategy.startswith("zero") and config.parallel.offload_optimizer != "none"
    return offloaded and config.optim.name == "adamw"


def _not_for(*tasks: TaskName) -> Callable[[RunConfig], bool]:
    """Whether the task is built in and none of these; a user's own task may read any key."""
    return lambda config: config.task.factory is None and config.task.name not in tasks


_REFERENCE = ("vocab_size", "max_seq_len", "d_model", "n_layers", "n_heads", "dropout", "tie_weights")
_TEXT: tuple[TaskName, ...] = ("causal_lm", "hf_causal_lm", "hf_masked_lm")
_IMAGES: tuple[TaskName, ...] = ("image_classification", "super_resolution")
_DOCUMENTS = tuple(
    f"data.{key}"
    for key in ("tokenizer", "chat_template", "columns", "loss_on", "add_eos", "long_samples", "max_bad_rows",
                "sources", "tokenize_workers")
)  # fmt: skip
_FOR_ONE: dict[str, tuple[TaskName, ...]] = {
    **{f"model.{key}": ("causal_lm",) for key in _REFERENCE},
    "model.resize_embeddings": ("hf_causal_lm", "hf_masked_lm"),
    **dict.fromkeys(("model.hf", "model.hf_config"), ("hf_causal_lm", "hf_masked_lm", *_IMAGES)),
    **dict.fromkeys(("train.seq_len", "model.loss_chunk_size", "data.bin_dtype", "data.cache_dir"), _TEXT),
    **dict.fromkeys(
        ("train.sample_prompts", "train.sample_tokens", "train.sample_temperature"), ("causal_lm", "hf_causal_lm")
    ),
    **dict.fromkeys(("data.packing", "data.streaming"), ("causal_lm", "hf_causal_lm")),
    **dict.fromkeys(_DOCUMENTS, _TEXT),
    **dict.fromkeys(("data.mask_fraction", "data.mask_token"), ("hf_masked_lm",)),
    **dict.fromkeys(("data.crops_per_image", "data.augment"), _IMAGES),
    "data.crop_size": ("super_resolution",),
}
"""Keys that only some built-in tasks read."""

IGNORED: tuple[Ignored, ...] = (
    *(
        Ignored(key, _not_for(*tasks), f"among the built-in tasks it is a key of {', '.join(tasks)} only")
        for key, tasks in _FOR_ONE.items()
    ),
    Ignored("compile.scope", lambda c: not c.compile.enabled, "compile.enabled=false"),
    Ignored("precision.loss_scale_init_power", lambda c: c.precision.mode != "fp16", "only fp16 scales the loss"),
    Ignored("precision.loss_scale_window", lambda c: c.precision.mode != "fp16", "only fp16 scales the loss"),
    Ignored("precision.autocast", lambda c: c.precision.mode in ("fp32", "tf32"), "the model computes in fp32"),
    Ignored(
        "precision.output_dtype", lambda c: c.precision.mode in ("fp32", "tf32"), "the model computes in fp32 already"
    ),
    Ignored(
        "parallel.offload_ratio", lambda c: c.parallel.offload_optimizer == "none", "no optimizer states are offloaded"
    ),
    *(
        Ignored(f"adapter.{key}", lambda c: c.adapter.type == "none", "adapter.type=none")
        for key in ("r", "alpha", "dropout", "targets", "use_rslora")
    ),
    Ignored("compile.mode", lambda c: not c.compile.enabled, "compile.enabled=false"),
    Ignored("activation.every_k", lambda c: c.activation.policy != "every_k", "activation.policy is not every_k"),
    Ignored("activation.budget", lambda c: c.activation.policy != "budget", "activation.policy is not budget"),
    Ignored("activation.offload_min_bytes", lambda c: c.activation.offload == "none", "activation.offload=none"),
    Ignored(
        "activation.block_classes",
        lambda c: not c.activation.recomputes and c.activation.offload == "none",
        "neither activation.policy nor activation.offload changes a block",
    ),
    Ignored("data.prefetch", lambda c: c.data.workers == 0, "data.workers=0 loads in the training process"),
    Ignored("data.val_fraction", lambda c: c.data.val_path is not None, "data.val_path names the validation data"),
    Ignored("data.val_fraction", lambda c: c.train.eval_samples == 0, "train.eval_samples=0: all data train"),
    Ignored(
        "data.val_fraction",
        lambda c: c.task.factory is None and c.task.name == "image_classification" and c.data.path is None,
        "the lower part of scikit-image's pictures is the validation data",
    ),
    Ignored("data.val_path", lambda c: c.train.eval_samples == 0, "train.eval_samples=0 turns evaluation off"),
    Ignored("train.sample_prompts", lambda c: c.train.eval_samples == 0, "train.eval_samples=0 turns evaluation off"),
    Ignored("train.sample_tokens", lambda c: not c.train.sample_prompts, "train.sample_prompts is empty"),
    Ignored("train.sample_temperature", lambda c: not c.train.sample_prompts, "train.sample_prompts is empty"),
    Ignored("train.eval_every", lambda c: c.train.eval_samples == 0, "train.eval_samples=0 turns evaluation off"),
    Ignored("optim.min_lr_ratio", lambda c: c.optim.schedule == "constant", "optim.schedule=constant never falls"),
    Ignored("optim.implementation", _cpu_adam, "ZeRO's offloaded AdamW steps with DeepSpeedCPUAdam"),
    Ignored(
        "parallel.no_sync",
        lambda c: c.parallel.strategy == "zero1" and c.parallel.no_sync is False,
        "ZeRO-1 always reduces gradients once per step",
    ),
)
