"""The largest model that trains on one card with host memory: fp32 masters and moments, real steps, falling loss.

The reference transformer, at a fixed width, grows layer by layer. Plain DeepSpeed with its defaults is compared with
shardkit's settings; `planned split` keeps as many optimizer states on the card as fit there according to the plan.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shardkit.hardware.cards import GPUS

from .cases import Case, Cases, Figures, Where
from .child import emulated_card
from .target import load, next_size, settings, target, train

if TYPE_CHECKING:
    from shardkit.plan.model.estimate import MemoryEstimate

BYTES_PER_PARAMETER = 16
"""bf16 weights and gradients, fp32 masters and two moments: 2 + 2 + 4 + 8."""
STEPS = 6
SIZES = {"d_model": 4096, "n_heads": 32, "vocab_size": 50257, "max_seq_len": 1024}
DRY_SIZES = {"d_model": 64, "n_heads": 4, "vocab_size": 256, "max_seq_len": 64}
DRY_LIMIT = 3_800_000
"""Bytes of device and of host memory that a dry run plans for."""
EMULATED_SIZES = {"d_model": 1024, "n_heads": 16, "vocab_size": 8192, "max_seq_len": 512}
EMULATED_LIMIT = 2 << 30
"""Bytes of an emulated card and of the host memory beside it: what offloading keeps on the host is real there."""
_MOST_TRIED, _DRY_MOST_TRIED = 4, 2
_MOST_PLANNED = 8
_SPLITS = 20
_OFFLOAD = ("parallel.strategy=zero2", "parallel.offload_optimizer=cpu")
_OFFLOAD_ALL = ("parallel.strategy=zero3", "parallel.offload_optimizer=cpu", "parallel.offload_param=cpu")


@dataclass(frozen=True)
class Arm:
    """A way to use the host's memory.

    Attributes:
        settings: shardkit's; for a plain arm the nearest ones, which give the size to start from.
        stage: ZeRO stage of plain DeepSpeed; `None`: shardkit runs.
        split: the plan chooses the share of optimizer states in host memory.
    """

    settings: tuple[str, ...]
    stage: int | None = None
    split: bool = False


ARMS = {
    "shardkit, planned split": Arm(
        ("parallel.strategy=zero3", "parallel.offload_optimizer=cpu",
         "parallel.ds_config={zero_optimization: {sub_group_size: 250000000}}"),
        split=True,
    ),
    "shardkit, zero2 offload_optimizer": Arm(_OFFLOAD),
    "DeepSpeed, ZeRO-Offload": Arm(_OFFLOAD, stage=2),
    "shardkit, zero3 offload_optimizer, offload_param": Arm(_OFFLOAD_ALL),
    "DeepSpeed, ZeRO-3 offload": Arm(_OFFLOAD_ALL, stage=3),
}  # fmt: skip


def cases(dry: bool) -> Cases:
    arms = {name: arm for name, arm in ARMS.items() if not dry or arm.split or arm.stage}
    return {name: Case(partial(_measure, arm), partial(_predict, arm)) for name, arm in arms.items()}


def model(where: Where) -> dict[str, int]:
    """The model's sizes except its depth."""
    return EMULATED_SIZES if where.emulated else DRY_SIZES if where.dry else SIZES


def base(where: Where) -> list[str]:
    sizes = model(where)
    return [
        *(f"model.{key}={value}" for key, value in sizes.items()), f"train.seq_len={sizes['max_seq_len']}",
        "train.micro_batch_size=1", "precision.mode=bf16", "activation.policy=full", "optim.warmup_steps=2",
    ]  # fmt: skip


def n_params(where: Where, layers: int) -> int:
    """Parameters of the reference transformer: blocks, two embeddings, the final norm, the head."""
    sizes = model(where)
    width = sizes["d_model"]
    fixed = (2 * sizes["vocab_size"] + sizes["max_seq_len"] + 2) * width
    return 12 * layers * width**2 + 13 * layers * width + fixed


def _predict(arm: Arm, where: Where) -> Figures:
    """The deepest model that fits on both sides, with the share of optimizer states that goes to the host.

    The memory of both sides is linear in the depth, and in depth times share: shallow models show where to look, and
    the planner decides there.
    """
    from dataclasses import replace

    from shardkit.plan.client import Planner

    if where.emulated:
        where = replace(where, host_memory=EMULATED_LIMIT)
    to = target(where, f"{EMULATED_LIMIT >> 20}MiB" if where.emulated else None)
    if where.on_cpu:  # the CPU has one memory: a limit on tensors represents both sides
        to = replace(to, cap=DRY_LIMIT, host_memory=None)
    with Planner(to) as planner:

        def plan(layers: int, share: float) -> MemoryEstimate:
            split = [] if share == 1 else [f"parallel.offload_ratio={share:g}"]
            return planner.predict(load(where, base(where), arm.settings, [f"model.n_layers={layers}"], split)([]))

        shallow, deeper = (1, 2) if model(where) is not SIZES else (8, 16)
        whole = plan(shallow, 1), plan(deeper, 1)
        half = plan(deeper, 0.5) if arm.split else whole[1]
        lines = [
            (line_through((shallow, deeper), [estimate.needed for estimate in (*whole, half)]), to.device_memory),
            (line_through((shallow, deeper), [estimate.host_peak for estimate in (*whole, half)]), to.host_memory),
        ]
        return _settled(arm, where, plan, [(line, limit) for line, limit in lines if limit is not None])


@dataclass(frozen=True)
class Line:
    """Bytes = fixed + (per_layer + shared × share) × layers."""

    fixed: float
    per_layer: float
    shared: float

    def deepest(self, share: float, limit: int) -> float:
        slope = self.per_layer + self.shared * share
        return math.inf if slope <= 0 else (limit - self.fixed) / slope


def line_through(depths: tuple[int, int], n_bytes: list[int]) -> Line:
    """The line through two depths with all states on the host, and the deeper one with half of the states there."""
    shallow, deeper = depths
    slope = (n_bytes[1] - n_bytes[0]) / (deeper - shallow)
    shared = 2 * (n_bytes[1] - n_bytes[2]) / deeper
    return Line(n_bytes[0] - slope * shallow, slope - shared, shared)


def best_share(lines: list[tuple[Line, int]], shares: list[float]) -> tuple[float, int]:
    """The share that allows the most layers, and their number."""
    deepest = {share: min(line.deepest(share, limit) for line, limit in lines) for share in shares}
    share = max(shares, key=deepest.__getitem__)
    return share, max(1, math.floor(deepest[share]))


def _settled(
    arm: Arm, where: Where, plan: Callable[[int, float], MemoryEstimate], lines: list[tuple[Line, int]]
) -> Figures:
    shares = [0.5] if arm.split and where.dry else [n / _SPLITS for n in range(1, _SPLITS + 1)] if arm.split else [1.0]
    share, start = best_share(lines, shares)
    fitting: dict[int, MemoryEstimate] = {}
    tried: Figures = {}
    layers, too_deep = start, 0  # not quite linear: pinned memory grows in powers of two
    while len(tried) < _MOST_PLANNED:
        estimate = plan(layers, share)
        fits = estimate.verdict != "does not fit"
        tried[str(layers)] = {"outcome": "ok" if fits else "does not fit", "needed": estimate.needed}
        if fits:
            fitting[layers] = estimate
        else:
            too_deep = layers
        deepest = max(fitting, default=0)
        layers = (deepest + too_deep) // 2 if too_deep else layers + max(1, layers // 20)
        if layers == deepest:
            break
    if not fitting:
        return {"outcome": "no boundary", "message": f"no depth up to {start} fits", "tried": tried}
    layers = max(fitting)
    return {
        "outcome": "ok", "layers": layers, "n_params": n_params(where, layers), "offload_ratio": share,
        "needed": fitting[layers].needed, "host": fitting[layers].host_peak, "host_limit": where.host_memory,
    }  # fmt: skip


def _measure(arm: Arm, where: Where) -> Figures:
    """Train around the predicted depth, 2 % at a time, until one works and the next one does not."""
    plan = where.predicted
    if plan["outcome"] != "ok":
        return {"outcome": plan["outcome"]}
    trials: Figures = dict(where.earlier.get("trials", {}))
    if where.earlier.get("ended") == "host memory":
        trials[str(where.earlier["trying"])] = _died(where, where.earlier["trying"])
    stride, memory = max(1, plan["layers"] // 50), memory_here(where)
    most = _DRY_MOST_TRIED if where.dry else _MOST_TRIED
    while len(trials) < most and (layers := next_size(trials, plan["layers"], stride)) is not None and layers > 0:
        where.keep({**memory, "trials": trials, "trying": layers})  # host memory may run out, and end this process
        trials[str(layers)] = trial = _try(arm, where, layers, plan["offload_ratio"])
        where.keep({**memory, "trials": trials})
        if trial["outcome"] == "failed":
            break
    worked = [trial["n_params"] for trial in trials.values() if trial["outcome"] == "ok"]
    outcome = "ok" if worked else next(reversed(trials.values()))["outcome"]
    return {**memory, "outcome": outcome, "n_params": max(worked, default=None), "trials": trials}


def _died(where: Where, layers: int) -> Figures:
    return {"outcome": "out of memory", "n_params": n_params(where, layers), "message": "host memory ran out"}


def memory_here(where: Where) -> Figures:
    """Bytes of the card, and of host memory that can be used."""
    if where.emulated:
        return {"hbm": EMULATED_LIMIT, "host_usable": EMULATED_LIMIT}
    if where.dry:
        return {"hbm": DRY_LIMIT, "host_usable": where.host_memory}
    import torch

    return {"hbm": torch.cuda.get_device_properties(0).total_memory, "host_usable": where.host_memory}


def _try(arm: Arm, where: Where, layers: int, ratio: float) -> Figures:
    if arm.stage is not None:
        figures = _plainly(arm.stage, where, layers)
    else:
        split = [] if ratio == 1 else [f"parallel.offload_ratio={ratio:g}"]
        chosen = settings(where, base(where), arm.settings, [f"model.n_layers={layers}"], split)
        trial = train(where, chosen, steps=STEPS, card=_card(where), traced=False)
        figures = {
            "outcome": trial.outcome, "losses": list(trial.losses), "peak_allocated": trial.peak,
            "tokens_per_s": trial.tokens_per_s, "message": trial.message,
        }  # fmt: skip
    if figures["outcome"] == "ok" and not (where.emulated or falls(figures["losses"])):
        figures |= {"outcome": "failed", "message": f"the loss does not fall: {figures['losses']}"}
    return {**figures, "n_params": n_params(where, layers), "layers": layers}


def _card(where: Where) -> dict[str, str]:
    """The variables of the emulated card, for the processes that train; none for another card."""
    if not where.emulated:
        return {}
    limits = {"MEMORY": EMULATED_LIMIT, "HOST_MEMORY": EMULATED_LIMIT, "CONTEXT": 0}
    return emulated_card(GPUS[where.card]) | {f"EMUCUDA_{name}": str(limit) for name, limit in limits.items()}


def falls(losses: list[float]) -> bool:
    """Whether every loss is finite and the last is below the first."""
    return bool(losses) and all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def _plainly(stage: int, where: Where, layers: int) -> Figures:
    """Plain DeepSpeed, in its own process."""
    request: dict[str, Any] = {
        "stage": stage, "sizes": {**model(where), "n_layers": layers}, "steps": STEPS, "cpu": where.on_cpu,
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.plain", json.dumps(request)]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=os.environ | _card(where)
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        return {"outcome": "failed", "losses": [], "message": lines[-1]}
    figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures
