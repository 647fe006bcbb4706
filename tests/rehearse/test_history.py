"""What a rehearsed program loads: the allocator's history by category and by line, and a hidden sitecustomize."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardkit.hardware.cards import GPUS
from shardkit.rehearse.build import INJECT
from shardkit.rehearse.rehearsal import write_report_files
from shardkit.rehearse.verdict import Verdict
from shardkit.report.measure import phase_peaks, status
from shardkit.report.page import run_page
from shardkit.report.read import read_run
from tests.rehearse import injected
from tests.rehearse.test_verdict import GIB, record

HISTORY = injected("shardkit_history")
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


def history(events: list[dict[str, Any]], holdings: Any = (), phases: Any = PHASES) -> Any:
    return HISTORY.History(events, [HISTORY.PhaseStart(*phase) for phase in phases], holdings)


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
    holdings = [
        HISTORY.Holding(50, {100: "params", 132: "grads", 500: "grads"}),  # 132 lies in the block of 100
        HISTORY.Holding(70, {100: "params", 800: "optimizer"}),
    ]
    events = a_step()
    told = history(events, holdings)
    assert {events[index]["addr"]: category for index, category in told.categories.items()} == {
        100: "params", 900: "unattributed", 200: "communication", 300: "activations", 400: "workspace", 500: "grads",
        600: "activations", 700: "workspace", 800: "optimizer",
    }  # fmt: skip
    trace = told.trace()
    assert (trace["peak"]["bytes"], trace["peak"]["phase"]) == (64 + 8 + 16 + 32 + 64 + 128, "backward")
    assert trace["peak"]["categories"]["activations"] == 32 + 128
    assert trace["phases"]["forward"]["bytes"] == 64 + 8 + 16 + 32 + 4
    heights = list(zip(*trace["stack"].values(), strict=True))
    assert [sum(point) for point in heights] == [total for _, total in trace["timeline"]] == told.totals()
    assert trace["largest"][0] == {
        "bytes": 128, "category": "activations", "phase": "backward", "op": "/home/me/train.py:9",
    }  # fmt: skip
    rows = {row["phase"]: row for row in told.steps()}
    assert (rows["building"]["reserved"], rows["building"]["allocated"]) == (2048, 72)
    assert (rows["forward"]["peak_allocated"], rows["forward"]["allocated"]) == (124, 120)


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    events = [event(41, "alloc", 100, 8), event(50, "free_requested", 100, 8), event(61, "alloc", 100, 8)]
    assert history(events, [HISTORY.Holding(45, {100: "grads"})]).categories == {0: "grads", 2: "workspace"}


def test_a_long_history_keeps_its_peak_in_few_points() -> None:
    assert history([], phases=PHASES[:1]).trace() == {}
    events = []
    for index in range(3000):
        events += [event(index, "alloc", index, 7 if index == 1234 else 1), event(index, "free_requested", index, 1)]
    trace = history(events, phases=PHASES[:1]).trace()
    assert len(trace["timeline"]) <= HISTORY.POINTS and max(total for _, total in trace["timeline"]) == 7


def test_a_forward_that_never_ended_holds_activations() -> None:
    categories = history(a_step()[:7], phases=PHASES[:2]).categories
    assert [categories[index] for index in (3, 4, 5)] == ["communication", "activations", "workspace"]


def test_what_is_computed_from_a_collectives_result_is_no_communication() -> None:
    """An operator on a tensor that waits for its collective passes through that tensor's own `__torch_dispatch__`."""
    filename = "/env/site-packages/torch/distributed/_functional_collectives.py"
    waiting = {"filename": filename, "line": 1159, "name": "__torch_dispatch__"}
    scattering = {"filename": filename, "line": 400, "name": "reduce_scatter_tensor"}
    events = [
        event(25, "alloc", 100, 16, waiting, PROGRAM), event(26, "alloc", 200, 32, waiting, MODULE, PROGRAM),
        event(27, "alloc", 300, 64, scattering, PROGRAM), event(28, "alloc", 400, 8, waiting, scattering, PROGRAM),
        event(41, "alloc", 500, 4, waiting, FSDP),
    ]  # fmt: skip
    categories = history(events).categories
    assert [categories[index] for index in range(5)] == ["activations"] * 2 + ["communication"] * 3


def allocation(action: str, address: int, size: int, line: int = 1) -> dict[str, Any]:
    """In this line of this file."""
    return event(0, action, address, size, MODULE, {"filename": __file__, "line": line, "name": "forward"})


def test_what_was_freed_before_the_peak_or_made_after_it_is_left_out() -> None:
    events = [
        allocation("alloc", 1, 10, line=2), allocation("alloc", 2, 50),
        allocation("free_requested", 2, 50), allocation("free_completed", 2, 50),
        allocation("alloc", 2, 60, line=3), allocation("alloc", 3, 60, line=3),
        allocation("free_requested", 3, 60), allocation("alloc", 4, 9),
    ]  # fmt: skip
    assert [made["addr"] for made in HISTORY.at_peak(events)] == [1, 2, 3]
    lines = HISTORY.by_line(HISTORY.at_peak(events))
    assert [(row["n_bytes"], row["tensors"]) for row in lines] == [(120, 2), (10, 1)]
    text = Path(__file__).read_text().splitlines()[2]
    assert lines[0]["source_line"] == f"{__file__}:3: {text}".strip()


def test_a_recording_of_the_programs_own_does_not_take_the_rehearsals_place() -> None:
    calls: list[Any] = []
    snapshot = {"device_traces": [[allocation("alloc", 1, 10)], []]}
    memory = SimpleNamespace(
        _record_memory_history=lambda enabled, **_: calls.append(enabled), _snapshot=lambda: snapshot
    )
    torch = SimpleNamespace(cuda=SimpleNamespace(memory=memory, _lazy_call=lambda begin: begin()))
    HISTORY.record_history(torch)
    memory._record_memory_history(enabled="state", max_entries=10)
    memory._record_memory_history(enabled=None)
    assert calls == ["all"]
    assert HISTORY.histories(torch) == {"0": snapshot["device_traces"][0]} and calls == ["all", None]


def test_allocations_without_a_line_of_python_are_those_of_backward() -> None:
    lines = HISTORY.by_line([{"size": 4, "frames": []}])
    assert lines == [{"source_line": "backward, or another thread without Python", "n_bytes": 4, "tensors": 1}]


def sample(step: int, allocated: int) -> dict[str, Any]:
    return {
        "step": step, "time": 100.0 + step, "rss": GIB, "peak_rss": 2 * GIB, "allocated": allocated,
        "peak_allocated": 2 * allocated, "reserved": 3 * allocated, "peak_reserved": 3 * allocated,
    }  # fmt: skip


def phase(name: str, step: int, peak: int) -> dict[str, Any]:
    return {"phase": name, "step": step, "allocated": 1, "peak_allocated": peak, "reserved": 2, "peak_reserved": peak}


def test_a_report_shows_the_memory_over_time_and_by_category(tmp_path: Path) -> None:
    phases = [phase("building", 0, 3), phase("forward", 1, 5), phase("backward", 1, 9), phase("forward", 1, 7)]
    at_update = {"parameters": 11, "gradients": 12, "optimizer states": 13}
    records = [
        record(0, over_time=[sample(1, GIB), sample(2, 2 * GIB)], phases=phases, at_update=at_update),
        record(1, over_time=[sample(1, GIB)], phases=[], at_update={}),
    ]
    trace = {"step": 1, "device": "cuda:0", "peak": {"bytes": 9, "categories": {"activations": 9}, "phase": "backward"}}
    (tmp_path / "records" / "trace").mkdir(parents=True)
    (tmp_path / "records" / "trace" / "rank0.json").write_text(json.dumps(trace))
    write_report_files(tmp_path, ["python", "train.py"], records, Verdict("fits", "fits it", GPUS["h100"]))
    run = read_run(tmp_path)
    assert [(gather.step, [row.identity.rank for row in gather.rows]) for gather in run.gathers] == [
        (1, [0, 1]),
        (2, [0]),
    ]
    assert phase_peaks(run.gathers, 0) == {"init": 3, "forward": 7, "backward": 9}
    row = run.gathers[0].rows[0]
    assert row.device_mem is not None and row.device_mem.total == GPUS["h100"].memory
    assert row.state is not None and row.state["grads"].device == 12
    assert not run.notes and status(run) == (True, "rehearsed on emulated cards: fits it")
    page = run_page(run, tmp_path / "report.html")
    assert "activations" in page and "shardkit rehearse -- python train.py" in page


def test_the_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.flag_of_mine = __name__\n")
    env = {**os.environ, "PYTHONPATH": f"{INJECT}{os.pathsep}{tmp_path}"}
    env.pop("SHARDKIT_REHEARSAL", None)
    code = "import sys; print(sys.flag_of_mine, 'shardkit_rehearsal' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sitecustomize", "False", "False"]
    assert not done.stderr


def test_an_exception_is_recorded_and_printed_as_before(tmp_path: Path) -> None:
    (tmp_path / "emucuda.py").write_text("def preload(): pass\n")
    program = tmp_path / "train.py"
    program.write_text("def train():\n    raise ValueError('bad batch')\n\n\ntrain()\n")
    (tmp_path / "records").mkdir()
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{INJECT}", "RANK": "1", "WORLD_SIZE": "2"}
    env.update(SHARDKIT_REHEARSAL=str(tmp_path / "records"), SHARDKIT_REHEARSAL_STEPS="3")
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: bad batch" in done.stderr
    from shardkit.rehearse.verdict import first_error, read_records

    error = first_error(read_records(tmp_path / "records"))
    assert error is not None and error["rank"] == 1
    assert error["end"]["type"] == "ValueError"
    assert error["end"]["where"] == f"{program}:2: raise ValueError('bad batch')"


def test_a_rank_ends_after_a_step_more_than_the_first_that_saved(tmp_path: Path) -> None:
    """A save is there for all ranks as soon as one has made it, while another may still be in the step before."""
    saving, late = (injected("shardkit_rehearsal").Recording(str(tmp_path), 3, until="save") for _ in range(2))
    saving.steps = 1
    assert not saving.is_past("save")
    saving.note("save", saving.steps)
    late.steps = 1
    assert not saving.is_past("save") and not late.is_past("save")
    late.note("save", 2)
    saving.steps = late.steps = 2
    assert saving.is_past("save") and late.is_past("save")
