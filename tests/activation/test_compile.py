"""Policies and offload under torch.compile: the order is checkpointing → offload → compile."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardkit.activation import checkpoint_activations, offload_activations
from shardkit.config.schema import ActivationConfig, CompileConfig
from shardkit.errors import ConfigError
from shardkit.parallel.blocks import compile_blocks
from tests.activation.test_activation import CPU, MODEL, POLICIES, batch, gradients, reference

pytestmark = pytest.mark.release


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    # Inductor's own generator draws by the shape of each graph, which a policy changes; eager's does not.
    # More threads would outlive the test.
    with inductor.patch(fallback_random=True, compile_threads=1):
        yield
    torch._functorch.config.activation_memory_budget = 1.0
    torch.compiler.reset()


def packed_bytes(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> int:
    """Bytes of the storages that autograd saves, parameters aside: the tracker does not see into compiled code."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), tokens, targets)}
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(tokens, targets).backward()
    return sum(sizes.values())


def compiled(dropout: float = 0.1, scope: str = "block", **settings: Any) -> Any:
    model = reference(MODEL.model_copy(update={"dropout": dropout}))
    config, blocks = ActivationConfig(**settings), list(model.blocks)
    checkpoint_activations(model, blocks, config, compiled=True)
    offload_activations(model, blocks, config, CPU)
    compile_blocks(model, blocks, CompileConfig(enabled=True, scope=scope), CPU)
    return model


def assert_close(got: Any, want: Any) -> None:
    assert got[0].item() == pytest.approx(want[0].item(), rel=1e-5)
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("policy", "scope", "offload"),
    [*product(POLICIES, ["block"], ["none", "cpu"]), *product(["full", "every_k", "selective"], ["model"], ["cpu"])],
)
def test_compiled_gradients_are_those_of_eager(policy: str, scope: str, offload: str) -> None:
    # Compiled dropout draws other numbers than eager: without it.
    want = gradients(reference(MODEL.model_copy(update={"dropout": 0.0})))
    assert_close(gradients(compiled(0.0, scope, **POLICIES[policy], offload=offload, offload_min_bytes=0)), want)


def test_compiled_dropout_is_the_same_the_second_time() -> None:
    want = gradients(compiled(0.1))
    torch.compiler.reset()
    assert_close(gradients(compiled(0.1, policy="full")), want)


def test_a_budget_keeps_less_and_gives_the_gradients_of_the_whole_budget() -> None:
    whole = compiled(0.0, policy="budget", budget=1.0)
    kept = packed_bytes(whole, *batch())
    whole.zero_grad()
    want = gradients(whole)
    tight = compiled(0.0, policy="budget", budget=0.2)
    assert_close(gradients(tight), want)
    assert packed_bytes(tight, *batch()) < 0.7 * kept


def slope(model: Any) -> tuple[float, float]:
    """The gradient's norm, and the loss's own slope in its direction under the same random numbers."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss() -> torch.Tensor:
        torch.manual_seed(5)
        return model(*batch())

    gradient = torch.autograd.grad(loss(), parameters)
    norm = torch.sqrt(sum(g.square().sum() for g in gradient)).item()
    ends, step = [], 2e-3
    for sign in (1, -2):
        with torch.no_grad():
            for parameter, g in zip(parameters, gradient, strict=True):
                parameter.add_(g, alpha=sign * step / norm)
        ends.append(loss().item())
    return norm, (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_dropout_the_gradient_is_that_of_the_loss_that_was_computed(policy: str) -> None:
    with inductor.patch(fallback_random=False):  # as users run it
        norm, real = slope(compiled(0.1, **POLICIES[policy]))
    assert norm == pytest.approx(real, rel=5e-3)


def test_a_budget_is_refused_to_a_model_with_dropout() -> None:
    with pytest.raises(ConfigError, match=r"dropout has p=0\.1: torch\.compile would draw other random numbers"):
        compiled(0.1, policy="budget", budget=0.5)
    compiled(0.1, policy="budget", budget=1.0)


@pytest.mark.parametrize(
    ("settings", "scope"),
    [({"policy": "full"}, "block"), ({"offload": "cpu"}, "block"), ({"policy": "full", "offload": "cpu"}, "model")],
)
def test_only_blocks_are_compiled_and_steps_do_not_compile_again(settings: dict[str, Any], scope: str) -> None:
    from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

    model = compiled(0.0, scope, **settings, offload_min_bytes=0)
    tokens, targets = batch()
    clear_compilation_metrics()
    counters.clear()
    seen = []
    for size in (len(tokens), len(tokens), len(tokens) - 1, len(tokens) - 1, len(tokens)):
        model(tokens[:size], targets[:size]).backward()
        seen.append(len(get_compilation_metrics()))
    assert seen[0] > 0
    assert seen[1] == seen[0], "the second step compiles nothing"
    assert seen[3] == seen[4] == seen[2], "a smaller batch is compiled once, and for all sizes"
    if scope == "block":
        assert {found.co_name for found in get_compilation_metrics()} == {"forward"}
        assert not counters["graph_break"]
