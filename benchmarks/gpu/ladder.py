"""The ladder on an emulated 24 GiB card and on the whole card: memory, speed, largest batch and model of each rung.

Running out of memory is a result. Sizes are predicted first; then the largest that fits and the next one are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .cases import Case, Cases, Figures, Where
from .target import load, next_size, planned, predicted, settings, target, train, went

if TYPE_CHECKING:
    from shardkit.plan.search.max_model import Boundary, Size


@dataclass(frozen=True)
class Card:
    """A card, and the model that the rungs of its ladder train."""

    cap: str | None
    base: tuple[str, ...]


_TEXT = ("train.seq_len=1024", "optim.warmup_steps=2")
CARDS = {
    "24 GiB": Card("24GiB", ("model.preset=355m", "train.micro_batch_size=24", *_TEXT)),
    "full card": Card(None, ("model.preset=1.3b", "train.micro_batch_size=40", *_TEXT)),
}
DRY_CARDS = {"24 GiB": Card("40MiB", ("model.preset=debug", "train.micro_batch_size=8"))}
KINDS = ("step", "batch", "model")
_MOST_TRIED = 4


def rungs(dry: bool) -> dict[str, tuple[str, ...]]:
    """Name → overrides, including those of earlier rungs; a dry run has the first two and the last."""
    from shardkit.plan.search.ladder import default_rungs

    settings: dict[str, str] = {}
    overrides = {}
    for rung in default_rungs(1):
        settings |= dict(item.split("=", 1) for item in rung.settings)
        overrides[rung.name] = tuple(f"{key}={value}" for key, value in settings.items())
    names = list(overrides)
    return {name: overrides[name] for name in (*names[:2], names[-1])} if dry else overrides


def cases(dry: bool) -> Cases:
    named: Cases = {}
    for kind in KINDS:
        for card_name, card in (DRY_CARDS if dry else CARDS).items():
            for name, rung in rungs(dry).items():
                if dry and kind != "step" and name != "+ checkpointing":
                    continue
                args = (card, rung) if kind == "step" else (card, rung, kind)
                predict, measure = (_predict, _measure) if kind == "step" else (_predict_largest, _measure_largest)
                named[f"{card_name}: {name}: {kind}"] = Case(partial(measure, *args), partial(predict, *args))
    return named


def _predict(card: Card, rung: Sequence[str], where: Where) -> Figures:
    return predicted(planned(where, load(where, card.base, rung)([]), target(where, card.cap)))


def _measure(card: Card, rung: Sequence[str], where: Where) -> Figures:
    host = where.predicted.get("host", 0)
    if where.emulated and host > where.host_memory:  # nothing that computes nothing is worth filling a machine
        return {"outcome": "out of host memory", "message": f"{host} bytes are needed, {where.host_memory} are free"}
    return went(train(where, settings(where, card.base, rung), card.cap, steps=6))


def _predict_largest(card: Card, rung: Sequence[str], kind: str, where: Where) -> Figures:
    from shardkit.errors import ConfigError
    from shardkit.plan.search.max_model import batch_sizes, largest, model_sizes

    base = load(where, card.base, rung, ["train.micro_batch_size=1"] if kind == "model" else [])
    to = target(where, card.cap)
    room = (to.device_memory or 0) + where.host_memory
    sizes = batch_sizes() if kind == "batch" else model_sizes(base([]).model, room / 2)
    try:
        boundary = largest(base, sizes, to, None)
    except ConfigError as error:
        return {"outcome": "no boundary", "message": error.cause}
    near = neighbours(boundary, sizes)
    return {"outcome": "ok", "needed": boundary.predicted, **near, "host_limit": where.host_memory}


def neighbours(boundary: Boundary, sizes: Sequence[Size]) -> Figures:
    """The predicted size and those around it."""
    at = sizes.index(boundary.largest)
    near = sizes[max(0, at - _MOST_TRIED) : at + 1 + _MOST_TRIED]
    return {
        "amount": boundary.largest.amount, "at": near.index(boundary.largest), "limited_by": boundary.limited_by,
        "sizes": [[list(size.settings), size.amount] for size in near],
    }  # fmt: skip


def _measure_largest(card: Card, rung: Sequence[str], kind: str, where: Where) -> Figures:
    if where.predicted["outcome"] != "ok":
        return {"outcome": where.predicted["outcome"]}
    fixed = ["train.micro_batch_size=1"] if kind == "model" else []

    def run(name: str, size: Sequence[str]) -> Figures:
        chosen = settings(where, card.base, rung, fixed, size)
        return went(train(where, chosen, card.cap, steps=3, name=name, traced=False))

    return around(where.predicted, where, run, {})


def around(plan: Figures, where: Where, run: Callable[[str, Sequence[str]], Figures], recorded: Figures) -> Figures:
    """Train the predicted size and its neighbours until one works and the next one runs out of memory.

    If host memory is the limit, no larger size is tried: the machine would run out of it.

    Args:
        run: trains with a size's settings, under a name.
        recorded: the result so far beside these trials.
    """
    trials: Figures = dict(where.earlier.get("trials", {}))
    while len(trials) < _MOST_TRIED and (at := next_size(trials, plan["at"], 1)) is not None:
        if not 0 <= at < len(plan["sizes"]):
            break
        size, amount = plan["sizes"][at]
        trials[str(at)] = trial = {**run(str(at), size), "amount": amount}
        where.keep({**recorded, "trials": trials})
        if trial["outcome"] == "failed" or (trial["outcome"] == "ok" and plan["limited_by"] == "host"):
            break
    return {**recorded, **summary(trials), "trials": trials}


def summary(trials: Figures) -> Figures:
    """The largest amount that trained, and the smallest that ran out of memory."""
    worked = [trial["amount"] for trial in trials.values() if trial["outcome"] == "ok"]
    ran_out = [trial["amount"] for trial in trials.values() if trial["outcome"] == "out of memory"]
    failed = [trial["message"] for trial in trials.values() if trial["outcome"] == "failed"]
    return {
        "outcome": "ok" if worked else "failed" if failed else "out of memory",
        "amount": max(worked, default=None), "out_of_memory_at": min(ran_out, default=None),
        **({"message": failed[0]} if failed else {}),
    }  # fmt: skip
