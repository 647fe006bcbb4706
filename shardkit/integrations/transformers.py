"""transformers' Trainer (and TRL's, which are its subclasses): a callback, or one line around `train()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .watching import WatchesTrainer, Watching, missing, say

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise missing("transformers", error) from error

_NAMES = {"learning_rate": "lr", "eval_loss": "val_loss"}
_AT_THE_END = ("train_", "total_flos")


class ShardkitCallback(WatchesTrainer, TrainerCallback):  # type: ignore[misc]
    """Accounts for every rank's memory; as a context manager around `train()` it also explains out-of-memory errors.

        shardkit = ShardkitCallback("runs/mine")
        trainer = Trainer(..., callbacks=[shardkit])
        with shardkit:
            trainer.train()

    `run_dir`: a new directory; default: `shardkit` in the Trainer's `output_dir`. `every`, `cap`, `tensorboard`: as for
    `shardkit.watch`; its bars are drawn with `disable_tqdm=True`. `resume`: continue the records in `run_dir`, from the
    step that the Trainer resumes after.
    """

    def __enter__(self) -> ShardkitCallback:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.watching is not None and error is not None:
            self.watching.explain(error)
        self.end_watching(failed=error is not None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin; collective. A second beginning means that the Trainer swallowed an out-of-memory error."""
        again = self.watching is not None
        if again:
            size = f"per_device_train_batch_size={state.train_batch_size}"
            say(f"shardkit: the Trainer ran out of memory and begins again with {size}; the records begin again too")
            self.end_watching(failed=True)
        model = kwargs["model"]
        half = "bf16" if args.bf16 else "fp16" if args.fp16 else None
        settings = self.watch_settings(
            args.output_dir, half, resume=self.resumes or again, done=state.global_step, bars=bool(args.disable_tqdm),
            total=state.max_steps,
        )  # fmt: skip
        self.watching = Watching(model, [kwargs["optimizer"]], settings)
        self.watching.open()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.watching is not None:
            numbers = {key: value for key, value in (logs or {}).items() if isinstance(value, (int, float))}
            figures = {_NAMES.get(key, key): value for key, value in numbers.items() if not key.startswith(_AT_THE_END)}
            self.watching.log(**figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gather a last time and print the table; collective."""
        self.end_watching()


@contextmanager
def watch(trainer: Any, run_dir: str | Path | None = None, **settings: Any) -> Iterator[ShardkitCallback]:
    """Watch everything that a Trainer trains inside, and explain its out-of-memory errors.

        with watch(trainer, run_dir="runs/mine"):
            trainer.train()

    `trainer`: transformers' Trainer or a subclass of it. `run_dir`, `settings`: as for `ShardkitCallback`.
    """
    callback = ShardkitCallback(run_dir, **settings)
    trainer.add_callback(callback)
    try:
        with callback:
            yield callback
    finally:
        trainer.remove_callback(callback)
