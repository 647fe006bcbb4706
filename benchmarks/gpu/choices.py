"""The choice of `plan --auto` on emulated cards at full size: it trains, and so does the largest model that fits with
its settings, by prediction; the next larger one runs out of memory. `shardkit max-model` steps between the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shardkit.hardware.cards import GPUS

from .cases import Case, Cases, Figures, Where
from .child import emulated_card
from .ladder import around, neighbours
from .target import load, settings, train, went

_BUDGET_S = 240.0


@dataclass(frozen=True)
class Job:
    """A model for some cards of one machine; the search chooses everything else but the precision."""

    base: tuple[str, ...]
    ranks: int
    card: str


_TEXT = ("train.seq_len=1024", "precision.mode=bf16")
JOBS = {
    "355m on one RTX 4090": Job(("model.preset=355m", "train.global_batch_size=16", *_TEXT), 1, "rtx4090"),
    "1.3b on two RTX 4090": Job(("model.preset=1.3b", "train.global_batch_size=16", *_TEXT), 2, "rtx4090"),
    "1.3b on one H100": Job(("model.preset=1.3b", "train.global_batch_size=16", *_TEXT), 1, "h100"),
}
DRY_JOBS = {
    "debug on one RTX 4090": Job(
        ("model.preset=debug", "train.global_batch_size=8", "parallel.strategy=single", "activation.policy=full"),
        1, "rtx4090",
    )
}  # fmt: skip


def cases(dry: bool) -> Cases:
    jobs = DRY_JOBS if dry else JOBS
    return {name: Case(partial(_measure, job), partial(_predict, job)) for name, job in jobs.items()}


def _predict(job: Job, where: Where) -> Figures:
    """The choice, and the sizes around the largest model that fits with its settings."""
    from shardkit.plan.search.max_model import largest, model_sizes
    from shardkit.plan.search.search import Search
    from shardkit.plan.target import Target

    to = Target(job.ranks, GPUS[job.card], job.ranks, host_memory=where.host_memory // job.ranks)
    set_by_user = {item.partition("=")[0] for item in job.base}
    with Search(load(where, job.base), to, set_by_user, None, lambda line: None, _BUDGET_S) as search:
        outcome = search.run()
    choice = outcome.best
    assert choice.estimate is not None, "the search has not finished"
    base = load(where, job.base, choice.settings)
    most = (GPUS[job.card].memory * job.ranks + where.host_memory) / 2
    sizes = model_sizes(base([]).model, most)
    boundary = largest(base, sizes, to, None)
    return {
        "outcome": "ok", "settings": list(choice.settings), "needed": choice.needed, "stopped": outcome.stopped,
        "overhead": choice.estimate.overhead, "host": choice.estimate.host_peak, **neighbours(boundary, sizes),
    }  # fmt: skip


def _measure(job: Job, where: Where) -> Figures:
    """Train the choice, then the sizes around the boundary; bytes outside of torch's allocator are taken as planned."""
    plan = where.predicted
    if plan["outcome"] != "ok":
        return {"outcome": plan["outcome"]}
    card = emulated_card(GPUS[job.card]) | {"EMUCUDA_CONTEXT": str(plan["overhead"])}

    def run(name: str, *more: Sequence[str]) -> Figures:
        chosen = settings(where, job.base, plan["settings"], *more)
        return went(train(where, chosen, steps=3, name=name, ranks=job.ranks, card=card, traced=False))

    choice = where.earlier.get("choice") or run("choice")
    where.keep({**where.earlier, "choice": choice})
    figures = around(plan, where, lambda name, size: run(name, size), {"choice": choice})
    if choice["outcome"] != "ok":
        figures |= {"outcome": "failed", "message": f"the choice: {choice['message'] or choice['outcome']}"}
    return figures
