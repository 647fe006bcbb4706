"""The tensors at the peak are those that the allocator's history held when most was allocated, by line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.rehearse import injected


def event(action: str, address: int, size: int, line: int = 1) -> dict[str, Any]:
    torch = {"filename": "/env/site-packages/torch/nn/functional.py", "line": 5, "name": "linear"}
    program = {"filename": __file__, "line": line, "name": "forward"}
    return {"action": action, "addr": address, "size": size, "frames": [torch, program]}


def test_what_was_freed_before_the_peak_or_made_after_it_is_left_out() -> None:
    history = [
        event("alloc", 1, 10, line=2), event("alloc", 2, 50),
        event("free_requested", 2, 50), event("free_completed", 2, 50),
        event("alloc", 2, 60, line=3), event("alloc", 3, 60, line=3),
        event("free_requested", 3, 60), event("alloc", 4, 9),
    ]  # fmt: skip
    tensors = injected("shardkit_history")
    assert [allocation["addr"] for allocation in tensors.at_peak(history)] == [1, 2, 3]
    lines = tensors.by_line(tensors.at_peak(history))
    assert [(row["n_bytes"], row["tensors"]) for row in lines] == [(120, 2), (10, 1)]
    text = Path(__file__).read_text().splitlines()[2]
    assert lines[0]["source_line"] == f"{__file__}:3: {text}".strip()


def test_a_recording_of_the_programs_own_does_not_take_the_rehearsals_place() -> None:
    calls: list[Any] = []
    snapshot = {"device_traces": [[event("alloc", 1, 10)], []]}
    memory = SimpleNamespace(
        _record_memory_history=lambda enabled, **_: calls.append(enabled), _snapshot=lambda: snapshot
    )
    torch = SimpleNamespace(cuda=SimpleNamespace(memory=memory, _lazy_call=lambda begin: begin()))
    tensors = injected("shardkit_history")
    tensors.record_history(torch)
    memory._record_memory_history(enabled="state", max_entries=10)
    memory._record_memory_history(enabled=None)
    assert calls == ["all"]
    assert tensors.histories(torch) == {"0": snapshot["device_traces"][0]} and calls == ["all", None]


def test_allocations_without_a_line_of_python_are_those_of_backward() -> None:
    lines = injected("shardkit_history").by_line([{"size": 4, "frames": []}])
    assert lines == [{"source_line": "backward, or another thread without Python", "n_bytes": 4, "tensors": 1}]
