"""A step of other tools' loops with and without `shardkit.watch`, on 2 CPU ranks.

`python -m benchmarks.watch_cost` runs each loop on 2 ranks over gloo, one thread each, in the one line of shardkit and
its defaults (every rank's memory gathered every 10 steps, metrics.jsonl, TensorBoard). Steps take turns: every other
one has shardkit's hooks taken off. Two processes of the same loop differ by 1 to 3 % for as long as they live, which
is more than what is looked for. All train the same Llama with two micro-batches a step; "own, short steps" trains a
small model, to show the cost itself. A tool that is not installed is left out: Lightning may be anywhere on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, TextIO

from .common import in_turns, measure_each, median_ci, stamp
from .options import options, samples
from .turns import Ranks

NAME = "watch_cost"
GOAL = 1.01
ACCUM, MICRO, SEQ, VOCAB = 2, 2, 128, 2048
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
SHORT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LOOPS = {
    "own": None,
    "own, short steps": None,
    "Accelerate": "accelerate",
    "DeepSpeed, ZeRO-2": "deepspeed",
    "transformers' Trainer": "transformers",
    "Lightning": "lightning",
}
ARMS = ("as it is", "watched")
WARMUP = 12  # steps: state is created, TensorBoard imported, memory gathered three times


class Turn:
    """A rank's side of taking turns, called at the end of each step.

    Attributes:
        watching: what watches the loop, once it began.
        is_on: whether it watches the step that runs.
    """

    watching: Any = None
    is_on = True

    def __init__(self, stream: TextIO) -> None:
        self._inside, self._stream = 0.0, stream
        self._began: tuple[float, float] | None = None

    def ended(self) -> bool:
        """A step ended: say how long it took, and wait for the next turn; False if there is none."""
        now, spent = time.perf_counter(), time.process_time()
        answer = {"loss": 0.0, "at": time.time()}
        if self._began is None:
            self._time_calls()
        else:
            answer |= {"seconds": now - self._began[0], "spent": spent - self._began[1], "inside": self._inside}
        print(json.dumps(answer), file=self._stream, flush=True)
        request = self._stream.readline()
        self.switch(request.strip() == "watched")
        self._inside = 0.0
        self._began = time.perf_counter(), time.process_time()
        return bool(request)

    def _time_calls(self) -> None:
        """Add up this thread's processor time in the calls that shardkit's hooks make."""

        def timed(call: Callable[..., None]) -> Callable[..., None]:
            def run(*args: Any, **kwargs: Any) -> None:
                began = time.thread_time()
                call(*args, **kwargs)
                self._inside += time.thread_time() - began

            return run

        self.switch(False)  # hooks keep the methods that they find
        for name in ("forward_begins", "backward_begins", "update_begins", "step_ends"):
            setattr(self.watching.marks, name, timed(getattr(self.watching.marks, name)))
        self.watching.log = timed(self.watching.log)

    def switch(self, is_on: bool) -> None:
        """Put shardkit's hooks on or take them off."""
        if is_on != self.is_on:
            self.is_on = is_on
            (self.watching.marks.hook if is_on else self.watching.marks.unhook)()


def llama(sizes: dict[str, int] = SIZES) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCAB))  # type: ignore[arg-type]


def tokens(count: int = MICRO) -> Any:
    import torch

    return torch.randint(0, VOCAB, (count, SEQ))


def by_hand(turn: Turn, folder: str, sizes: dict[str, int] = SIZES) -> None:
    import torch
    import torch.distributed as dist

    import shardkit

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(llama(sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    with shardkit.watch(model, optimizer, run_dir=folder) as turn.watching:
        going = True
        while going:
            for index in range(ACCUM):
                batch = tokens()
                with model.no_sync() if index + 1 < ACCUM else contextlib.nullcontext():
                    loss = model(input_ids=batch, labels=batch).loss
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn.is_on:
                turn.watching.log(loss=loss)
            going = turn.ended()


def accelerate(turn: Turn, folder: str) -> None:
    import torch
    from accelerate import Accelerator

    from shardkit.integrations.accelerate import watch

    accelerator, network = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM), llama()
    model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
    with watch(accelerator, model, optimizer, run_dir=folder) as turn.watching:
        going = True
        while going:
            with accelerator.accumulate(model):
                batch = tokens()
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if turn.is_on:
                    turn.watching.log(loss=loss)
                going = turn.ended()


def deepspeed(turn: Turn, folder: str) -> None:
    import deepspeed as library
    import torch

    from shardkit.integrations.deepspeed import watch

    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of compiling
    library.init_distributed(dist_backend="gloo")
    network = llama()
    engine, *_ = library.initialize(
        model=network,
        optimizer=torch.optim.AdamW(network.parameters()),
        config={
            "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": ACCUM,
            "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )  # fmt: skip
    with watch(engine, run_dir=folder) as turn.watching:
        going = True
        while going:
            batch = tokens()
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            is_end = engine.is_gradient_accumulation_boundary()
            engine.step()
            if is_end:
                if turn.is_on:
                    turn.watching.log(loss=loss)
                going = turn.ended()


def transformers(turn: Turn, folder: str) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from shardkit.integrations.transformers import watch

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            turn.watching = watched.watching
            control.should_training_stop = not turn.ended()
            return control

    args = TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=MICRO, gradient_accumulation_steps=ACCUM,
        max_steps=100_000, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=10,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens(4096)]
    trainer = Trainer(llama(), args, train_dataset=data, callbacks=[Turns()])
    with watch(trainer, folder) as watched:
        trainer.train()


def lightning(turn: Turn, folder: str) -> None:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader

    from shardkit.integrations.lightning import ShardkitCallback

    class Net(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    watched = ShardkitCallback(folder)

    class Turns(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % ACCUM == 0:
                turn.watching = turn.watching or watched.watching
                trainer.should_stop = not turn.ended()
                watched.watching = turn.watching if turn.is_on else None  # it has no hooks: its callback marks

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", accumulate_grad_batches=ACCUM, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[watched, Turns()],
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(tokens(4096), batch_size=MICRO))


def work(stream: TextIO, scratch: str, loop: str) -> Iterator[Any]:
    """One rank, whose loop answers at the end of each step."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    run: Callable[..., None] = globals()[LOOPS[loop] or "by_hand"]
    run(Turn(stream), f"{scratch}/run", **({"sizes": SHORT} if "short" in loop else {}))
    return iter(())


def measure(loop: str, pairs: int, folder: Path) -> dict[str, Any]:
    """Times of steps in turn: the slower rank's, and rank 0's processor time."""

    def step(ranks: Ranks, arm: str) -> tuple[float, float, float]:
        answers = ranks.answers(arm)
        return (
            max(answer["seconds"] for answer in answers), answers[0]["spent"],
            max(answer["inside"] for answer in answers),
        )  # fmt: skip

    with Ranks(loop, "benchmarks.watch_cost:work", folder, loop=loop) as ranks:
        ranks.first_step()
        return figures(in_turns({arm: partial(step, ranks, arm) for arm in ARMS}, pairs, WARMUP))


def figures(taken: dict[str, list[tuple[float, float, float]]]) -> dict[str, Any]:
    """Ratios and differences, watched over as it is, of steps that were neighbours, and the mean time inside."""
    plain, watched = (taken[arm] for arm in ARMS)
    pairs = list(zip(plain, watched, strict=True))
    return {
        "measured": {**stamp(), "load": os.getloadavg()[0]},
        "pairs": len(pairs),
        "step_s": median(seconds for seconds, *_ in plain),
        "step_time": median_ci([b[0] / a[0] for a, b in pairs]),
        "processor_time": median_ci([b[1] / a[1] for a, b in pairs]),
        "added_processor_s": median_ci([b[1] - a[1] for a, b in pairs]),
        "inside_s": mean(inside for *_, inside in watched),
        "samples": taken,
    }


def installed(loops: Iterable[str]) -> Iterator[str]:
    for loop in loops:
        tool = LOOPS[loop]
        if tool is None or importlib.util.find_spec(tool) is not None:
            yield loop
        else:
            print(f"{loop}: left out, {tool} is not installed", file=sys.stderr)


def main() -> None:
    args = options(__doc__, pairs=samples(400, "measured steps of each kind"), loops=LOOPS)
    with tempfile.TemporaryDirectory() as temp:
        measure_each(
            NAME, "loops", installed(args.loops),
            lambda loop: measure(loop, args.pairs * (3 if "short" in loop else 1), Path(temp)), goal=GOAL,
        )  # fmt: skip


if __name__ == "__main__":
    main()
