"""Every policy and offload give the gradients of keeping everything, bit for bit, dropout included."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from shardkit.activation import checkpoint_activations, offload_activations
from shardkit.activation.checkpoint import keep_products
from shardkit.config.schema import ActivationConfig, ModelConfig
from shardkit.errors import ConfigError, TrainingError
from shardkit.memory import TensorTracker
from shardkit.models.transformer import Transformer, init_parameter
from shardkit.parallel.blocks import find_blocks

MODEL = ModelConfig(vocab_size=61, max_seq_len=32, d_model=32, n_layers=5, n_heads=4, dropout=0.1)
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "every_k": {"policy": "every_k", "every_k": 2},
    "selective": {"policy": "selective"},
    "selective_op": {"policy": "selective_op"},
}
CPU = torch.device("cpu")


def reference(config: ModelConfig = MODEL) -> Transformer:
    model = Transformer(config)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        init_parameter(config, name, parameter.data, torch.Generator().manual_seed(index))
    return model.train()


def technique(model: nn.Module, **settings: Any) -> nn.Module:
    config = ActivationConfig(**settings)
    blocks = find_blocks(model)
    checkpoint_activations(model, blocks, config)
    offload_activations(model, blocks, config, CPU)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(
    model: nn.Module, loss: Callable[[nn.Module], torch.Tensor] | None = None, autocast: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, and gradient by parameter name, of two accumulated passes under the same random numbers."""
    torch.manual_seed(11)
    total = torch.zeros(())
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = loss(model) if loss is not None else model(*batch())
        value.backward()
        total = total + value.detach()
        torch.rand(1)  # what follows a pass draws on
    return total, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def of_a_line(model: nn.Module) -> torch.Tensor:
    """The loss of models that take five rows of eight."""
    return model(torch.linspace(-1, 1, 40).view(5, 8))


def assert_same(got: Any, want: Any) -> None:
    assert got[0].item() == want[0].item()
    assert list(got[1]) == list(want[1])
    for name, gradient in want[1].items():
        assert torch.equal(got[1][name], gradient), name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("policy", ["none", *POLICIES])
def test_gradients_are_those_of_keeping_everything(policy: str, offload: str, autocast: bool) -> None:
    settings = POLICIES.get(policy, {}) | {"offload": offload, "offload_min_bytes": 0}
    want = gradients(reference(), autocast=autocast)
    assert_same(gradients(technique(reference(), **settings), autocast=autocast), want)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copied_model_is_recomputed_with_its_own_weights(policy: str) -> None:
    model = technique(reference(), **POLICIES[policy], offload="cpu", offload_min_bytes=0)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert_same(gradients(twin), gradients(reference()))


class Counting(nn.Module):
    """Writes to buffers in forward, in place and by assignment, and computes with them; so does its spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = x + self.norm(self.linear(x)) * (1 + self.calls) + self.last
        self.last = out.detach().mean(0)
        return out


class Counters(nn.Module):
    """Calls one of its blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(Counting() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 2, 1, 3):
            x = self.layers[index](x)
        return x.square().sum()


@pytest.mark.parametrize("policy", ["full", "every_k", "selective_op"])
def test_buffers_that_forward_changes_are_changed_once(policy: str) -> None:
    model, plain = technique(Counters(), **POLICIES[policy]), Counters()
    assert_same(gradients(model, of_a_line), gradients(plain, of_a_line))
    assert plain.layers[1].calls == 4
    for (name, buffer), (_, want) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, want), name


def test_a_buffer_that_changes_only_later_is_an_error() -> None:
    class Late(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            if scale.max() > 1:
                self.seen += 1
            return super().forward(x, scale=scale)

    model = Chain()
    model.layers = nn.ModuleList(Late() for _ in range(2))
    technique(model, policy="full")
    model(torch.ones(5, 8)).backward()
    with pytest.raises(TrainingError, match="changes its buffer seen, which it left alone in the first step"):
        model(2 * torch.ones(5, 8))


# What is kept


def saved_bytes(model: nn.Module) -> int:
    """Bytes that a forward leaves alive until backward."""
    tokens, targets = batch()
    with TensorTracker() as tracker:
        tracker.see([model, tokens, targets])
        before = tracker.current("cpu")
        loss = model(tokens, targets)
        saved = tracker.current("cpu") - before
        loss.backward()
    return saved


def test_each_policy_keeps_what_it_says() -> None:
    saved = {name: saved_bytes(technique(reference(), **settings)) for name, settings in POLICIES.items()}
    saved["none"] = saved_bytes(reference())
    saved["every_1"] = saved_bytes(technique(reference(), policy="every_k", every_k=1))
    assert saved["every_1"] == saved["full"]
    assert saved["full"] < saved["every_k"] < saved["none"]
    assert saved["full"] < saved["selective"] < saved["none"]
    assert saved["full"] < saved["selective_op"] < saved["none"]


def test_nothing_outlives_backward() -> None:
    for settings in ({"policy": "none"}, {"policy": "full"}):
        model = technique(reference(), **settings, offload="cpu", offload_min_bytes=0)
        tokens, targets = batch()
        with TensorTracker() as tracker:
            tracker.see([model, tokens, targets])
            model(tokens, targets).backward()
            tracker.see(model)
            after = tracker.current("cpu")
            model(tokens, targets).backward()
            assert tracker.current("cpu") == after, settings


# Models that call their blocks in their own way


class Chain(nn.Module):
    """Blocks that are called one by one, with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        for index, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for layer in self.layers:
            x = layer(x, scale=first.abs())["out"]
        return x.sum()


class Layer(nn.Module):
    """Takes a keyword, returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": x + self.dropout(torch.tanh(self.linear(x) * scale))}


class Recomputing(Chain):
    """Recomputes two of three blocks itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            scale = x.abs()
            out = checkpoint(layer, x, scale=scale, use_reentrant=False) if index % 3 else layer(x, scale=scale)
            x = out["out"]
        return x.sum()


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("policy", ["full", "every_k", "selective_op"])
def test_a_model_that_recomputes_its_blocks_itself(policy: str, offload: str) -> None:
    model = technique(Recomputing(), **POLICIES[policy], offload=offload, offload_min_bytes=0)
    assert_same(gradients(model, of_a_line), gradients(Recomputing(), of_a_line))


# Offload


def test_offload_copies_a_shared_storage_once_and_leaves_parameters() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))
            self.mask = nn.Buffer(torch.ones(16, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = x @ self.weight.t() * self.mask
            a, b = hidden[:, :32], hidden[:, 32:]
            return torch.cat([a * b, (a - b) * hidden.t()[:32].t()], dim=1)

    model = nn.Sequential(Products(), Products())
    offload_activations(model, list(model), ActivationConfig(offload="cpu", offload_min_bytes=64), CPU)
    x = torch.ones(16, 64, requires_grad=True)
    model(x).sum().backward()
    # Each block saves its input (the second's is the first's output), `hidden` under three views, and `a - b`.
    assert model[0].forward.outer.func.__self__.moved_bytes == 2 * (2 * 16 * 64 * 4 + 16 * 32 * 4)


def test_offload_frees_what_it_moved() -> None:
    """What is left of the original storages after forward: nothing that was large enough."""
    model = technique(reference(), offload="cpu", offload_min_bytes=4096)
    seen: list[Any] = []
    import weakref

    def watch(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        seen.append(weakref.ref(args[0].untyped_storage()))

    for block in find_blocks(model):
        block.mlp.register_forward_hook(watch)
    loss = model(*batch())
    assert [ref() for ref in seen] == [None] * 5
    loss.backward()


def test_offload_says_when_the_threshold_leaves_nothing_to_move() -> None:
    model = technique(reference(), offload="cpu", offload_min_bytes=10**9)
    with pytest.warns(UserWarning, match="moves nothing: the largest saved tensor has"):
        model(*batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        model(*batch())


# Which operators selective_op keeps


class InPlace(nn.Module):
    """Writes over products after a view, where torch's own version counters see nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu_(self.up(x)))
        out += self.bias
        return torch.tanh(out) * out


def test_products_that_are_written_to_in_place() -> None:
    def chain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(InPlace(), InPlace())

    loss = lambda model: model(torch.linspace(-1, 1, 80).view(2, 5, 8)).sum()  # noqa: E731
    assert_same(gradients(technique(chain(), policy="selective_op"), loss), gradients(chain(), loss))


@pytest.mark.parametrize("policy", ["full", "selective_op"])
@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_several_backward_passes_through_a_block(policy: str, n_layers: int) -> None:
    """Products of one shape: with two layers, selective_op took the second's output for the first's."""

    def chain() -> nn.Module:
        torch.manual_seed(0)
        layers = [[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n_layers)] for _ in range(2)]
        return nn.Sequential(*(nn.Sequential(*block) for block in layers))

    def loss(model: nn.Module) -> torch.Tensor:
        x = torch.linspace(-1, 1, 40).view(5, 8).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        out.mean().backward(retain_graph=True)
        return slope.square().sum() + out.sum()

    assert_same(gradients(technique(chain(), policy=policy), loss), gradients(chain(), loss))


def test_selective_op_says_that_forward_ran_differently() -> None:
    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.linear, self.conv = 0, nn.Linear(8, 8), nn.Conv1d(5, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.tanh(self.linear(x) if self.calls % 2 else self.conv(x))

    model = technique(nn.Sequential(Alternating(), Alternating()), policy="selective_op")
    with pytest.raises(TrainingError, match="where forward had not"):
        model(torch.ones(5, 8)).sum().backward()


def test_attention_with_dropout_is_not_kept() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.zeros(1, 1, 2, 8)
    assert keep_products(None, flash, q, q, q) == CheckpointPolicy.MUST_SAVE
    assert keep_products(None, flash, q, q, q, 0.0, True) == CheckpointPolicy.MUST_SAVE
    assert keep_products(None, flash, q, q, q, 0.1, True) == CheckpointPolicy.PREFER_RECOMPUTE
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert keep_products(None, efficient, q, q, q, None, True, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert keep_products(None, torch.ops.aten.gelu.default, q) == CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", ["full", "selective", "selective_op"])
def test_equal_blocks_are_compiled_once_however_many_there_are(policy: str) -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model = reference(MODEL.model_copy(update={"dropout": 0.0, "n_layers": 12}))  # torch gives up after 8 compilations
    checkpoint_activations(model, list(model.blocks), ActivationConfig(policy=policy), compiled=True)
    for block in model.blocks:
        block.compile(backend="eager")
    model(*batch()).backward()
    assert counters["frames"] == {"total": 1, "ok": 1}
    torch.compiler.reset()


# Models that cannot


PLAIN = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)]


@pytest.mark.parametrize(
    ("model", "settings", "cause", "fix"),
    [
        (reference(), {"policy": "every_k", "every_k": 6}, "activation.every_k=6", "1..5"),
        (reference(), {"policy": "full", "block_classes": ["Blok"]}, "Blok", "Block ×5"),
        (Chain(), {"policy": "selective"}, "Layer has no module named *attention* or *attn*", ""),
        *((nn.Sequential(*PLAIN), settings, "Sequential", "Linear ×2") for settings in POLICIES.values()),
        (nn.Sequential(*PLAIN), {"offload": "cpu"}, "Sequential", "Linear ×2"),
    ],
)
def test_a_model_that_cannot_is_refused(model: nn.Module, settings: dict[str, Any], cause: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        technique(model, **settings)
    assert cause in caught.value.cause and fix in caught.value.fix
    assert "\n" not in caught.value.cause + caught.value.fix


def test_blocks_and_attention_by_class_name() -> None:
    model = technique(nn.Sequential(*PLAIN), policy="full", block_classes=["Linear"])
    assert ["forward" in vars(module) for module in model.children()] == [True, False, True]
    chain = Chain()
    checkpoint_activations(chain, find_blocks(chain), ActivationConfig(policy="selective"), (nn.Linear,))
    assert all("forward" in vars(layer.linear) for layer in chain.layers)
