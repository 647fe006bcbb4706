"""What this machine has measured replaces what is typical of a card."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.hardware import calibration
from shardkit.launch.ranks.env import model_names
from shardkit.plan import history, target
from shardkit.plan.target import choose_target
from shardkit.report.planned import close, entry
from shardkit.report.read import read_run
from tests.report.samples import add, plan, write_run

MIB = 2**20
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/shardkit"


def known(gpus: int) -> tuple[int, int, str]:
    gpu = choose_target(load_config(None, []).config, gpus, gpu="h100").gpu
    return gpu.context, gpu.per_communicator, gpu.overhead_from


def ran(outside: int | None, world_size: int, device: str = H100, **more: Any) -> dict[str, Any]:
    measured = {"peak": None, "reserved": None, "outside": outside}
    return {"schema": 1, "device": device, "world_size": world_size, "measured": measured, "predicted": {}, **more}


def calibrated(context: int | None, communicator: int | None, world_size: int = 8, device: str = H100) -> None:
    found = {"context_bytes": context, "communicator_bytes": communicator}
    calibration.save({"device": device, "world_size": world_size, **found})


def test_a_calibration_of_the_card_replaces_the_table(cache: Path) -> None:
    typical = known(8)
    assert typical[2] == "typical"
    calibrated(1, 2, device="NVIDIA A100-SXM4-80GB")
    assert known(8) == typical, "another card"
    calibrated(600 * MIB, 300 * MIB)
    assert known(16) == (600 * MIB, 300 * MIB, "measured here by shardkit doctor")
    calibrated(610 * MIB, None, world_size=1)
    assert known(1)[0] == 610 * MIB, "a world of one knows no communicators, but a context"
    calibrated(None, None)
    assert known(8) == typical, "a calibration before cards were measured"


def test_runs_on_the_card_say_what_they_held_outside(cache: Path) -> None:
    for outside in (900, 1000, 5000):
        history.note(ran(outside * MIB, 8))
    history.note(ran(450 * MIB, 1))
    history.note(ran(None, 8))
    context, communicators, source = known(4)
    assert (context + communicators, source) == (1000 * MIB, "measured here in 3 runs")
    assert known(1) == (450 * MIB, 0, "measured here in 1 run")
    calibrated(300 * MIB, 100 * MIB)
    assert known(2)[:2] == (300 * MIB, 700 * MIB), "what jobs held is more than what a benchmark holds"


def test_the_card_of_this_machine_is_known_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:07:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA L4\nIRQ:   \t 103\n")
    assert model_names({}, tmp_path) == ["NVIDIA L4"]
    monkeypatch.setattr("shardkit.launch.ranks.env.model_names", lambda: ["NVIDIA L4"])
    monkeypatch.setattr("shardkit.launch.ranks.env.visible_gpus", lambda: 1)
    here = target.target_here(load_config(None, []).config, 1, None, None)
    assert here.gpu is not None and here.gpu.name == "l4"
    monkeypatch.setattr("shardkit.launch.ranks.env.model_names", lambda: ["NVIDIA Whatever"])
    with pytest.raises(ConfigError, match=r"card \(NVIDIA Whatever\) is not one that planning knows"):
        target.target_here(load_config(None, []).config, 1, None, None)
    capped = target.target_here(load_config(None, []).config, 1, None, "10GiB")
    assert capped.device_memory == 10 * 2**30


def note_many(who: int) -> None:
    for number in range(20):
        history.note(ran(who * 100 + number, 8))


def test_jobs_that_end_together_are_all_noted_and_old_runs_are_dropped(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_WAIT_S", 100.0)  # on a busy machine the one that holds the lock may wait long
    jobs = [multiprocessing.get_context("fork").Process(target=note_many, args=(who,)) for who in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    held = [run["measured"]["outside"] for run in history.runs(H100)]
    assert sorted(held) == [who * 100 + number for who in range(4) for number in range(20)]
    whole = "".join(json.dumps(ran(n, 8)) + "\n" for n in range(history.MOST_ROWS + 7))
    no_run = json.dumps({"schema": 1, "device": H100})
    history.path().write_bytes(f"{whole}{no_run}\n".encode() + b"{torn\xff")
    history.note(ran(-1, 8))
    assert known(8)[2] == f"measured here in {history.MOST_ROWS - 2} runs"
    kept = history.path().read_text().splitlines()
    assert len(kept) == history.MOST_ROWS and json.loads(kept[-1])["measured"]["outside"] == -1
    assert len(history.runs(H100)) == history.MOST_ROWS - 2, "a damaged line and one of no run are passed over"
    assert sorted(p.name for p in cache.iterdir()) == ["past.jsonl", "past.lock"], "no drafts are left"


def test_a_run_on_gpus_is_kept_with_the_most_of_any_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    folder = write_run(tmp_path / "run", gpu=True)
    add(folder, {"plan.json": {**plan(), "config": "abc"}})
    run = read_run(folder)
    for gather in run.gathers:
        for row in gather.rows:
            object.__setattr__(row.device_mem, "in_use", row.device_mem.reserved + (900 + row.identity.rank) * MIB)
    found = entry(run, plan())
    assert found["measured"]["outside"] == 901.5 * MIB
    assert found["measured"]["peak"] == max(row.device_mem.peak_allocated for row in run.last_rows if row.device_mem)
    assert (found["predicted"]["peak"], found["predicted"]["required"]) == (3 * 2**30, 2**32)
    assert (found["world_size"], found["settings"]["parallel.strategy"]) == (4, "fsdp")
    close(folder)
    said = capsys.readouterr().out
    assert "rank 3@node1" in said and "params on the device" in said
    (kept,) = [json.loads(line) for line in history.path().read_text().splitlines()]
    assert kept["config"] == "abc" and kept["measured"]["outside"] is None, "the driver was not asked"


def test_a_ledger_that_cannot_be_written_is_a_warning(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path / "run", gpu=True)
    add(folder, {"plan.json": plan()})
    cache.parent.mkdir()
    cache.write_text("in the way")
    close(folder)
    (warning,) = caplog.records
    assert "not noted for later plans" in warning.message and "File exists" in warning.message
