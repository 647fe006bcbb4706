"""The command of torchrun, and jobs that lose and gain nodes: two launchers on this machine stand for two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.config.load import load_config
from shardkit.errors import LaunchError, ShardkitError
from shardkit.launch.failures import job_starts
from shardkit.launch.local import launcher, restart
from shardkit.launch.local.launcher import build_argv, command_line
from shardkit.launch.local.rendezvous import ReservedPort
from shardkit.launch.spec import JobSpec, Rendezvous, parse_nnodes, split_endpoint
from tests.launch.jobs import REPO, command, environment, losses, run, settings, with_marker

TWO = JobSpec(config="c.yaml", run_dir="runs/a", nproc_per_node=2, nodes=(1, 3), max_restarts=1)


def refusal(spec: JobSpec, *overrides: str) -> str:
    with pytest.raises(ShardkitError) as caught:
        launcher.check_elastic(spec, load_config(None, ["train.micro_batch_size=2", *overrides]).config)
    assert caught.value.fix
    return str(caught.value)


def test_what_would_go_wrong_when_a_node_leaves_or_joins_is_refused_before_the_start() -> None:
    launcher.check_elastic(TWO, load_config(None, ["train.micro_batch_size=2", "train.global_batch_size=24"]).config)
    launcher.check_elastic(replace(TWO, nodes=(2, 2)), load_config(None).config)
    assert "pass --max-restarts" in refusal(replace(TWO, max_restarts=0), "train.global_batch_size=24")
    assert "set train.global_batch_size=12" in refusal(TWO)
    assert "with 3 node(s) of --nnodes 1:3: train.global_batch_size=8" in refusal(TWO, "train.global_batch_size=8")
    assert "delete the run" in refusal(TWO, "train.global_batch_size=24", "run.overwrite=true")
    mesh = ["train.global_batch_size=24", "parallel.strategy=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=1"]
    assert "with 2 node(s)" in refusal(TWO, *mesh)


def test_nodes_that_join_later_meet_in_a_new_store_and_go_on_with_the_run(tmp_path: Path) -> None:
    assert launcher.elastic_variables(replace(TWO, nodes=(1, 1))) == {}
    assert launcher.elastic_variables(replace(TWO, nodes=(2, 2))) == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    told = launcher.elastic_variables(TWO)
    assert (
        restart.wrote(tmp_path, told) is True and restart.wrote(tmp_path, {"TORCHELASTIC_RESTART_COUNT": "0"}) is False
    )
    errors = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "SHARDKIT_KEEP": "x", "RANK": "0"}
    # Its own agent must see a failure: after a success it would wait for the others to end.
    assert restart.stopped(str(tmp_path), "SIGTERM", {**told, **errors}) == 75
    assert restart.stopped(str(tmp_path), "SIGUSR2", {**told, **errors}) == 0
    assert restart.stopped(str(tmp_path), "SIGTERM", errors) == 0


def test_a_restart_that_two_nodes_saw_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_starts.note_restart(tmp_path, "rank 0: Connection closed by peer", lost_peer=True)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # the other node's launcher
    job_starts.note_restart(tmp_path, "local rank 1: killed by SIGKILL (exit code -9)")
    job_starts.note_restart(tmp_path, "rank 1: ValueError: again")
    assert [reason for _, reason in job_starts.restarts(tmp_path)] == [
        "local rank 1: killed by SIGKILL (exit code -9)", "rank 1: ValueError: again",
    ]  # fmt: skip
    assert (job_starts.summary(tmp_path) or "").startswith("started 3 times; ended before: ")


def until(found: Callable[[], object], logs: list[Path], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        if time.monotonic() > deadline:
            raise AssertionError("\n".join(f"{path}:\n{path.read_text()[-4000:]}" for path in logs))
        time.sleep(0.05)


class Node:
    """A launcher that stands for a node."""

    def __init__(self, name: str, folder: Path, argv: list[str]) -> None:
        self.log, self._marker = folder / f"{name}.log", f"TEST_NODE={folder}/{name}"
        env = environment(**dict([self._marker.split("=", 1)]))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, cwd=REPO, env=env, stdout=log, stderr=log)

    def lose(self) -> None:
        """As when the power fails: nothing of it says goodbye."""
        for pid in with_marker(self._marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        until(lambda: not with_marker(self._marker), [self.log])


@contextmanager
def nodes(folder: Path, argv: list[str]) -> Iterator[Callable[[str], Node]]:
    started: list[Node] = []

    def start(name: str) -> Node:
        started.append(Node(name, folder, argv))
        return started[-1]

    try:
        yield start
    finally:
        for node in started:
            node.lose()


def records(run_dir: Path) -> list[dict[str, float]]:
    with contextlib.suppress(OSError, ValueError):
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return []


def resumed(log: Path) -> list[int]:
    """The steps that ranks resumed from, in order."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("resuming from /")]
    return [int(line.rpartition(" ")[2]) for line in lines]


@pytest.mark.release
def test_a_node_is_lost_and_returns(tmp_path: Path) -> None:
    fixed = dict(
        train__max_steps=400, train__global_batch_size=8, train__grad_accum_steps="null", checkpoint__every_steps=5,
        checkpoint__keep_last=2,
    )  # fmt: skip
    run(command("--nproc-per-node", "1", *settings(tmp_path / "plain", **fixed)), code=0)

    slow, folder = tmp_path / "slow", tmp_path / "run"
    slow.touch()
    port = ReservedPort()  # nobody else is given it, and the first node can still take it
    options = ["--nproc-per-node", "1", "--nnodes", "1:2", "--max-restarts", "3"]
    options += ["--rdzv-endpoint", f"localhost:{port.port}", "--rdzv-id", tmp_path.name]
    options += ["--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"]
    argv = command(*options, *settings(folder, task__args__slow_while=slow, **fixed))
    with nodes(tmp_path, argv) as start:
        first = start("first")
        until(lambda: records(folder), [first.log])  # it holds the store, and trains alone
        second = start("second")
        alone = len(records(folder))
        logs = [first.log, second.log]
        until(lambda: len(resumed(first.log)) + len(resumed(second.log)) == 1, logs)
        (joined_at,) = resumed(first.log) + resumed(second.log)
        assert joined_at >= alone, "growing saves first"
        until(lambda: len(records(folder)) > joined_at + 12, logs)

        second.lose()
        had = len(records(folder))
        before = len(resumed(first.log))
        until(lambda: len(resumed(first.log)) > before, logs)
        lost = had - resumed(first.log)[-1]
        assert 0 <= lost <= 5 + 1, f"{lost} steps were lost: at most those since the last save, and the one under way"
        until(lambda: len(records(folder)) > had + 5, logs)

        third = start("third")
        logs.append(third.log)
        seen = len(records(folder))
        until(lambda: third.log.exists() and (resumed(third.log) or len(resumed(first.log)) > before + 1), logs)
        assert max(resumed(first.log) + resumed(third.log)) >= seen
        slow.unlink()
        assert first.process.wait(90) == 0, first.log.read_text()
        assert third.process.wait(90) == 0, third.log.read_text()
    port.close()
    want, found = losses(tmp_path / "plain"), losses(folder)
    assert found.keys() == want.keys()
    assert max(abs(found[step] - want[step]) for step in want) <= 1e-5
    reasons = [reason for _, reason in job_starts.restarts(folder)]
    assert len(reasons) == 3 and reasons[0].startswith("saved for SIGTERM"), reasons
    assert "started 4 times" in first.log.read_text() + third.log.read_text()


ONE = JobSpec(config="c.yaml", run_dir="runs/a", nproc_per_node=2, overrides=("optim.lr=1",), log_dir="runs/a/logs/1")


NUMBERED = replace(ONE, nodes=(2, 2), rendezvous=Rendezvous("n1:999", node_rank=1, is_host=False, run_id="j"))
"""Its nodes are numbered from outside."""


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ONE, "--nnodes 1 --nproc-per-node 2 --max-restarts 0 --rdzv-backend c10d --rdzv-id shardkit"
              " --rdzv-conf store_type=file --log-dir runs/a/logs/1 --redirects 3 -m shardkit.train"
              " --config c.yaml optim.lr=1"),
        (replace(ONE, rendezvous=Rendezvous(folder="/tmp/x", conf="join_timeout=9")),
         "--rdzv-endpoint /tmp/x/agent --rdzv-id shardkit --rdzv-conf store_type=file,join_timeout=9"),
        (NUMBERED, "--rdzv-id j --node-rank 1 --master-addr n1 --master-port 999"),
        (replace(NUMBERED, max_restarts=2),
         "--rdzv-backend c10d --rdzv-endpoint n1:999 --rdzv-id j --rdzv-conf is_host=false"),
        (replace(ONE, nodes=(1, 4), max_restarts=3, rendezvous=Rendezvous("head:29500")),
         "--nnodes 1:4 --nproc-per-node 2 --max-restarts 3"),
    ],
)  # fmt: skip
def test_nodes_meet_in_a_file_at_an_address_or_by_their_numbers(spec: JobSpec, words: str) -> None:
    text = shlex.join(build_argv(spec)[3:])
    assert words in text and ("c10d" in text) == (spec is not NUMBERED)


def test_the_command_can_be_pasted_into_a_shell() -> None:
    spec = replace(ONE, overrides=("run.dir=a b's $(id)",))
    line = command_line(build_argv(spec), {"OMP_NUM_THREADS": "4"})
    assert shlex.split(line) == ["OMP_NUM_THREADS=4", *build_argv(spec)]


@pytest.mark.parametrize(("given", "meant"), [("1", (1, 1)), ("3", (3, 3)), ("1:2", (1, 2))])
def test_nnodes(given: str, meant: tuple[int, int]) -> None:
    assert parse_nnodes(given) == meant


@pytest.mark.parametrize("given", ["", "0", "2:1", "a", "1:", "1:2:3", "-1", "１"])
def test_nnodes_refused(given: str) -> None:
    with pytest.raises(LaunchError, match="--nnodes"):
        parse_nnodes(given)


@pytest.mark.parametrize("given", ["host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_an_endpoint_is_a_host_and_a_port(given: str) -> None:
    assert split_endpoint("[fe80::1]:29500") == ("[fe80::1]", 29500)
    with pytest.raises(LaunchError, match="HOST:PORT"):
        split_endpoint(given)
