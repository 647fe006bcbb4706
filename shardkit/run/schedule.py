"""Which samples each step of the run reads, and the loader that reads them."""

from __future__ import annotations

from ..config.load import resolve_batch
from ..config.schema import RunConfig
from ..data.loader import StepLoader
from ..data.order import BatchSchedule, Order, State
from ..errors import DataError
from ..parallel.world import World
from ..tasks.base import Dataset, Task


def make_schedule(config: RunConfig, world: World, samples: Dataset) -> BatchSchedule:
    """Divide the training split into the micro-batches of steps and ranks.

    Raises:
        DataError: the split is too small for a step.
    """
    train, data, accum = config.train, config.data, resolve_batch(config, world.size)
    if train.micro_batch_size > len(samples):
        raise DataError(
            f"train.micro_batch_size={train.micro_batch_size} is more than the {len(samples)} samples of the "
            "training split",
            f"set it to {max(1, len(samples) // (accum * world.size))} or less, or use more data",
        )
    make_order = getattr(samples, "order", None)
    order: Order | None = make_order(train.seed, data.shuffle) if callable(make_order) else None
    try:
        return BatchSchedule(
            n_samples=len(samples) if order is None else order.n,
            global_batch=train.micro_batch_size * accum * world.size,
            micro_batch=train.micro_batch_size,
            accum=accum,
            rank=world.rank,
            world=world.size,
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
        getattr(task, "collate", None),
        state=state,
        n_steps=n_steps,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        pin_memory=world.device.type == "cuda",
    )
