"""What is checked of a run, from the paths it starts from to its first steps: data, parameters, types, losses."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import pvariance
from typing import Any

import torch
from torch import nn

from ..config.capability import CAPABILITIES
from ..config.libraries import is_first_rank
from ..config.load import resolve_batch
from ..config.schema import ParallelConfig, PrecisionConfig, RunConfig, TrainConfig
from ..data.loader import BatchSchedule, Order, State, StepLoader
from ..data.rows import format_of
from ..data.text_data import Mixed, Samples, Streamed
from ..data.tokenizer import tokenizer_path
from ..data.windows import DocumentWindows, MaskedWindows, PackedDocuments, Windows
from ..errors import SHOWN, CheckpointError, ConfigError, DataError, TrainingError, gib, listed
from ..launch.local import restart
from ..parallel.compat import graph_breaks
from ..parallel.precision import master_dtype
from ..parallel.world import World
from ..strategies import Strategy
from ..strategies.step import HostValue, one_number
from ..tasks.base import Dataset, Task
from ..tasks.load import collate_of
from .block_calls import plain


def check_sources(config: RunConfig) -> None:
    """Refuse a path to start from that is not there or holds nothing to load, and a model folder without a tokenizer.

    Only names of files are looked at: what they hold is judged when they are read.
    """
    source = config.run.source
    if source is not None:
        from ..checkpoint.resume import candidates

        if not Path(source).exists():
            raise CheckpointError(f"run.resume={source} does not exist", "name a checkpoint, or a run with one")
        if not candidates(Path(source)):
            cause = f"run.resume={source}: there is no checkpoint"
            raise CheckpointError(cause, "name a checkpoint, or a run with one")
    if config.model.init_from is None:
        return
    goes_on = source is not None or (config.run.continues and restart.has_run(Path(config.run.dir)))
    if config.adapter.type != "none" or not goes_on:  # a run that goes on has weights, unless for an adapter's base
        _check_weights(config.model.init_from)
    folder = Path(config.model.init_from).expanduser()
    if (folder / "config.json").is_file():
        _check_tokenizer(config, folder)


def _check_weights(init_from: str) -> None:
    from ..checkpoint.formats.detect import opener

    folder = Path(init_from).expanduser()
    if not folder.exists():
        raise ConfigError(
            f"model.init_from={init_from} does not exist", "name a folder of transformers, a run or a checkpoint"
        )
    try:
        opener(folder)
    except CheckpointError as error:
        only_described = (folder / "config.json").is_file()
        fix = "; or set model.hf_config to that folder, to start from random weights" if only_described else ""
        raise ConfigError(f"model.init_from={init_from}: {error.cause}", error.fix + fix) from error
    except OSError as error:
        raise ConfigError(
            f"model.init_from={init_from} cannot be read: {error.strerror}", "make it readable, or name another"
        ) from error


def _check_tokenizer(config: RunConfig, folder: Path) -> None:
    if config.task.factory is not None or config.task.name not in ("hf_causal_lm", "hf_masked_lm"):
        return
    if tokenizer_path(config) is not None:
        return
    paths = [path for path in (config.data.path, *(source.path for source in config.data.sources)) if path is not None]
    records = next((path for path in paths if format_of(path) is not None), None)
    if records is None:
        return
    raise ConfigError(
        f"no tokenizer.json in {folder}, and {records} needs a tokenizer",
        "copy the model's tokenizer there, or set data.tokenizer to a tokenizer.json or to a folder that holds one",
    )


def check_same_data(world: World, train: Sized | None, val: Mapping[str, Sized], digests: Mapping[str, str]) -> None:
    """Refuse ranks with other data: they would take different numbers of steps, or train on a mixture; collective.

    `digests`: of this rank's data, by name, as `Task.digests` gives them.
    """
    n_val = str(sum(map(len, val.values()))) if val else "none"
    facts = {
        "number of training samples": str(0 if train is None else len(train)),
        "number of validation samples": n_val,
    }
    everyone: list[Any] = world.gather((platform.node(), facts | dict(digests)))
    # In the order of `facts`: sizes that differ say more than the digests, which then differ too.
    for name in dict.fromkeys(name for _, rank_facts in everyone for name in rank_facts):
        ranks_with: dict[str, list[str]] = {}
        for rank, (host, rank_facts) in enumerate(everyone):
            ranks_with.setdefault(rank_facts.get(name, "none"), []).append(f"{rank} ({host})")
        if len(ranks_with) > 1:
            parts = [
                f"{fact} on {len(ranks)} rank{'s' * (len(ranks) > 1)}: {listed(ranks)}"
                for fact, ranks in sorted(ranks_with.items(), key=lambda pair: -len(pair[1]))[:SHOWN]
            ]
            raise DataError(
                f"ranks do not have the same {name}, and would train a mixture: {'; '.join(parts)}",
                "give every node the same files, whole (the sampler splits them): the contents count, not the place",
            )


def refuse_unused(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ParallelConfig,
    chosen: set[str],
    allowed: Collection[str],
) -> None:
    """Before each update, raise if a trained parameter got no gradient and the strategy cannot leave it alone.

    `chosen`: names of the parameters that a rank may skip in a step. Unless `parallel.find_unused` is false, they are
    left out of the check. `allowed`: names that are left out too, of which more may be found in a step
    (`BlockCalls.allowed`).
    """
    strategy = config.strategy
    reason = CAPABILITIES["unused_params"].reasons.get(strategy)
    may_skip = set[str]() if config.find_unused is False else {plain(name) for name in chosen}
    if reason is None:
        return
    named = ((plain(fqn), p) for fqn, p in model.named_parameters())
    trained = {fqn: p for fqn, p in named if p.requires_grad and fqn not in may_skip}
    waiting = dict(trained)
    for fqn, param in trained.items():
        param.register_hook(partial(_seen, waiting, fqn))  # type: ignore[no-untyped-call]
    steps = 0

    def check(*_: Any) -> None:
        nonlocal steps
        if len(waiting) == len(trained):  # no backward: a resume creates the optimizer's state by such a step
            return
        lacking = [fqn for fqn in waiting if fqn not in allowed]
        if lacking:
            when = "this step" if steps else "the first step"
            raise ConfigError(
                f"{len(lacking)} of {len(trained)} parameters got no gradient in {when} ({listed(lacking)}), which "
                f"parallel.strategy={strategy} cannot train: {reason}",
                "freeze them (requires_grad_(False)), use them in the loss, or set parallel.strategy=fsdp",
            )
        steps += 1
        waiting.update(trained)

    optimizer.register_step_pre_hook(check)


def _seen(waiting: dict[str, nn.Parameter], fqn: str, grad: torch.Tensor) -> None:
    waiting.pop(fqn, None)


_LOG = logging.getLogger(__name__)


def check_masters(config: PrecisionConfig, strategy: Strategy) -> None:
    """Check that the optimizer updates weights in the dtype of the precision mode."""
    masters = [tensor for kind, tensor in strategy.state_tensors() if kind == "master_params"]
    if not masters:
        masters = [param for group in strategy.optimizer.param_groups for param in group["params"]]
    expected = master_dtype(config)
    wrong = [t for t in masters if t.is_floating_point() and t.dtype != expected]
    if wrong:
        size = sum(t.numel() * t.element_size() for t in wrong)
        raise ConfigError(
            f"precision.mode={config.mode} updates {_name(expected)} weights, but {gib(size)} of the model's trainable "
            f"parameters are {_name(wrong[0].dtype)}",
            "build the model in fp32" + (", or set precision.mode=pure_bf16" if expected == torch.float32 else ""),
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FirstUpdate:
    """Refuses a training whose first update changes no parameter on any rank."""

    def __init__(self, world: World, strategy: Strategy) -> None:
        self.is_checked = False  # whether there is nothing left to do
        self._world, self._strategy = world, strategy
        self._before: list[torch.Tensor] = []

    def look(self) -> None:
        """Remember the weights before an update."""
        if not self.is_checked:
            self._before = self._fingerprint()

    def check(self, lr: float) -> None:
        """Compare the weights after an update that was not skipped; collective the first time."""
        if self.is_checked:
            return
        self.is_checked = True
        n_moved = sum(float(not torch.equal(a, b)) for a, b in zip(self._before, self._fingerprint(), strict=True))
        self._before = []
        if lr > 0 and self._world.sum([n_moved])[0] == 0:
            raise TrainingError(
                "no parameter changed in the first step, on any rank",
                "check that the loss depends on the model's parameters and that they require gradients",
            )

    def _fingerprint(self) -> list[torch.Tensor]:
        """The first elements of this rank's part of each weight."""
        return [s.local[:256].float().clone() for s in self._strategy.shards() if s.name.startswith("model.")]


def say_graph_breaks() -> None:
    """Warn if torch.compile could not make one graph of each unit: the pieces between breaks are slower."""
    breaks = graph_breaks()
    if breaks and is_first_rank():
        reasons = ", ".join(f"{reason} ({number})" for reason, number in breaks.items())
        _LOG.warning(
            "compile.enabled=true: torch.compile broke its graphs %d times in the first step: %s. The code between two "
            "breaks is compiled, the rest is not; TORCH_LOGS=graph_breaks names the lines",
            sum(breaks.values()), reasons,
        )  # fmt: skip


_SUMS_MIN, _SUMS_MAX, _SUMS_SPREAD = 8, 64, 1.5


class SumCheck:
    """Warns once if a loss that should be a sum over targets does not grow with their number: it may be a mean.

    Looks at rank 0's first micro-batches, if their numbers of targets differ. `loss_name`, `fix`: words for the
    warning.
    """

    def __init__(self, loss_name: str, fix: str) -> None:
        self._loss_name, self._fix = loss_name, fix
        self._counts: list[int] = []
        self._losses: list[HostValue] = []
        self._is_judged = not is_first_rank()

    def expect(self, counts: Sequence[int]) -> None:
        """Announce the numbers of targets of the next micro-batches; 0 = ignore this one."""
        if not self._is_judged:
            self._counts += counts

    def around(self, loss_fn: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        """The loss function, with its losses recorded; it does not wait for them."""

        def noted(model: Any, batch: Any) -> torch.Tensor:
            loss = one_number(loss_fn(model, batch))
            if not self._is_judged:
                self._losses.append(HostValue(loss))
            return loss

        return noted

    def judge(self) -> None:
        """Warn if the losses look like means; call it after a step whose loss is known."""
        if self._is_judged:
            return
        seen = [(n, loss.item()) for n, loss in zip(self._counts, self._losses, strict=False) if n]
        counts = [n for n, _ in seen]
        self._is_judged = len(self._losses) >= _SUMS_MAX
        if len(seen) < _SUMS_MIN or max(counts) < _SUMS_SPREAD * min(counts) or min(loss for _, loss in seen) <= 0:
            return
        # For a sum, loss / targets stays about the same; for a mean, the loss does.
        of_mean = pvariance([math.log(loss) for _, loss in seen])
        of_sum = pvariance([math.log(loss / n) for n, loss in seen])
        if of_mean < of_sum / 4:
            self._is_judged = True
            _LOG.warning(
                "%s does not grow with its targets (%d to %d of them): it looks like their mean, but is used as "
                "their sum, which makes gradients too small\n  fix: %s",
                self._loss_name, min(counts), max(counts), self._fix,
            )  # fmt: skip


# How much data a run has, how many passes its steps make, and which samples each step reads.

MANY_PASSES = 20
"""More passes over the data get a warning."""
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Amount:
    """A data set's size."""

    n: int  # the number of what its source holds: conversations, documents, rows
    noun: str  # the name of what is counted
    tokens: int | None = None  # None if the data have none, or nobody has counted them


def amount(data: Dataset) -> Amount:
    """Count what a data set was made of."""
    if isinstance(data, MaskedWindows):
        return amount(data.windows)
    if isinstance(data, Mixed):
        parts = [amount(part) for part in data.parts]
        nouns = {part.noun for part in parts}
        counted = [part.tokens for part in parts if part.tokens is not None]
        noun = nouns.pop() if len(nouns) == 1 else "documents"
        return Amount(sum(part.n for part in parts), noun, sum(counted) if len(counted) == len(parts) else None)
    if isinstance(data, Streamed):
        return Amount(len(data), "rows")
    if isinstance(data, Windows):
        return Amount(len(data), f"windows of {data.seq_len} tokens", len(data.span))
    if isinstance(data, PackedDocuments | DocumentWindows | Samples):
        source, tokens = data.documents, data.n_tokens if isinstance(data, PackedDocuments) else data.documents.n_tokens
        counts = getattr(source, "long", None)
        n = len(source.lengths) if counts is None else counts.documents
        return Amount(n, getattr(source, "noun", "documents"), tokens)
    return Amount(len(data), "samples")


def val_parts(task: Task) -> dict[str, Dataset]:
    """The validation data in parts by name, such as the sources of a mix; one part without a name otherwise."""
    parts: dict[str, Dataset] = getattr(task, "val_parts", dict)()
    if parts:
        return parts
    split = task.dataset("val")
    return {} if split is None else {"": split}


def describe_split(config: RunConfig, data: Dataset, val_parts: Mapping[str, Dataset]) -> str:
    """One line: how many of the data train, how many validate, and the setting that decides it."""
    train, val = amount(data), [amount(part) for part in val_parts.values()]
    if not config.train.eval_samples:
        return f"data: all {train.n:,} {train.noun} train (train.eval_samples=0: no evaluation)"
    if not val:
        return f"data: {train.n:,} {train.noun} train, none validate"
    reason = f"data.val_fraction={config.data.val_fraction:g}; train.eval_samples=0 trains on all"
    if config.task.factory is not None:  # the task itself splits its data
        reason = "train.eval_samples=0: no evaluation"
    elif config.data.val_path is not None:
        reason = f"data.val_path={config.data.val_path}"
    elif any(part.documents.choice.split is None for part in val_parts.values() if isinstance(part, Samples)):
        reason = "the validation split of data.path"
    elif config.task.name == "image_classification" and config.data.path is None:
        reason = "the lower part of scikit-image's pictures"
    noun = "" if val[0].noun == train.noun else f" {val[0].noun}"
    return f"data: {train.n:,} {train.noun} train, {sum(part.n for part in val):,}{noun} validate ({reason})"


def last_step(train: TrainConfig, schedule: BatchSchedule, step: int, at: State) -> int:
    """The run's last step: `train.max_steps`, or earlier the step that completes `train.epochs`.

    `step`: steps that were taken before, perhaps on another number of ranks. `at`: the position in the data after them.
    """
    if train.epochs is None:
        return train.max_steps
    passes_done = at.epoch + at.next_sample / schedule.n_samples
    to_go = math.ceil((train.epochs - passes_done) * schedule.steps_per_epoch - _ROUNDING)
    return min(train.max_steps, max(1, step + max(0, to_go)))


def describe_passes(data: Dataset, schedule: BatchSchedule, steps: int) -> str:
    """One line: the samples, tokens and steps of a pass, and the passes of the run's steps."""
    counted, per_pass = amount(data), schedule.steps_per_epoch
    tokens = "" if counted.tokens is None else f"{counted.tokens:,} tokens, "
    n_samples = schedule.n_samples
    passes = f"{steps / per_pass:,.1f}".removesuffix(".0")
    if steps < per_pass:
        passes = f"{steps / per_pass:.2g} of a pass"
    else:
        passes += f" pass{'es' * (passes != '1')}"
    return (
        f"a pass: {n_samples:,} samples, {tokens}{per_pass:,} step{'s' * (per_pass > 1)}; {steps:,} "
        f"step{'s' * (steps > 1)} {'are' if steps > 1 else 'is'} {passes}"
    )


def doubt(train: TrainConfig, schedule: BatchSchedule) -> str | None:
    """A warning about steps that repeat the data more often than anybody means to; None for passes that are named."""
    passes = train.max_steps / schedule.steps_per_epoch
    if train.epochs is not None or passes <= MANY_PASSES:
        return None
    return (
        f"train.max_steps={train.max_steps} takes each sample {passes:,.0f} times: name the passes instead, such as "
        f"train.epochs=3, or set train.max_steps={3 * schedule.steps_per_epoch}"
    )


def without_validation(config: RunConfig) -> RunConfig:
    """The config for the data of a run that never evaluates: nothing is held out."""
    if config.train.eval_samples:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"val_fraction": 0.0})})


def make_schedule(config: RunConfig, world: World, samples: Dataset) -> BatchSchedule:
    """Divide the training split into the micro-batches of steps and ranks."""
    train, data, accum = config.train, config.data, resolve_batch(config, world.size)
    if train.micro_batch_size > len(samples):
        raise DataError(
            f"train.micro_batch_size={train.micro_batch_size} is more than the {len(samples)} samples of the "
            "training split",
            f"set it to {max(1, len(samples) // (accum * world.data_size))} or less, or use more data",
        )
    make_order = getattr(samples, "order", None)
    order: Order | None = make_order(train.seed, data.shuffle) if callable(make_order) else None
    try:
        return BatchSchedule(
            n_samples=len(samples) if order is None else order.n,
            global_batch=train.micro_batch_size * accum * world.data_size,
            micro_batch=train.micro_batch_size,
            accum=accum,
            rank=world.data_rank,
            world=world.data_size,
            seed=train.seed,
            shuffle=data.shuffle,
            drop_last=data.drop_last,
            order=order,
        )
    except ValueError as error:
        raise DataError(
            f"the training split cannot fill a step: {error}", "use more data, or smaller batches"
        ) from error


def make_loader(
    config: RunConfig, world: World, task: Task, samples: Dataset, schedule: BatchSchedule, state: State, n_steps: int
) -> StepLoader:
    """Read `n_steps` steps from the position `state` on."""
    return StepLoader(
        samples,
        schedule,
        collate_of(task, world.loss_rank, config.parallel.cp),
        state=state,
        n_steps=n_steps,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        pin_memory=world.device.type == "cuda",
        filler=getattr(task, "filler", lambda batch: batch),
    )
