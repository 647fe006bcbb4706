"""Text that the model writes at an evaluation, from the prompts of `train.sample_prompts`.

Every rank continues prompts of its own through the wrapped model, so engines gather block by block as in training and
no rank holds a whole model. There is no cache of keys and values: each new token is a forward over prompt and answer,
of one shape for all of them, and never of more tokens than a micro-batch of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..parallel.blocks import release_graph_outputs
from ..tasks.load import Prompts
from .job import Job


def write_samples(
    job: Job, task: Any, prompts: Prompts, step: int, is_over: Callable[[], bool] = lambda: False
) -> list[dict[str, Any]]:
    """Continue every prompt by at most `train.sample_tokens` tokens; collective.

    Temperature 0 takes the likeliest token. Above it, tokens are drawn by (train.seed, step, prompt), whatever the
    number of ranks.

    Args:
        is_over: called before every token, with the same answer on every rank; True leaves the answers as they are.

    Returns:
        On rank 0, in the order of the prompts, {"step", "prompt", "text", "tokens"}; the tokens are new ones.
    """
    world = job.world
    rows, _ = prompts.batch(job.config.train, world.size)
    answers: dict[int, list[int]] = {}
    job.model.eval()
    with torch.no_grad(), job.strategy.evaluating():
        for begin in range(0, len(prompts.ids), rows * world.size):
            indices = range(begin + world.rank, begin + rows * world.size, world.size)
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
    _, width = prompts.batch(train, job.world.size)
    tokens = torch.zeros(len(indices), width, dtype=torch.long)
    answers: dict[int, list[int]] = {index: [] for index in indices if index < len(prompts.ids)}
    lengths = [1] * len(indices)
    for row, index in enumerate(indices):
        if index in answers:
            tokens[row, : len(prompts.ids[index])] = torch.tensor(prompts.ids[index])
            lengths[row] = len(prompts.ids[index])
    rows = {row: index for row, index in enumerate(indices) if index in answers}
    draws = {index: torch.Generator().manual_seed(_seed(train.seed, step, index)) for index in answers}
    for _ in range(train.sample_tokens):
        if is_over() or not job.world.sum([float(len(rows))])[0]:
            break
        release_graph_outputs()
        positions = torch.tensor([row * width + length - 1 for row, length in enumerate(lengths)], device=device)
        logits = task.next_logits(job.model, tokens.to(device), positions).float().cpu()
        for row, index in list(rows.items()):
            new = _pick(logits[row], train.sample_temperature, draws[index])
            if new == prompts.end:
                del rows[row]
                continue
            answers[index].append(new)
            tokens[row, lengths[row]] = new
            lengths[row] += 1
    return answers


def _pick(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))


def _seed(seed: int, step: int, prompt: int) -> int:
    return (seed * 1_000_003 + step) * 1_009 + prompt
