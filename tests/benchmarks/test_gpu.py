"""The GPU benchmark without a GPU: it goes on where it stopped, within its budget; a dry run is no measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.common import REPO, RESULTS, environment
from benchmarks.gpu import PARTS, child, command, largest, part_cases, plain, store, tables
from benchmarks.gpu.cases import Case, Cases, Figures, Where
from benchmarks.gpu.child import Worker, run_case
from benchmarks.gpu.command import Options, Part
from benchmarks.gpu.largest import Line, falls
from benchmarks.gpu.target import next_size
from benchmarks.gpu.wheels import needed, read_have
from shardkit.errors import ConfigError, OutOfMemoryError
from tests.benchmarks.test_common import running
from tests.slurm.cluster import until

Ran = list[tuple[str, str]]


def unused(where: Where) -> Figures:
    raise AssertionError("cases run in processes of their own")


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(True, False, "h200", 1 << 34, tmp_path / "out", 100.0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """A part of three cases, the first with a prediction; what was run of it."""
    cases: Cases = {"a": Case(unused, unused), "b": Case(unused, predicted_as="a"), "c": Case(unused)}
    done: Ran = []

    def run(
        part: str, case: str, what: str, where: Where, limit_s: float, worker: Worker | None
    ) -> tuple[Figures, str]:
        done.append((case, what))
        return {"outcome": "ok", "saw": where.predicted.get("outcome")}, "done"

    monkeypatch.setattr(command, "part_cases", lambda part, dry: cases)
    monkeypatch.setattr(command, "run_case", run)
    return done


def instead(monkeypatch: pytest.MonkeyPatch, of_case: str, do: Callable[[Where], tuple[Figures, str]]) -> None:
    """Let a case end as `do` says, the others as before."""
    before: Any = vars(command)["run_case"]

    def run(
        part: str, case: str, what: str, where: Where, limit_s: float, worker: Worker | None
    ) -> tuple[Figures, Any]:
        return do(where) if case == of_case else before(part, case, what, where, limit_s, worker)

    monkeypatch.setattr(command, "run_case", run)


def results(options: Options) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((options.out / "gpu_mfu.json").read_text())
    return found


def test_what_is_known_is_not_run_again_and_new_code_is(
    ran: Ran, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = [("a", "predicted"), ("a", "measured"), ("b", "measured"), ("c", "measured")]
    assert Part("mfu", options).run()
    assert ran == everything
    assert results(options)["cases"]["b"]["measured"]["saw"] == "ok", "b sees the prediction of a"
    assert Part("mfu", options).run()
    assert ran == everything
    monkeypatch.setattr(store, "code_digest", lambda: "other")
    assert Part("mfu", replace(options, keep_plans=True)).run()
    assert ran == [*everything, *everything[1:]], "predictions of other code count if that is asked for"
    assert Part("mfu", options).run()
    assert ran == [*everything, *everything[1:], everything[0]]


def test_other_versions_measure_again_but_predictions_are_good(
    ran: Ran, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Part("mfu", replace(options, predict=True)).run()
    assert ran == [("a", "predicted")]
    elsewhere = {**environment(), "torch": "2.11.0"}
    monkeypatch.setattr(store, "environment", lambda: dict(elsewhere))
    assert Part("mfu", options).run()
    assert ran == [("a", "predicted"), ("a", "measured"), ("b", "measured"), ("c", "measured")]


def test_the_same_card_under_another_patch_of_the_driver_is_the_same(
    ran: Ran, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: dict[str, Any] = environment()
    monkeypatch.setattr(store, "environment", lambda: dict(there))
    for gpu, runs in (
        ("NVIDIA H200, 143771 MiB, 580.159.03", 1),
        ("NVIDIA H200, 143771 MiB, 580.159.04", 1),
        ("NVIDIA H100, 81559 MiB, 580.159.04", 2),
    ):
        there["gpus"] = [gpu]
        assert Part("mfu", options).run()
        assert ran.count(("c", "measured")) == runs


def test_a_model_that_does_not_fit_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turns(model: Any, where: Where) -> Figures:
        raise OutOfMemoryError("rank 0 ran out of memory in forward of step 1", "use more ranks")

    monkeypatch.setattr("benchmarks.gpu.mfu_arms.in_turns", in_turns)
    where = Where(True, "h200", 1 << 34, Path("unused"))
    found = part_cases("mfu", dry=True)["1.3b"].measure(where)
    assert found == {"outcome": "out of memory", "message": "rank 0 ran out of memory in forward of step 1"}


@pytest.mark.parametrize(("message", "outcome"), [("CUDA error: out of memory", "out of memory"), ("odd", None)])
def test_plain_deepspeed_may_run_out_of_pinned_memory(
    message: str, outcome: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver refuses to lock more pages with another error than the GPU's allocator raises."""

    def train(**options: Any) -> Figures:
        raise RuntimeError(message)

    monkeypatch.setattr(plain, "train", train)
    monkeypatch.setattr(sys, "argv", ["plain", "{}"])
    monkeypatch.setattr(os, "_exit", lambda code: None)
    if outcome is None:
        with pytest.raises(RuntimeError, match="odd"):
            plain.main()
    else:
        plain.main()
        assert json.loads(capsys.readouterr().out)["outcome"] == outcome


@pytest.mark.parametrize(("fits_up_to", "start"), [(20, 41), (45, 41), (1, 3)])
def test_the_deepest_model_is_found_where_needs_are_no_straight_line(fits_up_to: int, start: int) -> None:
    """Pinned memory grows in powers of two."""

    def plan(layers: int, share: float) -> Any:
        verdict = "fits" if layers <= fits_up_to else "does not fit"
        return SimpleNamespace(verdict=verdict, needed=layers, host_peak=layers)

    where = Where(False, "h200", 1 << 37, Path("unused"))
    found = largest._settled(largest.ARMS["DeepSpeed, ZeRO-Offload"], where, plan, [(Line(0, 1, 0), start)])
    assert (found["outcome"], found["layers"]) == ("ok", fits_up_to)
    assert (
        largest._settled(largest.ARMS["DeepSpeed, ZeRO-Offload"], where, lambda *_: plan(999, 1), [(Line(0, 1, 0), 3)])[
            "outcome"
        ]
        == "no boundary"
    )


def test_what_was_planned_for_more_host_memory_than_there_is_is_planned_again(
    ran: Ran, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, "a", lambda where: ({"outcome": "ok", "host_limit": where.host_memory}, "done"))
    predicting = replace(options, predict=True)
    assert Part("mfu", predicting).run()
    more, less = replace(options, host_memory=1 << 35), replace(options, host_memory=1 << 33)
    assert Part("mfu", more).store.complete("a", "predicted")
    assert not Part("mfu", less).store.complete("a", "predicted")


def test_no_case_begins_when_the_budget_is_spent(ran: Ran, options: Options) -> None:
    said: list[str] = []
    assert not Part("mfu", replace(options, budget_s=1.0), said.append).run()
    assert ran == []
    assert "time is up" in said[0] and "'a'" in said[0]


def test_what_a_case_kept_before_its_time_was_up_is_where_it_goes_on(
    ran: Ran, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Figures] = []

    def late(where: Where) -> tuple[Figures, str]:
        seen.append(where.earlier)
        where.keep({"trials": [1]})
        return ({"trials": [1]}, "time is up") if len(seen) == 1 else ({"trials": [1, 2], "outcome": "ok"}, "done")

    instead(monkeypatch, "b", late)
    assert not Part("mfu", options).run()
    assert results(options)["cases"]["b"]["measured"]["complete"] is False
    assert Part("mfu", options).run()
    assert seen == [{}, {"trials": [1]}]
    assert results(options)["cases"]["b"]["measured"]["trials"] == [1, 2]


def test_a_case_that_gets_nowhere_in_the_whole_time_has_failed(
    ran: Ran, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, "a", lambda where: ({}, "time is up"))
    assert not Part("mfu", options).run()
    assert results(options)["cases"]["a"]["predicted"]["message"].startswith("not finished within")
    assert not Part("mfu", options).run(), "its measurement gets a whole time of its own"
    assert Part("mfu", options).run()


def test_an_interruption_keeps_what_was_measured(ran: Ran, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(where: Where) -> tuple[Figures, str]:
        where.keep({"trials": [1]})
        raise KeyboardInterrupt

    instead(monkeypatch, "c", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Part("mfu", options).run()
    cases = results(options)["cases"]
    assert cases["b"]["measured"]["complete"] and cases["c"]["measured"]["trials"] == [1]


def test_where_host_memory_ran_out_a_case_goes_on_after_what_it_tried(
    ran: Ran, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Figures] = []

    def greedy(where: Where) -> tuple[Figures, str]:
        seen.append(where.earlier)
        return ({"trying": 7}, "host memory") if len(seen) < 3 else ({"outcome": "ok"}, "done")

    instead(monkeypatch, "b", greedy)
    assert Part("mfu", options).run()
    assert seen == [{}, {"trying": 7, "ended": "host memory"}], "the same a second time is how it went"
    assert results(options)["cases"]["b"]["measured"]["outcome"] == "out of host memory"


def test_a_dry_run_is_never_among_the_measurements(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    for refused in (["--dry-run", "--out", str(RESULTS)], ["--dry-run", "--out", os.path.relpath(RESULTS)]):
        with pytest.raises(SystemExit):
            command.parse(refused)
        assert "is for measurements" in capsys.readouterr().err
    assert command.parse(["--dry-run"])[1].out != RESULTS
    Part("mfu", options).store.put("a", "measured", {"outcome": "ok"}, complete=True)
    assert results(options)["dry_run"] is True
    with pytest.raises(ConfigError, match="holds a dry run"):
        Part("mfu", replace(options, dry=False))
    with pytest.raises(ValueError, match="holds a dry run"):
        tables.on_a_gpu(options.out)


def test_what_an_emulated_card_shows_is_never_among_the_measurements(
    options: Options, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.parse(["--emulated"])
    assert "this interpreter has no emulated card" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(SystemExit):
        command.parse(["--emulated", "--out", str(RESULTS)])
    assert "is for measurements" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.parse(["--dry-run", "--part", "ranks"])
    assert "--part ranks: " in capsys.readouterr().err
    assert command.parse(["--emulated", "--dry-run"])[1].out not in (RESULTS, RESULTS / "emulated", command.DRY)
    parts, parsed = command.parse(["--emulated", "--host-memory", "100GiB"])
    assert set(parts) == {*PARTS, "ranks", "choices"} - {"rehearsed", "qlora"}
    assert parsed.emulated and parsed.out == RESULTS / "emulated" and parsed.card == "h200"

    there = Part("accuracy", replace(options, dry=False, emulated=True))
    there.store.put("gpt2", "measured", {"outcome": "ok"}, complete=True)
    held = json.loads(there.store.path.read_text())["cases"]["gpt2"]["measured"]
    assert held["environment"]["gpus"] == ["emulated NVIDIA H200, 143155 MiB, no driver"]
    with pytest.raises(ConfigError, match="holds an emulated card's results"):
        Part("accuracy", replace(options, dry=False))
    with pytest.raises(ValueError, match="holds an emulated card's results"):
        tables.on_a_gpu(options.out)
    there.store.path.rename(options.out.parent / "gpu_accuracy.json")
    (options.out / "emulated").mkdir()
    there.store.path = options.out / "emulated/gpu_accuracy.json"
    there.store.put("gpt2, single, fp32, full", "measured", {"outcome": "failed", "message": "why"}, complete=True)
    assert tables.on_a_gpu(options.out).partition("### Predicted against an emulated card")[2].count("failed: why") == 1


def test_an_emulated_card_has_no_speed(options: Options) -> None:
    there = Part("ladder", replace(options, dry=False, emulated=True))
    step = {"outcome": "ok", "peak": 2 << 30, "reserved": 3 << 30, "tokens_per_s": 1234.0, "losses": [5.0, 4.5]}
    there.store.put("24 GiB: fp32: step", "measured", step, complete=True)
    grown = {"outcome": "ok", "amount": 7, "trials": {"0": {**step, "amount": 7}}}
    there.store.put("24 GiB: fp32: batch", "measured", grown, complete=True)
    assert "1234" not in there.store.path.read_text()
    results = options.out.parent
    options.out.rename(results / "emulated")
    page = tables.on_a_gpu(results).partition("### The other parts on emulated cards")[2]
    assert "| fp32 | – | 2.00 | 3.00 | – → 7 |" in page
    assert "tokens/s" not in page

    written = results / "emulated" / "gpu_ladder.json"
    held = json.loads(written.read_text())
    held["cases"]["24 GiB: fp32: batch"]["measured"]["trials"]["0"]["tokens_per_s"] = 1234.0
    written.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=r"has no speed, but .*/trials/0/tokens_per_s"):
        tables.on_a_gpu(results)


def test_a_case_in_too_little_memory_says_what_ended_it(tmp_path: Path) -> None:
    said = (
        "error: rank 1 ran out of memory in backward of step 2 (blocks.3): it asked for 64.0 MiB of "
        "memory.cap=6521651KiB, 43.9 MiB were free and 5.0 MiB held in pieces"
    )
    store = Part("accuracy", Options(False, False, "h200", 1 << 34, tmp_path, 100.0)).store
    for name, message in (("355m, single, fp32, none", said), ("355m, single, bf16, full", "Killed")):
        store.put(f"{name}: too little", "measured", {"outcome": "out of memory", "message": message}, complete=True)
    page = tables.on_a_gpu(tmp_path)
    assert "no: backward of step 2 (blocks.3), 64.0 MiB with 43.9 MiB free |" in page
    assert "| no |" in page


def test_a_measurement_without_its_plan_has_no_error(tmp_path: Path) -> None:
    store = Part("accuracy", Options(False, False, "h200", 1 << 34, tmp_path, 100.0)).store
    found = {"outcome": "ok", "peak": 2 << 30, "reserved": 3 << 30}
    store.put("355m, single, fp32, none", "measured", found, complete=True)
    assert "| 355m, single, fp32, none | – / – / – | 2.00 | – | 3.00 | – |" in tables.on_a_gpu(tmp_path)


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "environment", lambda: {"gpus": []})
    with pytest.raises(SystemExit):
        command.parse([])
    assert "pass --dry-run, or --predict" in capsys.readouterr().err
    assert command.parse(["--predict", "--host-memory", "120GiB"])[1].host_memory == 120 << 30


def test_a_case_that_takes_too_long_or_crashes_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "HOST_RESERVE", 0)  # what else runs here may leave less
    late, crashing = (Where(True, "h200", 1 << 34, tmp_path / name) for name in ("late", "crashing"))
    for where in (late, crashing):
        where.folder.mkdir()
    assert run_case("mfu", "1.3b", "measured", late, 0.5) == ({}, "time is up")
    found, ended = run_case("mfu", "no such case", "measured", crashing, 60)
    assert ended == "done"
    assert found == {"outcome": "failed", "message": "KeyError: 'no such case'"}
    until(lambda: str(tmp_path) not in running(), 60, running)


def test_the_next_size_is_between_what_works_and_what_does_not() -> None:
    def after(start: int, **outcomes: str) -> int | None:
        return next_size({key[1:]: {"outcome": outcome} for key, outcome in outcomes.items()}, start, 2)

    none = "out of memory"
    assert after(10) == 10
    assert after(10, s10="ok") == 12
    assert after(10, s10="ok", s12=none) is None
    assert after(10, s10=none) == 8
    assert after(10, s10=none, s8=none) == 6
    assert after(10, s10=none, s8="ok") is None


def test_a_loss_has_to_fall_and_to_be_finite() -> None:
    assert falls([5.0, 5.1, 4.0])
    assert not falls([5.0, 5.1]) and not falls([]) and not falls([5.0, float("nan"), 4.0])


def test_every_case_has_its_row_and_no_figure_that_was_not_measured(tmp_path: Path) -> None:
    page = tables.on_a_gpu(tmp_path)
    for line in page.splitlines():
        if line.startswith("| ") and tables.MISSING in line:
            assert not [cell for cell in line.split("|")[2:][-3:] if any(map(str.isdigit, cell))], line
    assert page.count(tables.MISSING) >= len(part_cases("accuracy", dry=False))
    found = {"outcome": "ok", "peak": 2 << 30, "reserved": 3 << 30, "tokens_per_s": 1234.0, "losses": [5.0, 4.5]}
    measured = Part("ladder", Options(False, False, "h200", 1 << 34, tmp_path, 100.0))
    measured.store.put("24 GiB: fp32: step", "measured", {"outcome": "out of memory"}, complete=True)
    measured.store.put("24 GiB: + bf16: step", "measured", found, complete=True)
    measured.store.put("24 GiB: + bf16: step", "predicted", {"required": 2 << 30, "overhead": 0}, complete=True)
    measured.store.put("24 GiB: + ZeRO-2: step", "measured", found, complete=False)
    page = tables.on_a_gpu(tmp_path)
    assert "| fp32 | – | out of memory |" in page
    assert "| + bf16 | 2.00 | 2.00 | 3.00 | 1,234 | 4.500 |" in page
    assert f"| + ZeRO-2 | – | {tables.MISSING} |" in page, "an interrupted case is not a result"


def test_wheels_are_what_the_other_machine_lacks(tmp_path: Path) -> None:
    everything = needed("shardkit", "3.12", {})
    assert {"deepspeed", "pydantic", "pydantic-core", "typer", "hjson"} <= set(everything)
    assert "torch" not in everything and "pytest" not in everything
    listed = tmp_path / "have.txt"
    listed.write_text("typer==0.29.2\nPydantic==2.0.1\nhjson\nrich==1.0\n")
    some = needed("shardkit", "3.12", read_have(listed))
    assert "typer" not in some and "hjson" not in some
    assert "pydantic" in some and "rich" in some, "too old there"


@pytest.mark.release
@pytest.mark.parametrize("part", PARTS)
def test_a_dry_run_goes_through_every_kind_of_case(part: str, tmp_path: Path) -> None:
    if part == "rehearsed" and not torch.cuda.is_available():
        pytest.skip("its programs know nothing of dry runs, and need a GPU")
    began = time.monotonic()
    options = ["--dry-run", "--part", part, "--out", str(tmp_path), "--budget-s", "280"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", *options], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"{part}: complete" in done.stdout, done.stdout
    assert time.monotonic() - began < 300
    held = json.loads((tmp_path / f"gpu_{part}.json").read_text())
    assert held["dry_run"] is True
    assert set(held["cases"]) == set(part_cases(part, dry=True))
    for name, case in held["cases"].items():
        short = name == "24 GiB: fp32: step" or name.endswith(": too little")
        expected = "out of memory" if short else "ok"
        assert case["measured"]["outcome"] == expected, (name, case["measured"])
