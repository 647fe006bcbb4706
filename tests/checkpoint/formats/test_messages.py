"""While a folder fills a run, ranks send few messages, and hold the folder's values bit for bit."""

from __future__ import annotations

import gc
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardkit.checkpoint import node_reads
from shardkit.checkpoint.formats import start as loading
from shardkit.errors import CheckpointError
from shardkit.run.job import start
from shardkit.tasks.load import build_model, load_task
from tests.checkpoint.formats import hub
from tests.parallel.exchanges import messages
from tests.ranks import run_ranks
from tests.strategies.cases import PARTITION_ALL

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {}, "zero1": {}, "zero2": {}, "fsdp": {}, "hsdp": {"parallel.dp_replicate": 2},
    "zero3": {"parallel.ds_config": PARTITION_ALL}, "ddp with an average": {"train.ema_decay": 0.5},
}  # fmt: skip
KINDS = ("llama", "mixtral")
BUCKET, MESSAGE = 2**14, 2**12
"""Small ones: tensors are cut into several buckets, and ranks take turns."""
FEW = 8
"""Messages of a rank for a small folder: one bucket, to each other rank, the sum of what was read, an engine's own."""


def loaded(root: str, strategies: list[str], small: bool, local_size: int | None = None) -> dict[str, int]:
    """ "<strategy> <kind>" → this rank's messages of a load; raises if a rank holds another bit than the folder.

    Args:
        small: fill small buckets.
        local_size: ranks of a node; `None` = all.
    """
    from transformers import AutoModelForCausalLM

    out: dict[str, int] = {}
    if local_size is not None:
        os.environ |= {"LOCAL_WORLD_SIZE": str(local_size), "LOCAL_RANK": str(int(os.environ["RANK"]) % local_size)}
    for kind in KINDS:
        folder = f"{root}/{kind}"
        there = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for name in strategies:
            extra = {"parallel.strategy": name.partition(" ")[0], **STRATEGIES[name]}
            with start(None, hub.settings(folder, root, **extra)) as job:
                task = load_task(job.config)
                model: Any = job.wrap(
                    partial(build_model, job.config, task), block_classes=task.block_classes,
                    init_parameter=task.init_parameter, drawn=False,
                )  # fmt: skip
                bucket, message = (BUCKET, MESSAGE) if small else (loading.BUCKET_BYTES, node_reads.MESSAGE_BYTES)
                sized = (
                    patch.object(loading, "BUCKET_BYTES", bucket),
                    patch.object(node_reads, "MESSAGE_BYTES", message),
                )
                with sized[0], sized[1], messages() as called, loading.opening(folder, model) as open_source:
                    loading.load_weights(job.strategy, job.world, job.world.control_group, open_source)
                out[f"{name} {kind}"] = len(called)
                for shard in job.strategy.load_targets():
                    if shard.name.startswith(("model.", "ema.")):
                        whole = there[shard.name.partition(".")[2]].flatten()
                        assert same(shard.local, whole[shard.start : shard.start + shard.local.numel()]), shard.name
                if extra["parallel.strategy"] in ("ddp", "zero1", "zero2"):
                    for fqn, param in model.module.named_parameters():
                        assert same(param.detach(), there[fqn]), (name, fqn)
                        del param
                shard = model = None
            gc.collect()
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, int]]:
    """The folders' root; kind → bytes of its tensors."""
    root = tmp_path_factory.mktemp("messages")
    models = {kind: hub.make_folder(root / kind, kind) for kind in KINDS}
    return str(root), {kind: sum(param.nbytes for param in model.parameters()) for kind, model in models.items()}


LATER = pytest.mark.release


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("world", "local_size"), [(2, None), pytest.param(4, None, marks=LATER), pytest.param(4, 2, marks=LATER)]
)
def test_a_load_sends_few_messages(folders: tuple[str, dict[str, int]], world: int, local_size: int | None) -> None:
    """Not one for each rank and parameter; and no other bit than the folder's."""
    strategies = [name for name in STRATEGIES if name != "hsdp" or world == 4]
    for called in run_ranks(
        world, "tests.checkpoint.formats.test_messages:loaded", root=folders[0], strategies=strategies, small=False,
        local_size=local_size,
    ):  # fmt: skip
        assert max(called.values()) <= FEW, called


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.release
def test_buckets_that_cut_tensors_keep_every_bit(folders: tuple[str, dict[str, int]]) -> None:
    """Each rank sends a third of the messages, to two others; and one bucket in four ends with a shorter one."""
    root, n_bytes = folders
    for called in run_ranks(
        3, "tests.checkpoint.formats.test_messages:loaded", root=root, strategies=["ddp", "zero2", "fsdp"], small=True
    ):
        for kind in KINDS:
            assert called[f"ddp {kind}"] <= 2 * (5 / 4 * n_bytes[kind] / MESSAGE / 3 + 1) + FEW, called


def refused(root: str, folders: list[str]) -> str:
    """What a load says where each rank is a node of its own, whose folder under the path is its own."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with start(None, hub.settings(folders[0], root)) as job:
        task = load_task(job.config)
        job.wrap(partial(build_model, job.config, task), block_classes=task.block_classes, drawn=False)
        try:
            with loading.opening(folders[rank], job.model) as open_source:
                loading.load_weights(job.strategy, job.world, job.world.control_group, open_source)
        except CheckpointError as error:
            return error.cause
    return ""


@pytest.mark.slow
@pytest.mark.dist
def test_nodes_with_other_weights_under_one_path_are_refused(tmp_path: Path) -> None:
    """Each node would read its own, and the ranks would train a mixture."""
    from safetensors.torch import load_file, save_file

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    hub.make_folder(ours, "llama")
    shutil.copytree(ours, theirs)
    weights = next(theirs.glob("*.safetensors"))
    tensors = load_file(weights)
    next(iter(tensors.values())).add_(1)
    save_file(tensors, weights, {"format": "pt"})
    call = "tests.checkpoint.formats.test_messages:refused"
    assert run_ranks(2, call, root=str(tmp_path), folders=[str(ours), str(ours)]) == ["", ""]
    for rank, said in enumerate(run_ranks(2, call, root=str(tmp_path), folders=[str(ours), str(theirs)])):
        assert said == f"{(ours, theirs)[rank]} of node 1 holds another model than that of node 0"
