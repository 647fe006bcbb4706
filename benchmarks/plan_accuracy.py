"""Predicted against measured peaks of tensor memory: models × optimizers × policies × precisions × strategies, on CPU.

`python -m benchmarks.plan_accuracy` runs every case for real, one process per rank, and measures torch's CPU allocator
on rank 0 (from the profiler's events). The prediction is the planner's; the measurement does not use the
planner's tracker.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from statistics import median
from typing import Any

from tests.ranks import run_ranks

from .common import earlier, environment, publish
from .models import llama
from .options import ONLY, PREDICT, chosen, options

TEXT = ["train.micro_batch_size=2", "train.seq_len=256"]
_LLAMA = llama(256, 704, depth=4, heads=4, kv_heads=2, vocab=8192, positions=256)
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256, "vocab_size": 8192},
    "llama": _LLAMA,
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "bert": llama(256, 1024, depth=4, heads=4, vocab=4096, positions=256),
    "vit": llama(256, 1024, depth=4, heads=4, image_size=64, patch_size=8),
}


def _hf(model: str) -> str:
    return "model.hf=" + json.dumps({"model_type": model, **SIZES[model]})


MODELS: dict[str, list[str]] = {
    "transformer": [
        *TEXT, "model.d_model=256", "model.n_layers=4", "model.n_heads=4", "model.vocab_size=8192",
        "model.dropout=0.1",
    ],
    "gpt2": ["task.name=hf_causal_lm", *TEXT, _hf("gpt2")],
    "llama": ["task.name=hf_causal_lm", *TEXT, _hf("llama")],
    "lora": ["task.name=hf_causal_lm", *TEXT, _hf("llama"), "adapter.type=lora"],
    "qlora": ["task.name=hf_causal_lm", *TEXT, _hf("llama"), "adapter.type=lora", "model.quantize={bits: 4}"],
    "qlora-double": ["task.name=hf_causal_lm", *TEXT, _hf("llama"), "adapter.type=lora",
                     "model.quantize={bits: 4, double: true}"],
    "qlora-experts": ["task.name=hf_causal_lm", *TEXT, _hf("mixtral"), "adapter.type=lora",
                      "adapter.targets=all-linear", "model.quantize={bits: 4, experts: true}"],
    "bert": ["task.name=hf_masked_lm", *TEXT, _hf("bert")],
    "vit": ["task.name=image_classification", "train.micro_batch_size=8", _hf("vit")],
    "swinir": ["task.name=super_resolution", "model.preset=swin2sr-debug", "data.crop_size=128",
               "train.micro_batch_size=2"],
    "mixtral": ["task.name=hf_causal_lm", *TEXT, _hf("mixtral")],
    "mlp": ["task.factory=benchmarks.plan_models:MLP", "train.micro_batch_size=64"],
    "cnn": ["task.factory=benchmarks.plan_models:CNN", "train.micro_batch_size=4"],
}  # fmt: skip
STRATEGIES = {
    "single@1": (1, ["parallel.strategy=single"]),
    "ddp@2": (2, ["parallel.strategy=ddp", "parallel.bucket_mb=1"]),
    "ddp@4": (4, ["parallel.strategy=ddp", "parallel.bucket_mb=1"]),
    "fsdp@2": (2, ["parallel.strategy=fsdp"]),
    "fsdp@4": (4, ["parallel.strategy=fsdp"]),
    "hsdp@4": (4, ["parallel.strategy=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2"]),
}
POLICIES = {
    "none": [],
    "full": ["activation.policy=full"],
    "selective": ["activation.policy=selective"],
    "every_k": ["activation.policy=every_k", "activation.every_k=2"],
    "selective_op": ["activation.policy=selective_op"],
    "packed": ["data.packing=packed"],
}
ZERO: dict[str, tuple[int, list[str]]] = {
    f"{stage}@{world}{suffix}": (world, [f"parallel.strategy={stage}", "parallel.bucket_mb=4", *settings])
    for stage in ("zero1", "zero2", "zero3")
    for world in (2, 4)
    for suffix, settings in {
        "": [],
        "+bucket": ["parallel.bucket_mb=1"],
        **({} if stage == "zero1" else {"+fp32grads": ["parallel.ds_config.data_types={grad_accum_dtype: fp32}"]}),
        "+accum": ["train.grad_accum_steps=2"],
        "+offload": ["parallel.offload_optimizer=cpu"],
        **(
            {"+offload_all": ["parallel.offload_optimizer=cpu", "parallel.offload_param=cpu"]}
            if stage == "zero3"
            else {}
        ),
    }.items()
}
AXES: dict[str, list[str]] = {
    "": [],
    "tp2": ["parallel.tp=2"],
    "tp4": ["parallel.tp=4"],
    "cp2": ["parallel.cp=2"],
    "cp4": ["parallel.cp=4"],
    "ep2": ["parallel.ep=2"],
    "ep4": ["parallel.ep=4"],
    "ep4, uneven": ["parallel.ep=4", "parallel.ep_imbalance=2.5"],
    "tp2 x cp2": ["parallel.tp=2", "parallel.cp=2"],
    "tp2 x ep2": ["parallel.tp=2", "parallel.ep=2"],
    "cp2 x ep2": ["parallel.cp=2", "parallel.ep=2"],
    "tp2 x replicas": ["parallel.tp=2", "parallel.dp_shard=1"],
}
"""What ranks share beside rows."""
NAME = "plan_accuracy"
STEPS = 3
_MARKER = 12_347  # bytes; allocated at the end of each step, to find that moment among the allocator's events


def cases() -> dict[str, tuple[int, list[str]]]:
    """Name → (ranks, overrides)."""
    named: dict[str, tuple[int, list[str]]] = {}

    def add(model: str, strategy: str, precision: str, policy: str, optimizer: str, axes: str = "") -> None:
        world, sharding = (STRATEGIES | ZERO)[strategy]
        name = " ".join(filter(None, (model, strategy, axes, precision, policy, optimizer)))
        named[name] = world, [
            *MODELS[model], *sharding, *POLICIES[policy], *AXES[axes],
            *(["model.dropout=0"] if model == "transformer" and "tp" in axes else []),
            f"precision.mode={precision}", f"optim.name={optimizer}", "run.device=cpu",
            *([] if "offload" in strategy else ["optim.implementation=foreach"]),
        ]  # fmt: skip

    for model in (name for name in MODELS if "lora" not in name and name != "mixtral"):
        for precision in ("fp32", "bf16"):
            add(model, "single@1", precision, "none", "adamw")
            add(model, "single@1", precision, "full", "adamw")
        add(model, "single@1", "fp32", "none", "sgd")
    for model in ("transformer", "gpt2", "llama", "bert", "vit", "mlp"):
        for strategy in ("ddp@2", "fsdp@2"):
            add(model, strategy, "fp32", "none", "adamw")
    for policy in ("selective", "every_k", "selective_op"):
        add("transformer", "single@1", "fp32", policy, "adamw")
    add("llama", "single@1", "fp32", "packed", "adamw")
    for strategy in ZERO:
        add("transformer", strategy, "bf16", "none", "adamw")
    for strategy in ("zero1@2", "zero2@2", "zero3@2"):
        add("llama", strategy, "fp32", "full", "adamw")
    for strategy in ("ddp@2", "ddp@4", "fsdp@2", "fsdp@4", "hsdp@4"):
        add("transformer", strategy, "bf16", "full", "adamw")
        add("llama", strategy, "fp32", "full", "sgd")
    for strategy in ("single@1", "ddp@2", "fsdp@2", "hsdp@4", "zero1@2", "zero2@2", "zero3@2"):
        add("lora", strategy, "bf16", "full", "adamw")
    for strategy in ("single@1", "ddp@2", "fsdp@2", "hsdp@4", "zero1@2", "zero2@2", "zero3@2", "zero3@2+offload_all"):
        add("qlora", strategy, "bf16", "full", "adamw")
        add("qlora-double", strategy, "bf16", "full", "adamw")
        add("qlora-experts", strategy, "bf16", "full", "adamw")
    for model in ("qlora", "qlora-double", "qlora-experts"):
        add(model, "single@1", "fp32", "none", "adamw")
    for model in ("transformer", "llama"):
        for axes in ("tp2", "cp2"):
            add(model, "fsdp@2", "fp32", "none", "adamw", axes)
            add(model, "fsdp@4", "fp32", "full", "sgd", axes)
            add(model, "fsdp@4", "bf16", "selective_op", "adamw", axes)
        for axes in ("cp4", "tp2 x cp2", *(["tp4"] if model == "transformer" else [])):  # llama has 2 key heads
            add(model, "fsdp@4", "fp32", "full", "adamw", axes)
        add(model, "hsdp@4", "fp32", "none", "adamw", "tp2 x replicas")
    for strategy in ("ddp@2", "zero1@2", "zero2@2", "zero3@2"):
        add("llama", strategy, "bf16", "none", "adamw", "cp2")
    add("lora", "fsdp@2", "bf16", "full", "adamw", "cp2")
    add("lora", "fsdp@4", "bf16", "full", "adamw", "tp2")
    add("llama", "fsdp@2", "fp32", "packed", "adamw", "cp2")
    for axes in ("ep2", "ep4"):
        add("mixtral", "fsdp@4", "fp32", "none", "adamw", axes)
    add("mixtral", "fsdp@4", "fp32", "full", "sgd", "ep4, uneven")
    add("mixtral", "hsdp@4", "bf16", "full", "adamw", "ep2")
    add("mixtral", "fsdp@4", "bf16", "full", "adamw", "tp2 x ep2")
    add("mixtral", "fsdp@4", "fp32", "full", "adamw", "cp2 x ep2")
    return named


def measured(overrides: list[str]) -> tuple[int, int]:
    """Bytes of torch's CPU allocator on this rank: (peak in the wrap and a few steps, total after them)."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from shardkit.config.load import load_config
    from shardkit.launch.ranks.env import RankEnv
    from shardkit.parallel.mesh import split_ranks
    from shardkit.parallel.weights import Weights
    from shardkit.parallel.world import World
    from shardkit.plan.simulate.step import sample_batch
    from shardkit.tasks.load import load_task, splitting

    config, rank, world_size = load_config(None, overrides).config, dist.get_rank(), dist.get_world_size()
    env = RankEnv(rank, world_size, rank, world_size, 0, 1, "group")
    group = dist.group.WORLD
    assert group is not None
    cp, ep, imbalance = (getattr(config.parallel, key) for key in ("cp", "ep", "ep_imbalance"))
    context, mesh, experts = split_ranks(config, "cpu", env)
    world = World(env, torch.device("cpu"), group, group, context=context, mesh=mesh, experts=experts)
    task: Any = load_task(config)
    if ep > 1:
        build = task.build_model
        task.build_model = lambda: routed(build(), ep, imbalance)
    batch = splitting(task, world.loss_rank, cp)(sample_batch(task, config))
    weights = Weights(config.train.seed, getattr(task, "init_parameter", None))
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # Allocated here: the planner counts it too.
        batch = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        unobserved(config, world, task, batch, weights)
        del batch
        gc.collect()
        alive = held_addresses()
    dist.barrier()
    totals = allocated(profiler, alive)
    after = next(total - size for size, total in reversed(totals) if size == _MARKER)
    return max(total for _, total in totals), after


def routed(model: Any, ep: int, imbalance: float) -> Any:
    """The model, whose routers send each group's first rank `imbalance` times the average, as a plan assumes."""
    import torch

    def choose(router: Any, inputs: Any, outputs: Any) -> Any:
        logits, weights, index = outputs
        n, local = index.numel(), router.weight.shape[0] // ep
        busiest = min(n, math.ceil(imbalance * n / ep))
        chosen = [pair % local if pair < busiest else local + pair % (local * (ep - 1)) for pair in range(n)]
        return logits, weights, torch.tensor(chosen).view_as(index)

    for module in model.modules():
        if hasattr(module, "top_k") and hasattr(module, "weight"):
            module.register_forward_hook(choose)
    return model


def allocated(profiler: Any, alive: set[int]) -> list[tuple[int, int]]:
    """(bytes, live bytes afterwards) of every event of torch's CPU allocator under a profiler with `profile_memory`.

    Blocks without an end that no tensor holds are left out: a gloo thread freed them, which the profiler does not
    follow.

    Args:
        alive: addresses that tensors still hold at the end of the profile.
    """
    events = sorted(_events(profiler.profiler.kineto_results.experimental_event_tree()))
    begun: dict[int, int] = {}
    counted: set[int] = set()
    for at, (_, address, size) in enumerate(events):
        if size > 0:
            begun[address] = at
        elif address in begun:
            counted |= {begun.pop(address), at}
    counted |= {at for address, at in begun.items() if address in alive}
    totals, total = [], 0
    for at, (_, _, size) in enumerate(events):
        total += size if at in counted else 0
        totals.append((size, total))
    return totals


def held_addresses() -> set[int]:
    """Start addresses of the storages of all CPU tensors that Python knows."""
    import torch

    addresses = set()
    for python_object in gc.get_objects():
        if not issubclass(type(python_object), torch.Tensor):
            continue
        if python_object.device.type == "cpu" and python_object.layout == torch.strided:
            with suppress(RuntimeError):  # a fake tensor has no address
                addresses.add(python_object.untyped_storage().data_ptr())
    return addresses


def _events(tree: list[Any]) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes) of the CPU allocator's events."""
    from torch._C._profiler import _EventType

    pending = list(tree)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size


class Unheard:
    """A `Phases` that records nothing."""

    def phase(self, name: Any, follows: bool = False) -> Any:
        return nullcontext()

    def sample_state(self, source: Any) -> None: ...


def unobserved(config: Any, world: Any, task: Any, batch: Any, weights: Any) -> None:
    """The wrap and `STEPS` steps, each followed by an allocation that marks its end."""
    import torch

    from shardkit.plan.simulate.step import take_step, wrapped

    n_targets = float(task.n_targets(batch))
    with wrapped(config, world, task, weights) as strategy:
        for _ in range(STEPS):
            take_step(config, world, task, batch, n_targets, strategy, Unheard())
            torch.empty(_MARKER, dtype=torch.uint8)


def compare(
    selected: Mapping[str, tuple[int, list[str]]], known: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Predictions beside measurements, case by case.

    Args:
        selected: name → (ranks, overrides).
        known: rows of an earlier result; their measurements are taken instead of running the cases again.
    """
    from shardkit.config.load import load_config
    from shardkit.plan.client import Planner
    from shardkit.plan.target import Target

    rows: dict[str, Any] = {}
    commit = environment()["commit"]
    for world_size in sorted({world for world, _ in selected.values()}):
        with Planner(Target(world_size, None, 8)) as planner:
            for name, (_, overrides) in ((n, case) for n, case in selected.items() if case[0] == world_size):
                began = time.perf_counter()
                estimate = planner.predict(load_config(None, overrides).config)
                seconds = time.perf_counter() - began
                if known is not None and name in known:
                    row = known[name]
                    peak, resident, measured_at = (row[key] for key in ("measured", "resident_measured", "measured_at"))
                else:
                    measured_at = commit
                    environ = {"DS_ACCELERATOR": "cpu"}  # ranks that hold nothing of this process
                    case = {"overrides": overrides, "env": environ, "timeout": 300}
                    peak, resident = run_ranks(world_size, "benchmarks.plan_accuracy:measured", **case)[0]
                rows[name] = row = {
                    "predicted": estimate.peak.allocated, "measured": peak,
                    "error": estimate.peak.allocated / peak - 1,
                    "resident_predicted": estimate.resident, "resident_measured": resident,
                    "resident_error": estimate.resident / resident - 1,
                    "phase": estimate.peak.phase, "seconds": round(seconds, 2), "measured_at": measured_at,
                }  # fmt: skip
                shown = f"peak {100 * row['error']:+8.3f} %  resident {100 * row['resident_error']:+8.3f} %"
                print(f"{name:52s} {shown}  {row['phase']:9s} {seconds:5.1f} s", flush=True)
    return rows


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    errors = sorted(abs(row["error"]) for row in rows.values())
    return {
        "cases": len(errors),
        "median_error": median(errors),
        "error_of_95_percent": errors[max(0, -(-95 * len(errors) // 100) - 1)],
        "lowest": min(row["error"] for row in rows.values()),
        "highest": max(row["error"] for row in rows.values()),
    }


def main() -> None:
    args = options(__doc__, only=ONLY, predict=PREDICT)
    names, known = chosen(cases(), args.only), recorded()
    if args.predict:
        names = [name for name in names if name in known]
    rows = compare({name: cases()[name] for name in names}, known if args.predict else None)
    print(summary(rows))
    known = recorded()  # other cases may have been measured meanwhile
    rows = {name: row for name in cases() if (row := rows.get(name, known.get(name)))}
    publish(NAME, {"summary": summary(rows), "steps": STEPS, "cases": rows})


def recorded() -> dict[str, dict[str, Any]]:
    """The rows of the earlier result, each with the commit that it was measured at."""
    before = earlier(NAME)
    return {name: {"measured_at": before.get("measured_at"), **row} for name, row in before.get("cases", {}).items()}


if __name__ == "__main__":
    main()
