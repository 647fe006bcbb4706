"""shardkit beside its alternatives: the same engine under PyTorch or DeepSpeed alone, Accelerate, Fabric.

`python -m benchmarks.peers` runs on 2 CPU ranks over gloo, in its own environment (peers_env.py). Starts are timed one
after the other, in turns, from torchrun's command to the end of the first step. Then all arms are alive at once and
take turns, one step each: each step is compared with the neighbouring steps of the other arms. Peak tensor memory is
the peak of torch's CPU allocator from the model's construction on, from the profiler's events in a separate start. No
ratio is written unless all losses equal those of the hand-written loop.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import bare, peers_env
from .common import earlier, paired_ratio, publish, stamp
from .options import options, samples
from .overhead import write_tokens
from .peers_arms import ARMS, OURS, REFUSALS
from .peers_ranks import Ranks
from .turns import RANKS, Arms, peaks_of, side_by_side, starts_of

TOLERANCE = 1e-5  # largest difference of a loss from the hand-written loop's
WARMUP = 2  # untimed steps after the first
PEAK_STEPS = 3
PACKAGES = ("torch", "accelerate", "deepspeed", "lightning-fabric", "transformers")

Samples = Mapping[str, Sequence[float]]  # of each arm


class DifferentLosses(RuntimeError):
    """An arm does not train like the hand-written loop: its times would say nothing."""


def arms_of(engine: str, arms: Sequence[str], tokens: str, folder: Path, count: int, mode: str = "turns") -> Arms:
    return {arm: partial(Ranks, engine, arm, tokens, folder, count, mode) for arm in arms}


def turns(
    engine: str, arms: Sequence[str], tokens: str, folder: Path, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Each arm's seconds per step, and the losses of all its steps, warm-up included."""
    first, taken = side_by_side(arms_of(engine, arms, tokens, folder, 1 + WARMUP + steps), WARMUP + steps)
    seconds = {arm: [took for took, *_ in timed[WARMUP:]] for arm, timed in taken.items()}
    return seconds, {arm: [first[arm], *(step[1] for step in timed)] for arm, timed in taken.items()}


def loss_differences(losses: Samples, tolerance: float = TOLERANCE, **of_arm: float) -> dict[str, float]:
    """Each arm's largest loss difference from the first arm, the reference.

    Args:
        of_arm: other tolerances of single arms.

    Raises:
        DifferentLosses: a difference is larger than rounding explains.
    """
    reference, expected = next(iter(losses.items()))
    largest = {}
    for arm, values in losses.items():
        allowed = of_arm.get(arm, tolerance)
        differences = [abs(value - other) for value, other in zip(values, expected, strict=True)]
        for step, difference in enumerate(differences):
            if not difference <= allowed:  # NaN included
                raise DifferentLosses(
                    f"{arm}: loss {values[step]} in step {step + 1}, {expected[step]} with {reference}; more than "
                    f"{allowed:g} apart, so their times are not compared"
                )
        largest[arm] = max(differences)
    return largest


def ratio(samples: Samples, arm: str) -> tuple[float, float, float]:
    """(median, low, high) of shardkit's times over the arm's neighbouring ones."""
    return paired_ratio(samples[OURS], samples[arm])


def times(engine: str, arms: Sequence[str], tokens: str, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Starts, steps, and shardkit's ratios to each arm ("beside").

    Args:
        arms: names, the hand-written loop first, including shardkit.
        rounds: number of starts of each arm.
        steps: number of steps of each arm.

    Raises:
        DifferentLosses: an arm does not train like the hand-written loop.
    """
    began = starts_of(arms_of(engine, arms, tokens, folder, 1), rounds)
    taken, losses = turns(engine, arms, tokens, folder, steps)
    return {
        "measured": stamp(),
        "loss_difference": loss_differences(losses),
        "first_step_s": began,
        "step_s": taken,
        "losses": losses,
        "beside": {
            arm: {"step_time": ratio(taken, arm), "first_step": ratio(began, arm)} for arm in arms if arm != OURS
        },
    }


def peaks(engine: str, arms: Sequence[str], tokens: str, folder: Path) -> dict[str, int]:
    """Peak bytes of each arm."""
    return peaks_of(arms_of(engine, arms, tokens, folder, PEAK_STEPS, "peak"))


def refusals(engine: str, tokens: str, folder: Path) -> dict[str, str]:
    """The error of each library that does not train with this engine on a CPU."""
    errors = {}
    for arm in REFUSALS.get(engine, {}):
        with Ranks(engine, arm, tokens, folder, 1, "refusal") as ranks:
            errors[arm] = ranks.answers()[0]["refused"]
    return errors


def write(engines: Mapping[str, Any]) -> None:
    publish("peers", {
        "ranks": RANKS, "tolerance": TOLERANCE, "packages": {package: version(package) for package in PACKAGES},
        "settings": {key: value for key, value in vars(bare).items() if key.isupper() and key != "ENGINES"},
        "engines": {engine: engines[engine] for engine in ARMS if engine in engines},
    })  # fmt: skip


def main() -> None:
    args = options(
        __doc__,
        rounds=samples(9, "starts of each arm"),
        steps=samples(25, "of each arm"),
        engines=ARMS,
        parts=("memory", "time"),
    )
    peers_env.enter()
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        tokens = write_tokens(folder)
        for engine in args.engines:
            arms = [*ARMS[engine], OURS]
            figures: dict[str, Any] = {}
            if "memory" in args.parts:
                figures["peak_bytes"] = peaks(engine, arms, tokens, folder)
                figures["refused"] = refusals(engine, tokens, folder)
            if "time" in args.parts:
                figures |= times(engine, arms, tokens, folder, args.rounds, args.steps)
            known = earlier("peers").get("engines", {})
            write({**known, engine: {**known.get(engine, {}), **figures}})


if __name__ == "__main__":
    main()
