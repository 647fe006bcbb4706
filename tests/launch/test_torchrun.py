from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from shardkit.errors import LaunchError
from shardkit.launch.local.launcher import build_argv, command_line
from shardkit.launch.spec import JobSpec, Rendezvous, parse_nnodes, split_endpoint

ONE = JobSpec(config="c.yaml", run_dir="runs/a", nproc_per_node=2, overrides=("optim.lr=1",), log_dir="runs/a/logs/1")


def text(spec: JobSpec) -> str:
    return shlex.join(build_argv(spec)[3:])


def test_one_node_meets_in_a_file() -> None:
    assert text(ONE) == (
        "--nnodes 1 --nproc-per-node 2 --max-restarts 0 --rdzv-backend c10d --rdzv-id shardkit"
        " --rdzv-conf store_type=file --log-dir runs/a/logs/1 --redirects 3"
        " -m shardkit.train --config c.yaml optim.lr=1"
    )


def test_one_nodes_file_is_where_the_launcher_wants_it_and_settings_are_kept() -> None:
    spec = replace(ONE, rendezvous=Rendezvous(folder="/tmp/x", conf="join_timeout=9"))
    assert "--rdzv-endpoint /tmp/x/agent --rdzv-id shardkit --rdzv-conf store_type=file,join_timeout=9" in text(spec)


def test_nodes_that_are_numbered_from_outside_keep_their_numbers() -> None:
    spec = replace(ONE, nodes=(2, 2), rendezvous=Rendezvous("n1:999", node_rank=1, is_host=False, run_id="j"))
    assert "--rdzv-id j --node-rank 1 --master-addr n1 --master-port 999" in text(spec)
    assert "c10d" not in text(spec)
    elastic = text(replace(spec, max_restarts=2))
    assert "--rdzv-backend c10d --rdzv-endpoint n1:999 --rdzv-id j --rdzv-conf is_host=false" in elastic


def test_an_elastic_job_has_a_range_of_nodes() -> None:
    spec = replace(ONE, nodes=(1, 4), max_restarts=3, rendezvous=Rendezvous("head:29500"))
    assert "--nnodes 1:4" in text(spec) and "--max-restarts 3" in text(spec)


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
