"""A traced step explains what torch's own allocator counted, on the models that people train."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_accuracy import MODELS, allocated, held_addresses
from tests.ranks import run_ranks


def measured(folder: str, settings: list[str]) -> tuple[int, int]:
    """Peak of the CPU allocator over a run of two steps, and that of the second one as it was traced."""
    from torch.profiler import ProfilerActivity, profile

    from shardkit.config.load import load_config
    from shardkit.run.job import start
    from shardkit.run.trainer import Trainer

    gc.unfreeze()  # the server of ranks has frozen its objects: data loaders would leave the model frozen, and unseen
    common = ["train.max_steps=2", "train.eval_samples=0", "memory.trace_step=2", "checkpoint.at_end=false",
              "logging.tensorboard=false", "run.device=cpu", "parallel.strategy=single",
              "optim.implementation=foreach", f"run.dir={folder}"]  # fmt: skip
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        start(load_config(None, [*settings, *common])) as job,
    ):
        Trainer(job).fit()
        del job
        gc.collect()
        alive = held_addresses()
    traced: dict[str, Any] = json.loads((Path(folder) / "trace" / "rank0.json").read_text())
    return max(total for _, total in allocated(profiler, alive)), traced["peak"]["bytes"]


@pytest.mark.release
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("model", ["transformer", "bert", "vit", "swinir"])
def test_at_most_3_percent_of_the_allocators_peak_is_unattributed(model: str, policy: str, tmp_path: Path) -> None:
    settings = [*MODELS[model], f"activation.policy={policy}"]
    if model == "swinir":  # deep enough that a convolution's scratch does not weigh more than it does in the real one
        settings.append("model.hf={depths: [6, 6, 6], num_heads: [2, 2, 2]}")
    ((allocator, traced),) = run_ranks(
        1, "tests.memory.tracing.test_traced_models:measured", init_group=False, folder=str(tmp_path), settings=settings
    )
    # It may be a little more: pictures lie in memory of numpy's, which torch's allocator knows nothing of.
    assert abs(allocator - traced) <= 0.03 * allocator
