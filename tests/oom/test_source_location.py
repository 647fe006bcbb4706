"""Where an exception came from, read from its traceback alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.oom.shortage import innermost, module_of, plain_name, raised_at


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails_at, self.passes = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.fails_at:
            raise torch.OutOfMemoryError("no")
        return x.square()  # keeps its input: computed again


def tree(fails_at: int = 1) -> nn.Module:
    leaf = Leaf()
    leaf.fails_at = fails_at
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), leaf))


def caught(run: Callable[[], object]) -> BaseException:
    try:
        run()
    except torch.OutOfMemoryError as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_innermost_module_of_forward() -> None:
    model = tree()
    error = caught(lambda: model(torch.ones(1, 2)))
    assert module_of(error, model) == "1.1"
    at = raised_at(error)
    assert at is not None and at.startswith(f"{__file__}:") and at.endswith(" in forward")


def test_the_module_that_backward_computes_again() -> None:
    model = tree(fails_at=2)
    x = torch.ones(1, 2, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=False).sum()
    assert module_of(caught(loss.backward), model) == "1.1"


def test_nothing_is_claimed_where_no_module_runs() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("no")

    loss = Fails.apply(torch.ones(1, requires_grad=True)).sum()  # type: ignore[no-untyped-call]
    error = caught(loss.backward)
    assert module_of(error, tree()) is None
    at = raised_at(error)
    assert at is not None and at.endswith(" in backward")
    assert module_of(error, None) is None


def test_a_module_of_another_model_has_no_name() -> None:
    other = tree()
    error = caught(lambda: other(torch.ones(1, 2)))
    assert module_of(error, nn.Linear(2, 2)) is None


def test_an_engine_that_runs_backward_is_not_taken_for_the_module() -> None:
    class Engine(nn.Module):
        def backward(self) -> None:
            raise torch.OutOfMemoryError("no")

    engine = Engine()
    assert module_of(caught(engine.backward), engine) is None


def test_names_are_without_wrappers() -> None:
    assert plain_name("module.blocks.0._checkpoint_wrapped_module.mlp") == "blocks.0.mlp"
    assert plain_name("_orig_mod.head") == "head"
    assert plain_name("encoder.module.0") == "encoder.module.0"
    assert plain_name("") == ""


def test_the_innermost_line_outside_torch() -> None:
    import sys

    assert innermost(sys._getframe()).endswith("in test_the_innermost_line_outside_torch")
    assert innermost(None) == ""
