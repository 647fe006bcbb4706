"""The planner's answer: per-rank memory by phase and category, in the ledger's terms, and a verdict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from ...errors import ConfigError
from ...files import write_whole
from ...hardware.cards import TYPICAL
from ...memory.rows import Category, PhaseName
from .cost import TimeEstimate

if TYPE_CHECKING:
    from ...config.schema import RunConfig

SCHEMA = 1
ROUGHLY = 0.1
"""Relative error of an estimate from a few layers of a deep model."""
Verdict = Literal["fits", "tight", "does not fit"]
Method = Literal["cuda", "cpu"]
EvaluationPhase = Literal["evaluate", "sample"]
EVALUATION: tuple[EvaluationPhase, ...] = ("evaluate", "sample")
"""An evaluation's losses, and its texts from `train.sample_prompts`."""
PlannedPhase = PhaseName | EvaluationPhase


_BESIDE = {"run", "logging", "checkpoint", "profile", "memory"}
"""Config sections that do not change a step's memory."""


def digest(config: RunConfig) -> str:
    """A hash that is equal for configs whose steps need the same memory."""
    settings = config.model_dump(mode="json", exclude=_BESIDE)
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


class DoesNotFit(ConfigError):
    exit_code = 4


@dataclass(frozen=True)
class PhaseEstimate:
    allocated: int
    reserved: int
    host: int


@dataclass(frozen=True)
class PeakEstimate:
    allocated: int  # bytes of the tensors' blocks, as the allocator counts them
    reserved: int  # bytes that the allocator takes from a GPU with room to spare
    required: int  # bytes that remain when the allocator releases its cache
    phase: str  # phase, module: the part of the step that peaks
    module: str


@dataclass(frozen=True)
class CategoryEstimate:
    """Bytes at the peak on the device, and at the peak on the host."""

    device: int
    host: int


@dataclass(frozen=True)
class MemoryEstimate:
    device: str
    world_size: int
    rank: int  # the rank of these figures
    n_params: int  # n_params, n_blocks: the model's parameters and repeated blocks
    n_blocks: int
    method: Method  # the device of the traced fake tensors; "cpu" for a GPU job means that the fake CUDA device failed
    phases: Mapping[PlannedPhase, PhaseEstimate]
    peak: PeakEstimate
    resident: int  # bytes on the device between two steps
    host_peak: int  # bytes of tensors on the host at their peak
    categories: Mapping[Category, CategoryEstimate]
    overhead: int = 0  # bytes on the GPU outside torch's allocator: context and communicators
    overhead_from: str = TYPICAL  # the source of `overhead`: typical, or measured on this machine
    device_memory: int | None = None  # device_memory, host_memory: the limits in bytes; `None` = not asked
    host_memory: int | None = None
    uncertainty: float = 0.03  # expected relative error, 0 to 1
    extrapolated_from: tuple[int, ...] = ()  # the depths traced instead of the whole model; empty = traced whole
    notes: tuple[str, ...] = field(default=())
    time: TimeEstimate | None = None  # the time of a step; `None` = not asked
    n_packable: int = 0  # values that `model.quantize` would pack in linear layers, and in experts
    n_packable_experts: int = 0
    ep_imbalance: float | None = None  # rows of the busiest rank's experts over the average; `None` = no parallel.ep

    @property
    def condition(self) -> str:
        """The rows under which the verdict holds, to be printed after it; empty without `parallel.ep`."""
        if self.ep_imbalance is None:
            return ""
        rows = f"{self.ep_imbalance:g} times the average rows (parallel.ep_imbalance)"
        if self.verdict == "does not fit":
            return f", where the busiest rank's experts get {rows}"
        return f", if the busiest rank's experts get at most {rows}"

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits; "tight" = not if the estimate is too low; `None` without a limit."""
        limits = self._needs_and_limits
        if any(need > limit for need, limit in limits):
            return "does not fit"
        if any(need * (1 + self.uncertainty) > limit for need, limit in limits):
            return "tight"
        return "fits" if limits else None

    @property
    def is_clear(self) -> bool:
        """Whether an estimate from a few layers, off by `ROUGHLY` at most, tells the verdict of an exact one."""
        limits = self._needs_and_limits
        fits = all(need * (1 + ROUGHLY + self.uncertainty) <= limit for need, limit in limits)
        return bool(limits) and (fits or any(need * (1 - ROUGHLY) > limit for need, limit in limits))

    @property
    def _needs_and_limits(self) -> list[tuple[int, int]]:
        pairs = [(self.needed, self.device_memory), (self.host_peak, self.host_memory)]
        return [(need, limit) for need, limit in pairs if limit is not None]

    @property
    def needed(self) -> int:
        """Bytes on the device, including those outside torch's allocator."""
        return self.peak.required + self.overhead

    def limited(self, device_memory: int | None, host_memory: int | None) -> MemoryEstimate:
        return replace(self, device_memory=device_memory, host_memory=host_memory)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "verdict": self.verdict, **asdict(self)}

    def save(self, run_dir: Path, config: RunConfig, other_ranks: Sequence[MemoryEstimate] = ()) -> None:
        """Write `plan.json` for the report; a run of another config ignores it. `other_ranks` have other shards."""
        obj = {
            "schema": SCHEMA, "verdict": self.verdict, "uncertainty": self.uncertainty, "config": digest(config),
            "device_memory": self.device_memory, "ranks": [asdict(estimate) for estimate in (self, *other_ranks)],
        }  # fmt: skip
        write_whole(run_dir / "plan.json", json.dumps(obj, indent=1) + "\n")

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> MemoryEstimate:
        return TypeAdapter(cls).validate_python(obj)
