"""Fine-tuning with shardkit beside TRL's SFTTrainer and peft + Accelerate.

`python -m benchmarks.sft` runs on 2 CPU ranks over gloo under DDP, in its own environment (sft.txt): the same small
Llama, conversations, order and settings, targets in the assistant's turns alone. With padded rows, the losses of every
step must agree before anything is timed. Packed rows hold other conversations in another order with each library, so
the figure compared there is targets a second. Arms take turns, one
step each. Peaks are those of torch's CPU allocator in a start of their own. Tokenisation compares `shardkit tokenize`
with `datasets.map` on the same number of processes, in turns; `--settings` without a name measures that alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from . import peers_env, sft_arms, sft_data, turns
from .common import FEWEST, earlier, in_turns, paired_ratio, publish, stamp
from .options import Option, options, refuse
from .peers import loss_differences
from .peers_ranks import peak_of
from .sft_arms import AT_ONCE, PEERS, Setting

NAME = "sft"
OURS = "shardkit"
ARMS = (*PEERS, OURS)
SETTINGS = (("full", "padded"), ("lora", "padded"), ("lora", "packed"), ("qlora", "padded"), ("qlora", "packed"))
REFERENCE = "peft + Accelerate"
TOLERANCE = 2e-5  # largest difference of a loss from the reference's
BF16_ADAPTER = {"qlora": {"TRL": 5e-3}}
"""Larger tolerances: over a base in 4 bits TRL trains the adapter in bf16, the others in fp32."""
COMPARED, PEAK_STEPS, WARMUP = 4, 2, 2
COPIES = 10  # of the conversations, to tokenise
LENGTHS, CONTEXT = 1_000_000, 4096  # packed by best-fit decreasing


class Ranks(turns.Ranks):
    """Two ranks of an arm; `mode` is "turns", or "peak" for one such answer."""

    def __init__(self, setting: Setting, arm: str, folder: Path, count: int, mode: str = "turns") -> None:
        arguments = {"mode": mode, "arm": arm, "count": count, "setting": asdict(setting)}
        super().__init__(f"{arm}, {setting.tuned}, {setting.layout}", "benchmarks.sft:answers", folder, **arguments)


def answers(
    stream: TextIO, scratch: str, mode: str, arm: str, count: int, setting: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """What a rank answers."""
    chosen = Setting(**setting)
    peers = PEERS if mode == "turns" else PEERS | AT_ONCE
    steps = sft_arms.ours(chosen, count, scratch) if arm == OURS else peers[arm](chosen, count)
    if mode == "turns":
        yield from turns.timed(({"loss": loss, "tokens": tokens} for loss, tokens in steps), stream)
    else:
        yield {"peak": peak_of(steps)}
    for _ in steps:  # a library's loop ends after the last step that it was set up for
        pass


def agree(setting: Setting, folder: Path) -> dict[str, float]:
    """Each arm's largest difference of a loss from the reference's, over a few steps.

    Raises:
        DifferentLosses: a difference is larger than the arm's tolerance.
    """
    losses: dict[str, list[float]] = {}
    for arm in (REFERENCE, *(arm for arm in ARMS if arm != REFERENCE)):
        with Ranks(setting, arm, folder, COMPARED) as ranks:
            losses[arm] = [ranks.first_step()[1], *(ranks.step()[1] for _ in range(COMPARED - 1))]
    differences = loss_differences(losses, TOLERANCE, **BF16_ADAPTER.get(setting.tuned, {}))
    return {arm: differences[arm] for arm in ARMS}


def arms_of(setting: Setting, folder: Path, count: int, mode: str = "turns") -> turns.Arms:
    return {arm: partial(Ranks, setting, arm, folder, count, mode) for arm in ARMS}


def steps_in_turn(setting: Setting, folder: Path, steps: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, targets) of each arm's steps."""
    _, taken = turns.side_by_side(arms_of(setting, folder, 1 + WARMUP + steps), WARMUP + steps)
    return {arm: [(took, tokens) for took, _, tokens in steps[WARMUP:]] for arm, steps in taken.items()}


def tokenisation(setting: Setting, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds to tokenise and mark the conversations, by command, with `TOKENISERS` processes each."""
    many = folder / "many.jsonl"
    many.write_text(Path(setting.data).read_text() * COPIES)
    n = str(sft_arms.TOKENISERS)
    commands: dict[str, Callable[[str], list[str]]] = {
        "datasets.map": lambda out: ["-m", "benchmarks.sft_arms", str(many), setting.model, f"{out}/map"],
        OURS: lambda out: [
            "-m", "shardkit.cli", "tokenize", str(many), f"{out}/ours", "--tokenizer", setting.model,
            "data.loss_on=assistant", f"data.tokenize_workers={n}",
        ],
    }  # fmt: skip

    def tokenise(command: Callable[[str], list[str]]) -> float:
        shutil.rmtree(folder / "datasets", ignore_errors=True)  # what `datasets` keeps of an earlier round
        out = tempfile.mkdtemp(dir=folder)
        began = time.perf_counter()
        subprocess.run([sys.executable, *command(out)], check=True, capture_output=True)
        return time.perf_counter() - began

    return in_turns({name: partial(tokenise, command) for name, command in commands.items()}, rounds)


def packing() -> dict[str, float]:
    """Seconds to pack a million lengths of a long-tailed mix, and the share of positions filled."""
    import numpy as np

    from shardkit.data.windows import best_fit_decreasing

    drawn = np.random.default_rng(0).lognormal(5.5, 1.0, LENGTHS)
    lengths = np.clip(drawn.astype(np.int64), 2, CONTEXT)
    began = time.perf_counter()
    _, bounds = best_fit_decreasing(lengths, CONTEXT)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "fill": float(lengths.sum() / ((len(bounds) - 1) * CONTEXT))}


def beside(figures: Mapping[str, Any]) -> dict[str, Any]:
    """shardkit's ratios to each peer, with intervals: more tokens a second is better, less time to a first step."""
    speed = {arm: [tokens / seconds for seconds, tokens in taken] for arm, taken in figures["steps"].items()}
    return {
        arm: {
            "tokens_per_s": paired_ratio(speed[OURS], speed[arm]),
            "first_step": paired_ratio(figures["first_step_s"][OURS], figures["first_step_s"][arm]),
            "peak": figures["peak_bytes"][OURS] / figures["peak_bytes"][arm],
        }
        for arm in PEERS
    }


def main() -> None:
    args = options(
        __doc__,
        rounds=Option(6, f"starts of each arm, at least {FEWEST} of a setting"),
        steps=Option(15, f"timed steps of each arm, at least {FEWEST} of a setting"),
        settings=[" ".join(setting) for setting in SETTINGS],
        no_data=Option(False, "leave out tokenisation and packing"),
    )
    if args.settings and min(args.rounds, args.steps) < FEWEST:
        refuse(f"--rounds {args.rounds} --steps {args.steps}: at least {FEWEST}")
    peers_env.enter(NAME)
    load = os.getloadavg()[0]
    result = earlier(NAME) or {"settings": {}}
    result["packages"] = {
        name: version(name) for name in ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
    }
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets")}
        model, data = sft_data.write(folder)
        sft_data.write_adapter(model, folder / sft_arms.ADAPTER, sft_arms.LORA)
        for named in args.settings:
            tuned, layout = named.split()
            setting = Setting(tuned, layout, str(model), str(data))
            figures: dict[str, Any] = {"measured": stamp()}
            if layout == "padded":
                figures["loss_difference"] = agree(setting, folder)
            figures["peak_bytes"] = turns.peaks_of(arms_of(setting, folder, PEAK_STEPS, "peak"))
            figures["steps"] = steps_in_turn(setting, folder, args.steps)
            # Tokenisation included: caches are emptied; there is none before the first.
            empty = partial(shutil.rmtree, Path(setting.data).parent / "datasets", ignore_errors=True)
            figures["first_step_s"] = turns.starts_of(arms_of(setting, folder, 1), args.rounds, empty)
            figures["beside"] = beside(figures)
            result["settings"][named] = figures
            publish(NAME, result)
        if not args.no_data:
            setting = Setting("full", "padded", str(model), str(data))
            result["data_measured"] = {**stamp(), "load": load}
            result |= {"tokenise_s": tokenisation(setting, folder, args.rounds), "packing": packing()}
            publish(NAME, result)


if __name__ == "__main__":
    main()
