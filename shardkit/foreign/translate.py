"""The config here that trains as the files of another tool's job say, and how far it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.errors import combined, shown
from ..config.load import Layers, LoadedConfig, split_override
from ..config.schema import RunConfig
from ..config.strategy import SHARDING, Sharding
from ..config.yaml import Document
from ..errors import ConfigError, NotPlannedError
from . import tables
from .autos import in_few_lines
from .combine import combine
from .files import File, family
from .four_bits import bnb_layers, settle
from .gather import adapter_file, gather, read_model
from .notes import Note, notes
from .recipes import loaded_type, lora_kernels, model_named
from .tables import Problem, Settings
from .together import PSEUDO, FileKey, Together
from .transfers import Transfer, makes_config_first, transfers

TASKS = {
    "ForCausalLM": "hf_causal_lm",
    "LMHeadModel": "hf_causal_lm",
    "ForMaskedLM": "hf_masked_lm",
    "ForImageClassification": "image_classification",
    "ForImageSuperResolution": "super_resolution",
}
"""How a class in a model's `architectures` ends → the built-in task with that head."""
OF_ONE_ENGINE = (
    "precision.autocast", "precision.reduce_dtype", "parallel.find_unused", "parallel.bucket_mb", "parallel.hpz",
    "parallel.reshard_after_forward", "parallel.dp_replicate", "parallel.dp_shard", "parallel.ds_config.",
    "optim.implementation", "data.mask_fraction",
)  # fmt: skip
"""Keys that other engines refuse, or that only describe their memory; a search over engines leaves them out."""
_TORCH_ADAM = "optimizer.params.torch_adam"


@dataclass(frozen=True)
class LeftOut:
    """A difference that a plan does not have.

    Attributes:
        per_token: bytes on the device for each token of a micro-batch; 0 if the size is unknown.
    """

    text: str
    per_token: int = 0

    def amount(self, config: RunConfig) -> int:
        """Bytes of it on the device at most; 0 if the size is unknown."""
        return self.per_token * config.train.micro_batch_size * config.train.seq_len


@dataclass(frozen=True)
class ForeignJob:
    """A job of other tools, in keys here.

    Attributes:
        file_keys: every key of every file, and defaults of their tools that differ from shardkit's.
        settings: dotted keys here → values.
        added: settings without a key in any file, each with its reason.
        left_out: differences that a plan does not have.
        transfers: moments of loading and saving.
        problems: reasons not to plan; empty if the files say everything.
        gpus: ranks of the job.
        gpus_per_node: ranks on one machine; `None` if no file says it.
        loop: for the planner: how their loop differs where no key here says it.
        reread: the job with other files in place of `files`.
        adapter: the files' settings of an adapter that is off, for a command line that turns it on.
        notes: what silently changes the mathematics, and misspelt keys; no plan depends on them.
    """

    files: tuple[File, ...]
    file_keys: tuple[FileKey, ...]
    settings: Settings
    added: tuple[tuple[str, Any, str], ...]
    left_out: tuple[LeftOut, ...]
    transfers: tuple[Transfer, ...]
    problems: tuple[Problem, ...]
    gpus: int
    gpus_per_node: int | None
    loop: Settings = field(default_factory=dict)
    reread: Callable[[Sequence[File]], ForeignJob] | None = field(default=None, repr=False, compare=False)
    adapter: Settings = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    expandable = False
    """For the target: torch's allocator has segments of fixed size unless a variable asks for others."""

    @property
    def name(self) -> str:
        return " + ".join(Path(file.name).name for file in self.files if file.tool != "model")

    @property
    def not_planned(self) -> list[str]:
        """A line for each key that changes memory and that no plan models; with one there is no verdict."""
        return [
            f"not planned: {file_key.key}={shown(file_key.value)} in {file_key.file}: {file_key.note}"
            for file_key in self.file_keys
            if file_key.fate == "unplanned"
        ]

    def refuse_unplanned(self, otherwise: str = "") -> None:
        """Stop before work that only a complete plan is good for.

        Args:
            otherwise: a second fix, such as a flag that goes on without a plan.

        Raises:
            NotPlannedError: a key of the files changes memory, and no plan models it; each has a line.
        """
        if self.not_planned:
            fix = "to plan without it, remove the key from a copy of the file; with it, shardkit rehearse -- COMMAND"
            raise NotPlannedError("\n".join(self.not_planned), f"{fix}, or {otherwise}" if otherwise else fix)

    def load(self, overrides: Sequence[str] = ()) -> LoadedConfig:
        """The config here, validated; `["train.seq_len=2048"]` wins over the files and settles open points.

        Raises:
            ConfigError: the files contradict each other or leave something open, or a value is refused.
        """
        pairs = [split_override(item) for item in overrides]
        keys = [key for key, _ in pairs]
        still = [problem for problem in self.problems if problem.setting not in keys]
        if still:
            raise combined([ConfigError(cause, fix) for cause, fix in in_few_lines(still)])
        settings = dict(self.settings)
        if ("adapter.type", "lora") in pairs:
            settings |= self.adapter
        if ("run.device", "cpu") in pairs and settings.get("optim.implementation") == "foreach":
            settings["optim.implementation"] = "for_loop"  # torch's own choice there
        layers = Layers()
        layers.add_file(self.name, Document(nested(settings)))
        for dotted, value in pairs:
            layers.add_override(dotted, value, raw=True)
        return LoadedConfig(*layers.resolve())


def read_job(
    names: Sequence[str | Path | Mapping[str, Any] | Any],
    model: str | Path | None = None,
    gpus: int | None = None,
    peft: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> ForeignJob:
    """Read files of other tools that are used together in one job.

    The tools are Accelerate, DeepSpeed, transformers' Trainer, TRL, LLaMA-Factory, axolotl and peft.

    Args:
        names: the files; one that another names is read too. In place of a file also its content as a mapping, or
            an object that gives one by `to_dict()`, such as TrainingArguments or LoraConfig.
        model: a transformers `config.json`, or a folder that holds one.
        gpus: ranks of the job; default: what the files say, else 1.
        peft: peft's `adapter_config.json`, or the folder that holds one.
        overrides: settings that the job will be loaded with; an `auto` that one of them sets counts as filled.

    Raises:
        ConfigError: a file cannot be read; two files of one tool; or `model` has no config.
    """
    sources, problems = gather([*names, *([] if peft is None else [adapter_file(str(peft))])])
    if model is None:
        model = next((file.name for file in sources if file.tool == "model"), None) or model_named(sources)[0] or None
    path = None if model is None else str(model)
    config = {} if path is None else read_model(path)
    command_line = dict(map(split_override, overrides))

    def made(files: Sequence[File]) -> ForeignJob:
        job = translate(combine(list(files), config, list(problems), command_line), path, gpus)
        return replace(job, reread=made)

    return made(sources)


def nested(settings: Settings) -> dict[str, Any]:
    """Dotted keys as a tree."""
    tree: dict[str, Any] = {}
    for dotted, value in settings.items():
        *sections, key = dotted.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return tree


def translate(job: Together, model: str | None, gpus: int | None) -> ForeignJob:
    """The job in keys here."""
    work = _Translation(job, model, gpus)
    work.strategy()
    work.precision()
    defaults = settle(job, work.halves, work.stored).items()
    work.added += [(key, choice, f"{family(job.recipe)}'s default") for key, choice in defaults]
    work.batch()
    work.task()
    work.loop()
    work.drop_what_does_nothing()
    machines, loop, spare = work.machines or 1, work.other_loop(), work.drop_an_adapter_that_is_off()
    return ForeignJob(
        tuple(job.files), tuple(job.file_keys), job.settings, tuple(work.added), tuple(work.left_out()),
        work.transfers(), tuple(job.problems), work.gpus, work.gpus // machines if work.gpus % machines == 0 else None,
        loop, adapter=spare, notes=notes(job),
    )  # fmt: skip


class _Translation:
    """The steps of `translate`."""

    def __init__(self, job: Together, model: str | None, gpus: int | None) -> None:
        self.job, self.settings, self.model, self.path = job, job.settings, job.model, model
        pseudo = {key: self.settings.pop(key, None) for key in PSEUDO}
        self.halves = [half for half in ("fp16", "bf16") if pseudo[half]]
        self.tf32, self.engine, self.machines = pseudo["tf32"], pseudo["engine"], pseudo["machines"]
        self.gpus, self.ranks_are_said = gpus or max(1, pseudo["gpus"] or 1), bool(gpus or pseudo["gpus"])
        self.added: list[tuple[str, Any, str]] = []
        self.in_file = str(self.model.get("dtype") or self.model.get("torch_dtype") or "").removeprefix("torch.")
        self.stored = loaded_type(job, self.halves, self.in_file)
        head = str((self.model.get("architectures") or ["ForCausalLM"])[0])
        self.task_name = next((task for end, task in TASKS.items() if head.endswith(end)), "")
        self.text = self.task_name in ("hf_causal_lm", "hf_masked_lm", "")

    def set(self, setting: str, value: Any, reason: str) -> None:
        self.settings[setting] = value
        self.added.append((setting, value, reason))

    @property
    def sharding(self) -> Sharding:
        """What the job's strategy shares out among ranks."""
        return SHARDING[self.settings["parallel.strategy"]]

    @property
    def of_the_trainer(self) -> bool:
        """Whether the Trainer makes the optimizer."""
        return self.job.has("trainer") and not self.job.value("deepspeed", "optimizer.type")

    def strategy(self) -> None:
        stage, named = self.job.stage, self.settings.get("parallel.strategy")
        if stage is not None and self.job.fsdp_version() is not None:
            self.job.problem(
                "contradiction", "the files ask for FSDP and for DeepSpeed at once",
                "remove one of the two, or set parallel.strategy on the command line", "parallel.strategy",
            )  # fmt: skip
        for tool, key in (("accelerate", "fsdp_config.fsdp_version"), ("trainer", "fsdp_config.version")):
            version = self.job.value(tool, key)
            if version is not None and str(version) not in ("1", "2"):
                self.job.problem(
                    "wrong value", f"{key}={version} is neither FSDP1 nor FSDP2",
                    "set it to 2, or parallel.strategy on the command line", "parallel.strategy", (key,),
                )  # fmt: skip
        on_cpu = self.job.is_on("accelerate", "use_cpu")
        if stage is not None and self.job.has("trainer") and self.job.kind in ("NO", "MULTI_CPU") and on_cpu:
            self.job.problem(
                "contradiction",
                f"use_cpu=true with distributed_type={self.job.kind} in Accelerate's file: Accelerate then leaves "
                "DeepSpeed out, and trains with DDP",
                "remove use_cpu from Accelerate's file and set it in the Trainer's, or remove the DeepSpeed file",
                "parallel.strategy", ("use_cpu", "deepspeed"),
            )  # fmt: skip
        if stage == 0 and self.halves:
            self.job.problem(
                "no counterpart", "zero_optimization.stage is 0: DeepSpeed in half precision then keeps whole fp32 "
                "copies in an optimizer of its own, which shardkit does not have",
                "set stage 1 or higher, or parallel.strategy on the command line",
                "parallel.strategy", ("zero_optimization.stage",),
            )  # fmt: skip
        if stage is not None:
            named = tables.STAGES[stage]
        elif named is None and self.engine and SHARDING[self.engine].by_fsdp and not self.job.on_cpu:
            named = self.engine
        if named is not None:
            self.settings["parallel.strategy"] = named
            return
        unsharded = "ddp" if self.gpus > 1 else "single"
        self.set("parallel.strategy", unsharded, f"no file shards anything; the number of ranks is {self.gpus}")

    def precision(self) -> None:
        if len(self.halves) == 2:
            keys = self.job.file_keys
            switches = [next(str(key) for key in keys if key.settings.get(half)) for half in self.halves]
            self.job.problem(
                "contradiction", f"{switches[0]} and {switches[1]}: only one half-precision type can be on",
                "turn one of the two off", "precision.mode", ("fp16", "bf16"),
            )  # fmt: skip
        half = self.halves[0] if self.halves else ""
        self.settings.setdefault("precision.mode", half or ("tf32" if self.tf32 else "fp32"))
        upcast = self.job.stage is not None or (half and self.sharding.by_fsdp) or self.job.adapted
        if self.stored == "bfloat16" and half != "fp16" and not upcast:
            whose = "the model's dtype is bfloat16, which from_pretrained keeps"
            if self.job.recipe:
                whose = f"{family(self.job.recipe)} loads the weights in bfloat16, which is kept"
            self.set("precision.mode", "pure_bf16", f"{whose} for weights, gradients and moments")
        elif half and self.sharding.by_fsdp:
            self.set("precision.reduce_dtype", half, "Accelerate reduces FSDP's gradients in that type")
            if self.job.fsdp_version() == 1:
                self.set("precision.autocast", True, "Accelerate runs FSDP1's forward under autocast too")

    def batch(self) -> None:
        total, micro = self.settings.pop("train.global_batch_size", None), self.settings.get("train.micro_batch_size")
        accum = self.settings.get("train.grad_accum_steps")
        if total is not None and micro and accum and total != micro * accum * self.gpus:
            product = micro * accum * self.gpus
            self.job.problem(
                "contradiction",
                f"train_batch_size={total}, but micro-batch × accumulation × ranks = "
                f"{micro} × {accum} × {self.gpus} = {product}",
                f"set train_batch_size={product}, or leave it out; --gpus sets the ranks",
                "train.micro_batch_size", ("train_batch_size",),
            )  # fmt: skip
        elif total is not None and not micro:
            self.settings["train.micro_batch_size"] = max(1, total // (self.gpus * (accum or 1)))
        elif total is not None and micro and not accum:
            self.settings["train.grad_accum_steps"] = max(1, total // (self.gpus * micro))
        if "train.micro_batch_size" not in self.settings:
            self.unsaid("train.micro_batch_size", "how many samples a micro-batch has", 4)
        if self.text and "train.seq_len" not in self.settings:
            self.unsaid("train.seq_len", "how many tokens a sample has", 2048)

    def unsaid(self, setting: str, missing: str, example: int) -> None:
        if not any(problem.setting == setting for problem in self.job.problems):
            self.job.problem(
                "unsaid", f"no file says {missing}", f"add it to the command, such as {setting}={example}", setting
            )

    def task(self) -> None:
        if self.path is None:
            named = model_named(self.job.files)[1]
            cause = f"{named} is no folder with a config.json here" if named else "no file says which model it is"
            self.job.problem("unsaid", cause, "pass --model, its config.json or its folder")
            return
        if not self.task_name:
            ignored_code = ", and code in its folder (auto_map) is never run" if self.model.get("auto_map") else ""
            self.job.problem(
                "no counterpart", f"no built-in task has the head of {self.model['architectures'][0]}{ignored_code}",
                "set task.name=hf_causal_lm on the command line to plan its body with that head", "task.name",
            )  # fmt: skip
        self.settings["task.name"] = self.task_name or "hf_causal_lm"
        self.settings["model.hf_config"] = str(Path(self.path).expanduser().resolve())

    def loop(self) -> None:
        """Set the differences of their loop that keys here can express."""
        if self.text and "model.loss_chunk_size" not in self.settings:
            whose = "transformers computes the logits of all tokens at once"
            if self.job.recipe == "trl":
                whose += "; TRL with loss_type: chunked_nll does not"
            self.set("model.loss_chunk_size", 0, whose)
        if self.task_name == "hf_masked_lm":
            self.set("data.mask_fraction", 1.0, "transformers computes the logits of every token, masked or not")
        if not self.of_the_trainer:
            self.set("optim.decay_norm_bias_embed", True, "an optimizer over model.parameters() has one group")
        names_optimizer = self.job.value("deepspeed", "optimizer.type") and not self.job.value("deepspeed", _TORCH_ADAM)
        if not self.job.has("trainer") and not names_optimizer:
            self.set("optim.implementation", "foreach", "torch's own choice for AdamW on GPUs")
        if self.settings.get("optim.implementation") == "foreach" and self.settings.get("run.device") == "cpu":
            self.set("optim.implementation", "for_loop", "on the CPU torch's own choice is one parameter at a time")

    def other_loop(self) -> Settings:
        """The differences of their loop that are no keys here, in the fields of the planner's `Loop`."""
        fields: Settings = {"bucket_views": False} | bnb_layers(self.settings)
        if self.of_the_trainer:
            fields["embeddings_decay"] = True
        elif not self.job.has("trainer"):
            fields["keeps_cache"] = self.model.get("use_cache") is not False  # the Trainer turns it off
        if self.job.fsdp_version() == 2:
            fields["tail_unit"] = True
        if self.job.adapted and self.sharding.stage == 3 and self.halves and makes_config_first(self.job):
            fields["fp32_adapters"] = True
            self.added.append(
                ("adapters", "float32", "peft makes them after zero.Init, and DeepSpeed casts nothing then")
            )
        if self.job.adapted and self.sharding.stage == 0:
            fields["frozen"] = stored = self.stored or "float32"
            loaded = {"bf16": "bfloat16", "fp16": "float16"}.get(self.settings["precision.mode"], "float32")
            if stored != loaded:
                whose = f"{family(self.job.recipe)} loads" if self.job.recipe else "peft leaves"
                of = "that type" if self.job.recipe else "the type of the model's files"
                self.added.append(("frozen weights", stored, f"{whose} them in {of}"))
        return fields

    def transfers(self) -> tuple[Transfer, ...]:
        """Loading and saving in their loop; none for a model that no file describes."""
        n_bytes = 2 if self.in_file in ("bfloat16", "float16") else 4
        return transfers(self.job, self.settings["parallel.strategy"], bool(self.halves), n_bytes)

    def left_out(self) -> Iterator[LeftOut]:
        """Differences of their loop that no key here can express."""
        job = self.job
        yield from map(LeftOut, lora_kernels(job))
        if self.model.get("auto_map"):
            yield LeftOut("the model folder's own code (auto_map), which is never run: transformers' class is planned")
        if job.fsdp_version() == 1:
            yield LeftOut("FSDP1's flat parameters: planned as FSDP2, which shards each parameter")
        if self.halves and job.stage is None and job.fsdp_version() != 2 and self.text:
            vocabulary = int(self.model.get("vocab_size") or 0)
            yield LeftOut("Accelerate copies half-precision logits to fp32", 4 * vocabulary)
        if self.sharding.state and not self.ranks_are_said:
            yield LeftOut("more than one rank to shard over: no file says how many there are; name them with --gpus N")
        if not job.has("trainer"):
            yield LeftOut("the script's own loop and optimizer: planned are transformers' forward and one AdamW")

    def drop_an_adapter_that_is_off(self) -> Settings:
        """Remove and return the adapter's settings unless one is trained: shardkit would refuse them."""
        if self.job.command_line.get("adapter.type") == "lora":
            self.settings["adapter.type"] = "lora"
        if self.settings.get("adapter.type") == "lora":
            return {}
        names = [key for key in self.settings if key.startswith("adapter.")]
        spare = {key: self.settings.pop(key) for key in names}
        return {key: value for key, value in spare.items() if key != "adapter.type"}

    def drop_what_does_nothing(self) -> None:
        """Remove settings that have no effect in this job: shardkit would refuse them."""
        settings, zero = self.settings, self.sharding.stage > 0
        strategy = settings["parallel.strategy"]
        offloads = [settings.get(f"parallel.offload_{part}") for part in ("optimizer", "param")]
        adam = str(settings.get("optim.name", "adamw")).startswith("adamw")
        betas = [settings.pop(f"optim.betas.{index}", None) for index in (0, 1)]
        if adam and None not in betas:
            settings["optim.betas"] = betas
        drop = {  # find_unused and buckets are DDP's own, and one rank reduces nothing
            "parallel.find_unused": strategy != "ddp",
            "parallel.bucket_mb": strategy != "ddp",
            "parallel.dp_shard": not self.sharding.replicates,
            "parallel.reshard_after_forward": not self.sharding.by_fsdp,
            "parallel.nvme_path": "nvme" not in offloads,
            "parallel.hpz": settings.get("parallel.hpz") is None,
            "precision.loss_scale_init_power": settings["precision.mode"] != "fp16",
            "precision.loss_scale_window": settings["precision.mode"] != "fp16",
            "precision.reduce_dtype": strategy == "single",
            "activation.block_classes": settings.get("activation.policy") is None,
            "compile.mode": not settings.get("compile.enabled"),
            "optim.implementation": settings.get("optim.name", "adamw") not in ("adamw", "sgd") or (zero and any(
                device not in (None, "none") for device in offloads[:1]
            )),
            "optim.min_lr_ratio": settings.get("optim.schedule") == "constant",
            "optim.eps": not adam,
            "train.seq_len": not self.text,
        }  # fmt: skip
        for key in [*settings]:
            if drop.get(key) or (key.startswith("parallel.ds_config.") and not zero):
                del settings[key]
        self.added = [entry for entry in self.added if entry[0] in settings]
