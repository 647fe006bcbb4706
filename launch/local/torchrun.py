"""torchrun's command line as a pure function of the job, and checks for jobs whose number of nodes changes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...errors import ConfigError, LaunchError
from ..spec import JobSpec, check_world, split_endpoint

if TYPE_CHECKING:
    from ...config.schema import RunConfig


def build_argv(spec: JobSpec) -> list[str]:
    """The torchrun command of one node.

    Every rank's output goes to a file below `log_dir`. A single node uses a file as its store: torchrun's own store
    listens on every interface and unpickles data from anyone. Nodes with given numbers keep them (static rendezvous)
    unless workers may restart, which needs c10d.

    Raises:
        LaunchError: several nodes without an endpoint, or no ranks.
    """
    if spec.nproc_per_node < 1:
        raise LaunchError(f"--nproc-per-node {spec.nproc_per_node}", "start at least one rank per node")
    if spec.max_restarts < 0:
        raise LaunchError(f"--max-restarts {spec.max_restarts} is negative", "pass 0 or more")
    argv = [spec.python, *spec.module("torch.distributed.run")]
    argv += ["--nnodes", _nnodes(spec), "--nproc-per-node", str(spec.nproc_per_node)]
    argv += ["--max-restarts", str(spec.max_restarts), *_rendezvous(spec)]
    if spec.log_dir:
        argv += ["--log-dir", spec.log_dir, "--redirects", "3"]
    return [*argv, *spec.program]


def command_line(argv: list[str], environ: Mapping[str, str]) -> str:
    """The shell command for the same process; `environ` holds the added variables."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in environ.items()]
    return " ".join([*settings, shlex.join(argv)])


def _nnodes(spec: JobSpec) -> str:
    low, high = spec.nodes
    return str(low) if low == high else f"{low}:{high}"


def _rendezvous(spec: JobSpec) -> list[str]:
    meet = spec.rendezvous
    if meet.endpoint is None:
        if spec.nodes != (1, 1):
            raise LaunchError(
                f"--nnodes {_nnodes(spec)} without --rdzv-endpoint: nodes cannot find each other",
                "pass --rdzv-endpoint HOST:PORT, the same on every node, or use slurm/train.sbatch",
            )
        file = ["--rdzv-endpoint", f"{meet.folder}/agent"] if meet.folder else []
        stored = ",".join(["store_type=file", *([meet.conf] if meet.conf else [])])
        return ["--rdzv-backend", "c10d", *file, "--rdzv-id", meet.run_id, "--rdzv-conf", stored]
    host, port = split_endpoint(meet.endpoint)
    if meet.node_rank is not None and spec.max_restarts == 0 and not spec.is_elastic:
        return [
            "--rdzv-id", meet.run_id, "--node-rank", str(meet.node_rank),
            "--master-addr", host, "--master-port", str(port),
        ]  # fmt: skip
    settings = [] if meet.is_host is None else [f"is_host={str(meet.is_host).lower()}"]
    settings += [meet.conf] if meet.conf else []
    conf = ["--rdzv-conf", ",".join(settings)] if settings else []
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", meet.endpoint, "--rdzv-id", meet.run_id, *conf]


VARIABLE = "SHARDKIT_ELASTIC"


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this rank's job may lose and gain nodes."""
    return bool(environ.get(VARIABLE))


def check_elastic(spec: JobSpec, config: RunConfig | None) -> None:
    """Refuse an elastic job that would go wrong when the number of nodes changes; a script has no config to look at.

    Raises:
        LaunchError: no restarts are allowed, or each start would delete the run.
        ConfigError: a batch or mesh that does not fit some number of nodes.
    """
    if not spec.is_elastic:
        return
    nodes = f"--nnodes {spec.nodes[0]}:{spec.nodes[1]}"
    if spec.max_restarts < 1:
        raise LaunchError(
            f"{nodes} with --max-restarts {spec.max_restarts}: a lost node would end the job", "pass --max-restarts 3"
        )
    if config is None:
        return
    if config.run.overwrite:
        raise LaunchError(
            f"{nodes} with run.overwrite=true would delete the run whenever a node joins",
            "delete run.dir yourself, or set another one: an elastic job continues the run that is there",
        )
    if config.train.global_batch_size is None:
        most = spec.nodes[1] * spec.nproc_per_node
        batch = config.train.micro_batch_size * (config.train.grad_accum_steps or 1) * most
        raise ConfigError(
            f"{nodes}: the samples per step would change with the nodes, train.global_batch_size is not set",
            f"set train.global_batch_size={batch} ({most} ranks' share now), and leave train.grad_accum_steps unset",
        )
    for count in range(spec.nodes[0], spec.nodes[1] + 1):
        world_size = count * spec.nproc_per_node
        try:
            check_world(config, "cuda" if spec.on_gpus else "cpu", world_size, spec.nproc_per_node)
        except ConfigError as error:
            raise ConfigError(f"with {count} node(s) of {nodes}: {error.cause}", error.fix) from error


def check_ranks(spec: JobSpec, config: RunConfig | None) -> None:
    """Refuse a job of a fixed size that its ranks would refuse, before anything is written or started.

    Raises:
        ConfigError: the strategy, its mesh or the batch does not fit the ranks.
    """
    if spec.is_elastic or config is None:
        return
    device = "cpu" if config.run.device == "cpu" else "cuda"  # the ranks say that there is no GPU
    check_world(config, device, spec.nodes[1] * spec.nproc_per_node, spec.nproc_per_node)


def elastic_variables(spec: JobSpec) -> dict[str, str]:
    """Variables for torchrun and its ranks if nodes meet through c10d and workers may restart.

    By default torchrun shares its own store with the ranks. A node that joins later never learns its address, and keys
    of earlier rounds stay in it (https://github.com/pytorch/pytorch/issues/135712, open in torch 2.13): with this
    variable the first rank makes a new store in each round.
    """
    if spec.nodes[1] == 1 or spec.max_restarts == 0:
        return {}
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **({VARIABLE: "1"} if spec.is_elastic else {})}
