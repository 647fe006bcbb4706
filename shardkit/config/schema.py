"""The run's configuration: frozen pydantic models, one per section of the YAML file.

Every field is described where it is defined, and a `Capability` beside its type says which strategies can do what it
asks for; `load` reads files and overrides into these models and `capability` refuses the combinations that cannot work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..errors import parse_bytes
from .presets import HF_PRESETS, MODEL_PRESETS

# The strategies, and what a key of the config asks of them: declared on the key's field, as a `Capability`.

StrategyName = Literal["single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)


@dataclass(frozen=True)
class Sharding:
    """What a strategy shares out among ranks, and by which library: known by its name, before there is an engine."""

    by_fsdp: bool = False  # by torch's FSDP2
    stage: int = 0  # by DeepSpeed's ZeRO at this stage; 0 = not by it
    replicates: bool = False  # groups of ranks have copies of the shards

    @property
    def parameters(self) -> bool:
        """A rank holds a part of each parameter."""
        return self.by_fsdp or self.stage == 3

    @property
    def state(self) -> bool:
        """A rank holds a part of the weights or of their optimizer state."""
        return self.by_fsdp or self.stage > 0


SHARDING: dict[str, Sharding] = {
    "single": Sharding(), "ddp": Sharding(), "fsdp": Sharding(by_fsdp=True),
    "hsdp": Sharding(by_fsdp=True, replicates=True),
    "zero1": Sharding(stage=1), "zero2": Sharding(stage=2), "zero3": Sharding(stage=3),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Capability:
    """A row of docs/capability.md: something that some strategies can do, and the config's values that ask for it.

    It annotates the field of the key (`Annotated[bool, Capability(…)]`). The refusals of `capability.check`, the table
    and the tests follow from it.
    """

    words: str  # the row's title
    # names of strategies, separated by spaces → the reason why they cannot do it
    refused: Mapping[str, str] = field(default_factory=dict)
    name: str = ""  # the row's short name; empty = the key's, without its section
    choices: tuple[Any, ...] = ()  # the values that ask for it; empty = all but the default
    beside: Callable[[Any], bool] = lambda section: True  # whether the section's other keys leave the value in force
    # the error's fix; `{works}` stands for the strategies that can do it, `{key}` for the key. Empty = remove the key.
    fix: str = ""
    on_cpu: str = ""  # the reason why it does not work without a GPU, and what to use instead; empty = it works

    def __post_init__(self) -> None:
        unknown = set(" ".join(self.refused).split()) - {*STRATEGIES}
        if unknown:
            raise ValueError(f"{self.words!r} is refused by unknown strategies: {sorted(unknown)}")

    @property
    def reasons(self) -> dict[StrategyName, str]:
        """The reason of each strategy that cannot do it."""
        by_name = {name: reason for names, reason in self.refused.items() for name in names.split()}
        return {name: by_name[name] for name in STRATEGIES if name in by_name}

    @property
    def works(self) -> list[StrategyName]:
        """The strategies that can do it."""
        return [name for name in STRATEGIES if name not in self.reasons]


Offload = Literal["none", "cpu", "nvme"]
TaskName = Literal["causal_lm", "hf_causal_lm", "hf_masked_lm", "image_classification", "super_resolution"]
PresetName = Literal[
    "debug", "124m", "355m", "1.3b", "7b", "13b", "gpt2", "gpt2-debug", "llama-debug", "bert-base", "bert-large",
    "bert-debug", "vit-b", "vit-l", "vit-debug", "swin2sr", "swin2sr-debug",
]  # fmt: skip


NO_LIMIT = 1_000_000_000
"""`train.max_steps` where `train.epochs` alone says how long a run is."""


def conflict(cause: str, fix: str) -> PydanticCustomError:
    """The error for values that are valid alone but not together; plain pydantic shows only its cause."""
    return PydanticCustomError("conflict", "{cause}", {"cause": cause, "fix": fix})


class Section(BaseModel):
    """A section of the config: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class TaskConfig(Section):
    name: TaskName = "causal_lm"
    """Built-in task; ignored when `factory` is set. See docs/tasks.md."""
    factory: str | None = Field(None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """Your own task as `package.module:Class`; see docs/tasks.md."""
    args: dict[str, Any] = {}
    """Keyword arguments for the factory."""

    @property
    def takes_adapters(self) -> bool:
        """Whether the task's model may have adapters."""
        return self.factory is None and self.name in ("hf_causal_lm", "hf_masked_lm")

    @property
    def may_split_sequences(self) -> bool:
        """Whether ranks may share the task's sequences; a user's own task says so itself."""
        return self.factory is not None or self.name in ("causal_lm", "hf_causal_lm")

    @model_validator(mode="after")
    def _args_need_factory(self) -> TaskConfig:
        if self.args and self.factory is None:
            raise conflict(
                "task.args is set, but there is no task.factory to pass it to",
                "set task.factory=package.module:Class, or remove task.args",
            )
        return self


class QuantizeConfig(Section):
    bits: Literal[4, 8] = 4
    """Bits of a stored weight; 8 is refused so far."""
    type: Literal["nf4", "fp4", "int8"] = "nf4"
    """The 16 numbers that a weight may be in its block: nf4 (Dettmers et al. 2023) or fp4; int8 is refused so far."""
    double: bool = False
    """Double quantisation: a scale is one byte, in blocks of 256 scales of a layer."""
    skip: tuple[str, ...] = ()
    """Ends of the names of linear layers that stay as they are, or of modules around them; the output head always is
    left out."""
    experts: bool = False
    """Quantise experts too that a transformers module holds as 3-D parameters (most of a Mixtral), one by one."""
    block_size: Literal[64, 128, 256, 512, 1024, 2048, 4096] = 64
    """Neighbouring weights of a row that share a scale; must divide the layers' input features."""

    @model_validator(mode="after")
    def _supported(self) -> QuantizeConfig:
        for key, refused in (("bits", 8), ("type", "int8")):
            if getattr(self, key) == refused:
                raise conflict(
                    f"model.quantize.{key}={refused} is not supported: layers of 8 bits are not among the frozen "
                    "layers here",
                    f"remove {key}: model.quantize={{bits: 4}} packs linear layers in nf4",
                )
        return self


class ModelConfig(Section):
    preset: PresetName | None = None
    """Model sizes by name; keys set beside it override the preset's."""
    hf_config: str | None = None
    """A transformers `config.json`, or a directory that holds one: the model of every task except causal_lm. Unset: the
    one in the folder of `init_from`, unless `hf.model_type` or a preset names the model."""
    hf: dict[str, Any] = {}
    """Keys of the transformers config; they override `hf_config`'s. Without a file, set `model_type` here."""
    init_from: str | None = Field(None, min_length=1)
    """Weights to start from: a run, a shardkit checkpoint, or anything `shardkit convert` reads (safetensors, …)."""
    quantize: Annotated[QuantizeConfig | None, Capability("frozen weights in 4 bits (`model.quantize`, QLoRA)")] = None
    """With an adapter: keep the frozen linear layers in 4 bits (needs bitsandbytes), `{bits: 4}` or more keys. See
    docs/adapters.md."""
    resize_embeddings: Annotated[
        bool, Capability("embedding rows for a tokenizer's new ids (`model.resize_embeddings`)", choices=(True,))
    ] = False
    """hf_causal_lm, hf_masked_lm: give the model as many embedding rows as the tokenizer has ids, if it has fewer; the
    rows that the weights of `init_from` lack become the mean of theirs. See docs/data.md."""
    sync_batchnorm: Annotated[
        bool, Capability("batch-norm statistics over all ranks (`sync_batchnorm`)", choices=(True,))
    ] = False
    """Batch-norm statistics over all ranks' micro-batches instead of each rank's own."""
    vocab_size: int = Field(256, ge=2)
    """Entries of the token embedding; at least the largest token of the data plus one."""
    max_seq_len: int = Field(256, ge=1)
    """Rows of the position embedding; `train.seq_len` may not exceed it."""
    d_model: int = Field(128, ge=1)
    """Width of the residual stream."""
    n_layers: int = Field(4, ge=1)
    """Number of transformer blocks."""
    n_heads: int = Field(4, ge=1)
    """Attention heads; must divide `d_model`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout after embeddings, attention and MLP, and inside attention."""
    tie_weights: Annotated[bool, Capability("tied weights", name="tied_weights", choices=(True,))] = False
    """Share the token embedding with the output head."""
    loss_chunk_size: int = Field(1024, ge=0)
    """Tokens per chunk of the cross-entropy, so that [tokens, vocab] fp32 logits never exist whole; 0 = no chunking."""
    mlp_chunks: Annotated[int, Capability("MLPs in tiles of the positions (`model.mlp_chunks`)")] = Field(1, ge=1)
    """Parts of the positions that the MLP of each block computes one after another, and again in backward, so that the
    hidden activations of one part exist at once (docs/long.md); 1 = all positions together."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        preset = data.get("preset") if isinstance(data, dict) else None
        if not isinstance(preset, str):
            return data
        if preset in HF_PRESETS and isinstance(data.get("hf", {}), dict):
            return {**data, "hf": {**HF_PRESETS[preset], **data.get("hf", {})}}
        return {**MODEL_PRESETS.get(preset, {}), **data}

    @property
    def described_by(self) -> Path | None:
        """The `config.json` that describes the model: `hf_config`'s, else the one in the folder of `init_from`."""
        if self.hf_config is not None:
            path = Path(self.hf_config).expanduser()
            return path / "config.json" if path.is_dir() else path
        if self.init_from is None or "model_type" in self.hf:
            return None
        beside = Path(self.init_from).expanduser() / "config.json"
        return beside if beside.is_file() else None

    @model_validator(mode="after")
    def _heads(self) -> ModelConfig:
        if self.d_model % self.n_heads:
            nearest = max(1, round(self.d_model / self.n_heads)) * self.n_heads
            raise conflict(
                f"model.n_heads={self.n_heads} does not divide model.d_model={self.d_model}",
                f"set model.d_model={nearest}, or another number of heads",
            )
        return self


class AdapterConfig(Section):
    type: Annotated[
        Literal["none", "lora"],
        Capability(
            "LoRA adapters over a frozen model (`adapter.type: lora`)",
            name="adapter",
            choices=("lora",),
            fix="remove adapter",
        ),
    ] = "none"
    """lora: freeze the model and train a product of two small matrices beside each target (Hu et al. 2021), by peft.
    For hf_causal_lm and hf_masked_lm. See docs/adapters.md."""
    r: int = Field(8, ge=1)
    """Rank of the product."""
    alpha: int = Field(8, ge=1)
    """The product is scaled by alpha / r; peft calls it lora_alpha."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the product's input; peft calls it lora_dropout."""
    targets: str | list[str] = Field("all-linear", min_length=1)
    """The linear layers to adapt, peft's target_modules: the ends of their names (q_proj, self_attn.o_proj), a regular
    expression for whole names, or all-linear: all but the output head. Experts that `model.quantize.experts` packs are
    adapted one by one, by the names of their weights (down_proj); all-linear has them too."""
    use_rslora: bool = False
    """Scale by alpha / √r instead (Kalajdzievski 2023)."""

    @property
    def scaling(self) -> float:
        """The factor of the product B·A."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class SourceConfig(Section):
    path: str = Field(min_length=1)
    """As `data.path`."""
    name: str | None = Field(None, min_length=1)
    """Name in messages and figures; unset = the path's last part."""
    weight: float = Field(1.0, gt=0)
    """Passes over this source in one epoch of the mix: 2 takes each sample twice, 0.5 another half in each epoch."""

    @property
    def called(self) -> str:
        return self.name or self.path.rstrip("/").rpartition("/")[2]


class DataConfig(Section):
    path: str | None = None
    """A text file, directory or glob, or a `.bin` of tokens; unset = the source of Python's standard library. With a
    tokenizer also JSON lines, parquet, arrow, a `datasets` folder, or a folder that `shardkit tokenize` made.
    Image tasks: a directory of pictures (classes: one directory each); unset = scikit-image's pictures."""
    val_path: str | None = None
    """Validation data; unset = a fixed share of `path`."""
    val_fraction: float = Field(0.05, gt=0, lt=1)
    """Share of documents, files, pictures or of the tail (`.bin`) held out when `val_path` is unset; nothing with
    `train.eval_samples=0`."""
    bin_dtype: Literal["uint16", "uint32"] = "uint16"
    """Token type of a `.bin` file (little endian)."""
    packing: Literal["none", "packed", "padding_free"] = "none"
    """causal_lm, hf_causal_lm: samples made of documents, each attending to itself alone. packed: as many whole
    documents as fit into `train.seq_len`; padding_free: one document a sample, and the samples of a micro-batch in one
    row without padding; longer documents are cut. none: windows that know no documents."""
    tokenizer: str | None = Field(None, min_length=1)
    """A tokenizer.json, or a folder with one; unset = the tokenizer in the folder of `model.init_from` or
    `model.hf_config`. Without any, text is read as bytes."""
    chat_template: str | None = Field(None, min_length=1)
    """A file with a chat template; unset = the tokenizer's."""
    chat_date: date | None = None
    """The day (YYYY-MM-DD) that a chat template takes for today. Templates that write the date into the text
    (`strftime_now`; Llama 3's does) need it: all nodes and resumes then make the same tokens."""
    columns: dict[Literal["text", "messages", "prompt", "completion", "input", "system", "tools"], str] = {}
    """Columns of records under other names, such as {text: body}; unset = messages, conversations, prompt and
    completion, or text, whichever is there. An input joins the prompt behind an empty line."""
    ignore: list[str] = []
    """Columns, and members of conversations' turns, that are as if they were not there, such as [label]."""
    loss_on: Literal["auto", "all", "assistant", "completion"] = "auto"
    """Tokens to predict: auto = the assistant's turns of conversations, the completion after a prompt, all of a text;
    all; assistant; completion = of a conversation, its last turn by the assistant."""
    add_eos: bool = True
    """End each text and completion with the tokenizer's end-of-text token; conversations end as their template says."""
    long_samples: Literal["auto", "truncate", "split", "drop"] = "auto"
    """Documents with more than `train.seq_len` targets: keep the start, cut into several samples, or leave out; auto =
    split texts, truncate conversations and completions. Windows over plain text have no such limit."""
    max_bad_rows: float = Field(0.0, ge=0, lt=1)
    """Share of rows that may be unusable and are left out with a warning; beyond it the data are refused."""
    sources: list[SourceConfig] = []
    """Several data sets in place of `path`, each with its weight in the mix."""
    streaming: bool = False
    """causal_lm, hf_causal_lm: tokenise records while they are read instead of before the first step, for sets whose
    tokens fit on no disk. A row is a sample; rows are shuffled within windows of a few pieces of files."""
    tokenize_workers: int | None = Field(None, ge=1)
    """Processes that tokenise; unset = one for each CPU of the process."""
    cache_dir: str | None = None
    """Directory for tokenised data; unset = $XDG_CACHE_HOME/shardkit or ~/.cache/shardkit."""
    mask_fraction: float = Field(0.15, gt=0, le=1)
    """hf_masked_lm: share of positions to predict."""
    mask_token: int | None = Field(None, ge=0)
    """hf_masked_lm: the token that replaces a masked one; unset = the tokenizer's, else the vocabulary's last."""
    crop_size: int = Field(192, ge=8)
    """super_resolution: side of the crops in pixels, at full resolution."""
    crops_per_image: int | None = Field(None, ge=1)
    """Image tasks: crops of each picture in an epoch; unset = 1 for a directory of classes, else 64."""
    augment: bool = True
    """Image tasks: random crops and flips of training pictures, a function of (train.seed, sample index)."""
    workers: int = Field(0, ge=0)
    """Loader processes per rank; 0 loads in the training process (a memory-mapped corpus needs none)."""
    prefetch: int = Field(2, ge=1)
    """Micro-batches each worker keeps ready."""
    shuffle: bool = True
    """A new order in each epoch, from (train.seed, epoch), the same for every world size."""
    drop_last: bool = False
    """Skip the epoch's last, smaller global batch instead of training on it."""

    @model_validator(mode="after")
    def _one_or_several(self) -> DataConfig:
        if self.sources and self.path is not None:
            raise conflict(
                f"data.path={self.path} and data.sources are both set", "set only one: a path, or a list of sources"
            )
        names = [source.called for source in self.sources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise conflict(f"data.sources has two sources named {twice}", "give each a name of its own")
        return self


DOCUMENT_KEYS = (
    "chat_template", "chat_date", "columns", "ignore", "loss_on", "add_eos", "long_samples", "max_bad_rows", "sources",
    "tokenize_workers",
)  # fmt: skip
"""Keys of `data` that only text with a tokenizer reads."""


class TrainConfig(Section):
    max_steps: int = Field(100, ge=1)
    """Optimizer steps; with `epochs` the limit, and 1000000000 if it is not set beside it."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training data, at most `max_steps` steps; unset = as many as `max_steps` makes. A pass ends with
    a smaller step, or without it (`data.drop_last`)."""
    micro_batch_size: int = Field(8, ge=1)
    """Samples per rank in one forward/backward."""
    seq_len: int = Field(256, ge=1)
    """Tokens per sample of the built-in tasks."""
    grad_accum_steps: int | None = Field(None, ge=1)
    """Micro-batches per optimizer step; default 1, or derived from `global_batch_size`."""
    global_batch_size: int | None = Field(None, ge=1)
    """Samples per optimizer step over all ranks; accumulation is derived from it."""
    max_norm: float | None = Field(1.0, gt=0)
    """Clip the global gradient norm to this; null = no clipping."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seeds weights, data order and dropout."""
    deterministic: bool = False
    """Deterministic kernels and reduction layouts: the same run twice gives the same bits."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between evaluations; unset = at the end only."""
    eval_samples: int = Field(400, ge=0)
    """Validation samples of one evaluation, over all ranks; 0 = no evaluation, and all data train. Evenly spaced ones
    represent a larger set, the same for any number of ranks and any micro-batch size. A packed sample is `seq_len`
    tokens."""
    sample_prompts: tuple[str, ...] = ()
    """causal_lm and hf_causal_lm: texts that the model continues at each evaluation (`samples.jsonl`)."""
    sample_tokens: int = Field(64, ge=1)
    """Tokens that a continuation may have; each is a forward, and with its prompt it must fit into `seq_len`."""
    sample_temperature: float = Field(0.0, ge=0)
    """0 = the likeliest token; above 0 tokens are drawn by (seed, step, prompt)."""
    ema_decay: Annotated[float | None, Capability("moving average of the weights (`ema_decay`)", name="ema")] = Field(
        None, gt=0, lt=1
    )
    """Keep an exponential moving average of the weights with this decay per step, sharded like them; evaluation uses
    it, and checkpoints hold it."""

    @model_validator(mode="before")
    @classmethod
    def _epochs_alone(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("epochs") is not None and "max_steps" not in data:
            return {**data, "max_steps": NO_LIMIT}
        return data


_ADAMW = "set optim.name=adamw"
_FLAT = "ZeRO updates flat pieces of parameters, and this optimizer needs whole matrices: use ddp or single"
_SCALED_STATES = {
    "fsdp hsdp": "256 elements of its states share a scale; row shards would split such a group: use ddp",
    "zero1 zero2 zero3": "ZeRO keeps its own flat fp32 states: use ddp, or zero2 with offload",
}


class OptimConfig(Section):
    name: Annotated[
        Literal["adamw", "sgd", "adafactor", "muon", "adamw8bit", "adamw_bnb_8bit"],
        Capability(
            "Adafactor",
            {
                "fsdp hsdp": "FSDP2 shards rows, and this optimizer keeps one number per row and column: use ddp or "
                "single",
                "zero1 zero2 zero3": _FLAT,
            },
            name="adafactor",
            choices=("adafactor",),
            fix=_ADAMW,
        ),
        Capability("Muon", {"zero1 zero2 zero3": _FLAT}, name="muon", choices=("muon",), fix=_ADAMW),
        Capability("8-bit AdamW (torchao)", _SCALED_STATES, name="adamw8bit", choices=("adamw8bit",), fix=_ADAMW),
        Capability(
            "8-bit AdamW (bitsandbytes)", _SCALED_STATES, name="adamw_bnb_8bit", choices=("adamw_bnb_8bit",), fix=_ADAMW
        ),
    ] = "adamw"
    """adamw (Loshchilov & Hutter 2019); sgd with optional momentum; adafactor (Shazeer & Stern 2018: second moments by
    rows and columns); muon (Jordan et al. 2024) for matrices with adamw for the rest; adamw8bit: moments in 8 bits
    (Dettmers et al. 2022) by torchao; adamw_bnb_8bit: by bitsandbytes."""
    lr: float = Field(3e-4, ge=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay (adamw), L2 penalty (sgd); see `decay_norm_bias_embed` for exceptions."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's term that keeps the division finite."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """SGD only."""
    in_backward: Annotated[
        bool,
        Capability(
            "optimizer in backward (`in_backward`)",
            {
                "ddp fsdp hsdp zero1 zero2 zero3": "gradients are reduced over ranks before they are used: only single "
                "updates in backward"
            },
            choices=(True,),
        ),
    ] = False
    """Update each parameter as soon as its gradient is ready, and free the gradient: only one exists at a time. Needs
    one micro-batch per step and no clipping."""
    decay_norm_bias_embed: bool = False
    """Apply weight decay to norms, biases and embeddings too (off: two parameter groups)."""
    implementation: Literal["auto", "fused", "foreach", "for_loop"] = "auto"
    """Kernel of the optimizer; auto = fused if torch has it for the device."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up, over the remaining steps."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear rise from lr/warmup_steps to lr; the last of them uses lr."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """The last step, train.max_steps, has this share of lr."""

    @model_validator(mode="after")
    def _own_keys_only(self) -> OptimConfig:
        if self.name != "sgd" and "momentum" in self.model_fields_set and self.momentum:
            raise conflict(
                f"optim.momentum={self.momentum} is a key of sgd, but optim.name={self.name}",
                "set optim.name=sgd, or remove optim.momentum",
            )
        if self.name not in ("adamw", "adamw8bit", "adamw_bnb_8bit", "muon"):
            for key in ("betas", "eps"):
                if key in self.model_fields_set and getattr(self, key) != type(self).model_fields[key].default:
                    raise conflict(
                        f"optim.{key}={getattr(self, key)} is a key of adamw, but optim.name={self.name}",
                        f"set optim.name=adamw, or remove optim.{key}",
                    )
        if self.in_backward and self.name == "muon":
            raise conflict(
                "optim.in_backward=true with optim.name=muon: it is two optimizers", "use adamw, or in_backward=false"
            )
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise conflict(
                    f"optim.betas={list(self.betas)}: {beta} is outside [0, 1)", "the usual pair is [0.9, 0.95]"
                )
        return self


_ONE_RANK = "a single rank has nobody to exchange gradients with"
_ZERO3_ONLY = {"single ddp fsdp hsdp zero1 zero2": "only ZeRO-3 has it"}
_NVME = Capability(
    "optimizer state or parameters on a local disk (`nvme`)",
    {"single ddp fsdp hsdp zero1 zero2": "only ZeRO-3 swaps state to a disk: use zero3"},
    name="nvme",
    choices=("nvme",),
    fix="set parallel.strategy=zero3, or {key}=cpu where that works",
)


class ParallelConfig(Section):
    strategy: StrategyName = "ddp"
    """How the model is spread over ranks; see the table in docs/capability.md."""
    dp_replicate: int | None = Field(None, ge=1)
    """Replica groups (hsdp); dp_replicate × dp_shard = world size."""
    dp_shard: int | None = Field(None, ge=1)
    """Ranks that share one copy of the state (hsdp); default: the ranks of one node."""
    cp: Annotated[
        int,
        Capability(
            "sequences split over ranks (`cp`; not run on several GPUs)",
            {"single": "a single rank has nobody to share sequences with"},
        ),
    ] = Field(1, ge=1)
    """Ranks that share the same samples, each with a part of every sequence (context parallelism); they are neighbours,
    and data ranks = world size / cp."""
    cp_across_nodes: bool = False
    """Let the ranks that share sequences be on several nodes, where the exchanges in attention are slow."""
    tp: Annotated[
        int,
        Capability(
            "layers split over ranks (`tp`; not run on several GPUs)",
            {
                "single": "a single rank has nobody to share layers with",
                "ddp": "torch's DDP holds whole parameters",
                "zero1 zero2 zero3": "DeepSpeed would reduce the parts of a layer as if they were replicas",
            },
            fix="set parallel.strategy=fsdp, or hsdp with parallel.dp_shard=1 for replicas; or remove parallel.tp",
        ),
    ] = Field(1, ge=1)
    """Ranks that share each layer's columns, rows and heads (tensor parallelism) and have the same samples; they are
    neighbours, and data ranks = world size / (tp × cp)."""
    tp_across_nodes: bool = False
    """Let the ranks that share layers be on several nodes, where every layer waits for the network."""
    tp_sequence: bool = False
    """Let each rank that shares layers hold a part of every sequence between them (sequence parallelism): residuals and
    norms take a tp-th of the memory, and each all-reduce becomes an all-gather and a reduce-scatter."""
    ep: Annotated[
        int,
        Capability(
            "experts split over ranks (`ep`; not run on several GPUs)",
            {
                "single": "a single rank has nobody to share experts with",
                "ddp": "DDP averages every gradient over all ranks, those of other experts too",
                "zero1 zero2 zero3": "DeepSpeed would average the gradients of different experts",
            },
            fix="set parallel.strategy=fsdp, or remove {key}",
        ),
    ] = Field(1, ge=1)
    """Ranks that hold different experts of each layer and send each other rows (expert parallelism); they are
    neighbours, and each has samples of its own."""
    ep_imbalance: float = Field(1.72, ge=1)
    """plan and rehearse: rows that the busiest rank's experts get, over the ranks' average; `ep_peak` in
    metrics.jsonl is the measured one. Default: the busiest expert of a model of 1B parameters trained with an auxiliary
    loss (Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, table 2: MaxVio 0.72; 0.04 with their biases). Ranks
    average over their experts, so a rank has less."""
    no_sync: Annotated[
        bool | None,
        Capability(
            "reduce gradients once per step (`no_sync`)",
            {
                "single": _ONE_RANK,
                "zero2 zero3": "gradients are partitioned as they are produced, so each micro-batch has to reduce",
            },
            choices=(True,),
        ),
    ] = None
    """Reduce gradients only on a step's last micro-batch; default on for ddp, off for fsdp/hsdp (it would keep
    unsharded gradients), refused for zero2/zero3."""
    reshard_after_forward: Annotated[
        bool,
        Capability(
            "keep parameters gathered until backward (`reshard_after_forward: false`)",
            {
                "single ddp zero1 zero2": "parameters are whole on every rank: there is nothing to gather or free",
                "zero3": "set parallel.ds_config.zero_optimization.stage3_max_reuse_distance instead",
            },
            name="keep_gathered",
            choices=(False,),
        ),
    ] = True
    """fsdp/hsdp: free a block's gathered parameters after forward (ZeRO-3) or keep them until backward (ZeRO-2)."""
    bucket_mb: Annotated[
        float | None,
        Capability(
            "gradient bucket size (`bucket_mb`)",
            {"single": _ONE_RANK, "fsdp hsdp": "FSDP2 reduces one block at a time"},
        ),
    ] = Field(None, gt=0)
    """ddp and zero: size in MiB of the gradient buckets that are reduced during backward; default 25 for ddp,
    500 (or the whole model, if smaller) for zero."""
    find_unused: Annotated[
        bool | None,
        Capability(
            "any parameter may be left out of a step (`find_unused: true`)",
            {
                "single fsdp hsdp": "it already skips parameters without a gradient: remove the key",
                "zero1 zero2 zero3": "ZeRO lets ranks leave out members of lists by itself, and no other parameters: "
                "remove the key or use ddp",
            },
            choices=(True,),
        ),
    ] = None
    """Average the gradient of a parameter that some ranks do not use in a step (an expert without tokens), and do not
    update it if no rank uses it. Null: ddp for every parameter, zero for lists whose members the data may choose. true
    (ddp): torch looks for such parameters in every forward, which costs less than to notice them after backward where
    most steps have some. false: every rank uses every parameter; zero3 gathers the members of such lists one by one."""
    prefetch: Annotated[
        int,
        Capability(
            "gather further ahead (`prefetch`)",
            {"single ddp zero1 zero2 zero3": "only FSDP2 gathers block by block: use fsdp or hsdp"},
        ),
    ] = Field(1, ge=1)
    """fsdp/hsdp: number of blocks to gather ahead of the computing one; 1 = torch's own overlap."""
    hpz: Annotated[
        int | None, Capability("second copy of the weights inside a node (`hpz`, CUDA only)", _ZERO3_ONLY)
    ] = Field(None, ge=2)
    """zero3: ranks of a group that keeps a second, whole copy of the weights between forward and backward, so backward
    gathers inside the group (ZeRO++, Wang et al. 2023); usually the ranks of a node."""
    offload_ratio: Annotated[
        float, Capability("offload a share of the optimizer states (`offload_ratio`)", _ZERO3_ONLY)
    ] = Field(1.0, gt=0, le=1)
    """zero3: share of the optimizer states that is offloaded; the rest is updated on the GPU (Twin-Flow)."""
    offload_optimizer: Annotated[
        Offload,
        Capability(
            "optimizer state on the CPU, parameters on the GPU (`offload_optimizer: cpu`)",
            {
                "single ddp": "only ZeRO updates on the CPU: use zero2, which works on one GPU too",
                "fsdp hsdp": "FSDP2 keeps the optimizer where the shards are: set parallel.offload_param=cpu too",
            },
            choices=("cpu",),
            beside=lambda parallel: parallel.offload_param != "cpu" or parallel.strategy not in ("fsdp", "hsdp"),
            fix="set {key}=none, or parallel.strategy to one of {works}",
        ),
        _NVME,
    ] = "none"
    """Where optimizer states live between steps."""
    offload_param: Annotated[
        Offload,
        Capability(
            "parameters on the CPU too (`offload_param: cpu`)",
            {"single ddp zero1 zero2": "whole parameters stay on the device: use fsdp or zero3"},
            choices=("cpu",),
            fix="set {key}=none, or parallel.strategy to one of {works}",
        ),
        _NVME,
    ] = "none"
    """Where parameter shards live between uses."""
    nvme_path: str | None = None
    """Directory on a local disk for nvme offload."""
    ds_config: Annotated[
        dict[str, Any],
        Capability(
            "raw DeepSpeed keys (`ds_config`)",
            {"single ddp fsdp hsdp": "only ZeRO has an engine that reads it: use zero1, zero2 or zero3"},
        ),
    ] = {}
    """Raw DeepSpeed keys, passed through; a key that shardkit sets itself is an error."""

    @property
    def sharding(self) -> Sharding:
        """What the strategy shares out among ranks."""
        return SHARDING[self.strategy]

    @model_validator(mode="after")
    def _nvme(self) -> ParallelConfig:
        nvme = [key for key in ("offload_optimizer", "offload_param") if getattr(self, key) == "nvme"]
        if nvme and not self.nvme_path:
            raise conflict(
                f"parallel.{nvme[0]}=nvme needs parallel.nvme_path",
                "set parallel.nvme_path to a directory on a local disk",
            )
        if self.nvme_path and not nvme:
            raise conflict(
                f"parallel.nvme_path={self.nvme_path!r} is set, but nothing is offloaded to nvme",
                "set offload_optimizer or offload_param to nvme, or remove parallel.nvme_path",
            )
        return self


class PrecisionConfig(Section):
    mode: Annotated[
        Literal["fp32", "tf32", "bf16", "fp16", "fp8", "pure_bf16"],
        Capability("bf16", name="bf16", choices=("bf16",)),
        Capability(
            "fp16 with dynamic loss scaling (CUDA only)",
            name="fp16",
            choices=("fp16",),
            on_cpu="fp16 needs a GPU: use bf16 or fp32",
        ),
        Capability(
            "fp8 linear layers (torchao, CUDA sm89 or newer)",
            {
                "zero1 zero2 zero3": "DeepSpeed's engine casts the model itself, and fp8 layers would be cast with it: "
                "use fsdp"
            },
            name="fp8",
            choices=("fp8",),
            fix="set precision.mode=bf16, or another parallel.strategy",
            on_cpu="fp8 matrix products need an NVIDIA GPU of compute capability 8.9 or newer: use bf16",
        ),
        Capability(
            "weights, gradients and optimizer states all bf16 (`pure_bf16`)", name="pure_bf16", choices=("pure_bf16",)
        ),
        Capability(
            "tf32 (CUDA only)",
            name="tf32",
            choices=("tf32",),
            on_cpu="tf32 is a mode of NVIDIA's matrix units: use fp32",
        ),
    ] = "fp32"
    """Compute type of forward and backward; master weights stay fp32, except with pure_bf16: weights, gradients and
    optimizer states are all bf16. fp8: the matrix products of linear layers, the rest in bf16 (needs torchao, sm89)."""
    reduce_dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        Capability("type in which gradients travel (`reduce_dtype`)", {"single": _ONE_RANK}),
    ] = "auto"
    """Type in which gradients travel between ranks; auto = fp32 (pure_bf16: bf16; ZeRO: its compute type)."""
    output_dtype: Literal["auto", "fp32"] = "auto"
    """Type of the model's output; auto = as computed, fp32 = cast."""
    autocast: Annotated[
        bool,
        Capability(
            "forward under autocast too, for models that mix types (`autocast`)",
            {"single ddp": "its forward always runs under autocast: remove the key"},
            choices=(True,),
        ),
    ] = False
    """fsdp, hsdp and ZeRO: run forward under autocast too, as single and ddp do, for a model that mixes its own fp32
    tensors into products; the engine itself casts only weights and inputs."""
    router_fp32: bool = True
    """Compute the routers of transformers' experts in fp32 in every mode: logits, probabilities, the choice and its
    weights. fsdp and hsdp gather their fp32 weights; ZeRO and pure_bf16 have these in 16 bits."""
    loss_scale_init_power: int = Field(16, ge=0, le=31)
    """fp16: the loss scale starts at 2 to this power; a gradient overflow halves it and skips the step."""
    loss_scale_window: int = Field(1000, ge=1)
    """fp16: steps without overflow after which the scale doubles."""


class ActivationConfig(Section):
    policy: Annotated[
        Literal["none", "full", "every_k", "selective", "selective_op", "budget"],
        Capability("activation checkpointing, every policy", name="activation_checkpointing"),
    ] = "none"
    """Parts that backward recomputes instead of keeping their activations: none, every block, every `every_k`-th block,
    attention only, all but matrix products and fused attention, or enough for `budget`."""
    every_k: int = Field(2, ge=1)
    """every_k: one block in this many is recomputed; 1 = all, at most the number of blocks."""
    budget: float = Field(0.5, ge=0, le=1)
    """budget: share of the activations that torch.compile may keep; 0 = inputs only, 1 = all."""
    block_classes: list[str] = []
    """Class names of the modules that are blocks; unset = the task's, or the longest list of equal modules."""
    offload: Annotated[
        Literal["none", "cpu"],
        Capability(
            "activations in host memory (`activation.offload: cpu`)", name="activation_offload", choices=("cpu",)
        ),
    ] = "none"
    """Where blocks keep tensors for backward: on the device, or in pinned host memory."""
    offload_min_bytes: int = Field(1_048_576, ge=0)
    """cpu: smaller storages stay on the device."""

    @property
    def recomputes(self) -> bool:
        """Whether a policy changes modules, so that the model's blocks have to be found."""
        return self.policy not in ("none", "budget")


class CompileConfig(Section):
    enabled: Annotated[bool, Capability("torch.compile per block", name="compile", choices=(True,))] = False
    """torch.compile each block in place."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's mode; reduce-overhead and max-autotune keep CUDA graphs, whose buffers raise the peak."""
    scope: Annotated[
        Literal["block", "model"],
        Capability(
            "torch.compile of the whole model (`compile.scope: model`)",
            {
                "fsdp hsdp zero3": "hooks gather weights in the middle of the model's forward, and each would break "
                "its graph"
            },
            name="compile_model",
            choices=("model",),
            beside=lambda compilation: compilation.enabled,
            fix="set compile.scope=block",
        ),
    ] = "block"
    """Unit of compilation: each block (equal blocks share one compilation), or the whole model."""

    @property
    def keeps_graphs(self) -> bool:
        """Whether compiled code becomes CUDA graphs."""
        return self.mode in ("reduce-overhead", "max-autotune")


class CheckpointConfig(Section):
    every_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints; unset = not by count."""
    every_minutes: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    """Save at the first step after this time since the last checkpoint; null = not by time. auto = after ten minutes,
    or 50 times as long as the longest save took (2 % of the time), unless `every_steps` is set."""
    at_end: bool = True
    """Save after the last step."""
    keep_last: int | None = Field(3, ge=1)
    """Number of newest checkpoints to keep; older ones are deleted; null = keep all."""
    keep_best: bool = True
    """Also keep the one with the lowest validation loss, among those saved right after an evaluation."""
    async_save: bool = False
    """Write while training continues, from a copy of the rank's share in host memory."""
    on_corrupt: Literal["previous", "error"] = "previous"
    """A damaged checkpoint on resume: use the newest intact one, or stop."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds in which a save may write no byte before the job ends and names the rank; unset = 1800 for a run's first
    save, then ten times its longest save, at least 120."""

    @property
    def is_periodic(self) -> bool:
        """Whether the settings say when the run saves checkpoints before its end."""
        return self.every_steps is not None or self.every_minutes not in (None, "auto")

    @property
    def is_automatic(self) -> bool:
        """Whether the run chooses the time between checkpoints by the time that they take."""
        return self.every_steps is None and self.every_minutes == "auto"


class MemoryConfig(Section):
    interval: int = Field(10, ge=1)
    """Steps between gathers of every rank's memory on rank 0 (the first and last step are always gathered)."""
    trace_step: int | None = Field(None, ge=1)
    """An optimizer step to trace tensor by tensor on every rank: the tensors of its peak, and how memory rises and
    falls module by module (trace/rank{r}.json); that step takes several times as long. Unset = none."""
    cap: str | None = None
    """Limit of a rank's memory for tensors, such as 2GiB; beyond it a rank runs out of memory as on a smaller GPU.
    On a GPU the allocator enforces it at no cost; on the CPU, counting costs some 20 µs per operator."""
    plan: Literal["auto"] | bool = "auto"
    """Predict the run's memory during its first steps (a process of the lowest priority on rank 0's host) and show it
    beside the measured memory: true or false; auto = on GPUs, if rank 0 has a second CPU and memory for it."""
    host_warn: float = Field(0.95, gt=0, le=1)
    """Share of the host's memory in use at which a rank warns, and writes a post-mortem in case it is killed."""

    @model_validator(mode="after")
    def _cap(self) -> MemoryConfig:
        try:
            self.cap_bytes  # noqa: B018
        except ValueError:
            raise conflict(
                f"memory.cap={self.cap} is not a size",
                "write a number and KiB, MiB, GiB or TiB, such as memory.cap=2GiB",
            ) from None
        return self

    @property
    def cap_bytes(self) -> int | None:
        return None if self.cap is None else parse_bytes(self.cap)


class ProfileConfig(Section):
    start: int | None = Field(None, ge=1)
    """First optimizer step to profile; unset = none. Step 1 also shows one-time work."""
    steps: int = Field(2, ge=1)
    """Number of consecutive steps to profile; the trace grows with it."""
    ranks: Literal["all"] | list[int] = Field([0], min_length=1)
    """The ranks to profile; the others run as usual."""
    record_shapes: bool = False
    """Record each operator's input shapes; keeps inputs alive a little longer."""
    stack: bool = False
    """Record the line of Python that each operator and allocation comes from; slows the profiled steps."""

    @model_validator(mode="after")
    def _start_and_ranks(self) -> ProfileConfig:
        fields = type(self).model_fields
        ignored = [key for key in sorted(self.model_fields_set) if getattr(self, key) != fields[key].default]
        if self.start is None and ignored:
            raise conflict(
                f"profile.{ignored[0]} is set, but profile.start is not: nothing would be profiled",
                f"set profile.start to a step, or remove profile.{ignored[0]}",
            )
        if self.ranks != "all" and min(self.ranks) < 0:
            raise conflict(f"profile.ranks={self.ranks}: ranks count from 0", "set profile.ranks=[0], or all")
        return self


class LoggingConfig(Section):
    every: int = Field(10, ge=1)
    """Steps between progress lines when there is no terminal."""
    tensorboard: bool = True
    """Write TensorBoard event files beside `metrics.jsonl`."""
    wandb_project: str | None = Field(None, min_length=1)
    """Also log to this Weights & Biases project (needs the `wandb` extra; WANDB_MODE=offline works)."""
    prometheus_port: int | None = Field(None, ge=0, le=65535)
    """Port on which rank 0 answers Prometheus; 0 = any free port, written to `logs/prometheus.txt`; unset = none."""
    prometheus_host: str = Field("127.0.0.1", min_length=1)
    """Address that the endpoint binds to; it has no password, so open it only to machines that you trust."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is shown."""


class RunSection(Section):
    dir: str = Field("runs/default", min_length=1)
    """Directory for everything that a run writes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = cuda when torch sees a GPU."""
    resume: bool | str = False
    """true = continue the run in `dir`, which must exist unless a scheduler's job starts it; auto = continue it if
    there is one; or the path of a checkpoint or a run to start from (./auto for one of that name)."""
    overwrite: bool = False
    """Delete what an earlier run left in `dir`."""
    init_timeout_s: float = Field(1800, gt=0)
    """Longest wait for ranks to join and for the first step (compilation, op builds); a save must grow within it."""
    step_timeout_s: float = Field(600, gt=0)
    """Longest time without progress after the first step, not counting time in which the job is suspended."""

    @model_validator(mode="after")
    def _resume_or_overwrite(self) -> RunSection:
        if self.resume == "":
            raise conflict("run.resume is empty", "set run.resume=true, or to the path of a checkpoint or a run")
        if self.resume in ("latest", "last", "newest", "best"):
            raise conflict(
                f"run.resume={self.resume} is no way to resume",
                f"set run.resume=true for the newest checkpoint of run.dir, or ./{self.resume} for one of that name",
            )
        if self.continues and self.overwrite:
            word = "true" if self.resume is True else "auto"
            raise conflict(
                f"run.resume={word} and run.overwrite=true", "set only one: go on with the run, or delete it"
            )
        return self

    @property
    def continues(self) -> bool:
        """Whether the run that `dir` holds goes on."""
        return self.resume is True or self.resume == "auto"

    @property
    def source(self) -> str | None:
        """The checkpoint or run that `resume` names to start from."""
        return self.resume if isinstance(self.resume, str) and self.resume != "auto" else None


class RunConfig(Section):
    """The whole configuration; see docs/reference.md for the keys that are kept stable."""

    task: TaskConfig = TaskConfig()
    """The task to train."""
    model: ModelConfig = ModelConfig()
    """The model: the reference transformer, or one of transformers."""
    adapter: AdapterConfig = AdapterConfig()
    """Adapters over a frozen model."""
    data: DataConfig = DataConfig()
    """The data to read."""
    train: TrainConfig = TrainConfig()
    """Steps, batches, clipping, evaluation."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and learning-rate schedule."""
    parallel: ParallelConfig = ParallelConfig()
    """How state is spread over ranks and host memory."""
    precision: PrecisionConfig = PrecisionConfig()
    """Compute types."""
    activation: ActivationConfig = ActivationConfig()
    """Activation checkpointing."""
    compile: CompileConfig = CompileConfig()
    """torch.compile."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are saved, and which are kept."""
    memory: MemoryConfig = MemoryConfig()
    """The memory ledger."""
    profile: ProfileConfig = ProfileConfig()
    """torch's profiler over a few steps."""
    logging: LoggingConfig = LoggingConfig()
    """Progress, metrics and messages."""
    run: RunSection = RunSection()
    """The run's directory, device, start and timeouts."""

    @model_validator(mode="after")
    def _across_sections(self) -> RunConfig:
        reference = self.task.factory is None and self.task.name == "causal_lm"
        if reference and self.train.seq_len > self.model.max_seq_len:
            raise conflict(
                f"train.seq_len={self.train.seq_len} is longer than model.max_seq_len={self.model.max_seq_len}",
                f"set train.seq_len={self.model.max_seq_len}, or model.max_seq_len={self.train.seq_len}",
            )
        if self.model.init_from is not None and self.run.source is not None and self.adapter.type == "none":
            raise conflict(
                f"model.init_from={self.model.init_from} and run.resume={self.run.source}: both say what to start from",
                "set only one: weights alone, or the whole state of a run",
            )
        for keys, refused, reason, fix in COMBINATIONS:
            if refused(self):
                raise conflict(f"{' with '.join(map(self.setting, keys.split()))}: {reason}", fix)
        train = self.train
        if self.profile.start is not None and self.profile.start > train.max_steps:
            raise conflict(
                f"profile.start={self.profile.start} is after the last step, train.max_steps={train.max_steps}",
                f"set profile.start to at most {train.max_steps}, or raise train.max_steps",
            )
        unit = train.micro_batch_size * (train.grad_accum_steps or 1)
        if train.global_batch_size is not None and train.global_batch_size % unit:
            product = "micro_batch_size" if train.grad_accum_steps is None else "micro_batch_size × grad_accum_steps"
            near = train.global_batch_size // unit * unit
            raise conflict(
                f"train.global_batch_size={train.global_batch_size} is not a multiple of {product} = {unit}",
                f"set train.global_batch_size={f'{near} or {near + unit}' if near else unit}",
            )
        return self

    def setting(self, dotted: str) -> str:
        """A key and its value as messages show them; a mapping by its key alone."""
        section, _, key = dotted.partition(".")
        value = getattr(getattr(self, section), key)
        if isinstance(value, dict | Section):
            return dotted
        if isinstance(value, float):
            return f"{dotted}={value:g}"
        return f"{dotted}={str(value).lower() if isinstance(value, bool) else value}"


BESIDE_AXES: tuple[tuple[str, Callable[[RunConfig], bool], dict[str, str], str], ...] = (
    ("task.name", lambda c: not c.task.may_split_sequences,
     {"tp": "among the built-in tasks only causal language models share their layers"},
     "set task.name=causal_lm or hf_causal_lm"),
    ("model.dropout", lambda c: c.model.dropout > 0, {"tp": "ranks would drop the same values of different heads"},
     "set model.dropout=0"),
    ("adapter.dropout", lambda c: c.adapter.type != "none" and c.adapter.dropout > 0,
     {"tp": "ranks would drop the same values of different heads"}, "set adapter.dropout=0"),
    ("precision.mode", lambda c: c.precision.mode == "fp8",
     {"tp": "torchao scales whole weights and inputs", "ep": "it is not tested with experts of other ranks"},
     "set precision.mode=bf16"),
    ("activation.policy", lambda c: c.activation.policy == "budget",
     {"tp ep": "torch.compile cannot weigh such code"}, "set activation.policy=selective"),
    ("model.mlp_chunks", lambda c: c.model.mlp_chunks > 1, {"ep": "ranks would exchange rows for each part"},
     "set model.mlp_chunks=1"),
    ("parallel.tp_sequence", lambda c: c.parallel.tp_sequence and c.model.mlp_chunks > 1,
     {"tp": "each part of an MLP would scatter its sum over other positions"},
     "set parallel.tp_sequence=false or model.mlp_chunks=1"),
    ("parallel.tp_sequence", lambda c: c.parallel.tp_sequence and c.parallel.ep > 1,
     {"tp": "routers would see parts of sequences"}, "set parallel.tp_sequence=false or parallel.ep=1"),
    ("parallel.tp_sequence", lambda c: c.parallel.tp_sequence and c.precision.mode == "fp16",
     {"tp": "fp16 is not compared with one process there"}, "set parallel.tp_sequence=false or precision.mode=bf16"),
    ("parallel.tp_sequence", lambda c: c.parallel.tp_sequence and c.compile.enabled,
     {"tp": "torch.compile fails to keep a tensor of its parts until backward"},
     "set parallel.tp_sequence=false or compile.enabled=false"),
)  # fmt: skip
"""What the axes that split layers and experts cannot do yet: (a key, whether a config has it, each axis' reason, the
fix). docs/wide.md has the same list."""


def _refused_axes() -> Iterator[tuple[str, Callable[[RunConfig], bool], str, str]]:
    for key, has, reasons, fix in BESIDE_AXES:
        for axis, reason in ((axis, reason) for axes, reason in reasons.items() for axis in axes.split()):

            def refused(config: RunConfig, axis: str = axis, has: Callable[[RunConfig], bool] = has) -> bool:
                return bool(getattr(config.parallel, axis) > 1 and has(config))

            yield f"parallel.{axis} {key}", refused, reason, f"{fix}, or remove parallel.{axis}"


COMBINATIONS: tuple[tuple[str, Callable[[RunConfig], bool], str, str], ...] = (
    *_refused_axes(),
    ("adapter.type task.name", lambda c: c.adapter.type != "none" and not c.task.takes_adapters,
     "only hf_causal_lm and hf_masked_lm take adapters",
     "set task.name=hf_causal_lm or hf_masked_lm, or remove adapter"),
    ("adapter.type model.resize_embeddings", lambda c: c.adapter.type != "none" and c.model.resize_embeddings,
     "the new rows would be frozen, and nothing trains them",
     "train the new rows in a run with adapter.type=none first, and name its export in model.init_from"),
    ("adapter.type train.ema_decay", lambda c: c.adapter.type != "none" and c.train.ema_decay is not None,
     "the frozen model would be averaged as well", "remove train.ema_decay"),
    ("adapter.type precision.mode", lambda c: c.adapter.type != "none" and c.precision.mode == "fp8",
     "torchao would replace the adapter's own linear layers", "set precision.mode=bf16"),
    ("parallel.cp task.name", lambda c: c.parallel.cp > 1 and not c.task.may_split_sequences,
     "among the built-in tasks only causal language models split their sequences",
     "remove parallel.cp, or set task.name=causal_lm or hf_causal_lm"),
    ("model.quantize adapter.type", lambda c: c.model.quantize is not None and c.adapter.type == "none",
     "packed weights have no gradient, so nothing could train", "set adapter.type=lora, or remove model.quantize"),
    ("model.quantize compile.enabled", lambda c: c.model.quantize is not None and c.compile.enabled,
     "the packed layers are not compiled", "set compile.enabled=false"),
    ("model.quantize parallel.offload_param",
     lambda c: c.model.quantize is not None and c.parallel.offload_param == "nvme",
     "DeepSpeed keeps parameters there in the compute type, and would cast packed bytes",
     "set parallel.offload_param=cpu"),
    ("model.mlp_chunks compile.enabled", lambda c: c.model.mlp_chunks > 1 and c.compile.enabled,
     "torch.compile would order the parts and their recomputation by itself",
     "set compile.enabled=false, or remove model.mlp_chunks"),
    ("model.mlp_chunks activation.policy",
     lambda c: c.model.mlp_chunks > 1 and c.activation.policy == "selective_op",
     "it keeps the products of every part, which then save nothing", "set activation.policy=full, selective or none"),
    ("model.mlp_chunks precision.mode", lambda c: c.model.mlp_chunks > 1 and c.precision.mode == "fp8",
     "products in fp8 need multiples of 16 rows, and a part may have any number", "set precision.mode=bf16"),
    ("optim.in_backward train.max_norm", lambda c: c.optim.in_backward and c.train.max_norm is not None,
     "clipping needs all gradients at once", "set train.max_norm=null, or remove optim.in_backward"),
    ("optim.in_backward train.grad_accum_steps",
     lambda c: c.optim.in_backward and (c.train.grad_accum_steps or 1) > 1,
     "each backward updates", "set train.grad_accum_steps=1, or remove optim.in_backward"),
    ("optim.in_backward precision.mode", lambda c: c.optim.in_backward and c.precision.mode == "fp16",
     "whether to skip a step is known after it", "set precision.mode=bf16, or remove optim.in_backward"),
    ("activation.policy compile.enabled", lambda c: c.activation.policy == "budget" and not c.compile.enabled,
     "torch.compile chooses what fits the budget", "set compile.enabled=true, or activation.policy=selective"),
    ("activation.policy compile.enabled parallel.strategy",
     lambda c: c.activation.policy == "selective_op" and c.compile.enabled and c.parallel.strategy == "zero3",
     "DeepSpeed's linear writes to the products that compiled code keeps",
     "set activation.policy=selective, or compile.enabled=false"),
    ("activation.offload compile.mode",
     lambda c: c.activation.offload == "cpu" and c.compile.enabled and c.compile.keeps_graphs,
     "CUDA graphs have memory of their own",
     "set compile.mode=default or max-autotune-no-cudagraphs, or activation.offload=none"),
    ("data.packing compile.enabled", lambda c: c.data.packing != "none" and c.compile.enabled,
     "every batch has other documents, and code would be compiled for each",
     "set compile.enabled=false, or data.packing=none"),
    ("parallel.offload_ratio optim.name", lambda c: c.parallel.offload_ratio != 1 and c.optim.name != "adamw",
     "DeepSpeed updates a share on each side with its own AdamW only",
     "set optim.name=adamw, or remove parallel.offload_ratio"),
    ("precision.mode parallel.offload_optimizer optim.name",
     lambda c: c.precision.mode == "pure_bf16" and c.optim.name != "adamw"
     and c.parallel.strategy.startswith("zero") and c.parallel.offload_optimizer != "none",
     "DeepSpeed keeps bf16 masters on the CPU for its own AdamW only",
     "set optim.name=adamw, or precision.mode=bf16"),
    # GradScaler and fused optimizers (torch 2.9 to 2.13) copy the scale without waiting for it.
    ("precision.mode parallel.offload_param parallel.strategy",
     lambda c: c.precision.mode == "fp16" and c.parallel.offload_param == "cpu"
     and c.parallel.strategy in ("fsdp", "hsdp"),
     "torch would scale gradients on the CPU by a number that is still on its way from the GPU",
     "set precision.mode=bf16, or parallel.strategy=zero3"),
)  # fmt: skip
"""Settings that are valid alone and refused together: (their keys, whether a config has them, why, the fix)."""


def sections() -> dict[str, type[Section]]:
    """The sections of the config by name, in the order of the file."""
    return {
        name: info.annotation
        for name, info in RunConfig.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
    }


def section_fields() -> dict[str, dict[str, Any]]:
    """Section name -> its fields, in the order they are documented."""
    return {name: dict(section.model_fields) for name, section in sections().items()}
