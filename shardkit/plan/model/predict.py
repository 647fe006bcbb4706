"""Predict one rank's memory by tracing its step on fake tensors; runs in its own process (see `worker`)."""

from __future__ import annotations

import gc
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ...config import capability
from ...config.load import resolve_batch
from ...config.schema import ModelConfig, ParallelConfig, RunConfig
from ...errors import ConfigError, gib
from ...hardware.cards import TYPICAL
from ...memory.rows import CATEGORIES, PHASES, Category
from ...memory.tracing.compat import TRACKER
from ...memory.tracing.events import EventLog, Peak, repeat_last_step
from ...memory.tracing.traced_step import BETWEEN, Tracing
from ...memory.tracing.tracker import TensorTracker
from ...models.hf import HFModel
from ...parallel.blocks import find_blocks
from ...parallel.weights import Weights
from ...parallel.world import World
from ...strategies.zero.config import build_ds_config
from ...tasks.base import Batch, Task
from ...tasks.load import Prompts, load_task, model_config, read_prompts, splitting
from ..simulate import shim
from ..simulate.compat import PLANS, call_directly
from ..simulate.fake_weights import FakeWeights, fake_world
from ..simulate.fakes import Fakes
from ..simulate.step import count_model, on_fake, sample_batch, take_evaluation, take_step, wrapped
from ..target import Target
from .allocator import ROUND, Replay, replay, required, whole_pages
from .cost import Segment, Speeds, TimeEstimate, speeds_of, step_time
from .estimate import EVALUATION, CategoryEstimate, MemoryEstimate, Method, PeakEstimate, PhaseEstimate, PlannedPhase
from .work import WorkCounter

_RECURRENT = 0.7
"""Uncertainty of plans with recurrent layers. An LSTM on the CPU took 1.7 times its plan, because a trace does not see
the workspace of the kernel's library."""
MICRO_BATCHES, FEW = 3, 2
"""Micro-batches traced per step: the first, one for all in the middle, and the last. Of deep models, whose traces are
slow, only the first and the last, which leave out a loss: 512 bytes. Times are of all three."""


def prepare(target: Target, fakes: str = "cuda") -> Method:
    """Prepare this process to trace, once, before anything else; `fakes`: "cpu" does without the fake CUDA device."""
    for feature in (TRACKER, PLANS):
        feature.require()
    os.environ["DS_ACCELERATOR"] = fakes = "cpu" if target.gpu is None else fakes
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # Threads of autograd would drop the last references to our modes, at worst after the interpreter ended (an abort).
    torch.autograd.set_multithreading_enabled(False)
    call_directly(Fakes, TensorTracker)
    if target.gpu is None or fakes == "cpu":
        return "cpu"
    shim.install(target.gpu, target.ranks_per_node)
    return "cuda"


def predict(
    config: RunConfig,
    target: Target,
    method: Method,  # the result of `prepare`, or "cpu" (less accurate) for a GPU job if the fake CUDA device fails
    all_layers: bool = False,  # trace every layer of a deep model
    timed: bool = False,  # also predict how long a step takes
    rough: bool = False,  # two micro-batches, deep models at two depths, under ZeRO too, whose buckets are then inexact
    evaluates: bool = True,  # trace an evaluation too
) -> MemoryEstimate:
    kind = "cpu" if target.gpu is None else "cuda"
    local_size = min(target.ranks_per_node, target.world_size)
    capability.check(config, device=kind, world_size=target.world_size, local_world_size=local_size)
    if config.precision.mode == "fp8" and target.gpu is not None and target.gpu.capability < (8, 9):
        reason = capability.CAPABILITIES["fp8"].on_cpu
        raise ConfigError(f"precision.mode=fp8 on {target.gpu.name}: {reason}", "use a newer card")
    micro_batches = resolve_batch(config, target.world_size)
    few = FEW if rough or (is_slow(config) and not timed) else MICRO_BATCHES
    config, notes = _traceable(config, min(micro_batches, few), evaluates)
    speeds = speeds_of(target) if timed else None
    device = torch.device("cuda", 0) if method == "cuda" else torch.device("cpu")
    scenario = Scenario(target, device, speeds)
    depth = None if all_layers else find_depth(config, rough)
    if depth is None:
        traced: tuple[int, ...] = ()
        trace = _traced(config, scenario)
    else:
        shallower, deeper = (
            _traced(depth.at(layers), scenario, (layers, depth.layers_at_ends)) for layers in depth.traced
        )
        trace, traced = _extrapolated(depth, shallower, deeper), depth.traced
    time = None
    if speeds is not None:
        targets = trace.targets * micro_batches * target.world_size
        time = step_time(trace.segments, micro_batches, targets, speeds.overlap, speeds.measured)
    imbalance = config.parallel.ep_imbalance if config.parallel.ep > 1 else None
    if imbalance is None and config.parallel.ep_imbalance != ParallelConfig().ep_imbalance:
        notes += ("parallel.ep_imbalance changes nothing without parallel.ep",)
    return replace(_estimate(trace, target, method, traced, notes, time), ep_imbalance=imbalance)


def ranks_alike(config: RunConfig, world_size: int, n_params: int) -> bool:
    """Whether all ranks take as much as rank 0, or less.

    ZeRO-1 and 2 keep a gradient on the rank that owns it, from the moment when its bucket is reduced. Buckets hold the
    last layers first: if there are several, the last rank keeps its whole share of gradients while most activations
    are still there.
    """
    if world_size == 1 or config.parallel.sharding.stage not in (1, 2):
        return True
    accum = resolve_batch(config, world_size)
    ds = build_ds_config(config, world_size, accum, on_cuda=True, sizes=(n_params, n_params))
    return bool(ds["zero_optimization"]["reduce_bucket_size"] >= n_params)


def _extrapolated(depth: Depth, shallower: _Trace, deeper: _Trace) -> _Trace:
    device = extended(depth, shallower.device, deeper.device)
    peak = max(edge.n_bytes for edge in device.values())
    larger = peak / max(1, deeper.peak)
    required = round(deeper.required * larger)
    # How blocks lie in memory decides how much is reserved, and how much of it can be released. It jumps from one depth
    # to the next, and a line through two of them went astray by tens of GiB: assume the layout of the deeper trace.
    rounding = whole_pages(deeper.arenas) - sum(deeper.arenas.values())
    reserved = {
        phase: rounding
        + (line(depth, (shallower.reserved_by_phase[phase], size)) if phase == "wrap" else size + peak - deeper.peak)
        for phase, size in deeper.reserved_by_phase.items()
    }
    return _Trace(
        allocated=round(deeper.allocated * larger),
        reserved=max([*reserved.values(), required]),
        required=required,
        allocated_by_phase={phase: round(n_bytes * larger) for phase, n_bytes in deeper.allocated_by_phase.items()},
        reserved_by_phase=reserved,
        arenas=deeper.arenas,
        n_params=line(depth, (shallower.n_params, deeper.n_params)),
        n_blocks=depth.layers,
        n_recurrent=deeper.n_recurrent,
        n_repeated=deeper.n_repeated,
        n_packable=line(depth, (shallower.n_packable, deeper.n_packable)),
        n_packable_experts=line(depth, (shallower.n_packable_experts, deeper.n_packable_experts)),
        device=device,
        host=extended(depth, shallower.host, deeper.host),
        segments=[
            segment.along(deeper_segment, depth.position)
            for segment, deeper_segment in zip(shallower.segments, deeper.segments, strict=True)
        ],
        targets=deeper.targets,
    )


def _traceable(config: RunConfig, micro_batches: int, evaluates: bool) -> tuple[RunConfig, tuple[str, ...]]:
    """The config without settings that fake tensors do not support, and a note for each on how it changes the plan."""
    notes = []
    few = {"grad_accum_steps": micro_batches, "global_batch_size": None, **({} if evaluates else {"eval_samples": 0})}
    changes: dict[str, Any] = {"train": config.train.model_copy(update=few)}
    if config.compile.enabled:
        changes["compile"] = config.compile.model_copy(update={"enabled": False})
        notes.append("compile is planned as eager: fused kernels keep less")
    if config.activation.policy == "budget":
        changes["activation"] = config.activation.model_copy(update={"policy": "none"})
        notes.append("activation.policy=budget is planned as none: at most this much")
    return config.model_copy(update=changes), tuple(notes)


@dataclass(frozen=True)
class _Trace(Replay):
    """The figures of a traced run: those of the replayed allocator, of the model and of its work."""

    n_params: int
    n_blocks: int
    n_recurrent: int
    n_repeated: int
    n_packable: int
    n_packable_experts: int
    device: Edges
    host: Edges
    segments: list[Segment]
    targets: float

    @property
    def peak(self) -> int:
        return max(peak.n_bytes for peak in self.device.values())


@dataclass(frozen=True)
class Scenario:
    target: Target
    device: torch.device  # the device of the fake tensors
    speeds: Speeds | None = None  # the target hardware's speeds; without them a trace counts no work


def _traced(config: RunConfig, scenario: Scenario, ends: tuple[int, int] | None = None) -> _Trace:
    """Trace a config into figures; `ends` of a shallow stand-in: (its own layers, layers to tell apart at each end)."""
    target, device = scenario.target, scenario.device
    on_gpu = target.gpu is not None
    # In segments of fixed size, blocks move until the third step; every later step is like the third.
    steps = 2 if target.expandable or not on_gpu else 3
    log, counts, segments, targets = trace(config, scenario, steps)
    real = replay(log, str(device), target.expandable) if on_gpu else None
    room = (target.device_memory or 0) - _overhead(target)
    if real is not None and steps == 2 and ends is None and real.required <= room < real.reserved:
        # On a card that must release its cache, blocks in growing segments move until the third step too.
        if not repeat_last_step(log, BETWEEN):
            log = trace(config, scenario, 3)[0]
        real = replay(log, str(device), target.expandable)
    on_device = edges(log, str(device), ROUND if on_gpu else 1, *ends or ())
    on_host = edges(log, "cpu", 1, *ends or ()) if device.type == "cuda" else {}
    if real is None:
        exact = max(peak.n_bytes for peak in on_device.values())
        memory = Replay(exact, exact, exact, {}, {}, {})
    else:
        # Small pages, because pages of 20 MiB would hide the bytes that a layer adds.
        smooth = replay(log, str(device), expandable=True, page=ROUND) if ends is not None else real
        n_required = required(log, str(device), target.expandable, on_a_large_card=real)
        memory = replace(
            smooth, allocated=real.allocated, allocated_by_phase=real.allocated_by_phase, required=n_required
        )
    figures: dict[str, Any] = {**vars(memory), **counts}
    return _Trace(**figures, device=on_device, host=on_host, segments=segments, targets=targets)


def _overhead(target: Target) -> int:
    """Bytes on the card outside torch's allocator: the CUDA context, and communicators if there are several ranks."""
    gpu = target.gpu
    return 0 if gpu is None else gpu.context + (gpu.per_communicator if target.world_size > 1 else 0)


def trace(
    config: RunConfig, scenario: Scenario, steps: int = 2
) -> tuple[EventLog, dict[str, int], list[Segment], float]:
    """Run steps and an evaluation: (all allocations, `count_model`, the last step's work, targets of a micro-batch)."""
    gc.collect()
    gc.freeze()  # later collections, some of them DeepSpeed's, then scan this trace's objects only
    target = scenario.target
    log = EventLog(stream=shim.current_stream)
    shim.on_release(log.released)
    if target.gpu is not None:
        log.product_workspace = target.gpu.blas_workspace
    speeds = scenario.speeds
    work = None if speeds is None else WorkCounter(config, log, speeds, scenario.device, target.ranks_per_node)
    task = load_task(config)
    split = splitting(task, (target.rank or 0) // config.parallel.tp, config.parallel.cp)
    batch = split(sample_batch(task, config))
    n_evaluated = min(config.train.micro_batch_size, config.train.eval_samples)
    evaluated = split(sample_batch(task, config, n_evaluated)) if n_evaluated else None
    inputs = _Inputs(batch, float(task.n_targets(batch)), evaluated, read_prompts(config, task))
    weights = FakeWeights(config.train.seed, getattr(task, "init_parameter", None))
    tracker = TensorTracker(log, work.ran if work else None)
    with (
        fake_world(scenario.device, target.world_size, target.ranks_per_node, target.rank or 0, config) as world,
        Tracing(tracker) as tracing,
    ):
        counts = _follow(config, scenario, world, task, inputs, weights, tracing, steps)
    if target.gpu is not None:  # on CPUs peaks are measured under a dispatch mode too
        log.accumulated_in_place()
    return log, counts, work.segments if work else [], inputs.n_targets


@dataclass(frozen=True)
class _Inputs:
    batch: Batch
    n_targets: float  # targets of `batch`, a micro-batch
    evaluated: Batch | None  # an evaluation's largest micro-batch; `None` without evaluations
    prompts: Prompts | None  # what the run samples from after an evaluation


def _follow(
    config: RunConfig, scenario: Scenario, world: World, task: Task, inputs: _Inputs, weights: Weights,
    tracing: Tracing, steps: int,
) -> dict[str, int]:  # fmt: skip
    """Take the steps and the evaluation; every tensor of the run is freed when this returns."""
    batch = on_fake(inputs.batch)
    with wrapped(config, world, task, weights) as strategy:
        tracing.wrapped(strategy, strategy.model)
        counts = count_model(strategy, task)
        for number in range(steps):
            if number == 2 and tracing.repeats():
                break
            take_step(config, world, task, batch, inputs.n_targets, strategy, tracing)
            tracing.stepped(strategy)
        if inputs.evaluated is not None:  # its batch is made after the steps
            take_evaluation(config, world, task, on_fake(inputs.evaluated), inputs.prompts, strategy, tracing)
    # Bytes by which one attention's keys and values are larger, as their heads are repeated for each rank of a group.
    return {**counts, "n_repeated": 0 if world.context is None else 2 * world.context.n_repeated}


def _estimate(
    trace: _Trace, target: Target, method: Method, extrapolated_from: tuple[int, ...], notes: tuple[str, ...],
    time: TimeEstimate | None,
) -> MemoryEstimate:  # fmt: skip
    peak = max(trace.device.values(), key=lambda peak: peak.n_bytes)
    host = max(trace.host.values(), key=lambda peak: peak.n_bytes, default=None)
    phases: dict[PlannedPhase, PhaseEstimate] = {}
    beyond = 0 if target.expandable else max(0, trace.allocated - peak.n_bytes)
    for phase in (*PHASES, *EVALUATION):
        allocated = max((p.n_bytes for p in trace.device.values() if p.phase == phase), default=0)
        if not target.expandable:
            allocated = max(allocated, trace.allocated_by_phase.get(phase, 0))
        on_host = max((p.n_bytes for p in trace.host.values() if p.phase == phase), default=0)
        if allocated or on_host:
            phases[phase] = PhaseEstimate(allocated, trace.reserved_by_phase.get(phase, allocated), on_host)
    host_categories = host.categories if host else {}
    on_device = {**peak.categories, "unattributed": peak.categories.get("unattributed", 0) + beyond}
    gpu = target.gpu
    # The relative error of plans, from comparisons with real runs. Overheads that were not measured here add to it.
    exact = 0.03 if gpu is None or gpu.overhead_from != TYPICAL else 0.05
    if gpu is not None and method == "cpu":
        notes += ("traced as CPU tensors: the fake CUDA device does not work with this build of torch",)
    if trace.n_recurrent:
        notes += ("recurrent layers are traced operator by operator, without oneDNN's or cuDNN's memory for backward",)
    if trace.n_repeated:
        notes += (
            f"repeated key heads, whose number parallel.cp does not divide, take {gib(trace.n_repeated)} of "
            "communication in each attention",
        )
    return MemoryEstimate(
        device=gpu.name if gpu else "cpu",
        world_size=target.world_size,
        rank=target.rank or 0,
        n_params=trace.n_params,
        n_blocks=trace.n_blocks,
        method=method,
        phases=phases,
        peak=PeakEstimate(peak.n_bytes + beyond, max(trace.reserved, peak.n_bytes), max(trace.required, peak.n_bytes),
                          peak.phase, peak.module),
        resident=trace.device[BETWEEN, ""].n_bytes,
        host_peak=host.n_bytes if host else 0,
        categories={
            category: CategoryEstimate(on_device.get(category, 0), host_categories.get(category, 0))
            for category in CATEGORIES
            if on_device.get(category) or host_categories.get(category)
        },
        overhead=_overhead(target),
        overhead_from="" if gpu is None else gpu.overhead_from,
        uncertainty=_RECURRENT if trace.n_recurrent else 0.15 if gpu is not None and method == "cpu" else exact,
        extrapolated_from=extrapolated_from,
        notes=notes,
        time=time,
        n_packable=trace.n_packable,
        n_packable_experts=trace.n_packable_experts,
    )  # fmt: skip


DEEP, DEEP_ROUGHLY = 49, 9
"""Models of at least so many layers are traced at two smaller depths, which misses some of the allocator's gaps."""
# Predict deep models from shallow traces: memory at each edge of a step grows equally with every layer.

MUCH_DEEPER = 24
"""Models of at least so many layers are traced several times faster at two depths than whole."""
LAYERS_AT_ENDS, LAYERS_AT_ENDS_ROUGHLY = 2, 1
"""Layers at each end that edges tell apart; the layers between them do not exceed these."""
Edge = tuple[str, str]
Edges = Mapping[Edge, Peak]


@dataclass(frozen=True)
class Depth:
    layers: int
    traced: tuple[int, int]  # the two depths
    at: Callable[[int], RunConfig]  # returns the config with another number of layers
    layers_at_ends: int  # layers at each end of the model that edges tell apart

    @property
    def position(self) -> float:
        """The position of the whole depth on a line with the two traced depths at 0 and 1."""
        shallower, deeper = self.traced
        return (self.layers - shallower) / (deeper - shallower)


def find_depth(config: RunConfig, rough: bool = False) -> Depth | None:
    """Find the layer count in the config and choose two depths to trace; `None` = trace the whole model.

    Traced whole: shallow models, users' own tasks, unequal layers, and ZeRO (its buckets span layers) unless a rough
    answer will do.
    """
    spans_layers = config.parallel.sharding.stage > 0 and not rough
    if config.task.factory is not None or spans_layers:
        return None
    built_in = config.model.n_layers, lambda layers: _with_model(config, n_layers=layers)
    model = built_in if config.task.name == "causal_lm" else _transformers(config)
    if model is None or model[0] < (DEEP_ROUGHLY if rough else DEEP):
        return None
    layers, at = model
    if config.task.name != "causal_lm" and not _layers_are_alike(config.task.name, config.model.model_dump_json()):
        return None
    every = config.activation.every_k if config.activation.policy == "every_k" else 1
    layers_at_ends = LAYERS_AT_ENDS_ROUGHLY if rough else LAYERS_AT_ENDS
    shallower = 2 * layers_at_ends + (layers - 2 * layers_at_ends) % every
    deeper = shallower + every
    return Depth(layers, (shallower, deeper), at, layers_at_ends) if deeper < layers else None


def is_slow(config: RunConfig) -> bool:
    """Whether the whole model is traced and so deep that a rough trace takes a fraction of the time."""
    rough = find_depth(config, rough=True)
    return find_depth(config) is None and rough is not None and rough.layers >= MUCH_DEEPER


def has_first_look(config: RunConfig) -> bool:
    """Whether a rough trace is much faster than an exact one and as good: not under ZeRO, whose buckets span layers."""
    return config.parallel.sharding.stage == 0 and is_slow(config)


def _with_model(config: RunConfig, **changes: object) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def _transformers(config: RunConfig) -> tuple[int, Callable[[int], RunConfig]] | None:
    model = model_config(config)
    layers = getattr(model, "num_hidden_layers", None)
    if not isinstance(layers, int) or "layer_types" in config.model.hf or hasattr(model, "depths"):
        return None
    if len(set(getattr(model, "layer_types", None) or [""])) > 1:
        return None
    key = model.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return layers, lambda n: _with_model(config, hf={**config.model.hf, key: n})


@lru_cache(maxsize=8)  # a search plans the same model tens of times
def _layers_are_alike(task: str, model: str) -> bool:
    """Whether each stack's layers hold about as many values: two dense layers tell nothing of the experts after them.

    `model`: `config.model` as JSON.
    """
    reference = HFModel(ModelConfig.model_validate_json(model), task).reference
    blocks = {id(block) for block in find_blocks(reference)}
    sizes: dict[str, list[int]] = {}
    for name, module in reference.named_modules():
        if id(module) in blocks:
            sizes.setdefault(name.rpartition(".")[0], []).append(sum(param.numel() for param in module.parameters()))
    return all(max(stack) <= 1.1 * min(stack) for stack in sizes.values())


def edges(
    log: EventLog, device: str, rounding: int, layers: int | None = None, layers_at_ends: int = LAYERS_AT_ENDS
) -> dict[Edge, Peak]:
    """The largest total of live bytes by (phase, module).

    `layers`: the model's depth, if it is a shallow stand-in: layers are then numbered from the nearer end, and only the
    peaks of `layers_at_ends` layers at each end are returned.
    """
    peaks: dict[Edge, Peak] = {}
    for (phase, module), peak in log.peaks(device, rounding).items():
        edge_module = module if layers is None else _from_the_ends(module, layers, layers_at_ends)
        if edge_module is None:
            continue
        largest = peaks.get((phase, edge_module))
        if largest is None or peak.n_bytes > largest.n_bytes:
            peaks[phase, edge_module] = peak
    return peaks


def _from_the_ends(module: str, layers: int, layers_at_ends: int) -> str | None:
    match = re.search(r"(?<![^.])\d+(?![^.])", module)
    if match is None:
        return module
    index = int(match[0])
    if layers_at_ends <= index < layers - layers_at_ends:
        return None
    from_end = str(index) if index < layers_at_ends else f"-{layers - index}"
    return module[: match.start()] + from_end + module[match.end() :]


def extended(depth: Depth, shallower: Edges, deeper: Edges) -> dict[Edge, Peak]:
    """The whole model's edges, each extrapolated along a line through the edges of the two traced depths."""
    peaks: dict[Edge, Peak] = {}
    for edge in shallower.keys() & deeper.keys():
        shallower_peak, deeper_peak = shallower[edge], deeper[edge]
        ends = {c: (shallower_peak.categories.get(c, 0), deeper_peak.categories.get(c, 0)) for c in CATEGORIES}
        categories: dict[Category, int] = {c: n for c, pair in ends.items() if (n := line(depth, pair)) > 0}
        n_bytes = line(depth, (shallower_peak.n_bytes, deeper_peak.n_bytes))
        module = re.sub(r"(?<![^.])-(\d+)", lambda match: str(depth.layers - int(match[1])), edge[1])
        peaks[edge] = replace(deeper_peak, n_bytes=n_bytes, module=module, categories=categories)
    return peaks


def line(depth: Depth, values: Sequence[int]) -> int:
    """The value at the whole depth, on the line through the values at the two traced depths."""
    return round(values[0] + (values[1] - values[0]) * depth.position)
