"""Optimizers beside AdamW and SGD: the same losses under every strategy that takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardkit.config.schema import OptimConfig
from shardkit.errors import ConfigError
from shardkit.parallel.optim import make_optimizer
from shardkit.run.job import start
from shardkit.strategies.states import state_parts
from tests.ranks import run_ranks

CURVES = "tests.strategies.cases:curves"


@pytest.mark.parametrize(
    ("optimizer", "names", "differs_by", "tolerance"),
    [
        ("muon", ["ddp", "fsdp"], 1e-3, 2e-3),  # it orthogonalises in bf16: the ranks' sums round differently before it
        ("adafactor", ["ddp"], 1e-3, 1e-5),
        ("adamw_bnb_8bit", ["ddp"], 1e-6, 1e-5),
    ],
)
def test_losses_are_those_of_one_process(optimizer: str, names: list[str], differs_by: float, tolerance: float) -> None:
    extra = {"optim.name": optimizer, "optim.lr": 3e-3}
    single = run_ranks(1, CURVES, names=["single"], extra=extra, steps=6)[0]["single"]
    adamw = run_ranks(1, CURVES, names=["single"], extra={}, steps=6)[0]["single"]
    assert single[0][0] - single[-1][0] > 0.05, "it learns"
    assert abs(single[-1][0] - adamw[-1][0]) > differs_by, "it is not adamw"
    for name, curve in run_ranks(2, CURVES, names=names, extra=extra, steps=6)[0].items():
        for (loss, _), (want, _) in zip(curve, single, strict=True):
            assert abs(loss - want) <= tolerance, f"{name}: {loss} instead of {want}"


def test_muon_takes_matrices_of_blocks_and_adamw_the_rest() -> None:
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)])
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "blocks": blocks, "head": nn.Linear(4, 8)})
    optimizer = make_optimizer(OptimConfig(name="muon"), model)
    by_muon = {id(p) for g in optimizer.param_groups if g["muon"] for p in g["params"]}
    assert by_muon == {id(block[0].weight) for block in model["blocks"]}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    assert {g["weight_decay"] for g in optimizer.param_groups if not g["muon"]} == {0.0, 0.1}


def test_muon_without_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="no matrix inside repeated blocks"):
        make_optimizer(OptimConfig(name="muon"), nn.Linear(4, 4))


def train_in_backward(in_backward: bool) -> tuple[list[tuple[float, float]], int]:
    """Losses and norms, and the most gradients that existed at once."""
    most = 0

    def look(param: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad is not None for p in model.parameters()))

    settings = {
        "parallel.strategy": "single", "run.device": "cpu", "train.max_norm": None, "optim.in_backward": in_backward,
        "optim.weight_decay": 0.1, "optim.lr": 1e-2,
    }  # fmt: skip
    torch.manual_seed(0)
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    with start(None, settings) as job:
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(look)
        job.wrap(model)
        curve = []
        for _ in range(5):
            result = job.step([(x, y)], lambda m, b: (m(b[0]) - b[1]).square().sum(), lambda b: 16)
            curve.append((result.loss, result.grad_norm))
    return curve, most


def test_updating_in_backward_gives_the_same_losses_with_one_gradient_at_a_time() -> None:
    usual, all_at_once = train_in_backward(False)
    early, at_most = train_in_backward(True)
    for step, want in zip(early, usual, strict=True):
        assert step == pytest.approx(want, rel=1e-6)
    assert (all_at_once, at_most) == (8, 1)


def train_in_8_bits(variant: str) -> tuple[list[float], int]:
    """(the last loss of AdamW and of its 8-bit variant, bytes of the latter's state of one matrix)."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    reference = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    reference.load_state_dict(model.state_dict())
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    losses = []
    for net, name in ((reference, "adamw"), (model, variant)):
        optimizer = make_optimizer(OptimConfig(name=name, lr=1e-2), net)
        for _ in range(20):
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    weight = model[0].weight
    return losses, sum(tensor.nbytes for _, tensor in state_parts(weight, optimizer.state[weight]))


@pytest.mark.parametrize("variant", [pytest.param("adamw8bit", marks=pytest.mark.slow), "adamw_bnb_8bit"])
def test_8_bit_adamw_follows_adamw(variant: str) -> None:
    target = "tests.strategies.test_optimizers:train_in_8_bits"
    (losses, n_bytes), *_ = run_ranks(1, target, init_group=False, variant=variant)  # torchao's compiler has threads
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert n_bytes < 3 * 64 * 64


@pytest.mark.parametrize(
    "optimizer", ["adafactor", "muon", pytest.param("adamw8bit", marks=pytest.mark.slow), "adamw_bnb_8bit"]
)
def test_a_resumed_run_goes_on_to_the_bit(optimizer: str, tmp_path: Path) -> None:
    extra = {"optim.name": optimizer, "optim.lr": 3e-3, "train.deterministic": True}
    target = "tests.strategies.precision_cases:resumed_curve"
    for through, resumed in run_ranks(2, target, root=str(tmp_path), extra=extra):
        assert resumed == through


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sgd_moves_every_weight_on_the_cpu(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(64, 64, bias=False).to(dtype)
    torch.nn.init.constant_(model.weight, 0.02)
    optimizer = make_optimizer(OptimConfig(name="sgd", lr=0.2, weight_decay=0.0), model)
    model.weight.grad = torch.full_like(model.weight, 0.01)
    optimizer.step()
    assert (model.weight < 0.019).all()
