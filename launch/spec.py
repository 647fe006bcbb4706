"""The description of a job, from which torchrun's command and Slurm's script are made."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import ConfigError, LaunchError
from ..files.children import RUN_MODULE
from .script import Script

if TYPE_CHECKING:
    from ..config.schema import RunConfig


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of one torchrun job meet.

    Attributes:
        endpoint: HOST:PORT of the store; None = one node, whose store is a file.
        folder: private folder of that file; empty = torchrun makes one for itself.
        node_rank: this node's number, if Slurm or the user numbers nodes; None = torchrun numbers them.
        is_host: whether this node holds the store; None = torchrun compares host names.
        run_id: the same on every node, and different for every job that uses the endpoint.
        conf: more entries for torchrun's `--rdzv-conf`, `key=value,…`.
    """

    endpoint: str | None = None
    node_rank: int | None = None
    is_host: bool | None = None
    run_id: str = "shardkit"
    conf: str = ""
    folder: str = ""


@dataclass(frozen=True)
class SlurmOptions:
    """Options for Slurm; None leaves the choice to the cluster.

    Attributes:
        style: `torchrun` starts one torchrun per node, `srun` one task per rank.
        signal_s: seconds before the time limit at which the job is told to save; None = preemption_warning.DEFAULT_S.
        time: time limit in Slurm's format, `4:00:00`.
        container: an image for srun's --container-image (pyxis).
        container_mounts: mounts in pyxis' format, besides the working and the run directory.
        max_requeues: the job is not requeued after this many preemptions and time limits.
        extra: raw `--key=value` options for sbatch.
    """

    style: str = "torchrun"
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    array: str | None = None
    dependency: str | None = None
    constraint: str | None = None
    mem: str | None = None
    exclude: str | None = None
    cpus_per_task: int | None = None
    container: str | None = None
    container_mounts: str | None = None
    signal_s: int | None = None
    max_requeues: int = 100
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class KubernetesOptions:
    """Options for Kubernetes.

    Attributes:
        image: the pods' image.
        volumes: `CLAIM:/PATH`, PersistentVolumeClaims and where they are mounted.
        cpus: CPUs of each pod, as Kubernetes writes them.
        memory: host memory of each pod, as Kubernetes writes it.
        limit_s: the job's time limit in seconds.
        max_restarts: how often a JobSet starts again after a failure; disruptions do not count.
    """

    image: str | None = None
    volumes: tuple[str, ...] = ()
    cpus: str | None = None
    memory: str | None = None
    limit_s: int | None = None
    max_restarts: int = 0


@dataclass(frozen=True)
class JobSpec:
    """A training job.

    Attributes:
        config: the YAML file; None = defaults.
        overrides: `section.key=value`, applied after the file.
        run_dir: directory of the run's files.
        nproc_per_node: ranks on each node.
        nodes: (min, max); they differ for an elastic job.
        gpus_per_node: GPUs to ask the cluster for; 0 = none.
        python: the interpreter that ranks run in.
        cwd: base directory of the config's relative paths.
        log_dir: torchrun's directory for each rank's output.
        bind_cpus: whether each rank is bound to its own CPUs.
        on_gpus: whether ranks use GPUs.
        script: the program that the ranks run instead of shardkit's own; None = `shardkit.train` with the config.
        starts_by_file: whether Python starts modules by the path of a file, since `-m` would search the current
            directory (`shardkit/files/run_module.py`).
        grace_s: seconds that the ranks of a config have to save and end after SIGTERM; None = the environment's
            (`restart.grace_s`) for a launcher, `kubernetes.GRACE_S` for a pod.
    """

    config: str | None
    run_dir: str
    nproc_per_node: int
    overrides: tuple[str, ...] = ()
    nodes: tuple[int, int] = (1, 1)
    gpus_per_node: int = 0
    max_restarts: int = 0
    python: str = "python3"
    cwd: str = "."
    log_dir: str = ""
    bind_cpus: bool = True
    on_gpus: bool = False
    name: str = "shardkit"
    rendezvous: Rendezvous = Rendezvous()
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    kubernetes: KubernetesOptions = KubernetesOptions()
    script: Script | None = None
    grace_s: float | None = None
    starts_by_file: bool = False

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may leave and join while the job runs."""
        return self.nodes[0] != self.nodes[1]

    @property
    def program(self) -> list[str]:
        """The words after `python` that start a rank."""
        if self.script is not None:
            return list(self.script.argv)
        config = [] if self.config is None else ["--config", self.config]
        return [*self.module("shardkit.train"), *config, *self.overrides]

    def module(self, name: str) -> list[str]:
        """The words after `python` that run a module."""
        return [str(RUN_MODULE), name] if self.starts_by_file else ["-m", name]


def parse_nnodes(text: str) -> tuple[int, int]:
    """`2` → (2, 2), `1:2` → (1, 2).

    Raises:
        LaunchError: not a number or MIN:MAX of numbers from 1.
    """
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise LaunchError(f"--nnodes {text!r} is not a number of nodes", "pass N, or MIN:MAX with 1 <= MIN <= MAX")
    return low, high


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`host:29500` → (host, 29500).

    Raises:
        LaunchError: the endpoint is not HOST:PORT.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or "/" in host or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise LaunchError(
            f"--rdzv-endpoint {endpoint!r} is not HOST:PORT",
            "name a host that all nodes reach and a free port on it, e.g. node0:29500",
        )
    return host, int(port)


def check_fits(config: RunConfig, nodes: int, ranks_per_node: int, gpus_per_node: int) -> None:
    """Refuse a job that its ranks would refuse.

    Raises:
        ConfigError: the strategy, its mesh or the batch does not fit the ranks, or run.device=cuda has no GPU.
        LaunchError: no ranks, or more ranks than GPUs on a node.
    """
    device_setting, world_size = config.run.device, nodes * ranks_per_node
    if nodes < 1 or ranks_per_node < 1:
        raise LaunchError(f"--nodes {nodes} with {ranks_per_node} rank(s) per node", "ask for at least one of each")
    if device_setting == "cuda" and not gpus_per_node:
        raise ConfigError("run.device=cuda, but the job asks for no GPU", "pass --gpus-per-node N, or run.device=cpu")
    if device_setting != "cpu" and 0 < gpus_per_node < ranks_per_node:
        raise LaunchError(
            f"{ranks_per_node} ranks on each node, but {gpus_per_node} GPU(s)",
            f"ask for {ranks_per_node} GPUs or {gpus_per_node} ranks per node, or set run.device=cpu",
        )
    device = "cuda" if gpus_per_node and device_setting != "cpu" else "cpu"
    check_world(config, device, world_size, ranks_per_node)


def check_world(config: RunConfig, device: str, world_size: int, ranks_per_node: int) -> None:
    """Refuse a config that does not fit the ranks.

    Raises:
        ConfigError: the strategy, its mesh or the batch does not fit them.
    """
    from ..config import capability
    from ..config.load import resolve_batch

    capability.check(config, device=device, world_size=world_size, local_world_size=ranks_per_node)
    resolve_batch(config, world_size)
