"""What ranks hold under ZeRO and FSDP1 is recorded as fragments: no rank calls a collective for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit.prove.inject import shardkit_pieces as pieces
from tests.ranks import run_ranks
from tests.strategies.graphs.proof import recorder


class Collectives(TorchDispatchMode):
    """The collectives that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [str(func)] if str(func).startswith("c10d") else []
        return func(*args, **(kwargs or {}))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 11), torch.nn.Linear(11, 3)
    layers[2].requires_grad_(False)
    return torch.nn.Sequential(*layers)


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


def record(folder: str, way: str) -> list[str]:
    """Record a step of this rank; the names of the collectives that the recorder has called."""
    net: Any = model()
    rank = torch.distributed.get_rank()
    if way == "fsdp1":
        net = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its extension would be compiled for minutes
        stage, _, offload = way.partition(" ")
        zero: dict[str, Any] = {"stage": int(stage[-1]), "stage3_param_persistence_threshold": 0}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        trained = [p for p in net.parameters() if p.requires_grad]
        net, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(trained, lr=0.1), config={
            "train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        })  # fmt: skip
        optimizer = net
    watched, collectives = recorder(Path(folder), 1), Collectives()
    watched.roots = [net]
    with collectives:
        watched._start()
    loss = net(inputs(rank)).square().mean()
    net.backward(loss) if optimizer is net else loss.backward()
    with collectives:
        watched.before_step(None)
    optimizer.step()
    with collectives:
        watched.end_step()
    return collectives.names


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("way", ["fsdp1", "zero1", "zero2", "zero3", "zero2 offload", "zero3 offload"])
def test_fragments_make_full_tensors_without_a_collective(tmp_path: Path, way: str) -> None:
    assert run_ranks(3, "tests.prove.test_fragments:record", folder=str(tmp_path), way=way) == [[], [], []]
    net = model()
    loss = torch.stack([net(inputs(rank)).square().mean() for rank in range(3)]).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    for event, field in (("start", "weights"), ("step1", "raw"), ("step1", "after")):
        recorded = pieces.by_name(pieces.read(str(tmp_path), event), field)
        expected: dict[str, Any] = {
            name: p for name, p in net.named_parameters() if event == "start" or p.requires_grad
        }
        if field == "raw":
            expected = {name: p.grad for name, p in expected.items()}
        if field == "after":
            expected = {name: p - 0.1 * p.grad for name, p in expected.items()}
        assert list(recorded) == list(expected)
        for name, tensor in expected.items():
            full, differing = pieces.assemble(str(tmp_path), recorded[name], tuple(tensor.shape))
            assert full is not None and differing == [], name
            torch.testing.assert_close(full, tensor.detach())
            assert all(piece["start"] is not None for piece in recorded[name].values()) or not tensor.requires_grad
    pieces._MAPS.clear()
