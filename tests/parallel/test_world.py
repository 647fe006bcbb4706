"""Devices and groups: what cannot work is refused, what is joined is left."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig, RunSection
from shardkit.errors import ConfigError, LaunchError
from shardkit.launch.ranks.env import SINGLE, RankEnv
from shardkit.parallel.world import choose_device, process_groups
from tests import ranks as ranks_of_tests
from tests.launch.jobs import REPO, environment
from tests.ranks import run_ranks


def config(device: str) -> RunConfig:
    return RunConfig(run=RunSection(device=device))


def test_more_ranks_than_gpus_are_refused_but_a_task_that_srun_gave_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    env = RankEnv(3, 8, 3, 4, 0, 2, "slurm")
    with pytest.raises(LaunchError, match="4 ranks on this machine, but torch sees 1 GPU"):
        choose_device(config("auto"), env)
    assert choose_device(config("cpu"), env).type == "cpu"
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "h100:1")
    assert choose_device(config("auto"), env) == torch.device("cuda", 0)


def test_auto_takes_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(config("auto"), SINGLE).type == "cpu"
    with pytest.raises(ConfigError, match="sees no GPU"):
        choose_device(config("cuda"), SINGLE)


def test_groups_are_left_on_success() -> None:
    with process_groups(config("cpu"), SINGLE) as world:
        assert world.sum([1.5, 2.0]) == [1.5, 2.0]
        assert world.gather("x") == ["x"]
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_groups_are_left_on_errors(kind: type[BaseException]) -> None:
    with pytest.raises(kind), process_groups(config("cpu"), SINGLE):
        raise kind
    assert not dist.is_initialized()


def test_a_group_of_the_callers_own_is_used_and_kept() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with process_groups(config("cpu"), SINGLE) as world:
            assert world.sum([2.0]) == [2.0]
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


LONG_S = 300
"""For processes that import torch and DeepSpeed first, which takes minutes on a machine that is slow and busy."""


@contextmanager
def started(argv: list[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        argv, cwd=REPO, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends its ranks
        process.communicate()


@pytest.mark.slow
def test_a_process_may_start_again_and_again(tmp_path: Path) -> None:
    meet = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    strategies = ["zero3", "fsdp", "zero2", "zero3"]
    ranks = ["-m", "tests.parallel.starts", "4", str(tmp_path / "run"), *strategies]
    with started([sys.executable, "-m", "torch.distributed.run", *meet, *ranks]) as job:
        out, err = job.communicate(timeout=LONG_S)
    assert (job.returncode, out.count("[0.0, 2.0, 4.0, 6.0]\n")) == (0, 2), err
    losses = [line for line in out.splitlines() if not line.startswith("[")]
    assert len(losses) == 8 and len(set(losses)) == 1, losses


@pytest.mark.slow
def test_an_address_that_an_earlier_run_left_is_passed_over(tmp_path: Path) -> None:
    """Under MPI without MASTER_ADDR; somebody else listens there by now, when rank 1 looks."""
    argv = [sys.executable, "-m", "tests.parallel.starts", "2", str(tmp_path / "run")]
    sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    rank_0_env, rank_1_env = (
        {**sizes, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank} for rank in ("0", "1")
    )
    with socket.create_server(("127.0.0.1", 0)) as server, started(argv, **rank_1_env) as job:
        (tmp_path / "run/.rendezvous").mkdir(parents=True)
        (tmp_path / "run/.rendezvous/0.0.0").write_text(f"127.0.0.1 {server.getsockname()[1]} word")
        server.settimeout(LONG_S)
        server.accept()[0].close()
        with started(argv, **rank_0_env) as rank_0:
            for process in (job, rank_0):
                out, err = process.communicate(timeout=LONG_S)
                assert (process.returncode, out) == (0, "[0.0, 2.0]\n"), err


def waits_of(run_dir: str, **parallel: Any) -> dict[str, float]:
    """Seconds that each group of a started job waits, by when: once joined, once wrapped."""
    import shardkit
    from shardkit.parallel.compat import groups

    waits: dict[str, float] = {}

    def note(when: str) -> None:
        for index, group in enumerate(groups()):
            backend: Any = group._get_backend(torch.device("cpu"))
            waits[f"{when} {index} of {group.size()}"] = backend.options._timeout.total_seconds()

    values = {f"parallel.{key}": value for key, value in parallel.items()}
    timeouts = {"run.device": "cpu", "run.dir": run_dir, "run.init_timeout_s": 77, "train.micro_batch_size": 1}
    with shardkit.start(overrides={**timeouts, **values}) as job:
        note("joined")
        job.wrap(torch.nn.Linear(4, 4))
        note("wrapped")
        job.world.set_timeout(55)
        note("set")
    return waits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel"), [(4, {"strategy": "hsdp", "dp_replicate": 2, "dp_shard": 2}), (2, {"strategy": "zero3"})]
)
def test_every_group_waits_as_long_as_the_config_says(ranks: int, parallel: dict[str, Any], tmp_path: Path) -> None:
    """Gloo's own default is 30 min, NCCL's 10; the caller's group is the caller's."""
    for waits in run_ranks(ranks, "tests.parallel.test_world:waits_of", run_dir=str(tmp_path), **parallel):
        job_waits = {name: wait for name, wait in waits.items() if " 0 of " not in name}
        assert len([name for name in job_waits if name.startswith("joined")]) == 2
        assert len(job_waits) > (9 if parallel["strategy"] == "hsdp" else 6), "the engine makes some as well"
        assert {wait for name, wait in job_waits.items() if not name.startswith("set")} == {77.0}, waits
        assert {wait for name, wait in job_waits.items() if name.startswith("set")} == {55.0}, waits
        assert {wait for name, wait in waits.items() if " 0 of " in name} == {180.0 * ranks_of_tests.patience}, waits


def begun_sums(run_dir: str) -> list[float]:
    """A sum of two ranks, the second of which begins it only when the first has sent it a message after it began."""
    import shardkit

    with shardkit.start(load_config(None, {"run.device": "cpu", "run.dir": run_dir})) as job:
        message = torch.zeros(1)
        if job.world.rank == 1:
            dist.broadcast(message, src=0)
        end = job.world.begin_sum([1.0 + job.world.rank, 0.5])
        if job.world.rank == 0:
            dist.broadcast(message + 1, src=0)
        return end()


def test_a_sum_may_begin_before_the_other_ranks_are_there(tmp_path: Path) -> None:
    assert run_ranks(2, "tests.parallel.test_world:begun_sums", run_dir=str(tmp_path)) == [[3.0, 1.0]] * 2
