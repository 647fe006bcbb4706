"""The rules behind `advice`: the saving of each change of a configuration, from counted bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from ..config.schema import RunConfig
from ..memory.rows import StateBytes, StateKind

_CHUNK = 1024
# A block's activations take 34 bytes per token and feature, its input 2 (Korthikanti et al. 2022, section 4.1).
_KEPT_INPUTS = 2 / 34
_LARGE = 0.1
_SHARDED = {
    "fsdp": ("params", "quantized", "master_params", "grads", "optimizer"),
    "zero3": ("params", "quantized", "master_params", "grads", "optimizer"),
    "zero2": ("master_params", "grads", "optimizer"),
    "zero1": ("master_params", "optimizer"),
}
_STRONGER = {
    "ddp": ("zero1", "zero2", "fsdp"),
    "zero1": ("zero2", "zero3", "fsdp"),
    "zero2": ("zero3", "fsdp"),
    "hsdp": ("fsdp",),
}
_SHARD_COST = {
    "zero1": "the same traffic as ddp",
    "zero2": "the same traffic as ddp; gradients are reduced in every micro-batch",
    "zero3": "parameters are gathered for each forward and backward: 1.5 times ddp's traffic",
    "fsdp": "parameters are gathered for each forward and backward: 1.5 times ddp's traffic",
}
_NAMES = {
    "params": "parameters", "quantized": "packed weights", "master_params": "fp32 weights", "grads": "gradients",
    "optimizer": "optimizer states",
}  # fmt: skip


@dataclass(frozen=True)
class Used:
    """The memory of one rank when it ran out, by its use, in bytes.

    Attributes:
        short_of: the memory that is short: the training device's or the host's.
        state: categories as the ledger counts them; `None` before there was any.
        not_state: memory that is not state, with the failed request; activations if `phase` is forward or backward.
        phase: the phase that ran.
        missing: bytes by which the free memory was too small; `None` if unknown.
        fragmentation: held by the allocator without a tensor in it.
        n_blocks: blocks of the model that can be recomputed; 0 if there are none.
        packable: shares of the model's values in frozen linear layers of its blocks, and in their frozen experts that
            are 3-D parameters: `model.quantize` would pack them.
        workers: held by data-loader workers.
        staging: copies of background saves.
    """

    short_of: Literal["device", "host"] = "device"
    state: Mapping[StateKind, StateBytes] | None = None
    not_state: int = 0
    phase: str | None = None
    missing: int | None = None
    fragmentation: int = 0
    n_blocks: int = 0
    packable: tuple[float, float] = (0.0, 0.0)
    workers: int = 0
    staging: int = 0


Rule = tuple[dict[str, Any], float | None, str, str]
"""Settings, saving, cost, why."""


class Numbers:
    """The figures that rules need, in bytes on this rank."""

    def __init__(self, config: RunConfig, world_size: int, accum: int, device: str, used: Used) -> None:
        self.config, self.world, self.accum, self.device, self.used = config, world_size, accum, device, used
        state = used.state or {}

        def state_bytes(kind: StateKind) -> int:
            return state[kind].device if kind in state else 0

        self.params, self.masters = state_bytes("params"), state_bytes("master_params")
        self.quantized = state_bytes("quantized")
        if not self.params and used.phase == "wrap":
            self.params = used.not_state  # nothing was counted yet, but memory in use while wrapping is weights
        self.grads, self.optimizer = state_bytes("grads"), state_bytes("optimizer")
        if used.phase != "wrap" and config.parallel.offload_optimizer == config.parallel.offload_param == "none":
            self._expect(config)
        in_pass = used.phase in ("forward", "backward", None)
        self.activations = used.not_state if in_pass else 0

    def _expect(self, config: RunConfig) -> None:
        """Add gradients and moments that the first step would create: a run that fails earlier would need them next."""
        if config.adapter.type != "none":
            return  # gradients and moments of an adapter are small
        updated = self.masters or self.params
        self.grads = self.grads or (0 if config.optim.in_backward else self.params)
        per_byte = {
            "adamw": 2.0,
            "adamw8bit": 0.5,
            "adamw_bnb_8bit": 0.5,
            "sgd": 1.0 if config.optim.momentum else 0.0,
            "muon": 1.0,
        }
        self.optimizer = max(self.optimizer, int(per_byte.get(config.optim.name, 0.0) * updated))

    @property
    def quantizing(self) -> tuple[dict[str, Any], float, str, str]:
        """(settings of a base in 4 bits, bytes that it saves, its cost, the reason); 0 bytes without LoRA or a base to
        pack."""
        config, (linear, experts) = self.config, self.used.packable
        share = linear + experts
        settings = {"model.quantize.bits": 4} | ({"model.quantize.experts": True} if experts else {})
        parts = " and ".join(name for name, part in (("linear layers", linear), ("experts", experts)) if part)
        bits = 16 if config.precision.mode in ("bf16", "fp16") else 32
        can = config.adapter.type == "lora" and config.model.quantize is None
        return (
            settings,
            self.params * share * (1 - (4 + 32 / 64) / bits) if can else 0.0,
            "each forward and backward unpacks a layer; the base is rounded to 16 numbers a block",
            f"frozen {parts} hold {share:.0%} of the values, and would take 4.5 bits a value instead of {bits}",
        )

    def bytes_of(self, *kinds: str) -> int:
        by_name = {
            "params": self.params, "quantized": self.quantized, "master_params": self.masters, "grads": self.grads,
            "optimizer": self.optimizer,
        }  # fmt: skip
        return sum(by_name[kind] for kind in kinds)

    def listed(self, *kinds: str) -> str:
        """Those of these categories that hold memory, in words."""
        return ", ".join(text for kind, text in _NAMES.items() if kind in kinds and self.bytes_of(kind))


def rules(n: Numbers) -> Iterator[Rule]:
    """Every change of settings that affects the memory that is short, whether or not it is allowed."""
    if n.used.short_of == "host":
        yield from _host(n)
    if n.used.short_of == "device" or n.device == "cpu":
        yield from _activations(n)
        yield from _quantizing(n)
        yield from _sharding(n)
        yield from _offload(n)
        yield from _optimizer(n)


def _activations(n: Numbers) -> Iterator[Rule]:
    config, activations = n.config, n.activations
    micro, blocks = config.train.micro_batch_size, n.used.n_blocks
    if activations <= 0:
        return
    if blocks > 1:
        remaining = 1 / blocks + _KEPT_INPUTS
        yield (
            {"activation.policy": "full"},
            activations * (1 - remaining) if config.activation.policy == "none" else None,
            "forward runs twice: about a third more compute",
            f"only the inputs of {blocks} blocks, and one block's activations, exist at a time",
        )
        if n.device == "cuda":
            yield (
                {"activation.offload": "cpu"},
                activations * (1 - 2 / blocks) if config.activation.policy == "none" else None,
                "as much pinned host memory, copied out and back in each micro-batch",
                "blocks keep their tensors for backward in host memory",
            )
    for smaller in _smaller(micro, activations, n.used.missing):
        settings: dict[str, Any] = {"train.micro_batch_size": smaller}
        if config.train.global_batch_size is None or config.train.grad_accum_steps is not None:
            settings["train.grad_accum_steps"] = n.accum * (micro // smaller)
        yield (
            settings,
            activations * (1 - smaller / micro),
            f"{micro // smaller} times as many passes for the same samples per step",
            "activations grow with the samples in a pass",
        )
    if config.precision.mode in ("fp32", "tf32"):
        is_frozen = config.adapter.type != "none"
        yield (
            {"precision.mode": "bf16"},
            activations / 2 + n.params / (2 if is_frozen else -2),
            "8 bits of mantissa in forward and backward; "
            + ("the frozen base is rounded to bf16" if is_frozen else "weights stay fp32"),
            f"activations{' and the frozen base' if is_frozen else ''} take 2 bytes instead of 4",
        )
    yield from _logits(n)


def _smaller(micro: int, activations: int, missing: int | None) -> Iterator[int]:
    """The largest divisor of the micro-batch that saves enough, else 1; nothing for a micro-batch of one."""
    divisors = [size for size in range(micro // 2, 0, -1) if micro % size == 0]
    enough = [size for size in divisors if missing is None or activations * (1 - size / micro) >= missing]
    yield from (enough or divisors[-1:])[:1]


def _logits(n: Numbers) -> Iterator[Rule]:
    config = n.config
    if config.task.factory is not None or config.model.loss_chunk_size != 0:
        return
    vocab = config.model.hf.get("vocab_size") if config.task.name != "causal_lm" else config.model.vocab_size
    tokens = config.train.micro_batch_size * config.train.seq_len
    yield (
        {"model.loss_chunk_size": _CHUNK},
        max(0, tokens - _CHUNK) * vocab * 8 if isinstance(vocab, int) else None,
        "none to speak of",
        "fp32 logits and their gradient never exist for all tokens at once",
    )


def _quantizing(n: Numbers) -> Iterator[Rule]:
    """A frozen base in 4 bits, in blocks of 64 values that share an fp32 scale."""
    settings, saved, cost, reason = n.quantizing
    if saved and find_spec("bitsandbytes") is not None:
        yield settings, saved, cost, reason


def _sharding(n: Numbers) -> Iterator[Rule]:
    parallel = n.config.parallel
    for target in _STRONGER.get(parallel.strategy, ()):
        kinds = set(_SHARDED[target])
        parts = n.world
        if parallel.sharding.replicates:
            parts = max(1, n.world // (parallel.dp_shard or n.world))
        else:
            kinds -= set(_SHARDED.get(parallel.strategy, ()))
        weights = n.bytes_of("params", "quantized")
        gathered = 2 * weights // n.used.n_blocks if "params" in kinds and n.used.n_blocks else 0
        settings: dict[str, Any] = {"parallel.strategy": target}
        if parallel.sharding.replicates:
            set_keys = [key for key in ("dp_replicate", "dp_shard") if getattr(parallel, key) is not None]
            settings |= {f"parallel.{key}": None for key in set_keys}
        yield (
            settings,
            n.bytes_of(*kinds) * (1 - 1 / parts) - gathered,
            _SHARD_COST[target],
            f"{n.listed(*kinds)} are shared out among {n.world} ranks",
        )
    if parallel.sharding.by_fsdp:
        copies = n.bytes_of("params", "quantized") * (n.world - 1)
        yield (
            {"parallel.reshard_after_forward": True},
            copies,
            "parameters are gathered again in backward",
            "a block's gathered parameters are freed after its forward",
        )
        if parallel.no_sync:
            yield (
                {"parallel.no_sync": False},
                n.grads * (n.world - 1),
                "gradients are reduced in every micro-batch",
                "gradients exist as shards only",
            )


def _offload(n: Numbers) -> Iterator[Rule]:
    parallel = n.config.parallel
    if n.device != "cuda":
        return
    slow = "the update runs on the CPU; gradients and parameters cross PCIe in each step"
    if parallel.sharding.stage:
        reason = "optimizer states and fp32 weights live in host memory"
        yield {"parallel.offload_optimizer": "cpu"}, n.bytes_of("optimizer", "master_params"), slow, reason
    elif not parallel.sharding.state:
        saved = n.optimizer + n.grads * (1 - 1 / n.world)
        reason = "optimizer states live in host memory"
        yield {"parallel.strategy": "zero2", "parallel.offload_optimizer": "cpu"}, saved, slow, reason
    if parallel.sharding.parameters:
        kinds = ("params", "quantized") + (("grads", "optimizer") if parallel.sharding.by_fsdp else ())
        saved = n.bytes_of(*kinds) * (1 - 1 / max(2, n.used.n_blocks))
        reason = f"{n.listed(*kinds)} live in host memory between uses"
        yield {"parallel.offload_param": "cpu"}, saved, "parameters cross PCIe in each pass; " + slow, reason


def _optimizer(n: Numbers) -> Iterator[Rule]:
    config = n.config
    in_8_bits = {"torchao": "adamw8bit", "bitsandbytes": "adamw_bnb_8bit"}
    installed = [name for library, name in in_8_bits.items() if find_spec(library) is not None]
    if config.optim.name == "adamw" and installed:
        yield (
            {"optim.name": installed[0]},
            n.optimizer * (1 - (1 + 4 / 256) / 4),
            "moments in 8 bits",
            "a moment takes one byte, and a scale for every 256",
        )
    if config.train.max_norm is None and n.accum == 1:
        yield (
            {"optim.in_backward": True},
            n.grads,
            "no clipping, no accumulation",
            "each parameter is updated as soon as its gradient is ready",
        )
    if config.train.ema_decay is not None:
        yield {"train.ema_decay": None}, None, "evaluation uses the last weights", "no moving average is kept"


def _host(n: Numbers) -> Iterator[Rule]:
    """Changes for a host that is short of memory: its uses besides the process itself."""
    config, state = n.config, n.used.state or {}
    if config.data.workers:
        fewer = config.data.workers // 2
        yield (
            {"data.workers": fewer},
            n.used.workers * (1 - fewer / config.data.workers) or None,
            "fewer processes load data",
            f"each of {config.data.workers} loader processes has its own copy of the memory it touches",
        )
    if config.checkpoint.async_save:
        yield {"checkpoint.async_save": False}, n.used.staging or None, "training waits for saves", (
            "no copy of the state is kept for background saves"
        )  # fmt: skip
    if n.device == "cuda":
        for key, kinds in (
            ("offload_param", ("params", "quantized")),
            ("offload_optimizer", ("optimizer", "master_params")),
        ):
            on_host = sum(bytes_.host for kind, bytes_ in state.items() if kind in kinds)
            reason = "state stays on the GPU"
            yield {f"parallel.{key}": "none"}, on_host or None, "as much memory of the GPU", reason
        reason = "activations stay on the GPU"
        yield {"activation.offload": "none"}, None, "as much memory of the GPU", reason


def outside(n: Numbers) -> Iterator[tuple[str, int, str, str]]:
    """(instruction, saving, cost, why) of changes outside the configuration."""
    strategy = n.config.parallel.strategy
    kinds = _SHARDED.get(strategy)
    if kinds is not None and n.used.state:
        reason = f"{n.listed(*kinds)} are shared out among twice as many"
        yield f"{2 * n.world} ranks", n.bytes_of(*kinds) // 2, "twice the devices", reason
    packing, saved, cost, reason = n.quantizing
    if saved and find_spec("bitsandbytes") is None:
        changes = " and ".join(f"{key}={str(setting).lower()}" for key, setting in packing.items())
        yield f"pip install 'shardkit[quantize]', then {changes}", round(saved), cost, reason
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    idle = n.used.fragmentation
    large = idle >= max(1, n.used.missing or 0, int(_LARGE * (idle + n.bytes_of("params", "grads", "optimizer"))))
    if n.device == "cuda" and large and "expandable_segments:True" not in settings:
        reason = "the allocator holds memory in pieces that no request fits into"
        yield "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", idle, "none to speak of", reason
