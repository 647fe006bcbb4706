"""A rank's memory by category: state by address, what a forward leaves behind, and what gathers parameters."""

from __future__ import annotations

from typing import Any

from tests.rehearse import injected

PROGRAM = {"filename": "/home/me/train.py", "line": 9, "name": "train"}
MODULE = {"filename": "/env/site-packages/torch/nn/modules/linear.py", "line": 5, "name": "forward"}
FSDP = {
    "filename": "/env/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    "line": 7,
    "name": "",
}
CHECKPOINT = {"filename": "/env/site-packages/torch/utils/checkpoint.py", "line": 3, "name": "unpack_hook"}
DDP = {"filename": "/env/site-packages/torch/nn/parallel/distributed.py", "line": 2, "name": "forward"}
PHASES = [(0, "building", 0), (20, "forward", 1), (40, "backward", 1), (60, "update", 1)]


def event(time_us: int, action: str, address: int, size: int, *frames: dict[str, Any]) -> dict[str, Any]:
    stack = list(frames or (MODULE, PROGRAM))
    return {"time_us": time_us, "action": action, "addr": address, "size": size, "frames": stack}


def a_step() -> list[dict[str, Any]]:
    """Weights at 100, a kept and a passing tensor of the forward, a gradient, an optimizer state."""
    return [
        event(5, "segment_alloc", 0, 2048), event(10, "alloc", 100, 64), event(11, "alloc", 900, 8),
        event(25, "alloc", 200, 16, FSDP, PROGRAM), event(26, "alloc", 300, 32, MODULE, DDP, PROGRAM),
        event(27, "alloc", 400, 4), event(28, "free_requested", 400, 4),
        event(41, "alloc", 500, 64), event(42, "alloc", 600, 128, MODULE, PROGRAM, CHECKPOINT),
        event(43, "free_requested", 300, 32), event(44, "free_requested", 600, 128),
        event(45, "alloc", 700, 2), event(61, "alloc", 800, 96),
    ]  # fmt: skip


def test_each_allocation_has_the_category_of_what_it_is_for() -> None:
    categories = injected("shardkit_history")
    holdings = [
        categories.Holding(50, {100: "params", 132: "grads", 500: "grads"}),  # 132 lies in the block of 100
        categories.Holding(70, {100: "params", 800: "optimizer"}),
    ]
    events = a_step()
    history = categories.History(events, [categories.PhaseStart(*phase) for phase in PHASES], holdings)
    assert {events[index]["addr"]: category for index, category in history.categories.items()} == {
        100: "params", 900: "unattributed", 200: "communication", 300: "activations", 400: "workspace", 500: "grads",
        600: "activations", 700: "workspace", 800: "optimizer",
    }  # fmt: skip
    trace = history.trace()
    assert (trace["peak"]["bytes"], trace["peak"]["phase"]) == (64 + 8 + 16 + 32 + 64 + 128, "backward")
    assert trace["peak"]["categories"]["activations"] == 32 + 128
    assert trace["phases"]["forward"]["bytes"] == 64 + 8 + 16 + 32 + 4
    heights = list(zip(*trace["stack"].values(), strict=True))
    assert [sum(point) for point in heights] == [total for _, total in trace["timeline"]] == history.totals()
    assert trace["largest"][0] == {
        "bytes": 128, "category": "activations", "phase": "backward", "op": "/home/me/train.py:9",
    }  # fmt: skip
    rows = {row["phase"]: row for row in history.steps()}
    assert (rows["building"]["reserved"], rows["building"]["allocated"]) == (2048, 72)
    assert (rows["forward"]["peak_allocated"], rows["forward"]["allocated"]) == (124, 120)


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    categories = injected("shardkit_history")
    events = [event(41, "alloc", 100, 8), event(50, "free_requested", 100, 8), event(61, "alloc", 100, 8)]
    history = categories.History(
        events, [categories.PhaseStart(*phase) for phase in PHASES], [categories.Holding(45, {100: "grads"})]
    )
    assert history.categories == {0: "grads", 2: "workspace"}


def test_a_long_history_keeps_its_peak_in_few_points() -> None:
    categories = injected("shardkit_history")
    events = []
    for index in range(3000):
        events += [event(index, "alloc", index, 7 if index == 1234 else 1), event(index, "free_requested", index, 1)]
    trace = categories.History(events, [categories.PhaseStart(0, "building", 0)], []).trace()
    assert len(trace["timeline"]) <= categories.POINTS and max(total for _, total in trace["timeline"]) == 7


def test_a_forward_that_never_ended_holds_activations() -> None:
    categories = injected("shardkit_history")
    history = categories.History(a_step()[:7], [categories.PhaseStart(*phase) for phase in PHASES[:2]], [])
    assert [history.categories[index] for index in (3, 4, 5)] == ["communication", "activations", "workspace"]


def test_an_empty_history_has_no_curve() -> None:
    categories = injected("shardkit_history")
    assert categories.History([], [categories.PhaseStart(0, "building", 0)], []).trace() == {}


def test_what_is_computed_from_a_collectives_result_is_no_communication() -> None:
    """An operator on a tensor that waits for its collective passes through that tensor's own `__torch_dispatch__`."""
    categories = injected("shardkit_history")
    filename = "/env/site-packages/torch/distributed/_functional_collectives.py"
    waiting = {"filename": filename, "line": 1159, "name": "__torch_dispatch__"}
    scattering = {"filename": filename, "line": 400, "name": "reduce_scatter_tensor"}
    events = [
        event(25, "alloc", 100, 16, waiting, PROGRAM), event(26, "alloc", 200, 32, waiting, MODULE, PROGRAM),
        event(27, "alloc", 300, 64, scattering, PROGRAM), event(28, "alloc", 400, 8, waiting, scattering, PROGRAM),
        event(41, "alloc", 500, 4, waiting, FSDP),
    ]  # fmt: skip
    history = categories.History(events, [categories.PhaseStart(*phase) for phase in PHASES], [])
    communicated = ["communication"] * 3
    assert [history.categories[index] for index in range(5)] == ["activations", "activations", *communicated]
