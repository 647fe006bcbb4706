"""Lightning's Trainer: a callback."""

from __future__ import annotations

from typing import Any

from .watching import WatchesTrainer, Watching, missing

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise missing("lightning", error) from error

_PRECISION = {"bf16-mixed": "bf16", "16-mixed": "fp16", "bf16-true": "pure_bf16", "32-true": "fp32"}


class ShardkitCallback(WatchesTrainer, Callback):  # type: ignore[misc]
    """Accounts for every rank's memory, and explains out-of-memory errors.

        trainer = Trainer(..., callbacks=[ShardkitCallback("runs/mine")])

    `run_dir`: a new directory; default: `shardkit` in the Trainer's `default_root_dir`. `every`, `cap`, `resume`,
    `tensorboard`: as for `shardkit.watch`; its bars are drawn with `enable_progress_bar=False`.
    """

    _steps: int
    _losses: list[Any]
    """Losses of the step's micro-batches so far, as tensors on their device."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin; collective."""
        mode = _PRECISION.get(str(trainer.precision))
        self._steps, self._losses = trainer.global_step, []
        settings = self.watch_settings(
            trainer.default_root_dir,
            mode,
            done=trainer.global_step,
            bars=trainer.progress_bar_callback is None,
            total=trainer.max_steps if trainer.max_steps and trainer.max_steps > 0 else None,
            is_marked=True,  # Lightning does not call the module's forward, and runs all of a step inside step()
        )
        model = trainer.strategy.model
        self.watching = Watching(pl_module if model is None else model, trainer.optimizers, settings)
        self.watching.open()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.watching is not None:
            self.watching.marks.forward_begins(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self.watching is not None:
            self.watching.marks.backward_begins()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.watching is not None:
            self.watching.marks.update_begins()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """If the model was updated, a step ended; collective every few steps.

        The step's loss is the mean over its micro-batches. Lightning gives each one's divided by
        `accumulate_grad_batches`, also in a shorter step at the end of an epoch.
        """
        if self.watching is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._losses.append(loss.detach() * trainer.accumulate_grad_batches)
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self.watching.marks.step_ends()
        if self._losses:
            self.watching.log(loss=sum(self._losses) / len(self._losses))
        self._losses = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Gather a last time and print the table; collective."""
        self.end_watching()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.watching is not None:
            self.watching.explain(exception)
        self.end_watching(failed=True)
