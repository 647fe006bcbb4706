"""One step, without ranks: the scale of the loss, fillers, the last micro-batch, times, and updates left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardkit.config.schema import ParallelConfig, RunConfig
from shardkit.errors import ConfigError
from shardkit.run.checks import refuse_unused
from shardkit.strategies import step
from shardkit.strategies.base import Facts, StepRequest, Strategy, Update

CPU = torch.device("cpu")
CLIPPED = RunConfig.model_validate({"train": {"max_norm": 1.0}})


class Alone:
    """One process's engine and ledger, which notes in `seen` the flags and phases of a step, if they follow others."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.facts = Facts()
        self.seen: list[Any] = []

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        self.seen.append(is_last)
        yield

    @contextmanager
    def phase(self, name: str, follows: bool = False) -> Iterator[None]:
        self.seen.append(f"then {name}" if follows else name)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def accumulated(batches: list[step.MicroBatch], n_targets: float, world: int) -> tuple[Alone, float]:
    alone = Alone()
    total, _ = step.accumulate(alone, alone, batches, lambda model, batch: model(batch).sum(), n_targets, world, CPU)
    return alone, total.item()


def test_a_loss_whose_memory_is_used_again_counts_as_it_was() -> None:
    """As a captured CUDA graph does with its outputs."""
    alone, kept = Alone(), list[torch.Tensor]()

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        for earlier in kept:
            earlier.data.fill_(99.0)
        kept.append(model(batch).sum())
        return kept[-1]

    batches: list[step.MicroBatch] = [(torch.full((1, 1), value), False) for value in (1.0, 2.0, 4.0)]
    total, _ = step.accumulate(alone, alone, batches, loss, 3.0, 1, CPU)
    assert total.item() == pytest.approx(7 * alone.model.weight.item())


@pytest.mark.parametrize(("world", "n_targets"), [(1, 4.0), (4, 10.0), (2, 0.0)])
def test_gradients_are_those_of_the_global_sum_over_its_targets(world: int, n_targets: float) -> None:
    batches = [(torch.full((2, 1), 3.0), False), (torch.full((1, 1), 5.0), False), (torch.full((7, 1), 1e6), True)]
    alone, total = accumulated(batches, n_targets, world)
    # The filler weighs nothing; engines average over ranks, so the sum is multiplied by their number.
    assert alone.model.weight.grad.item() == pytest.approx((2 * 3 + 5) * world / max(n_targets, 1))
    assert total == pytest.approx((2 * 3 + 5) * alone.model.weight.item())
    later = ["then forward", "then backward"]
    assert alone.seen == [False, "forward", "then backward", False, *later, True, *later]


@pytest.mark.parametrize("loss", [torch.ones(2), torch.ones(1), 1.0])
def test_a_loss_that_is_not_one_number_is_refused(loss: Any) -> None:
    with pytest.raises(ConfigError, match="not one number") as error:
        step.one_number(loss)
    assert "loss.sum()" in error.value.fix
    assert step.one_number(torch.ones((), dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_makes_no_update(bad: float) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for value, moves in ((1.0, True), (bad, False), (1.0, True)):
        before = model.weight.detach().clone()
        for param in model.parameters():
            param.grad = torch.full_like(param, value)
        norm = step.clip_and_step([*model.parameters()], optimizer, scaler, StepRequest(CLIPPED)).grad_norm
        assert torch.equal(model.weight, before) is not moves
        if moves:  # 4 gradients of 1: a norm of 2, clipped to 1
            assert norm.item() == pytest.approx(2.0)
            assert torch.allclose(model.weight, before - 0.25, atol=1e-5)
        assert all(param.grad is None for param in model.parameters())


class Scaled(Strategy):
    def loss_scale(self) -> float:
        return 4.0


def test_the_gradient_of_a_scaled_loss_is_not_scaled() -> None:
    weight = nn.Parameter(torch.ones(1))
    assert Scaled().gradient(weight) is None
    weight.grad = torch.full((1,), 8.0)
    gradient = Scaled().gradient(weight)
    assert gradient is not None and gradient.item() == 2.0 and weight.grad.item() == 8.0


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    limit: InitVar[int]
    size: int = field(init=False)

    def __post_init__(self, limit: int) -> None:
        object.__setattr__(self, "size", min(len(self.x), limit))


@dataclass
class Slotted:
    __slots__ = ("inner", "word")
    inner: Any
    word: str


class Listed(Mapping[str, Any]):
    """A mapping that only its own constructor can make."""

    def __init__(self, *pairs: tuple[str, Any]) -> None:
        self.pairs = dict(pairs)

    def __getitem__(self, key: str) -> Any:
        return self.pairs[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)


class Graph:
    """No container, but it knows how to move."""

    def __init__(self, edges: torch.Tensor) -> None:
        self.edges = edges

    def to(self, device: torch.device) -> Graph:
        return Graph(self.edges.to(device))


Form = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
FORMS: dict[str, Form] = {
    "dict of lists": (lambda x: {"a": [x, "text"]}, lambda batch: batch["a"][0]),
    "tuple": (lambda x: (x, 1), lambda batch: batch[0]),
    "named tuple": (lambda x: Pair(x, {"d": x}), lambda batch: batch.second["d"]),
    "defaultdict": (lambda x: defaultdict(list, b=[x]), lambda batch: [*batch["new"], *batch["b"]][0]),
    "proxy of a mapping": (lambda x: MappingProxyType({"d": x}), lambda batch: batch["d"]),
    "frozen dataclass": (lambda x: Frozen(x, 1), lambda batch: batch.x),
    "dataclass with slots": (lambda x: Slotted({"x": x}, "word"), lambda batch: batch.inner["x"]),
    "moves itself": (Graph, lambda batch: batch.edges),
    "packed sequence": (lambda x: nn.utils.rnn.pack_sequence([x]), lambda batch: batch.data),
}
"""How a batch holds a tensor, and where the tensor is found."""


@pytest.mark.parametrize(("make", "find"), FORMS.values(), ids=FORMS)
def test_a_batch_keeps_its_form_on_the_way_to_the_device(
    make: Callable[[torch.Tensor], Any], find: Callable[[Any], torch.Tensor]
) -> None:
    batch = make(torch.ones(2))
    moved = step.to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch) and find(moved).is_meta
    assert not find(batch).is_meta, "the given batch stays on its device"


def test_batches_of_transformers_and_what_holds_no_tensor() -> None:
    import transformers

    ones, meta = torch.ones(2), torch.device("meta")
    encoding = transformers.BatchEncoding({"input_ids": ones, "nested": [{"mask": ones}]})
    moved = step.to_device(encoding, meta)
    assert type(moved) is transformers.BatchEncoding and moved.input_ids.is_meta and moved["nested"][0]["mask"].is_meta
    output = step.to_device(transformers.modeling_outputs.BaseModelOutput(last_hidden_state=ones), meta)
    assert output.last_hidden_state.is_meta and output["last_hidden_state"].is_meta
    assert step.to_device(Frozen(ones, 1), meta).size == 1
    assert step.to_device(Listed(("a", 1)), meta)["a"] == 1
    assert step.to_device({"kind": Frozen, "text": "a"}, meta) == {"kind": Frozen, "text": "a"}
    with pytest.raises(ConfigError, match="a batch holds a Listed, which cannot be copied"):
        step.to_device(Listed(("a", ones)), meta)


class Event:
    """A GPU's event; `record` notes the milliseconds on this clock, `synchronize` that somebody waited."""

    clock_ms = 0.0
    waited: list[float] = []

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        assert device.type == "cuda" and enable_timing

    def record(self) -> None:
        self.at = Event.clock_ms

    def synchronize(self) -> None:
        Event.waited.append(self.at)

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_a_gpus_times_are_in_seconds_and_waited_for_at_the_last_stop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "waited", [])
    watch = step.Stopwatch(torch.device("cuda"))
    for begin, end in ((0.0, 1500.0), (2000.0, 4500.0), (9000.0, 9250.0)):
        monkeypatch.setattr(Event, "clock_ms", begin)
        watch.start()
        monkeypatch.setattr(Event, "clock_ms", end)
        watch.stop()
    assert watch.seconds() == pytest.approx(4.25)
    assert Event.waited == [9250.0]
    with FakeTensorMode():  # a plan's loss is copied as any other
        step.HostValue(torch.ones((), device="cuda")).arrived.wait()
    assert Event.waited == [9250.0] * 2


class Clock:
    """A CPU's clock, which runs only while a phase does."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class Timed(Alone):
    """An engine whose phases take their time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def backward(self, loss: torch.Tensor) -> None:
        self.clock.spend(20.0)

    def sample_state(self, source: object) -> None:
        self.clock.spend(1.0)

    def step(self, request: StepRequest) -> Update:
        self.clock.spend(300.0)
        return Update(torch.tensor(1.0), updated=True)


class Waiting(Timed):
    """An engine that waits for the device after its last backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.facts = Facts(waits_in_backward=True)

    def finish_backward(self) -> None:
        self.clock.spend(5.0)


@pytest.mark.parametrize(("engine", "n"), [(Timed, 1), (Timed, 3), (Waiting, 2)])
def test_phases_of_a_step_follow_one_another(engine: type[Timed], n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    timed: Any = engine(clock)
    monkeypatch.setattr(step, "time", clock)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        clock.spend(4.0)
        return model(batch).sum()

    batches: list[step.MicroBatch] = [(torch.ones(1, 1), False)] * n
    host = 7.0 if n > 1 else 0.0  # its own work between the last backward and the update
    if not host:
        out = step.train_step(timed, timed, batches, loss, 1.0, 1, CPU, StepRequest(CLIPPED))
    else:
        loss_sum, turns = step.accumulate(timed, timed, batches, loss, 1.0, 1, CPU)
        clock.spend(host)
        out = step.update(timed, timed, loss_sum, turns, CPU, StepRequest(CLIPPED))
    waited = 5.0 if engine is Waiting else 0.0
    assert out.times(host) == {"forward_s": 4.0 * n, "backward_s": 20.0 * n + waited, "update_s": 301.0}
    assert sum(out.times(host).values()) == clock.now - host


def test_other_hooks_of_the_optimizer_run_beside_the_check_of_unused_parameters() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    called: list[int] = []
    refuse_unused(model, optimizer, ParallelConfig(strategy="ddp"), set(), set())
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert called == [1, 1, 1]
