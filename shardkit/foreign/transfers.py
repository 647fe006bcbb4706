"""Memory of loading and saving in the loops of transformers 5.23, Accelerate 1.15 and DeepSpeed 0.19, before and after
the steps.

The figures are those of their code. transformers maps a safetensors file and makes no copy of it while the types are
equal; safetensors copies all tensors of a file to the host before it writes them; Accelerate's `get_state_dict` clones
the whole model on every rank under ZeRO-1 and 2, and gathers it to rank 0 under FSDP2 and ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..config.strategy import SHARDING
from . import tables
from .together import Together


@dataclass(frozen=True)
class Sizes:
    """The counts that a plan finds.

    Attributes:
        params, largest, largest_block: values of the model, of its largest parameter, of its largest block.
        shards: ranks that share one copy of the model.
    """

    params: int
    largest: int
    largest_block: int
    shards: int


@dataclass(frozen=True)
class Transfer:
    """A moment of loading or saving, on the ranks that it concerns.

    Attributes:
        ranks: `every rank`, `rank 0`, or a condition.
        device, host, mapped: bytes for each of the model's values: on the device, in private memory of the host, and
            mapped from the file: one copy for a machine's ranks, which the system may drop and read again.
        shard, gathered, unit: bytes on the device for each value of a rank's shard, of the largest parameter, and of
            the largest block, or of embedding and head together if they are larger.
        host_shard: private bytes on the host for each value of a rank's shard.
        beside: whether it comes on top of the state that stays between two steps.
        host_copy: whether the host gets a copy of the device's state.
        expected: `False` for an order of calls that no file shows.
        fix: a change of their keys or script that takes less; empty if there is none.
    """

    phase: Literal["loading", "saving"]
    ranks: str
    text: str
    device: float = 0
    host: float = 0
    mapped: float = 0
    shard: float = 0
    gathered: float = 0
    unit: float = 0
    host_shard: float = 0
    beside: bool = False
    host_copy: bool = False
    expected: bool = True
    fix: str = ""

    def on_device(self, sizes: Sizes, resident: int) -> int:
        """Bytes on the device at most; `resident`: those that training holds there between two steps."""
        unit = max(sizes.largest_block, 2 * sizes.largest)
        copies = self.device * sizes.params + self.gathered * sizes.largest + self.unit * unit
        return int(copies + self.shard * sizes.params / sizes.shards) + (resident if self.beside else 0)

    def on_host(self, sizes: Sizes, resident: int = 0) -> int:
        """Private bytes of one rank on the host at most; `resident` as for `on_device`."""
        state = resident if self.host_copy else 0
        return int(self.host * sizes.params + self.host_shard * sizes.params / sizes.shards) + state

    def in_file(self, sizes: Sizes) -> int:
        return int(self.mapped * sizes.params)


def transfers(job: Together, strategy: str, half: bool, stored: int) -> tuple[Transfer, ...]:
    """Loading with `from_pretrained`, and the save of the model, as the files have them.

    Args:
        half: whether mixed precision is on.
        stored: bytes of a value in the model's own files: 2 or 4.
    """
    if "model.quantize.bits" in job.settings:
        return tuple(_of_four_bits(strategy, stored))
    return (*_loading(job, strategy, half, stored), *_saving(job, strategy, half, stored))


def _of_four_bits(strategy: str, stored: int) -> Iterator[Transfer]:
    """Loading and saving where bitsandbytes packs the weights on the device, one after another."""
    text = "every rank maps the model's file, and packs one weight after another on the device"
    yield Transfer("loading", "every rank", text, mapped=stored, gathered=stored, beside=True)
    if SHARDING[strategy].stage in (1, 2):
        text = "get_state_dict clones the packed model on the host of every rank, and rank 0 alone writes it"
        yield Transfer("saving", "every rank", text, host_copy=True)


def _loading(job: Together, strategy: str, half: bool, stored: int) -> Iterator[Transfer]:
    device = 0 if job.on_cpu else 1
    trained = 2 if half else stored
    maps = "every rank maps the model's file"
    if SHARDING[strategy].stage == 3:
        early_text = f"{_early(job)}: each layer is sharded at once, and gathered to be filled"
        late = f"{_late(job)}: every rank loads the whole model, and DeepSpeed moves it to the device before it shards"
        early = makes_config_first(job)
        yield Transfer(
            "loading", "every rank", early_text, shard=trained, gathered=trained, host_shard=trained, expected=early
        )
        yield Transfer("loading", "rank 0", "rank 0 alone maps the model's file", mapped=stored, expected=early)
        cast = trained if trained != stored else 0
        yield Transfer(
            "loading", "every rank", late, mapped=stored, host=cast, device=device * trained, expected=not early,
            fix=_make_early(job),
        )  # fmt: skip
    elif SHARDING[strategy].stage in (1, 2):
        cast = trained if trained != stored else 0
        yield Transfer(
            "loading", "every rank", f"{maps}, casts it on the host and moves it to the device" if cast else
            f"{maps} and moves it to the device", mapped=stored, host=cast, device=device * trained,
            fix=f"set {_stage_key(job)}: 3, which shards the weights too",
        )  # fmt: skip
    elif SHARDING[strategy].by_fsdp:
        loaded = 4 if half else stored
        cast = loaded if loaded != stored else 0
        into = f"{maps}, casts it to fp32 on the host" if cast else maps
        option = "cpu_ram_efficient_loading"
        if job.is_on("accelerate", f"fsdp_config.fsdp_{option}") or job.is_on("trainer", f"fsdp_config.{option}"):
            text = f"{into}; rank 0 sends one parameter after another"
            yield Transfer("loading", "every rank", text, mapped=stored, host=cast, shard=loaded, gathered=loaded)
        else:
            text = (
                f"{into} and shards one block after another on the device; embedding and head stay whole until the end"
            )
            yield Transfer(
                "loading", "every rank", text, mapped=stored, host=cast, shard=loaded, unit=loaded,
                fix=f"set {_fsdp_key(job, option)}: true",
            )  # fmt: skip
    else:
        yield Transfer(
            "loading", "every rank", f"{maps} and copies it to the device", mapped=stored, device=device * stored
        )


def _saving(job: Together, strategy: str, half: bool, stored: int) -> Iterator[Transfer]:
    saved = (
        (4 if half else stored) if SHARDING[strategy].by_fsdp else 2 if half and SHARDING[strategy].stage else stored
    )
    if SHARDING[strategy].by_fsdp and saves_whole(job, strategy):
        yield Transfer("saving", "every rank", "a parameter is gathered on every device", gathered=saved, beside=True)
        fix = f"set {_fsdp_key(job, 'state_dict_type')}: SHARDED_STATE_DICT"
        yield Transfer("saving", "rank 0", "FULL_STATE_DICT: the whole model on the host", host=saved, fix=fix)
        if job.has("trainer"):
            text = "FULL_STATE_DICT: the optimizer's whole moments, in a checkpoint"
            yield Transfer("saving", "rank 0", text, host=8, fix=fix)
    elif SHARDING[strategy].stage in (1, 2):
        text = "get_state_dict clones the whole model on the host of every rank, and rank 0 alone writes it"
        fix = f"set {_stage_key(job)}: 3, whose checkpoints hold shards"
        yield Transfer("saving", "every rank", text, host=saved, fix=fix)
    elif SHARDING[strategy].stage == 3 and saves_whole(job, strategy):
        text, fix = f"{_GATHER}: a layer is gathered on every device", f"set {_gather_key(job)}: false, and convert "
        fix += "checkpoints with zero_to_fp32.py"
        yield Transfer("saving", "every rank", text, gathered=saved, beside=True, fix=fix)
        yield Transfer("saving", "rank 0", f"{_GATHER}: the whole model on the host", host=saved, fix=fix)
    elif SHARDING[strategy].stage == 3:
        yield Transfer("saving", "every rank", "DeepSpeed's own checkpoint: a rank's fp32 values", host_shard=4)
    elif not SHARDING[strategy].state and not job.on_cpu:
        yield Transfer("saving", "rank 0", "safetensors copies the whole file to the host", host=saved)


_GATHER = tables.GATHER.partition(".")[2]


def makes_config_first(job: Together) -> bool:
    """Whether transformers knows of ZeRO-3 before it makes the model, so that each layer is sharded at once."""
    is_early = job.kind == "DEEPSPEED" and job.is_on("accelerate", "deepspeed_config.zero3_init_flag")
    return is_early or job.has("trainer")


def _early(job: Together) -> str:
    return "TrainingArguments made before the model" if job.has("trainer") else "zero3_init_flag: true"


def _late(job: Together) -> str:
    if job.has("trainer"):
        return "TrainingArguments made after the model"
    if job.kind == "DEEPSPEED":
        return "zero3_init_flag: false, or a model made before the Accelerator"
    return "a model made without deepspeed.zero.Init or HfDeepSpeedConfig"


def _make_early(job: Together) -> str:
    """The change after which ZeRO-3 shards each layer as it is made."""
    if job.has("trainer"):
        return "make TrainingArguments before the model"
    if job.kind == "DEEPSPEED":
        return "set deepspeed_config.zero3_init_flag: true, and make the Accelerator before the model"
    return "make the model under deepspeed.zero.Init"


def _fsdp_key(job: Together, name: str) -> str:
    return f"fsdp_config.fsdp_{name}" if job.kind == "FSDP" else f"fsdp_config.{name}"


def _stage_key(job: Together) -> str:
    return "zero_optimization.stage" if job.has("deepspeed") else "deepspeed_config.zero_stage"


def _gather_key(job: Together) -> str:
    return tables.GATHER if job.has("deepspeed") else "deepspeed_config.zero3_save_16bit_model"


def saves_whole(job: Together, strategy: str) -> bool:
    """Whether a sharded model is gathered on rank 0 to be saved."""
    if SHARDING[strategy].by_fsdp:
        of_accelerate = job.kind == "FSDP"
        tool, prefix = ("accelerate", "fsdp_config.fsdp_") if of_accelerate else ("trainer", "fsdp_config.")
        default = "SHARDED_STATE_DICT" if of_accelerate and job.fsdp_version() == 2 else "FULL_STATE_DICT"
        return str(job.value(tool, f"{prefix}state_dict_type", default)) == "FULL_STATE_DICT"
    inline = job.is_on("accelerate", "deepspeed_config.zero3_save_16bit_model")
    return job.stage == 3 and (inline or job.is_on("deepspeed", tables.GATHER))
