"""Map shardkit's keys to a DeepSpeed config, and build the optimizer in C++ that one may ask for.

Raw keys pass through, conflicts are refused.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from ...config.libraries import NameGone
from ...config.load import merged
from ...config.schema import RunConfig
from ...errors import BuildError, ConfigError
from ...files import locked
from ...parallel.world import World
from .state import BUILD_FOLDER, BUILDS

DEFAULT_BUCKET_MB = 500.0

# DeepSpeed key -> the shardkit key that decides it. A raw value may repeat shardkit's, never contradict it.
_OWNED = {
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "train_batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.grad_accum_steps",
    "gradient_clipping": "train.max_norm",
    "optimizer": "optim.name",
    "scheduler": "optim.schedule",
    "bf16.enabled": "precision.mode",
    "bf16.bf16_master_weights_and_grads": "precision.mode",
    "bf16.bf16_optimizer_states": "precision.mode",
    "fp16.enabled": "precision.mode",
    "fp16.initial_scale_power": "precision.loss_scale_init_power",
    "fp16.loss_scale_window": "precision.loss_scale_window",
    "communication_data_type": "precision.reduce_dtype",
    "amp": "precision.mode",
    "torch_autocast": "precision.mode",
    "activation_checkpointing": "activation.policy",
    "compile": "compile.enabled",
    "zero_optimization.stage": "parallel.strategy",
    "zero_optimization.offload_optimizer.device": "parallel.offload_optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "parallel.nvme_path",
    "zero_optimization.offload_param.device": "parallel.offload_param",
    "zero_optimization.offload_param.nvme_path": "parallel.nvme_path",
    "zero_optimization.offload_optimizer.ratio": "parallel.offload_ratio",
    "zero_optimization.zero_hpz_partition_size": "parallel.hpz",
    "zero_optimization.cpu_offload": "parallel.offload_optimizer",
    "managed_gradient_accumulation": "train.grad_accum_steps",
}
_QUANTISED = ("zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_nontrainable_weights")


def build_ds_config(
    config: RunConfig, world_size: int, accum: int, on_cuda: bool, sizes: tuple[int, int] | None
) -> dict[str, Any]:
    """The engine's config dict.

    `accum`: micro-batches per optimizer step. `sizes`: values of the whole model, which cap the bucket of gathers
    ahead, and those of trained parameters, which cap the buckets of gradients and updates; `None` while the model is
    not built.
    """
    raw = config.parallel.ds_config
    _refuse_other_optimizer(config, raw)
    _refuse_bytes_quantised_again(config, raw)
    owned_values = _owned_values(config, world_size, accum)
    _refuse_conflicts(raw, owned_values)
    return merged(merged(_defaults(config, on_cuda, sizes), raw), owned_values)


def _owned_values(config: RunConfig, world_size: int, accum: int) -> dict[str, Any]:
    train, parallel, reduce = config.train, config.parallel, config.precision.reduce_dtype
    zero: dict[str, Any] = {"stage": parallel.sharding.stage}
    for key in ("offload_optimizer", "offload_param"):
        device = getattr(parallel, key)
        if device != "none":
            zero[key] = {"device": device}
            if device == "nvme":
                zero[key]["nvme_path"] = parallel.nvme_path
    if parallel.offload_ratio < 1:
        zero["offload_optimizer"]["ratio"] = parallel.offload_ratio
    if parallel.hpz is not None:
        zero["zero_hpz_partition_size"] = parallel.hpz
    precision = config.precision
    bf16: dict[str, Any] = {"enabled": precision.mode == "bf16"}
    if precision.mode == "pure_bf16":
        bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    fp16: dict[str, Any] = {"enabled": precision.mode == "fp16"}
    if precision.mode == "fp16":
        fp16["initial_scale_power"] = precision.loss_scale_init_power
        fp16["loss_scale_window"] = precision.loss_scale_window
        fp16["hysteresis"] = 1  # halve at the first overflow, as torch's GradScaler does
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "train_batch_size": train.micro_batch_size * accum * world_size,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": train.max_norm or 0.0,
        "bf16": bf16,
        "fp16": fp16,
        **({} if reduce == "auto" else {"communication_data_type": reduce}),
        "zero_optimization": zero,
    }


def _defaults(config: RunConfig, on_cuda: bool, sizes: tuple[int, int] | None) -> dict[str, Any]:
    """Defaults that raw keys may replace."""
    parallel = config.parallel
    bytes_per_element = 4 if config.precision.mode in ("fp32", "tf32") else 2
    limit = int((parallel.bucket_mb or DEFAULT_BUCKET_MB) * 2**20 / bytes_per_element)
    gathered, bucket = (limit, limit) if sizes is None else (min(limit, size) for size in sizes)
    bucket += bucket % 2  # DeepSpeed needs an even number of elements
    zero: dict[str, Any] = {
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "contiguous_gradients": True,
        "overlap_comm": on_cuda,
    }
    if parallel.sharding.stage == 3:
        zero["stage3_prefetch_bucket_size"] = (gathered + gathered % 2) // 10
    for key in ("offload_optimizer", "offload_param"):
        if getattr(parallel, key) != "none":
            zero[key] = {"pin_memory": on_cuda}
    return {
        # A pass over all gradients and a wait: only if the update cannot be skipped on the device (`FiniteNorms`).
        "bf16": {"check_grad_overflow": parallel.offload_optimizer != "none"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # any torch optimizer: elementwise ones are safe on flat partitions
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,  # the trainer prints instead
    }


def _refuse_other_optimizer(config: RunConfig, raw: dict[str, Any]) -> None:
    """Refuse zero1 + bf16 + fp32 accumulation: DeepSpeed (0.19) then uses an optimizer with another state layout."""
    accumulates = raw.get("data_types", {}).get("grad_accum_dtype") if isinstance(raw.get("data_types"), dict) else None
    if config.parallel.sharding.stage == 1 and config.precision.mode == "bf16" and accumulates in ("fp32", "float32"):
        raise ConfigError(
            f"parallel.ds_config.data_types.grad_accum_dtype={accumulates} under zero1 and bf16 makes DeepSpeed use "
            "BF16_Optimizer, which keeps whole fp32 gradients and whose state shardkit cannot save",
            "set parallel.strategy=zero2, or remove the raw key",
        )


def _refuse_bytes_quantised_again(config: RunConfig, raw: dict[str, Any]) -> None:
    """Refuse DeepSpeed's own quantisation of weights for packed bytes, which it would take for numbers."""
    set_keys = [path for path, is_set in _leaves(raw) if path in _QUANTISED and is_set]
    if set_keys and config.model.quantize is not None:
        raise ConfigError(
            f"parallel.ds_config.{set_keys[0]}=true with model.quantize: DeepSpeed would quantise the packed bytes "
            "again, as if they were numbers",
            "remove the raw key, or remove model.quantize",
        )


def _refuse_conflicts(raw: dict[str, Any], owned_values: dict[str, Any]) -> None:
    owned_leaves = dict(_leaves(owned_values))
    for path, value in _leaves(raw):
        owner = next((key for owned, key in _OWNED.items() if path == owned or path.startswith(owned + ".")), None)
        if owner is None or (path in owned_leaves and owned_leaves[path] == value):
            continue
        reason = f"shardkit sets it to {owned_leaves[path]!r}" if path in owned_leaves else "shardkit decides it"
        raise ConfigError(
            f"parallel.ds_config.{path}={value!r} contradicts {owner}: {reason}", f"remove the raw key and set {owner}"
        )


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Build DeepSpeedCPUAdam, a C++ op that is compiled at first use, once per machine.

_BUILDING = "building"


def build_cpu_adam(world: World) -> None:
    """Compile DeepSpeedCPUAdam once per machine before its ranks load it."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builds = world.env.local_rank == 0
    folder = _build_folder(CPUAdamBuilder) if builds else None
    if builds and (folder is None or not (folder / f"{CPUAdamBuilder.NAME}.so").exists()):
        print("building DeepSpeedCPUAdam (once per machine, 1-3 minutes) ...", file=sys.stderr, flush=True)
    for my_turn in (builds, not builds):
        problem = _load(CPUAdamBuilder) if my_turn else ""
        problems = [str(p) for p in world.gather(problem) if p]
        if problems:
            raise BuildError(
                f"DeepSpeedCPUAdam does not compile: {problems[0]}",
                "install a C++ compiler and Python's headers (apt-get install g++ python3-dev; for DeepSpeed up to "
                "0.19.6 also CUDA's toolkit, named by CUDA_HOME), or set parallel.offload_optimizer=none",
            )


def _load(builder: Any) -> str:
    """Compile the op if needed and load it into this process; returns the compiler's first error, or ""."""
    # deepspeed's ninja lies beside the interpreter: not on PATH unless the venv is activated.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    try:
        remember_cpu()
        folder = _build_folder(builder)
        with nullcontext() if folder is None else sole_builder(folder):
            builder().load(verbose=False)
    except Exception as error:  # torch and deepspeed raise many kinds; all mean that the op is missing
        return first_compiler_error(str(error))
    return ""


def remember_cpu() -> None:
    """Make py-cpuinfo keep its answer: it takes a process of a second, and DeepSpeed asks for each optimizer."""
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def _build_folder(builder: Any) -> Path | None:
    """Where torch builds the op; None if torch does not say."""
    try:
        return Path(BUILD_FOLDER.find()(builder.NAME, verbose=False))
    except NameGone:
        BUILDS.lost(BUILD_FOLDER)
        return None


@contextmanager
def sole_builder(folder: Path) -> Iterator[None]:
    """Hold the right to build in this folder, and remove the lock file of a killed build.

    torch guards a build by a file that must not exist: after a killed build (Ctrl-C, a time limit) every later one
    would wait forever. The system releases our lock with its process, whatever ends it.
    """
    with locked(folder / "shardkit.lock", optional=True) as file:
        if file is None:  # a file system without locks: only torch's own guard is left
            yield
            return
        file.seek(0)
        if file.read() == _BUILDING:
            (folder / "lock").unlink(missing_ok=True)
        _write(file, _BUILDING)
        yield
        _write(file, "")


def _write(file: IO[str], text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def first_compiler_error(text: str) -> str:
    """The first line of a build log that names an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line.lower() or "not found" in line.lower()]
    return (telling or lines or ["no message"])[0][:300]
