"""What a user gets from planning: figures that add up, verdicts, refusals, and the same answer from a shallow trace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkit.config import RunConfig
from shardkit.config_io import load_config
from shardkit.errors import ConfigError
from shardkit.plan.client import Planner, plan
from shardkit.plan.estimate import MemoryEstimate
from shardkit.plan.target import choose_target

REPO = Path(__file__).resolve().parents[2]
GIB = 2**30


def config(*overrides: str) -> RunConfig:
    return load_config(None, ["model.preset=debug", *overrides]).config


@pytest.fixture(scope="module")
def two_h100() -> Iterator[Planner]:
    with Planner(choose_target(config(), 2, gpu="h100")) as planner:
        yield planner


STRATEGIES = {
    "ddp": [],
    "fsdp": [],
    "zero2": ["parallel.offload_optimizer=cpu"],
    "zero3": ["parallel.offload_optimizer=cpu", "parallel.offload_param=cpu"],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_categories_sum_to_the_peak_and_state_is_what_the_formulas_say(strategy: str, two_h100: Planner) -> None:
    estimate = two_h100.predict(config(f"parallel.strategy={strategy}", "precision.mode=bf16", *STRATEGIES[strategy]))
    assert estimate.method == "cuda"
    assert sum(c.device for c in estimate.categories.values()) == estimate.peak.allocated
    assert sum(c.host for c in estimate.categories.values()) == estimate.host_peak
    assert estimate.peak.allocated <= estimate.peak.required <= estimate.peak.reserved
    assert max(phase.allocated for phase in estimate.phases.values()) == estimate.peak.allocated
    n = estimate.n_params
    optimizer = estimate.categories["optimizer"]
    moments = {"ddp": 8 * n, "fsdp": 4 * n, "zero2": 4 * n, "zero3": 4 * n}[strategy]
    held = optimizer.device if strategy in ("ddp", "fsdp") else optimizer.host
    assert held == pytest.approx(moments, rel=0.03)  # the allocator rounds each tensor up to 512 bytes
    if strategy.startswith("zero"):
        assert optimizer.device == 0
        assert estimate.host_peak > 8 * n / 2


def test_checkpointing_and_sharding_lower_the_prediction(two_h100: Planner) -> None:
    plain = two_h100.predict(config("parallel.strategy=ddp"))
    full = two_h100.predict(config("parallel.strategy=ddp", "activation.policy=full"))
    sharded = two_h100.predict(config("parallel.strategy=fsdp"))
    assert full.categories["activations"].device < 0.5 * plain.categories["activations"].device
    assert sharded.categories["params"].device == pytest.approx(plain.categories["params"].device / 2, rel=0.03)


def test_a_deep_model_is_the_same_from_two_shallow_traces() -> None:
    deep = config("parallel.strategy=fsdp", "model.n_layers=12", "activation.policy=full", "precision.mode=bf16")
    target = choose_target(deep, 4, gpu="h100")
    shallow = plan(deep, target)
    assert shallow.extrapolated_from == (4, 5)
    whole = plan(deep, target, whole=True)
    assert whole.extrapolated_from == ()
    assert shallow.peak.allocated == pytest.approx(whole.peak.allocated, rel=0.001)
    assert shallow.peak.reserved == pytest.approx(whole.peak.reserved, rel=0.05)
    assert (shallow.peak.phase, shallow.peak.module) == (whole.peak.phase, whole.peak.module)
    assert shallow.n_params == whole.n_params
    for name, phase in whole.phases.items():
        assert shallow.phases[name].allocated == pytest.approx(phase.allocated, rel=0.001)


def run(*args: str, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardkit.cli", "plan", *args], capture_output=True, text=True, cwd=cwd
    )


def test_a_misfit_exits_4_and_names_changes_that_fit_with_their_saving() -> None:
    settings = ["model.preset=debug", "parallel.strategy=single", "train.micro_batch_size=64"]
    done = run("-", *settings, "--gpu-memory", "1080MiB", "--gpus", "1", "--json")
    assert done.returncode == 4, done.stderr
    said = json.loads(done.stdout)
    assert said["verdict"] == "does not fit"
    fitting = [change for change in said["changes"] if change["verdict"] == "fits"]
    assert fitting
    assert all(change["saving"] > 0 and change["needs"] < 1080 * 2**20 for change in fitting)
    estimate = MemoryEstimate.from_json({k: v for k, v in said.items() if k != "changes"})
    assert estimate.needed - fitting[0]["saving"] == fitting[0]["needs"]


@pytest.mark.parametrize(
    ("options", "cause", "fix"),
    [
        (["--gpu", "h1000"], "--gpu h1000", "did you mean h100"),
        (["--gpu-memory", "eighty"], "--gpu-memory 'eighty'", "80GB"),
        (["--gpu-memory", "-3GB"], "--gpu-memory '-3GB'", "80GB"),
        (["--gpus", "0"], "--gpus 0", "1 or more"),
        (["--gpus", "12"], "--gpus 12", "8 or 16"),
    ],
)
def test_impossible_numbers_are_refused_in_two_lines(options: list[str], cause: str, fix: str) -> None:
    done = run("-", *options)
    assert done.returncode == 2
    first, second = done.stderr.strip().splitlines()
    assert cause in first and fix in second


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"gpus": -1}, "--gpus -1"),
        ({"gpus": 4, "gpus_per_node": 0}, "--gpus-per-node 0"),
        ({"gpus": 9, "gpus_per_node": 4}, "--gpus 9 is no whole number of machines"),
        ({"gpu_memory": "0GB"}, "--gpu-memory '0GB'"),
        ({"gpu_memory": "nan"}, "--gpu-memory 'nan'"),
        ({"gpu_memory": "80 parsecs"}, "--gpu-memory '80 parsecs'"),
        ({"host_memory": ""}, "--host-memory ''"),
        ({"memory_cap": "much"}, "--memory-cap 'much'"),
    ],
)
def test_the_option_that_is_wrong_is_named(options: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(cause)):
        choose_target(config(), **options)


def test_a_cap_stands_for_a_smaller_card_and_for_what_tensors_may_take_on_cpus() -> None:
    card = choose_target(config(), 2, gpu="h100", memory_cap="24GiB")
    assert card.gpu is not None and (card.gpu.name, card.device_memory) == ("h100", 24 * GIB)
    assert choose_target(config(), 2, memory_cap="24GiB").device_memory == 24 * GIB
    cpu = choose_target(config("run.device=cpu"), 2, memory_cap="1GiB")
    assert cpu.gpu is None and cpu.device_memory == GIB


def test_a_world_that_the_mesh_does_not_fill_is_refused() -> None:
    mesh = config("parallel.strategy=hsdp", "parallel.dp_shard=3", "parallel.dp_replicate=2")
    with pytest.raises(ConfigError, match="= 6, but there are 8 ranks"):
        plan(mesh, choose_target(mesh, 8))


USERS_TASK = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.inner, self.branch = nn.Linear(4, 4), branch

    def forward(self, x):
        y = self.inner(x)
        if self.branch == "value" and y.sum() > 0:
            y = -y
        if self.branch == "shape":
            y = y[y > 0]
        if self.branch == "op":
            y = torch.ops.users.twice(y)
        return y

torch.library.define("users::twice", "(Tensor x) -> Tensor")

@torch.library.impl("users::twice", "CPU")
def twice(x):
    return x * 2

class Task:
    def __init__(self, config, branch="", plan_loss=False):
        self.branch = branch
        if plan_loss:
            self.plan_loss = lambda model, batch: model.inner(batch).sum()

    def build_model(self):
        return Model(self.branch)

    def dataset(self, split):
        return [] if self.branch == "no data" else [torch.ones(4)] * 8

    def n_targets(self, batch):
        return len(batch)

    def loss(self, model, batch):
        return model(batch).sum()
"""


@pytest.mark.parametrize(
    ("branch", "cause", "fix"),
    [
        ("value", r"needs the value of a tensor at .*users_task.py:12 \(if self.branch", "plan_loss"),
        ("shape", r"needs the values of a tensor at .*users_task.py:15 ", "plan_loss"),
        ("op", r"users.twice.* at .*users_task.py:17 .*no fake kernel", "register_fake"),
        ("no data", r"task users_task:Task has no training data", "plan_batch"),
    ],
)
def test_what_cannot_be_traced_is_named_with_the_users_line(
    branch: str, cause: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_task.py").write_text(USERS_TASK)
    monkeypatch.chdir(tmp_path)
    mine = load_config(
        None, ["task.factory=users_task:Task", f"task.args={{branch: {branch}}}", "parallel.strategy=single"]
    ).config
    with pytest.raises(ConfigError, match=cause) as found:
        plan(mine, choose_target(mine, 1))
    assert fix in found.value.fix


def test_plan_loss_goes_round_what_cannot_be_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_task.py").write_text(USERS_TASK)
    monkeypatch.chdir(tmp_path)
    settings = [
        "task.factory=users_task:Task",
        "task.args={branch: value, plan_loss: true}",
        "parallel.strategy=single",
    ]
    mine = load_config(None, settings).config
    assert plan(mine, choose_target(mine, 1)).n_params == 20


def test_a_shim_that_crashes_its_process_leaves_cpu_fakes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'shardkit.plan.worker' in sys.orig_argv and sys.orig_argv[-1] == 'cuda': os.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPO}")
    estimate = plan(config("parallel.strategy=single"), choose_target(config(), 1, gpu="h100"))
    assert estimate.method == "cpu"
    assert estimate.uncertainty > 0.1
    assert any("CPU tensors" in note for note in estimate.notes)
    assert estimate.peak.allocated > 0


def test_planning_a_run_on_cpus_needs_no_card() -> None:
    cpu = config("run.device=cpu", "parallel.strategy=single")
    estimate = plan(cpu, choose_target(cpu, 1))
    assert estimate.device == "cpu" and estimate.verdict is None and estimate.overhead == 0
