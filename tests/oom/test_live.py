"""The largest tensors, by storage, with what is known of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardkit.memory.probe import module_state
from shardkit.oom.postmortem import Live, biggest, snapshot_blocks
from shardkit.oom.shortage import Made

CPU = torch.device("cpu")
BIG = 3_000_000


def biggest_of_these(sizes: set[int], **known: Any) -> list[Live]:
    """The largest tensors of these sizes: those that other tests have left behind may be larger."""
    return [live for live in biggest(sys.maxsize, CPU, **known) if live.n_bytes in sizes]


@dataclass
class Shard:
    name: str
    local: torch.Tensor


def test_a_storage_counts_once_with_its_largest_view_and_its_name() -> None:
    model = nn.Linear(BIG, 4, bias=False)
    model.weight.grad = torch.zeros(4, BIG)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    shards = [Shard("model.weight", model.weight.detach().view(-1))]
    activation = torch.zeros(2, BIG, dtype=torch.bfloat16)
    view = activation[:1]
    found = biggest_of_these({16 * BIG, 4 * BIG}, state=module_state(model, optimizer), shards=shards)
    assert [live.n_bytes for live in found] == [16 * BIG, 16 * BIG, 4 * BIG]
    assert {live.category for live in found[:2]} == {"params", "grads"}
    weight = next(live for live in found if live.category == "params")
    assert weight.name == "model.weight" and weight.shape in ((4, BIG), (4 * BIG,)) and weight.dtype == "torch.float32"
    assert found[2].to_json() == {
        "bytes": 4 * BIG, "shape": (2, BIG), "dtype": "torch.bfloat16", "category": None, "name": None, "made": None
    }  # fmt: skip
    del view


def test_what_only_an_allocator_or_a_cap_knows_is_listed_too() -> None:
    made = [Made(64 * BIG, 111, (8, 8), "torch.float32", "aten.mm at a.py:1 in f")]
    blocks = {222: (32 * BIG, "b.py:2 in g"), 111: (64 * BIG, None)}
    found = biggest_of_these({64 * BIG, 32 * BIG}, made=made, blocks=blocks)
    assert [(live.n_bytes, live.shape, live.made) for live in found] == [
        (64 * BIG, (8, 8), "aten.mm at a.py:1 in f"), (32 * BIG, None, "b.py:2 in g")
    ]  # fmt: skip


def test_fake_and_meta_tensors_hold_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(BIG, 100)
    meta = torch.zeros(BIG, 100, device="meta")
    found = biggest(5, CPU)
    assert len(found) <= 5 and all(live.n_bytes < 400 * BIG for live in found)
    del fake, meta


def test_blocks_in_use_of_one_device() -> None:
    frames = [
        {"filename": "/x/torch/nn/functional.py", "line": 5, "name": "linear"},
        {"filename": "/home/me/model.py", "line": 7, "name": "forward"},
    ]
    snapshot = {
        "segments": [
            {"device": 0, "blocks": [
                {"address": 10, "size": 512, "state": "active_allocated", "frames": frames},
                {"address": 11, "size": 99, "state": "inactive", "frames": []},
                {"address": 12, "size": 1024, "state": "active_pending_free", "frames": []},
            ]},
            {"device": 1, "blocks": [{"address": 20, "size": 7, "state": "active_allocated", "frames": []}]},
        ]
    }  # fmt: skip
    assert snapshot_blocks(snapshot, 0) == {10: (512, "/home/me/model.py:7 in forward"), 12: (1024, None)}
    assert set(snapshot_blocks(snapshot, None)) == {10, 12, 20}
    assert snapshot_blocks(None, 0) == {}
