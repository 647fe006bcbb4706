"""One engine under each library, written as in its documentation: the same model, weights, data and settings.

An arm is a function that sets a rank up and returns its optimizer step. `ARMS` lists the measured arms, hand-written
first. `REFUSALS` lists arms that do not run on a CPU; each raises its library's own error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import partial
from typing import Any

from . import bare
from .bare import ACCUM, MAX_NORM, Step

Arm = Callable[[], Step]


class Unsharded(RuntimeError):
    """A library accepted a setting that shards the model, but did not shard it."""


def by_hand(engine: str) -> Step:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return bare.ENGINES[engine]()


def accelerate_ddp() -> Step:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM, kwargs_handlers=[kwargs])
    model = bare.make_model()
    return _accelerated(accelerator, *accelerator.prepare(model, bare.adamw(model)))


def accelerate_fsdp2() -> Step:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FSDPModule

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    # Every micro-batch reduces, as in the other arms of this engine: `accumulate` would keep whole gradients.
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = bare.make_model()
    model, optimizer = accelerator.prepare(model, bare.adamw(model))
    if not isinstance(model, FSDPModule):
        raise Unsharded(f"fsdp_plugin(fsdp_version=2) was given and prepare() returned a {type(model).__name__}")

    return bare.loop(
        model, optimizer, accelerator.backward, lambda: accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    )


def accelerate_zero(stage: int) -> Step:
    bare.import_deepspeed()
    from accelerate import Accelerator, DeepSpeedPlugin

    model = bare.make_model()
    plugin = DeepSpeedPlugin(hf_ds_config=bare.ds_config(stage, model))
    # Not cpu=True, which makes Accelerate ignore the plugin. DeepSpeed finds the CPU by itself.
    accelerator = Accelerator(gradient_accumulation_steps=ACCUM, deepspeed_plugin=plugin)
    model, optimizer = accelerator.prepare(model, bare.adamw(model))
    if model.dp_world_size != int(os.environ["WORLD_SIZE"]):
        raise Unsharded(f"DeepSpeed's engine sees {model.dp_world_size} of {os.environ['WORLD_SIZE']} ranks")
    return _accelerated(accelerator, model, optimizer)


def _accelerated(accelerator: Any, model: Any, optimizer: Any) -> Step:
    def step(micro: list[Any]) -> float:
        losses = []
        for x, y in micro:
            with accelerator.accumulate(model):
                loss = model(x, y) / y.numel()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach() / len(micro))
        return bare.read(losses)

    return step


def fabric_ddp() -> Step:
    from lightning_fabric.strategies import DDPStrategy

    fabric = _fabric(DDPStrategy(gradient_as_bucket_view=True))
    model = bare.make_model()
    return _fabric_step(fabric, *fabric.setup(model, bare.adamw(model)))


def fabric_fsdp2() -> Step:
    from lightning_fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(model: Any, mesh: Any) -> Any:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=False)

    world_size = int(os.environ["WORLD_SIZE"])
    fabric = _fabric(ModelParallelStrategy(shard, data_parallel_size=world_size, tensor_parallel_size=1))
    model = fabric.setup_module(bare.make_model())
    # Every micro-batch reduces, as in the other arms of this engine: whole gradients would be kept otherwise.
    return _fabric_step(fabric, model, fabric.setup_optimizers(bare.adamw(model)), reduce_every=True)


def fabric_fsdp1() -> Step:
    from lightning_fabric.strategies import FSDPStrategy

    model = bare.make_model()
    names = bare.decays(model)
    fabric = _fabric(FSDPStrategy(auto_wrap_policy={type(model.blocks[0])}))
    model = fabric.setup_module(model)
    optimizer = bare.adamw(model, {f"_forward_module.{name}" for name in names} | names)
    return _fabric_step(fabric, model, fabric.setup_optimizers(optimizer), reduce_every=True)


def fabric_zero(stage: int) -> Step:
    bare.import_deepspeed()
    from lightning_fabric.strategies import DeepSpeedStrategy

    model = bare.make_model()
    fabric = _fabric(DeepSpeedStrategy(config=bare.ds_config(stage, model)))
    model, _ = fabric.setup(model, bare.adamw(model))
    # Fabric 2.6.6's optimizer steps an engine that looks like an optimizer. DeepSpeed 0.19.8's has no `param_groups`:
    # ZeRO's own optimizer would then be stepped in each micro-batch, without gradients ("KeyError: 0").
    return bare.engine_loop(model, fabric.backward, fabric.strategy.model.step)


def _fabric(strategy: Any) -> Any:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    return fabric


def _fabric_step(fabric: Any, model: Any, optimizer: Any, reduce_every: bool = False) -> Step:
    clip = partial(fabric.clip_gradients, model, optimizer, max_norm=MAX_NORM)
    unreduced = nullcontext if reduce_every else partial(fabric.no_backward_sync, model)
    return bare.loop(model, optimizer, fabric.backward, clip, unreduced)


ARMS: dict[str, dict[str, Arm]] = {
    "ddp": {"PyTorch": partial(by_hand, "ddp"), "Accelerate": accelerate_ddp, "Fabric": fabric_ddp},
    "fsdp": {"PyTorch": partial(by_hand, "fsdp"), "Fabric": fabric_fsdp2},
    "zero2": {"DeepSpeed": partial(by_hand, "zero2"), "Accelerate": partial(accelerate_zero, 2)},
    "zero3": {"DeepSpeed": partial(by_hand, "zero3"), "Accelerate": partial(accelerate_zero, 3)},
}
REFUSALS: dict[str, dict[str, Arm]] = {
    "fsdp": {"Accelerate": accelerate_fsdp2, "Fabric, FSDPStrategy": fabric_fsdp1},
    "zero2": {"Fabric": partial(fabric_zero, 2)},
    "zero3": {"Fabric": partial(fabric_zero, 3)},
}
OURS = "shardkit"


def steps_of(engine: str, arm: str, tokens: str, folder: str, count: int) -> Generator[float]:
    """Losses of up to `count` optimizer steps of an arm on this rank: means over ranks, or this rank's own."""
    if arm == OURS:
        from .overhead import Ours, overrides

        ours = Ours(overrides(engine, tokens, f"{folder}/run", count))
        try:
            for _ in range(count):
                yield ours.step()
        finally:
            ours.close()
        return
    import torch.distributed as dist

    step = (ARMS[engine] | REFUSALS.get(engine, {}))[arm]()
    data = bare.batches(tokens, dist.get_rank(), dist.get_world_size())
    for _ in range(count):
        yield step(next(data))
