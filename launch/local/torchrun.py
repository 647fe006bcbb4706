"""torchrun's command line, as a pure function of the job."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from ...errors import LaunchError
from ..job import JobSpec, split_endpoint


def build_argv(spec: JobSpec) -> list[str]:
    """The torchrun command of one node.

    Every rank's output goes to a file below `log_dir`. One node meets itself on a port that the system picks. Nodes
    that are numbered from outside keep their numbers (static rendezvous) unless workers may restart, which takes c10d.

    Raises:
        LaunchError: several nodes without an endpoint, or no ranks.
    """
    if spec.nproc_per_node < 1:
        raise LaunchError(f"--nproc-per-node {spec.nproc_per_node}", "start at least one rank per node")
    if spec.max_restarts < 0:
        raise LaunchError(f"--max-restarts {spec.max_restarts}", "pass 0 or more")
    argv = [spec.python, "-m", "torch.distributed.run"]
    argv += ["--nnodes", _nnodes(spec), "--nproc-per-node", str(spec.nproc_per_node)]
    argv += ["--max-restarts", str(spec.max_restarts), *_rendezvous(spec)]
    if spec.log_dir:
        argv += ["--log-dir", spec.log_dir, "--redirects", "3"]
    return [*argv, "-m", "shardkit.train", *spec.train_args]


def command_line(argv: list[str], environ: Mapping[str, str]) -> str:
    """What to type in a shell for the same process: `environ` holds the variables that were added."""
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
        return ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", meet.run_id]
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
