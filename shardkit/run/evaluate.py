"""The validation loss, text that the model writes at an evaluation, and rank 0's summary at the end of a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..data.loader import eval_batches
from ..launch.failures import job_starts
from ..parallel.blocks import release_graph_outputs
from ..parallel.precision import to_device
from ..tasks.base import Dataset, Task
from ..tasks.load import Prompts, collate_of
from . import directory
from .job import Job


def evaluate(
    job: Job, task: Task, parts: Mapping[str, Dataset], is_over: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """Means over `train.eval_samples` samples of the validation data; collective.

    The samples are the same whatever the ranks and the micro-batch size, and so are the means, to rounding.

    Keys: `val_loss`, and `val_<name>` for each further metric of the task; with several parts, which share the samples
    by size, also `val_<name>_<part>`. Tasks whose `perplexity` is true get it as a metric: exp(loss). `is_over`: called
    before every micro-batch, with the same answer on every rank; True ends the evaluation with no means.
    """
    limit, size = job.config.train.eval_samples, sum(map(len, parts.values()))
    means: dict[str, float] = {}
    totals: dict[str, float] = {}
    with torch.no_grad(), job.strategy.evaluating():
        for name, data in parts.items():
            sums = _sums(job, task, data, max(1, round(limit * len(data) / size)), is_over)
            if sums is None:
                return {}
            totals = {key: totals.get(key, 0.0) + value for key, value in sums.items()}
            if len(parts) > 1:
                means |= _means(task, sums, f"_{name}")
    return _means(task, totals, "") | means


def _means(task: Task, sums: dict[str, float], part: str) -> dict[str, float]:
    count = max(sums[_COUNT], 1.0)
    means = {f"val_{name}{part}": total / count for name, total in sums.items() if name != _COUNT}
    if getattr(task, "perplexity", False):
        loss = means[f"val_loss{part}"]
        means[f"val_perplexity{part}"] = math.exp(loss) if loss < _LARGEST else math.inf
    return means


_COUNT = ""
"""Key of the number of targets."""
_LARGEST = 700.0
"""Losses above this have no perplexity: exp would overflow."""


def _sums(job: Job, task: Task, data: Dataset, limit: int, is_over: Callable[[], bool]) -> dict[str, float] | None:
    """The sums of each metric over all ranks, and the number of targets; None if the evaluation is over."""
    model, world, train = job.model, job.world, job.config.train
    model.eval()
    sums: dict[str, torch.Tensor] = {}
    count = 0.0
    measure = getattr(task, "measure", None) or (lambda model, batch: {"loss": task.loss(model, batch)})
    collate = collate_of(task, world.loss_rank, job.config.parallel.cp)
    for batch, is_filler in eval_batches(
        data, train.micro_batch_size, world.data_rank, world.data_size, limit, collate
    ):
        if is_over():
            model.train()
            return None
        release_graph_outputs()
        for name, value in measure(model, to_device(batch, world.device)).items():
            total = sums.setdefault(name, torch.zeros((), dtype=torch.float64, device=world.device))
            if not is_filler:
                total += value.double()
        count += 0 if is_filler else task.n_targets(batch)
    model.train()
    totals = world.sum([*map(float, sums.values()), count])
    return dict(zip([*sums, _COUNT], totals, strict=True))


def report(job: Job, task: Task, run_dir: Path, measured: dict[str, float]) -> None:
    """Print every rank's memory, the last evaluation beside the task's baseline, restarts and files; on rank 0."""
    from ..memory.table import render_table  # imports rich, which would delay the first step

    print(render_table(job.ledger.last_rows))
    if "val_loss" in measured:
        val_loss = measured["val_loss"]
        for name, value in measured.items():
            print(f"validation {name.removeprefix('val_').replace('_', ' ')}: {value:.4f}")
        describe = getattr(task, "describe", dict)
        for name, value in describe().items():
            gain = f"  ({beside(val_loss, value)})" if "cross_entropy" in name else ""
            print(f"{name.replace('_', ' ')}: {value:.4f}{gain}")
    restarts = job_starts.summary(run_dir)
    if restarts is not None:
        print(restarts)
    print(f"files written: {directory.listed(run_dir)}")
    print(f"  look at them: shardkit report {shlex.quote(str(run_dir))}")


def beside(val_loss: float, baseline: float) -> str:
    """Compare a validation loss with a baseline in words: how many per cent below it, or how many times as high."""
    if val_loss > baseline:
        times = val_loss / baseline
        return f"the validation loss is {times:.2f} times as high: worse than each token's frequency alone"
    return f"the validation loss is {100 * (1 - val_loss / baseline):.1f} % lower"


# Text that the model writes at an evaluation, from the prompts of `train.sample_prompts`.
# Every rank continues prompts of its own through the wrapped model, so engines gather block by block as in training and
# no rank holds a whole model. There is no cache of keys and values: each new token is a forward over prompt and answer,
# of one shape for all of them, and never of more tokens than a micro-batch of training.


def write_samples(
    job: Job, task: Any, prompts: Prompts, step: int, is_over: Callable[[], bool] = lambda: False
) -> list[dict[str, Any]]:
    """Continue every prompt by at most `train.sample_tokens` tokens; collective.

    Temperature 0 takes the likeliest token. Above it, tokens are drawn by (train.seed, step, prompt), whatever the
    number of ranks. `is_over`: called before every token, with the same answer on every rank; True leaves the answers
    as they are. Returns on rank 0, in the order of the prompts, {"step", "prompt", "text", "tokens"}, new ones.
    """
    world = job.world
    rows, _ = prompts.batch(job.config.train, world.loss_size)
    answers: dict[int, list[int]] = {}
    job.model.eval()
    alone = nullcontext() if world.context is None else world.context.whole_sequences()
    with torch.no_grad(), job.strategy.evaluating(), alone:
        for begin in range(0, len(prompts.ids), rows * world.loss_size):
            indices = range(begin + world.loss_rank, begin + rows * world.loss_size, world.loss_size)
            answers |= _continue(job, task, prompts, indices, step, is_over)
    job.model.train()
    gathered: dict[int, list[int]] = {}
    for rank_answers in world.gather(answers):
        gathered |= rank_answers  # type: ignore[call-overload]
    if not world.is_main:
        return []
    return [
        {"step": step, "prompt": text, "text": prompts.decode(gathered[index]), "tokens": len(gathered[index])}
        for index, text in enumerate(prompts.texts)
    ]


def _continue(
    job: Job, task: Any, prompts: Prompts, indices: Sequence[int], step: int, is_over: Callable[[], bool]
) -> dict[int, list[int]]:
    """Generate the new tokens of this rank's prompts; fillers for missing prompts let all ranks call alike."""
    train, device = job.config.train, job.world.device
    _, width = prompts.batch(train, job.world.loss_size)
    tokens = torch.zeros(len(indices), width, dtype=torch.long)
    answers: dict[int, list[int]] = {index: [] for index in indices if index < len(prompts.ids)}
    lengths = [1] * len(indices)
    for row, index in enumerate(indices):
        if index in answers:
            tokens[row, : len(prompts.ids[index])] = torch.tensor(prompts.ids[index])
            lengths[row] = len(prompts.ids[index])
    rows = {row: index for row, index in enumerate(indices) if index in answers}
    first_seed = (train.seed * 1_000_003 + step) * 1_009  # a prompt's draws are the same on any number of ranks
    draws = {index: torch.Generator().manual_seed(first_seed + index) for index in answers}
    for _ in range(train.sample_tokens):
        if is_over() or not job.world.sum([float(len(rows))])[0]:
            break
        release_graph_outputs()
        positions = torch.tensor([row * width + length - 1 for row, length in enumerate(lengths)], device=device)
        logits = task.next_logits(job.model, tokens.to(device), positions).float().cpu()
        for row, index in list(rows.items()):
            if train.sample_temperature:
                shares = (logits[row] / train.sample_temperature).softmax(0)
                new = int(torch.multinomial(shares, 1, generator=draws[index]))
            else:
                new = int(logits[row].argmax())
            if new == prompts.end:
                del rows[row]
                continue
            answers[index].append(new)
            tokens[row, lengths[row]] = new
            lengths[row] += 1
    return answers
