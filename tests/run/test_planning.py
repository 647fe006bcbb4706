"""A run that plans itself: shown at its start, beside what was measured at its end, and never in its way."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from shardkit.config.load import load_config
from shardkit.errors import ShardkitError
from shardkit.launch.ranks.env import RankEnv
from shardkit.plan.client import Planner
from shardkit.plan.model.estimate import MemoryEstimate, PeakEstimate, digest
from shardkit.report.page import run_page
from shardkit.report.read import read_run
from shardkit.run import planning
from shardkit.strategies.base import Facts
from tests.commands import python_m
from tests.run.test_train import settings, text

__all__ = ["text"]


def planners() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended since it was listed
            found += [process] * ("shardkit.plan.worker" in " ".join(process.cmdline()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(0, "ddp"), pytest.param(2, "fsdp", marks=pytest.mark.slow)])
def test_a_run_shows_its_plan_beside_what_was_measured(
    ranks: int, strategy: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    more = {"parallel.strategy": strategy, "memory.plan": "true", "memory.trace_step": 3, "model.d_model": 33}
    argv = settings(tmp_path, text, **more, **{"model.n_heads": 1})
    done = python_m("tests.run.patient", *argv, ranks=ranks, timeout=280, code=0)
    assert "plan: " in done.stdout and " predicted" in done.stdout
    assert "not planned" not in done.stdout + done.stderr
    names = [f"rank {rank}@" for rank in range(max(1, ranks))]
    header = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["predicted"])
    assert all(name in header for name in names)
    for what in ("params", "optimizer"):
        exact = next(line for line in done.stdout.splitlines() if line.startswith(f"{what} on the device"))
        assert exact.count("(+0.0%)") == len(names), exact
    folder = tmp_path / "run"
    estimate, *others = json.loads((folder / "plan.json").read_text())["ranks"]
    assert [other["rank"] for other in others] == list(range(1, ranks)), "33 rows are 17 and 16: each rank has its plan"
    assert (estimate["rank"], estimate["world_size"], estimate["device"]) == (0, len(names), "cpu")
    page = run_page(read_run(folder), folder / "report.html")
    section = page[page.index('<section id="plan"') :].partition("</section>")[0]
    for what in ("peak allocated", "params on the device", "optimizer on the device", "activations on the device"):
        assert section.count(f">{what}<") == len(names), what


def a_job(run_dir: Path, held: tuple[int, ...], *overrides: str, device: str = "cpu") -> Any:
    """As much of a job as planning looks at: `held` bytes of state on each rank."""
    size = len(held)
    env = RankEnv(0, size, 0, size, 0, 1, "group", None, None, 0)
    world = SimpleNamespace(
        env=env, rank=0, size=size, is_main=True, device=torch.device(device), gather=lambda value: list(held)
    )
    config = load_config(None, [f"run.dir={run_dir}", "model.preset=debug", *overrides]).config
    facts = Facts(shards_state=config.parallel.strategy in ("zero1", "zero2"))
    strategy = SimpleNamespace(state_tensors=lambda: iter(()), facts=facts)
    return SimpleNamespace(config=config, world=world, strategy=strategy)


def test_ranks_of_unequal_shards_are_planned_and_every_size_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def predict(self: Planner, config: Any) -> MemoryEstimate:
        peak = PeakEstimate(2**29, 2**29, 2**29, "forward", "")
        return MemoryEstimate(
            "cpu", 4, self.target.rank or 0, 1, 1, "cpu", {}, peak, 1, 0, {}, device_memory=self.target.cap
        )

    monkeypatch.setattr(Planner, "predict", predict)
    job = a_job(tmp_path, (40, 40, 40, 24), "memory.plan=true", "memory.cap=1GiB")
    with planning.RunPlan() as plan:
        plan.begin(job, tmp_path)
        plan.wait(job.config)
    ranks = json.loads((tmp_path / "plan.json").read_text())["ranks"]
    assert [entry["rank"] for entry in ranks] == [0, 3]
    assert capsys.readouterr().out == "plan: 0.50 GiB of 1.00 GiB predicted (fits)\n", "said once"
    job = a_job(tmp_path / "zero", (40, 40, 40, 40), "parallel.strategy=zero2", "memory.plan=true")
    (tmp_path / "zero").mkdir()
    with planning.RunPlan() as plan:
        plan.begin(job, tmp_path / "zero")
        plan.wait(job.config)
    ranks = json.loads((tmp_path / "zero" / "plan.json").read_text())["ranks"]
    assert [entry["rank"] for entry in ranks] == [3, 0], "the last rank keeps its gradients longest"


def test_the_end_of_a_run_ends_its_planning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = a_job(tmp_path, (1,), "memory.plan=true")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with planning.RunPlan() as plan:
        plan.begin(job, tmp_path)
        while not (found := planners()):  # pytest's time limit ends it
            assert plan._thread is not None and plan._thread.is_alive()
        (process,) = found
        while process.nice() != 19:  # set from outside, once it has started
            assert plan._thread is not None and plan._thread.is_alive()
        assert os.getpriority(os.PRIO_PROCESS, 0) == own
    assert planners() == [] and not process.is_running()
    assert not (tmp_path / "plan.json").exists() and caplog.records == []
    assert [thread.name for thread in threading.enumerate() if "_plan" in thread.name] == []


def fails(self: Planner, config: Any, **how: Any) -> Any:
    raise ShardkitError("aten::odd has no fake kernel", "register one")


def takes_too_long(self: Planner, config: Any, **how: Any) -> Any:
    """Until it is stopped: the end of the run comes first, and the limit of the plan while the run waits for it."""
    assert STOPPED.wait(60), "nobody stopped it"
    raise ShardkitError("the planning process was ended by SIGKILL", "")


STOPPED = threading.Event()


@pytest.mark.parametrize(
    ("predict", "limit_s", "cause"),
    [
        (None, 0.01, "not ready after 0.01 s"),
        (fails, 60.0, "aten::odd has no fake"),
        (takes_too_long, 0.5, "not ready"),
    ],
    ids=["too late", "fails", "a short run waits in vain"],
)
def test_a_plan_that_fails_or_takes_too_long_is_one_warning(
    predict: Any, limit_s: float, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    STOPPED.clear()
    job = a_job(tmp_path, (1,), "memory.plan=true")
    monkeypatch.setattr(planning, "LIMIT_S", limit_s)
    if predict is not None:
        monkeypatch.setattr(Planner, "predict", predict)
        monkeypatch.setattr(Planner, "stop", lambda self: STOPPED.set())
    with planning.RunPlan() as plan:
        plan.begin(job, tmp_path)
        plan.close(job.config, tmp_path)
    (warning,) = caplog.records
    assert warning.message.startswith(f"this run is not planned: {cause}")


def test_the_plan_of_another_config_is_not_this_runs(tmp_path: Path) -> None:
    job = a_job(tmp_path, (1,), "memory.plan=true")
    kept = {"config": digest(job.config), "ranks": [{"world_size": 1}]}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(kept))
    with planning.RunPlan() as plan:
        plan.begin(job, tmp_path)
        assert plan._thread is None, "submit planned it"
        off = [f"memory.plan={value}" for value in ("auto", "false")]
        plan.begin(a_job(tmp_path, (1,), off[0], "run.overwrite=true", "logging.every=3"), tmp_path)
        assert path.exists(), "what is logged changes nothing"
        plan.begin(a_job(tmp_path, (1, 1), off[1]), tmp_path)
        assert not path.exists(), "another world"
        path.write_text(json.dumps(kept))
        plan.begin(a_job(tmp_path, (1,), off[1], "train.micro_batch_size=3"), tmp_path)
        assert not path.exists(), "another batch"
