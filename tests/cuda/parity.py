"""Which trainings are compared with the CPU's single process: engines, and what they are crossed with."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from shardkit.config import capability
from shardkit.config.load import load_config
from shardkit.errors import ConfigError

MODES = ("fp32", "bf16", "fp16", "pure_bf16", "fp8")
POLICIES = ("none", "full", "every_k", "selective", "selective_op")
GLOBAL_BATCH = 24

VARIANTS: dict[str, dict[str, Any]] = {
    "prefetch2": {"parallel.prefetch": 2},
    "keep_gathered": {"parallel.reshard_after_forward": False},
    "no_sync": {"parallel.no_sync": True},
    "reduce_each": {"parallel.no_sync": False},
    "deterministic": {"train.deterministic": True},
    "hpz": {"parallel.hpz": 2},
    "twin_flow": {"parallel.offload_ratio": 0.5},
}
"""Settings of an engine that is written `engine:variant`."""

BASE = ("single@1", "ddp@2", "fsdp@2", "hsdp@4", "zero1@2", "zero2@2", "zero3@2")
OFFLOADED = (
    "zero1+optimizer@2", "zero2+optimizer@2", "zero3+optimizer@2", "zero3+optimizer+param@2", "fsdp+param@2",
    "hsdp+param@4", "zero2+optimizer@1", "zero3+optimizer+param@1",
)  # fmt: skip
OTHERS = (
    "fsdp@3", "zero2@3", "zero3@4", "ddp@3", "fsdp:prefetch2@2", "fsdp+param:prefetch2@2", "fsdp:keep_gathered@2",
    "fsdp:no_sync@2", "ddp:reduce_each@2", "ddp:deterministic@2", "zero3:hpz@4", "zero3+optimizer:twin_flow@2",
)  # fmt: skip
ENGINES = BASE + OFFLOADED + OTHERS


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        engine: `strategy[+offloaded…][:variant]@ranks`.
        offload: whether activations wait in host memory.
        accum: micro-batches in a step.
        overflow: whether one rank's gradient is infinite once (fp16).
    """

    engine: str
    mode: str = "fp32"
    policy: str = "none"
    offload: bool = False
    accum: int = 2
    optimizer: str = "adamw_clipped"
    ema: bool = False
    overflow: bool = False

    @property
    def world(self) -> int:
        return int(self.engine.partition("@")[2])

    @property
    def strategy(self) -> str:
        """With what is offloaded, without variant and ranks."""
        return self.engine.partition("@")[0].partition(":")[0]

    def settings(self, device: str = "cuda") -> dict[str, Any]:
        from tests.strategies import cases

        out = cases.overrides(self.strategy, self.world, self.optimizer)
        out |= VARIANTS.get(self.engine.partition("@")[0].partition(":")[2], {})
        out |= {
            "run.device": device, "precision.mode": self.mode, "activation.policy": self.policy,
            "train.grad_accum_steps": self.accum, "train.micro_batch_size": GLOBAL_BATCH // self.accum // self.world,
        }  # fmt: skip
        if self.mode == "fp16":  # low enough that no gradient of this job overflows by itself
            out["precision.loss_scale_init_power"] = 10
        if self.offload:
            out |= {"activation.offload": "cpu", "activation.offload_min_bytes": 0}
        if self.ema:
            out["train.ema_decay"] = 0.5
        return out

    @property
    def wanted(self) -> str:
        """Name of the CPU's run that this one is compared with: in fp32, and for bf16 weights in bf16 weights."""
        mode = "-pure_bf16" if self.mode == "pure_bf16" else ""
        return f"{self.optimizer}-{self.layers}{mode}{'-overflow' * self.overflow}"

    @property
    def layers(self) -> int:
        """The last two blocks' activations are never brought back: offload shows from the third on."""
        return 4 if self.offload else 2

    def __str__(self) -> str:
        named = [f"{key}={value}" for key, value in asdict(self).items() if key not in ("engine", "mode", "policy")]
        return " ".join([self.engine, self.mode, self.policy, *named])


@lru_cache(None)
def allowed(case: Case) -> bool:
    """Whether the product takes the case, and its samples divide evenly."""
    if (case.overflow and case.mode != "fp16") or GLOBAL_BATCH % (case.accum * case.world):
        return False
    if case.optimizer == "sgd_unclipped" and case.mode != "fp32":
        return False  # at its rate, unclipped, a rounding more or less becomes a hundredth of the loss
    try:
        config = load_config(None, case.settings()).config
        capability.check(config, device="cuda", world_size=case.world, local_world_size=case.world)
    except ConfigError:
        return False
    return True


LATE = {"EMUCUDA_COPY_DELAY_US": "5000", "EMUCUDA_POISON": "1"}
"""Copies begin late, and memory that is new is not a number."""

PATHS = [
    Case("single@1", offload=True),
    Case("single@1", policy="selective", offload=True, accum=1, ema=True),
    Case("ddp@2", policy="full", offload=True),
    Case("fsdp:prefetch2@2", offload=True),
    Case("zero1+optimizer@2", accum=1),
    Case("zero2+optimizer@2", offload=True, ema=True),
    Case("zero3+optimizer@2", policy="full"),
    Case("zero3+optimizer+param@2", offload=True),
    Case("zero3+optimizer:twin_flow@2"),
    Case("fsdp+param@2", offload=True, ema=True),
    Case("fsdp+param:prefetch2@2", policy="full", accum=1),
    Case("zero3:hpz@4", accum=1),
    Case("hsdp+param@4", accum=1),
]
"""Each way in which something is copied between host and device, or gathered ahead."""
HALF = [replace(case, mode="bf16") for case in PATHS]


AXES: dict[str, Sequence[Any]] = {
    "engine": ENGINES, "mode": MODES, "policy": POLICIES, "offload": (False, True), "accum": (1, 2, 3),
    "optimizer": ("adamw_clipped", "sgd_unclipped"), "ema": (False, True), "overflow": (False, True),
}  # fmt: skip
Pair = tuple[str, Any, str, Any]


def pairs_of(case: Case) -> Iterator[Pair]:
    for one, other in combinations(AXES, 2):
        yield one, getattr(case, one), other, getattr(case, other)


def covering(axes: dict[str, Sequence[Any]] = AXES, seed: int = 0) -> list[Case]:
    """Cases such that each value of an axis meets each value of each other, where the product takes them together."""
    assert set(axes) == {field.name for field in fields(Case)}
    wanted = {
        (one, a, other, b) for one, other in combinations(axes, 2) for a, b in product(axes[one], axes[other])
    }  # fmt: skip
    draw = random.Random(seed)
    chosen: list[Case] = []
    for pair in sorted(wanted, key=repr):
        if pair not in wanted:
            continue
        best = max(_candidates(pair, axes, draw), key=lambda case: len(wanted & set(pairs_of(case))), default=None)
        if best is None:  # no case has both
            wanted.discard(pair)
            continue
        chosen.append(best)
        wanted -= set(pairs_of(best))
    return chosen


def _candidates(pair: Pair, axes: dict[str, Sequence[Any]], draw: random.Random) -> Iterable[Case]:
    one, a, other, b = pair
    found = 0
    for _ in range(400):
        case = replace(Case(**{axis: draw.choice(values) for axis, values in axes.items()}), **{one: a, other: b})
        if allowed(case):
            found += 1
            yield case
        if found == 30:
            return


def pool(case: Case) -> tuple[int, str]:
    """Ranks, and the backend of their group: cases of a pool can run one after the other in the same processes."""
    on_cpu = case.strategy in ("fsdp+param", "hsdp+param")  # as shardkit's own groups would be made
    return case.world, "cpu:gloo,cuda:nccl" if on_cpu else "nccl"


EXACT = 1e-5
"""fp32: losses over all steps."""
EXACT_WEIGHTS = 1e-4
"""fp32: ‖weights − wanted‖ / ‖wanted‖; AdamW turns gradients that are all rounding into whole steps."""


TIMES = {"fp16": 1, "bf16": 6, "pure_bf16": 6, "fp8": 8}
"""Below fp32: how many times as far as the CPU's own bf16 lies from its fp32.

Engines cast at other places than autocast does; fp16 keeps three bits more than bf16, fp8 four less. The CPU's own
distance is one sample of rounding: other chunks of the loss changed it by a fifth.
"""


def problems(case: Case, found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a case, if anything."""
    if "error" in found:
        yield found["error"]
        return
    loss, weights = EXACT, EXACT_WEIGHTS
    if case.mode != "fp32":
        spread = wanted["spread"][f"{case.optimizer} {case.layers} bf16"]
        loss, weights = TIMES[case.mode] * spread["loss"], TIMES[case.mode] * spread["weights"]
    far = max(abs(a - b) for a, b in zip(found["losses"], wanted["losses"][case.wanted], strict=True))
    if not far <= loss:
        yield f"a loss differs by {far:.1e}, not {loss:.1e}"
    if not found["weights"] <= weights:
        yield f"the weights differ by {found['weights']:.1e}, not {weights:.1e}"
    if found["elements"] != wanted["elements"][case.wanted]:
        yield f"the ranks hold {found['elements']} elements between them, not {wanted['elements'][case.wanted]}"
    if found["elsewhere"]:
        yield f"{found['elsewhere']} bytes were taken on other ranks' devices"
    if case.overflow and not min(found["scales"]) == found["scales"][-1] == 512.0:
        yield f"the loss scale was not halved once: {found['scales']}"
