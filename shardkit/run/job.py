"""shardkit as a library: join the ranks, wrap your model, take steps in your own loop."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..config import capability, libraries
from ..config.load import LoadedConfig, load_config, resolve_batch
from ..config.schema import RunConfig
from ..data.tokenizer import with_local_folders
from ..errors import ConfigError
from ..launch.failures import failure
from ..memory.ledger import MemoryLedger
from ..oom.postmortem import PostMortem
from ..oom.shortage import MemoryCap, memory_cap
from ..parallel.blocks import find_blocks, packable_shares
from ..parallel.compat import progress_of_groups
from ..parallel.optim import make_optimizer as default_optimizer
from ..parallel.precision import set_matmul_precision
from ..parallel.weights import Init, Weights
from ..parallel.world import World, choose_device, process_groups, rank_env
from ..strategies import OptimizerFactory, Strategy
from ..strategies.build import make_strategy, parallelize
from ..strategies.step import one_number
from .block_calls import BlockCalls, plain
from .checks import SumCheck, check_masters, check_sources, refuse_unused, say_graph_breaks
from .optimizer_step import OptimizerStep

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """One optimizer step over all ranks.

    Attributes:
        loss: mean over the step's target tokens, all ranks.
        grad_norm: global norm before clipping.
        n_targets: target tokens of all ranks.
    """

    loss: float
    grad_norm: float
    n_targets: int


@dataclass
class Job:
    """The ranks, the ledger and, after `wrap`, the wrapped model.

    Attributes:
        blocks: the repeated blocks of the wrapped model, by name.
        at_end: an exit stack that is closed when the job ends, also on errors.
    """

    loaded: LoadedConfig
    world: World
    ledger: MemoryLedger
    strategy: Strategy
    cap: MemoryCap | None = None
    blocks: dict[str, nn.Module] = field(init=False, default_factory=dict)
    calls: BlockCalls = field(init=False)
    step_index: int = 0
    at_end: ExitStack = field(default_factory=ExitStack)
    _last_step: float = math.nan
    _sums: SumCheck = field(
        default_factory=lambda: SumCheck("the loss of job.step", "pass reduction='mean' to job.step")
    )

    def __post_init__(self) -> None:
        local_size = self.world.env.local_world_size
        self.post_mortem = PostMortem(self.config, self.ledger, self.strategy, local_size, self.cap)
        self.ledger.risk.on_risk = self.post_mortem.at_risk

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def model(self) -> nn.Module:
        """The wrapped model: call this one."""
        return self.strategy.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; the next step uses the `lr` of its parameter groups."""
        return self.strategy.optimizer

    def wrap(
        self,
        model: nn.Module | Callable[[], nn.Module],
        make_optimizer: OptimizerFactory | None = None,
        *,
        block_classes: Sequence[type[nn.Module]] = (),
        attention_classes: Sequence[type[nn.Module]] = (),
        init_parameter: Init | None = None,
        drawn: bool = True,
    ) -> nn.Module:
        """Shard the model by the config's strategy and build its optimizer; returns the module to call in the loop.

        Args:
            model: a module with the same values on every rank, or a function that builds it.
            make_optimizer: builds the optimizer from the wrapped model; default: the config's `optim` section.
            block_classes: module types to shard, checkpoint and compile as one unit; default: members of lists of
                equal blocks.
            attention_classes: module types that activation.policy=selective recomputes; default: classes named like
                attention.
            init_parameter: draws one parameter; `model` must then be a function, and is built without allocating.
            drawn: False if the caller loads every weight afterwards: parameters that would be drawn are zero then.

        Raises:
            ConfigError: the config does not suit the model (no trainable parameter, parameters tied across blocks, a
                wrong dtype), or `init_parameter` came with a module.
        """
        if isinstance(model, nn.Module) and init_parameter is not None:
            raise ConfigError(
                "init_parameter was given with a model that is already built", "pass a function that builds it"
            )

        def build() -> nn.Module:
            built = model if isinstance(model, nn.Module) else model()
            self.post_mortem.packable = packable_shares(built)  # the weights themselves may not fit
            return built

        factory = make_optimizer or (lambda wrapped: default_optimizer(self.config.optim, wrapped, block_classes))
        with self.ledger.phase("wrap"):
            weights = Weights(self.config.train.seed, init_parameter, drawn)
            parallelize(
                self.config, self.world, self.strategy, build, factory, weights, block_classes, attention_classes
            )
            self.world.set_timeout(self.config.run.init_timeout_s)  # groups that the engine made
            wrapped = self.strategy.model
            blocks = find_blocks(wrapped, block_classes)
            names = {id(module): plain(name) for name, module in wrapped.named_modules()}
            self.blocks = {names[id(block)]: block for block in blocks}
            self.calls = BlockCalls(self.strategy, self.blocks, self.config, self.world)
            self.strategy.compare_gathers(self.calls.compare_reach)
            may_skip = self.calls.may_differ
            refuse_unused(wrapped, self.strategy.optimizer, self.config.parallel, may_skip, self.calls.allowed)
            check_masters(self.config.precision, self.strategy)
        if self.cap is not None:  # the model may have been built before the cap began
            self.cap.see([tensor for _, tensor in self.strategy.state_tensors()])
        return wrapped

    def step(
        self,
        batches: Sequence[Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        n_targets: Callable[[Any], int],
        *,
        reduction: Literal["sum", "mean"] = "sum",
    ) -> StepResult:
        """Take one optimizer step over this rank's micro-batches.

        Args:
            batches: this rank's micro-batches, `train.grad_accum_steps` of them on every rank.
            loss_fn: (model, batch) → the loss over the batch's targets, as `reduction` says.
            n_targets: returns a batch's number of targets; the loss is divided by their sum over all ranks.
            reduction: whether `loss_fn` returns the sum over the batch's targets or their mean; a mean is multiplied
                by the batch's `n_targets`.

        Raises:
            ConfigError: wrong arguments, or ranks that call different blocks.
            TrainingError: the loss or the gradient is not finite on some rank. Resume from a checkpoint then.
        """
        self._check_arguments(batches, reduction)
        self.step_index += 1
        if self.step_index == 1:  # building the model is no part of it
            self._last_step = time.perf_counter()
        counts = [n_targets(batch) for batch in batches]
        count = self.world.sum([float(sum(counts))])[0] / self.world.tp
        micro_batches = [(counted, False) for counted in zip(batches, counts, strict=True)]
        due = self.ledger.due(self.step_index)
        self.ledger.begin_step(self.step_index, due)

        def summed(model: Any, counted: tuple[Any, int]) -> torch.Tensor:
            loss = one_number(loss_fn(model, counted[0]))
            return loss * counted[1] if reduction == "mean" else loss

        self._sums.expect(counts)
        step = OptimizerStep(
            job=self, number=self.step_index, micro_batches=micro_batches, n_targets=count,
            loss_fn=self.calls.around(self._sums.around(summed)),
        )  # fmt: skip
        step.compute(self.ledger, due)
        if step.host_has_time:
            step.begin_agreement()
        step.update(self.ledger)
        if self.step_index == 1 and self.config.compile.enabled:
            say_graph_breaks()
        if not step.host_has_time:
            step.begin_agreement()
        step.reduction.finish()
        now = time.perf_counter()
        self.ledger.end_step(self.step_index, now - self._last_step, 0.0, step.busy_s())
        self._last_step = now
        step.refuse_bad_loss()
        self._sums.judge()
        return StepResult(step.loss, step.figures()["grad_norm"], int(count))

    def _check_arguments(self, batches: Sequence[Any], reduction: str) -> None:
        if reduction not in ("sum", "mean"):
            raise ConfigError(f"step() got reduction={reduction!r}", "pass reduction='sum' or reduction='mean'")
        expected = resolve_batch(self.config, self.world.size)
        if len(batches) != expected:
            raise ConfigError(
                f"step() got {len(batches)} micro-batches, but train.grad_accum_steps is {expected}",
                "pass as many micro-batches as the config accumulates",
            )

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """If memory runs out inside, write `RUN_DIR/oom/rank{r}.json` and raise an error that suggests changes."""
        try:
            yield
        except Exception as error:
            explained = self.post_mortem.explain(error)
            if explained is None:
                raise
            raise explained from error

    def explained(self, items: Iterator[T]) -> Iterator[T]:
        """Iterate over `items` inside `explaining`."""
        with self.explaining():
            yield from items


@contextmanager
def start(
    config: LoadedConfig | str | Path | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> Iterator[Job]:
    """Join the job's ranks and yield a `Job`; every group is torn down at the end, also on errors.

    Args:
        config: a YAML file, or the result of `load_config`; `None` = defaults.
        overrides: `{"parallel.strategy": "fsdp"}` or `["parallel.strategy=fsdp"]`.

    Raises:
        ConfigError: the config cannot run on this world; checked before anything is joined or written.
        LaunchError: the environment contradicts itself, or ranks cannot find each other.
        OutOfMemoryError: memory ran out inside and the caller did not handle it; `RUN_DIR/oom` has details.
    """
    loaded = config if isinstance(config, LoadedConfig) else load_config(config, overrides)
    loaded = replace(loaded, config=with_local_folders(loaded.config))
    check_sources(loaded.config)
    env = rank_env()
    device = choose_device(loaded.config, env)
    capability.check(
        loaded.config, device=device.type, world_size=env.world_size, local_world_size=env.local_world_size
    )
    resolve_batch(loaded.config, env.world_size)
    libraries.quiet()
    libraries.say_untested()
    set_matmul_precision(loaded.config.precision)
    # Dropout and the like differ on each rank, but not where ranks compute the same; weights do not use this generator.
    torch.manual_seed(loaded.config.train.seed * 1_000_003 + env.rank // loaded.config.parallel.tp)
    if loaded.config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    memory = loaded.config.memory
    with process_groups(loaded.config, env) as world, memory_cap(memory.cap_bytes, world.device) as cap:
        ledger = MemoryLedger(
            world.device, world.ledger, world.rank, world.size, env.local_rank,
            interval=memory.interval, host_warn=memory.host_warn,
        )  # fmt: skip
        strategy = make_strategy(loaded.config, world)
        job = Job(loaded, world, ledger, strategy, cap)
        with job.at_end:
            try:
                with job.explaining():
                    yield job
            except Exception as error:
                # Before the cleanup, which may wait for other ranks until the launcher ends this process.
                failure.record(error, groups=progress_of_groups())
                raise
            finally:
                strategy.teardown()
