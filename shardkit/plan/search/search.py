"""Find the fastest setting that fits: trace every combination roughly, then the promising combinations exactly.

A combination is traced at its largest micro-batch, and at its smallest only if the largest does not fit. Larger
micro-batches are assumed to be at least as fast, since a step then has fewer passes, and every pass gathers and reads
the weights and launches the kernels anew. Ranks that share samples are assumed to be no faster than ranks of their own,
since they compute as many tokens and exchange more: they are tried where the others hardly fit. Ranks that share
experts gather fewer of them and exchange rows, which may be faster: they are tried always.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod
from operator import attrgetter

from ...config.load import as_override
from ...config.schema import ParallelConfig, RunConfig
from ...errors import ConfigError, ShardkitError, gib
from ..client import Planner
from ..model.estimate import DoesNotFit, MemoryEstimate
from ..target import Target

# The settings an automatic plan may change: engine and offload, activation checkpointing, precision, micro-batch, and
# the axes along which ranks share samples or experts.

POLICIES = ("none", "selective_op", "selective", "full")
_OFFLOADED = {"offload_optimizer": "optimizer", "offload_param": "parameters"}


def _parts_of_sequences(config: RunConfig, target: Target) -> Iterator[int]:
    ranks = target.world_size if config.parallel.cp_across_nodes else target.ranks_per_node
    if not config.task.may_split_sequences:
        return
    heads = config.model.n_heads if config.task.factory is None and config.task.name == "causal_lm" else 0
    for size in range(2, ranks + 1):
        if ranks % size == target.world_size % size == config.train.seq_len % size == heads % size == 0:
            yield size


def _parts_of_layers(config: RunConfig, target: Target) -> Iterator[int]:
    if config.task.may_split_sequences:
        yield from (n for n in (2, 4, 8, 16) if target.ranks_per_node % n == target.world_size % n == 0)


def _parts_of_experts(config: RunConfig, target: Target) -> Iterator[int]:
    if config.task.factory is not None or config.task.name not in ("hf_causal_lm", "hf_masked_lm"):
        return
    from ...tasks.load import model_config  # imports torch

    model = model_config(config)
    numbers = (getattr(model, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    n_experts = next((number for number in numbers if isinstance(number, int)), 1)
    yield from (n for n in (2, 4, 8, 16) if target.ranks_per_node % n == target.world_size % n == n_experts % n == 0)


AXES: dict[str, Callable[[RunConfig, Target], Iterable[int]]] = {
    "cp": _parts_of_sequences,
    "tp": _parts_of_layers,
    "ep": _parts_of_experts,
}
"""Keys of `parallel` that let ranks share samples or experts → the sizes to try beside 1. What a model cannot do is
refused by its plan."""
SHARING = ("cp", "tp")
"""Of `AXES`, those whose ranks have the same samples; ranks that share experts have samples of their own."""


def ranks_to_a_sample(sizes: Iterable[int]) -> int:
    """How many ranks share a sample in groups of these sizes along `AXES`."""
    return prod(size for key, size in zip(AXES, sizes, strict=True) if key in SHARING)


def axis_settings(sizes: Iterable[int]) -> dict[str, str]:
    """The settings of groups of these sizes along `AXES`."""
    settings = {f"parallel.{key}": str(size) for key, size in zip(AXES, sizes, strict=True)}
    if settings["parallel.tp"] == "1":
        settings["parallel.tp_sequence"] = "false"
    return settings


def layout(engine: str, sizes: Iterable[int]) -> str:
    """The engine and the axes along which ranks share samples or experts, to show."""
    return ", ".join([engine, *(f"{key} {n}" for key, n in zip(AXES, sizes, strict=True) if n > 1)])


@dataclass(frozen=True)
class Combination:
    """A value for every axis except the micro-batch."""

    engine: str  # engine, policy, precision: names to show
    policy: str
    precision: str
    settings: tuple[str, ...]  # overrides as on the command line
    sizes: tuple[int, ...] = (1,) * len(AXES)  # of the groups along each of `AXES`

    @property
    def layout(self) -> str:
        return layout(self.engine, self.sizes)


def combinations(config: RunConfig, target: Target, fixed_keys: Collection[str]) -> list[Combination]:
    """All combinations to compare; settings of `fixed_keys` (dotted, given on the command line) stay as they are."""
    allowed = []
    own_policy, mode = config.activation.policy, config.precision.mode
    policies: tuple[str, ...] = POLICIES if own_policy in POLICIES else (own_policy, *POLICIES)
    # bf16 is an alternative to fp32 if the card supports it.
    is_fast = target.gpu is not None and target.gpu.capability >= (8, 0)
    precisions = (mode, "bf16") if is_fast and mode in ("fp32", "tf32") else (mode,)
    # A step keeps its samples.
    groups = [
        sizes
        for sizes in group_sizes(config, target, fixed_keys)
        if micro_batches(config, target, fixed_keys, ranks_to_a_sample(sizes))[1]
    ]
    for (engine, engine_settings), policy, precision, sizes in product(
        engines(config, target), policies, precisions, groups
    ):
        settings = {**engine_settings, "activation.policy": policy, "precision.mode": precision}
        shared = axis_settings(sizes)
        settings |= {key: size for key, size in shared.items() if size != as_override(attrgetter(key)(config))}
        splits_model = int(shared["parallel.tp"]) > 1 or int(shared["parallel.ep"]) > 1
        refused = splits_model and engine != "fsdp" and not engine.startswith("hsdp")
        if refused or (engine == "single" and prod(sizes) > 1):
            continue
        present = {key: as_override(attrgetter(key)(config)) for key in settings}
        if all(value == present[key] for key, value in settings.items() if key in fixed_keys):
            free = tuple(f"{key}={value}" for key, value in settings.items() if key not in fixed_keys)
            allowed.append(Combination(engine, policy, precision, free, sizes))
    return allowed


def group_sizes(config: RunConfig, target: Target, fixed_keys: Collection[str]) -> list[tuple[int, ...]]:
    """The sizes of groups to try along `AXES`, the smallest groups first; those of `fixed_keys` stay as they are."""
    present = [int(getattr(config.parallel, key)) for key in AXES]
    choices = [
        {size} if f"parallel.{key}" in fixed_keys else {1, size, *sizes(config, target)}
        for size, (key, sizes) in zip(present, AXES.items(), strict=True)
    ]
    every = sorted(product(*choices), key=lambda sizes: (prod(sizes), sizes))
    return [sizes for sizes in every if target.world_size % ranks_to_a_sample(sizes) == 0]


def engines(config: RunConfig, target: Target) -> Iterator[tuple[str, dict[str, str]]]:
    """(name, settings) of strategies with each kind of offload; the config's own keeps its `parallel` settings."""
    world = target.world_size
    plain: list[tuple[str, dict[str, str]]] = [("single", {})]
    if world > 1:
        doublings = (target.ranks_per_node * 2**n for n in range(world.bit_length()))
        shards = [n for n in doublings if 1 < n < world and world % n == 0]
        plain = [("ddp", {}), ("fsdp", {}), *(("hsdp", {"dp_shard": str(n)}) for n in shards)]
        plain += [("zero1", {}), ("zero2", {}), ("zero3", {})]
    if target.gpu is not None:
        plain += [("fsdp", {"offload_param": "cpu"})] if world > 1 else []
        plain += [("zero2", {"offload_optimizer": "cpu"}), ("zero3", {"offload_optimizer": "cpu"})]
        plain.append(("zero3", {"offload_optimizer": "cpu", "offload_param": "cpu"}))
    parallel = config.parallel
    for strategy, keys in plain:
        settings = {"parallel.strategy": strategy}
        changes = {"offload_optimizer": "none", "offload_param": "none", **keys}
        if strategy != parallel.strategy:  # another engine starts from the section's defaults
            chosen = {"strategy", "ep_imbalance", "tp_sequence", *AXES, *(f"{key}_across_nodes" for key in AXES)}
            defaults = ParallelConfig().model_dump(exclude=chosen)
            others = {key: as_override(value) for key, value in defaults.items() if value != getattr(parallel, key)}
            changes = {**others, **changes}
        settings |= {
            f"parallel.{key}": value for key, value in changes.items() if value != as_override(getattr(parallel, key))
        }
        offloaded = [part for key, part in _OFFLOADED.items() if key in keys]
        name = f"{strategy}, {' and '.join(offloaded)} on the CPU" if offloaded else strategy
        yield f"{strategy} ({keys['dp_shard']} to a shard group)" if "dp_shard" in keys else name, settings


def micro_batches(
    config: RunConfig, target: Target, fixed_keys: Collection[str], sharing: int | None = None
) -> tuple[int, list[int]]:
    """(samples per step of the ranks that share them, the micro-batch sizes that divide them): the global batch does
    not change. `sharing`: how many ranks share a sample, by default as in the config."""
    train = config.train
    present = prod(getattr(config.parallel, key) for key in SHARING)
    if target.world_size % present:
        shared = " × ".join(f"parallel.{key}={n}" for key in SHARING if (n := getattr(config.parallel, key)) > 1)
        fix = "plan for a multiple of them, or remove the key"
        raise ConfigError(f"{shared} ranks share their samples, which {target.world_size} ranks cannot", fix)
    accumulated, data_ranks = train.grad_accum_steps or 1, target.world_size // (sharing or present)
    total = train.global_batch_size or train.micro_batch_size * accumulated * (target.world_size // present)
    samples, remainder = divmod(total, data_ranks)
    if remainder or not samples:
        if sharing is not None:
            return 0, []
        cause = f"train.global_batch_size={total} is no multiple of {data_ranks} data ranks"
        raise ConfigError(cause, f"set a multiple of {data_ranks}")
    fixed = {"train.micro_batch_size", "train.grad_accum_steps"} & set(fixed_keys)
    if fixed and sharing in (None, present):
        return samples, [train.micro_batch_size]
    sizes = [n for n in range(1, samples + 1) if samples % n == 0]
    if "train.micro_batch_size" in fixed:
        sizes = [n for n in sizes if n == train.micro_batch_size]
    if "train.grad_accum_steps" in fixed:
        sizes = [n for n in sizes if samples // n == accumulated]
    return samples, sizes


Load = Callable[[Sequence[str]], RunConfig]
"""Returns the config with more overrides."""
_LOOSE = 1.25
"""A setting whose rough estimate exceeds the limit by at most this factor is traced exactly, since it may fit."""
_MOST_WORKERS = 8
INTERRUPTED = "interrupted"
_LONGER = "give it longer, with --budget 600"
_FOR_ROUGH = 0.6
"""Share of the budget for rough traces; the rest is for exact traces of the best."""


class _OutOfTime(Exception): ...


@dataclass(frozen=True)
class Setting:
    """A combination at one micro-batch size, with its prediction."""

    combination: Combination
    micro_batch: int
    passes: int  # micro-batches of a step
    settings: tuple[str, ...]  # overrides as on the command line
    needed: int  # bytes on the device
    filled: float  # share of the usable memory that it takes, on device or host, whichever is larger; up to 1 it fits
    waits: Mapping[str, float]  # seconds per token of all ranks for each part of the hardware
    sent: float  # bytes that a rank sends in collectives in a step
    estimate: MemoryEstimate | None = None  # `None` if interpolated between two rough traces

    @property
    def tokens_per_s(self) -> float:
        return 1 / sum(self.waits.values())


@dataclass(frozen=True)
class SearchResult:
    # the best micro-batch of every combination that fits, fastest first; the first and those on the `front` were traced
    # exactly, unless the search was `stopped`
    fitting: tuple[Setting, ...]
    misfits: tuple[Setting, ...]  # combinations that fit at no micro-batch size, each at the one that needs least
    refused: Mapping[Combination, str]  # combinations that cannot be planned, with the reason
    sizes: tuple[Setting, ...]  # the best combination at every micro-batch size
    samples: int  # samples per step, of all ranks
    stopped: str = ""  # why the search ended early; empty if it finished
    left_out: tuple[Combination, ...] = ()  # combinations that were not planned for lack of time

    @property
    def best(self) -> Setting:
        return self.fitting[0]

    @property
    def front(self) -> tuple[Setting, ...]:
        """The settings that nothing beats in both memory and speed, fastest first."""
        return tuple(pareto(self.fitting))


def pareto(settings: Sequence[Setting]) -> Iterator[Setting]:
    """The settings that need less memory than every faster one, fastest first."""
    least: float = float("inf")
    for setting in sorted(settings, key=lambda s: -s.tokens_per_s):
        if setting.needed < least:
            least = setting.needed
            yield setting


class Search:
    """Compares combinations on one target; a context manager that ends its planning processes on exit."""

    def __init__(
        self,
        load: Load,  # returns the config with more overrides
        target: Target,
        fixed_keys: Collection[str],
        margin: float | None,  # share of the memory to leave free; `None` = the estimate's uncertainty
        report: Callable[[str], None],
        budget: float | None = None,  # seconds for `run`; `None` = until the best is certain
    ) -> None:
        if target.device_memory is None:
            raise ConfigError("there is no memory to fit into", "pass --gpu or --gpu-memory; for CPUs --memory-cap")
        self._load, self._target, self._fixed_keys = load, target, fixed_keys
        self._margin, self._report = margin, report
        config = load(())
        self._present = prod(getattr(config.parallel, key) for key in SHARING)
        samples, _ = micro_batches(config, target, fixed_keys)
        self.samples = samples * target.world_size // self._present
        # samples per step of the ranks that share them, and the micro-batch sizes that divide them, by how many share
        self._batches = {
            n: micro_batches(config, target, fixed_keys, n)
            for n in range(1, target.world_size + 1)
            if target.world_size % n == 0
        }
        self._stack = ExitStack()
        self._planners: list[Planner] = []
        self._idle: queue.Queue[Planner] = queue.Queue()
        self._workers = max(1, min(_MOST_WORKERS, os.cpu_count() or 1))
        self._budget = budget
        self._begun = time.monotonic()
        self._settings_by_key: dict[tuple[Combination, int], Setting] = {}
        self._largest: dict[Combination, Setting] = {}
        self._at_one_end: set[Combination] = set()
        self._refused: dict[Combination, str] = {}
        self._left_out: set[Combination] = set()
        self._unneeded: set[Combination] = set()  # ranks need not share that many samples
        self._every: list[Combination] = []

    def __enter__(self) -> Search:
        self._planners = [self._stack.enter_context(Planner(self._target)) for _ in range(self._workers)]
        for planner in self._planners:
            self._idle.put(planner)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self) -> SearchResult:
        """Trace and rank the combinations. After Ctrl-C or at the end of the budget, rank those traced so far."""
        self._every = every = combinations(self._load(()), self._target, self._fixed_keys)
        if not every:
            names = ", ".join(sorted(self._fixed_keys))
            cause = f"no combination for world size {self._target.world_size} has all of {names}"
            raise ConfigError(cause, "leave keys of parallel out of the command line, or plan without --auto")
        self._begun, stopped = time.monotonic(), ""
        try:
            self._look_roughly(every)
            if not self._settings_by_key and not self._left_out:
                reason = next(iter(self._refused.values()))
                raise ConfigError(f"no setting can be planned: {reason}", "plan without --auto first")
            self._look_exactly()
        except (KeyboardInterrupt, _OutOfTime) as over:
            for planner in self._planners:
                planner.stop()
            if isinstance(over, KeyboardInterrupt):
                if not self._settings_by_key:
                    raise
                stopped = INTERRUPTED
            else:
                stopped = f"out of time after {self._budget:g} s"
        if self._left_out and not stopped:
            stopped = f"out of time for more after {_FOR_ROUGH * (self._budget or 0.0):g} s"
        return self._sorted_out(stopped)

    def _look_roughly(self, every: Sequence[Combination]) -> None:
        """Trace combinations at their largest micro-batch, then the misfits at their smallest, while time allows."""
        until = None if self._budget is None else self._begun + _FOR_ROUGH * self._budget
        self._left_out = set(every)
        policy = self._load(()).activation.policy
        for sizes, layer in groupby(sorted(every, key=_sharing), key=attrgetter("sizes")):
            todo = []
            for combination in layer:
                if self._hardly_fits(combination):
                    todo.append(combination)
                else:
                    self._unneeded.add(combination)
            self._left_out -= self._unneeded
            # The combination of each engine that keeps the config's checkpointing, with the fastest precision offered,
            # is first: a search that is cut short has compared the engines.
            by_engine = dict[str, Combination]()
            for combination in todo:
                if combination.engine not in by_engine or combination.policy == policy:
                    by_engine[combination.engine] = combination
            one_each = list(by_engine.values())
            for group in (one_each, [combination for combination in todo if combination not in one_each]):
                if prod(sizes) > 1 and group and self._refused.keys() >= set(one_each):  # the model cannot be split so
                    self._refused |= dict.fromkeys(group, self._refused[one_each[0]])
                    self._left_out -= set(group)
                    continue
                self._trace_roughly(group, until, largest=True)
                misfits = [c for c in group if c in self._largest and c in self._left_out]
                self._trace_roughly(misfits, until)

    def _hardly_fits(self, combination: Combination) -> bool:
        """Whether none of the same combinations with fewer ranks to a sample fits for certain."""
        return not any(
            less in self._unneeded
            or any(s.filled <= 1 / _LOOSE for (c, _), s in self._settings_by_key.items() if c == less)
            for less in self._every
            if _same_but_axes(less, combination)
            and less.sizes != combination.sizes
            and all(
                a <= b if key in SHARING else a == b
                for key, a, b in zip(AXES, less.sizes, combination.sizes, strict=True)
            )
        )

    def _neighbours(self, best: Combination) -> list[Combination]:
        """The same combination with another size along one axis, where that was not planned."""
        traced = {combination for combination, _ in self._settings_by_key} | self._largest.keys() | self._refused.keys()
        return [
            c
            for c in self._every
            if c not in traced
            and _same_but_axes(c, best)
            and sum(a != b for a, b in zip(c.sizes, best.sizes, strict=True)) == 1
        ]

    def _trace_roughly(self, todo: Collection[Combination], until: float | None = None, largest: bool = False) -> None:
        """Trace combinations at their smallest micro-batch, or at their largest."""
        began = time.monotonic()
        self._at_one_end -= set(todo)
        pairs = [(combination, self._sizes(combination)[-1 if largest else 0]) for combination in todo]
        for n_done, ((combination, _), answer) in enumerate(self._traced(pairs, rough=True, until=until), 1):
            if isinstance(answer, str):
                self._refused[combination] = answer
                self._left_out.discard(combination)
            else:
                self._learn(combination, answer)
            remaining = (len(pairs) - n_done) * (time.monotonic() - began) / n_done
            self._tell(f"traced {n_done} of {len(pairs)} roughly, about {remaining:.0f} s for the rest")

    def _sizes(self, combination: Combination) -> list[int]:
        """The micro-batch sizes of a combination, the smallest first."""
        return self._batches[ranks_to_a_sample(combination.sizes)][1]

    def _learn(self, combination: Combination, rough: Setting) -> None:
        """Store a rough setting. The smallest micro-batch's setting also adds interpolations up to the largest's."""
        sizes = self._sizes(combination)
        if rough.micro_batch < sizes[-1]:
            for setting in self._between(rough, self._largest[combination]):
                self._settings_by_key.setdefault((combination, setting.micro_batch), setting)
        elif rough.filled <= 1 or len(sizes) == 1:
            self._settings_by_key[combination, rough.micro_batch] = replace(rough, estimate=None)
            self._at_one_end |= {combination} if len(sizes) > 1 else set()
        self._largest.setdefault(combination, rough)
        if any((combination, size) in self._settings_by_key for size in sizes):
            self._left_out.discard(combination)

    def _look_exactly(self) -> None:
        """Replace rough figures by exact traces until the fastest setting that fits and the front are exact."""
        settings, seen = self._settings_by_key, 0
        while True:
            fastest = sorted(settings.values(), key=lambda s: -s.tokens_per_s)
            best = next((s for s in fastest if s.estimate is not None and s.filled <= 1), None)
            hopes = [
                s for s in fastest
                if s.estimate is None and s.filled <= _LOOSE and (best is None or s.tokens_per_s > best.tokens_per_s)
            ]  # fmt: skip
            if not hopes:
                able = [s for s in best_of_each(settings.values()) if s.filled <= 1]
                hopes = [s for s in pareto(able) if s.estimate is None]
            if not hopes and best is not None:  # for the report; the best is certain without these
                try:
                    if best.combination in self._at_one_end:
                        self._trace_roughly([best.combination])
                        continue
                    if neighbours := self._neighbours(best.combination):
                        self._trace_roughly(neighbours, largest=True)
                        planned = {combination for combination, _ in settings}
                        self._trace_roughly([c for c in neighbours if c in self._largest and c not in planned])
                        continue
                except _OutOfTime:
                    return
            if not hopes:
                return
            todo = [(setting.combination, setting.micro_batch) for setting in hopes[: self._workers]]
            for key, answer in self._traced(todo):
                if isinstance(answer, Setting):
                    settings[key] = answer
                else:
                    del settings[key]
                seen += 1
                self._tell(f"traced {seen} exactly, at least {len(hopes) - len(todo)} to go")
            misfits = [key[0] for key in todo if key not in settings or settings[key].filled > 1]
            self._trace_roughly(self._at_one_end.intersection(misfits))

    def _tell(self, progress: str) -> None:
        if self._budget is not None:
            progress += f"; the search ends within {max(0.0, self._begun + self._budget - time.monotonic()):.0f} s"
        able = [s for s in self._settings_by_key.values() if s.filled <= 1]
        if able:
            best = max(able, key=lambda s: s.tokens_per_s)
            progress += f"; best so far: {named(best)}: {best.tokens_per_s:,.0f} tokens/s, roughly"
        self._report(progress)

    def _traced(
        self, todo: Sequence[tuple[Combination, int]], rough: bool = False, until: float | None = None
    ) -> Iterator[tuple[tuple[Combination, int], Setting | str]]:
        """For each pair, in order, a setting or why it has no plan; pairs that begin after `until` are left out."""
        end = None if self._budget is None else self._begun + self._budget
        with ThreadPoolExecutor(self._workers) as pool:
            answers = [pool.submit(self._predict, combination, size, rough) for combination, size in todo]
            try:
                for pair, answer in zip(todo, answers, strict=True):
                    if until is not None and time.monotonic() > until:
                        for waiting in answers:
                            waiting.cancel()
                    if not answer.cancelled():
                        yield pair, answer.result(None if end is None else max(0.0, end - time.monotonic()))
            except BaseException as error:  # such as Ctrl-C: the remaining predictions are not needed
                pool.shutdown(wait=False, cancel_futures=True)
                for planner in self._planners:
                    planner.stop()
                if isinstance(error, NotReady):
                    raise _OutOfTime from None
                raise

    def _predict(self, combination: Combination, size: int, rough: bool) -> Setting | str:
        settings = self._settings(combination, size)
        planner = self._idle.get()
        try:
            estimate = planner.predict(self._load(settings), timed=True, rough=rough)
        except ShardkitError as error:
            return error.cause
        finally:
            self._idle.put(planner)
        assert estimate.time is not None
        filled = self._filled(estimate, estimate.needed, estimate.host_peak)
        waits = {name: seconds / estimate.time.targets for name, seconds in estimate.time.parts.items()}
        passes = self._batches[ranks_to_a_sample(combination.sizes)][0] // size
        sent = estimate.time.sent
        return Setting(combination, size, passes, settings, estimate.needed, filled, waits, sent, estimate)

    def _settings(self, combination: Combination, size: int) -> tuple[str, ...]:
        sharing = ranks_to_a_sample(combination.sizes)
        if len(self._sizes(combination)) == 1 and sharing == self._present:
            return combination.settings
        batch = {
            "train.micro_batch_size": size,
            "train.grad_accum_steps": "null",
            "train.global_batch_size": self.samples,
        }
        free = (f"{key}={value}" for key, value in batch.items() if key not in self._fixed_keys)
        return (*combination.settings, *free)

    def _filled(self, estimate: MemoryEstimate, needed: float, on_host: float) -> float:
        usable = 1 / (1 + estimate.uncertainty) if self._margin is None else 1 - self._margin
        limits = ((needed, self._target.device_memory), (on_host, self._target.host_memory))
        return max(need / (limit * usable) for need, limit in limits if limit is not None)

    def _between(self, smallest: Setting, largest: Setting) -> Iterator[Setting]:
        """Interpolate to every micro-batch size: the phases' peaks linearly, time linearly in 1 / micro-batch."""
        assert smallest.estimate is not None and largest.estimate is not None
        samples, sizes = self._batches[ranks_to_a_sample(smallest.combination.sizes)]
        for size in sizes:
            settings = self._settings(smallest.combination, size)
            up = (size - smallest.micro_batch) / (largest.micro_batch - smallest.micro_batch)
            in_time = (1 / size - 1 / smallest.micro_batch) / (1 / largest.micro_batch - 1 / smallest.micro_batch)
            waits = {name: max(0.0, _line(at, largest.waits[name], in_time)) for name, at in smallest.waits.items()}
            low, high = smallest.estimate, largest.estimate
            phases = low.phases.keys() & high.phases.keys()  # a rough one has no evaluation
            # A phase's peak is the largest of several lines, therefore linear interpolation is never too low.
            needed = _line(low.needed - low.peak.allocated, high.needed - high.peak.allocated, up)
            needed += max(_line(low.phases[name].allocated, high.phases[name].allocated, up) for name in phases)
            filled = self._filled(high, needed, _line(low.host_peak, high.host_peak, up))
            sent = _line(smallest.sent, largest.sent, in_time)
            yield Setting(smallest.combination, size, samples // size, settings, round(needed), filled, waits, sent)

    def _sorted_out(self, stopped: str) -> SearchResult:
        settings = self._settings_by_key
        best = best_of_each(settings.values())
        fitting = sorted((s for s in best if s.filled <= 1), key=lambda s: -s.tokens_per_s)
        misfits = sorted((s for s in best if s.filled > 1), key=lambda s: s.needed)
        if not best and stopped:
            raise ConfigError(f"the search was {stopped}, before any setting was traced", _LONGER)
        if not best:
            raise ConfigError("no setting can be traced exactly", "plan without --auto to see why")
        if not fitting:
            least = misfits[0]
            if stopped:
                counts = f"of {len(best)} combinations none seems to fit, {len(self._left_out)} were not planned"
                raise ConfigError(f"the search was {stopped}: {counts}", _LONGER)
            policy = f"activation.policy={least.combination.policy}"
            setting = f"{least.combination.layout} with {policy} and micro_batch_size={least.micro_batch}"
            needs = f"{setting}, needs {gib(least.needed)} of {gib(self._target.device_memory or 0)}"
            fix = "use more GPUs or larger ones, a smaller model, shorter samples, or fix fewer settings"
            raise DoesNotFit(f"no setting fits: the least, {needs}", fix)
        sizes = tuple(s for (combination, _), s in settings.items() if combination == fitting[0].combination)
        return SearchResult(
            tuple(fitting), tuple(misfits), self._refused, sizes, self.samples, stopped,
            tuple(combination for combination in self._every if combination in self._left_out),
        )  # fmt: skip


def _sharing(combination: Combination) -> tuple[int, tuple[int, ...]]:
    return prod(combination.sizes), combination.sizes


def _same_but_axes(a: Combination, b: Combination) -> bool:
    return (a.engine, a.policy, a.precision) == (b.engine, b.policy, b.precision)


def named(setting: Setting) -> str:
    combination = setting.combination
    batch = f"micro-batch {setting.micro_batch}" + (f" × {setting.passes}" if setting.passes > 1 else "")
    return f"{combination.layout}; checkpointing {combination.policy}; {combination.precision}; {batch}"


def best_of_each(settings: Iterable[Setting]) -> list[Setting]:
    """Each combination at its fastest micro-batch that fits, or else at the one that needs least memory."""
    best: dict[Combination, Setting] = {}
    for setting in settings:
        if _rank(setting) > _rank(best.setdefault(setting.combination, setting)):
            best[setting.combination] = setting
    return list(best.values())


def _rank(setting: Setting) -> tuple[bool, float]:
    return setting.filled <= 1, setting.tokens_per_s if setting.filled <= 1 else -setting.filled


def _line(start: float, end: float, position: float) -> float:
    return start + (end - start) * position
