"""Join the job's ranks in process groups, and leave these without hanging."""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..config.schema import RunConfig
from ..errors import ConfigError, LaunchError
from ..launch.local import rendezvous
from ..launch.ranks.env import RankEnv, detect, flight_recorder, job_name
from . import compat
from .compat import FileStore, HashStore, PrefixStore, Store, TCPStore
from .context import ContextParallel
from .mesh import split_ranks

if TYPE_CHECKING:
    from .experts import ExpertParallel

_PATIENCE_S = 10.0
"""Seconds to wait for an answer from the address that rank 0 published, before a newer one is looked for."""


@dataclass(frozen=True)
class World:
    """This rank's position in the job, its device, and the process groups for bookkeeping."""

    env: RankEnv  # rank, number of ranks, and how the launcher said so
    device: torch.device  # the device on which the model is trained
    # gloo group for bookkeeping (token counts, flags, loss), separate from the engine's group
    control_group: dist.ProcessGroup
    # gloo group for the memory ledger, whose gathers must not interleave with the step's reduction
    ledger: dist.ProcessGroup
    foreign_groups: tuple[dist.ProcessGroup, ...] = ()  # groups that the caller had made before
    context: ContextParallel | None = None  # the group that shares this rank's sequences; None = nobody does
    mesh: DeviceMesh | None = None  # (dp_replicate, dp_shard, tp); None = nobody shares layers
    experts: ExpertParallel | None = None  # the groups that share a layer's experts; None = nobody does

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def size(self) -> int:
        return self.env.world_size

    @property
    def tp(self) -> int:
        """Ranks that share each layer of the model: they compute the same loss of the same positions."""
        return 1 if self.mesh is None else self.mesh.size(2)

    @property
    def loss_rank(self) -> int:
        """Which positions this rank computes the loss of: those of a group that shares layers are the same."""
        return self.rank // self.tp

    @property
    def loss_size(self) -> int:
        """Number of ranks, or of groups that share layers, with a loss of their own."""
        return self.size // self.tp

    @property
    def data_rank(self) -> int:
        """Which samples this rank has: those of a group that shares sequences are the same."""
        return self.loss_rank if self.context is None else self.loss_rank // self.context.size

    @property
    def data_size(self) -> int:
        """Number of ranks, or of groups that share sequences, with samples of their own."""
        return self.loss_size if self.context is None else self.loss_size // self.context.size

    @property
    def is_main(self) -> bool:
        return self.env.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """The element-wise sum over all ranks, in fp64; one collective on the bookkeeping group."""
        return self.begin_sum(values)()

    def begin_sum(self, values: list[float]) -> Callable[[], list[float]]:
        """Begin a `sum`. The returned function waits for it and returns it; no other collective of the bookkeeping
        group may come in between."""
        total = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(total, group=self.control_group, async_op=True) if self.size > 1 else None

        def end() -> list[float]:
            if work is not None:
                work.wait()
            return [float(v) for v in total.tolist()]

        return end

    def gather(self, value: object) -> list[object]:
        """Collect every rank's `value` on every rank. Slow: for rare events (start, errors), not for every step."""
        out: list[object] = [None] * self.size
        dist.all_gather_object(out, value, group=self.control_group)
        return out

    def set_timeout(self, seconds: float) -> None:
        """Let collectives fail after `seconds` if they start from now on, in every group of this job and its engine."""
        for group in compat.groups():
            if group not in self.foreign_groups:
                compat.set_timeout(group, timedelta(seconds=seconds))


def choose_device(config: RunConfig, env: RankEnv) -> torch.device:
    """The device on which this rank trains, as `run.device` says."""
    kind = config.run.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"run.device=cuda, but torch {torch.__version__} sees no GPU on this machine",
            "set run.device=cpu, or install a CUDA build of torch and check nvidia-smi",
        )
    n_gpus = torch.cuda.device_count()
    # srun gave each task its own GPU (--gpus-per-task=1), which the task then sees as device 0.
    one_gpu_each = os.environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1"
    if n_gpus == 1 and env.source == "slurm" and env.local_world_size > 1 and one_gpu_each:
        return torch.device("cuda", 0)
    if env.local_world_size > n_gpus:
        raise LaunchError(
            f"{env.local_world_size} ranks on this machine, but torch sees {n_gpus} GPU(s)",
            f"start at most {n_gpus} ranks per machine (--nproc-per-node {n_gpus}), or set run.device=cpu",
        )
    return torch.device("cuda", env.local_rank)


def rank_env() -> RankEnv:
    """This process's rank and world size, from an existing process group, or else from the launcher's environment."""
    if not dist.is_initialized():
        return detect()
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return RankEnv(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=rank // local_size,
        n_nodes=-(-size // local_size),
        source="group",
        master_addr=None,
        master_port=None,
        restart_count=0,
    )


@contextmanager
def process_groups(config: RunConfig, env: RankEnv) -> Iterator[World]:
    """Join the job's ranks, yield the world, and leave no group behind on success, error or Ctrl-C.

    A default group that already exists is used unchanged and not destroyed.
    """
    device = choose_device(config, env)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.update(flight_recorder(config.run.dir, os.environ))
    joined_here, shared, mesh, experts = not dist.is_initialized(), None, None, None
    foreign_groups = () if joined_here else tuple(compat.groups())
    timeout = timedelta(seconds=config.run.init_timeout_s)
    if joined_here:
        _join(config, env, device, timeout)
    failed = True
    try:
        # Made before anything can hang: bookkeeping must work while the engine's group is stuck.
        control_group, ledger = (
            dist.new_group(backend="gloo", timeout=timeout, group_desc=name) for name in ("bookkeeping", "ledger")
        )
        if env.rank == 0:  # every rank has read the address
            rendezvous.withdraw(_meeting_place(config))
        world = World(env, device, control_group, ledger, foreign_groups)
        _refuse_scattered(config, world)
        shared, mesh, experts = split_ranks(config, device.type, env)
        yield replace(world, context=shared, mesh=mesh, experts=experts)
        failed = False
    finally:
        if joined_here:
            _leave(failed)
        elif not failed:
            dist.destroy_process_group(control_group)
            dist.destroy_process_group(ledger)
            if shared is not None:
                dist.destroy_process_group(shared.group)
            meshes = [split for split in (mesh, None if experts is None else experts.mesh) if split is not None]
            for group in (group for split in meshes for group in split.get_all_groups()):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)


def _refuse_scattered(config: RunConfig, world: World) -> None:
    """Refuse ranks that were dealt out to nodes in turn, so that neighbours of `parallel.tp` or `parallel.cp` are on
    different nodes."""
    parallel = config.parallel
    spans = {"tp": parallel.tp, "cp": parallel.tp * parallel.cp}
    near = [key for key in spans if getattr(parallel, key) > 1 and not getattr(parallel, f"{key}_across_nodes")]
    nodes = world.gather(world.env.node_rank) if near else []
    for key in near:
        span = spans[key]
        apart = next((rank for rank in range(world.size) if nodes[rank] != nodes[rank // span * span]), None)
        if apart is not None:
            start, shared = apart // span * span, "layers" if key == "tp" else "sequences"
            raise ConfigError(
                f"parallel.{key}={getattr(parallel, key)}: ranks {start} and {apart} share {shared}, but are on nodes "
                f"{nodes[start]} and {nodes[apart]}",
                f"number the ranks node by node (srun --distribution=block), or set parallel.{key}_across_nodes=true",
            )


def _join(config: RunConfig, env: RankEnv, device: torch.device, timeout: timedelta) -> None:
    # A group that is bound to a device connects at once, and later groups split off from it.
    backend = "gloo"
    device_id: torch.device | None = None
    if device.type == "cuda" and config.parallel.sharding.by_fsdp and config.parallel.offload_param == "cpu":
        # The norm of CPU gradients is summed on the CPU. Not bound: NCCL would split off groups without gloo.
        backend = "cpu:gloo,cuda:nccl"
    elif device.type == "cuda":
        # Splitting a communicator of one rank fails on some machines (DeepSpeed #8248), and has no peer to connect to.
        backend, device_id = "nccl", device if env.world_size > 1 else None
    try:
        dist.init_process_group(
            backend,
            store=_store(config, env, timeout),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
            device_id=device_id,
        )
    except dist.DistNetworkError as error:
        address = f"{env.master_addr}:{env.master_port}"
        taken = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
        if taken and env.source == "torchelastic":
            raise  # torchrun picked that port: the next attempt gets another one
        if taken:
            raise LaunchError(
                f"rank 0 cannot listen on MASTER_PORT={env.master_port}: the port is in use",
                "start with torchrun --standalone (it picks a free port), or set another MASTER_PORT",
            ) from error
        raise LaunchError(
            f"rank {env.rank} cannot reach rank 0 at {address}: {str(error).splitlines()[0]}",
            "check that MASTER_ADDR resolves on every node and that a firewall leaves the port open",
        ) from error
    except dist.DistStoreError as error:
        raise LaunchError(
            f"not all {env.world_size} ranks joined within run.init_timeout_s={config.run.init_timeout_s:g} s",
            "look at the other ranks' logs for the first error, or raise run.init_timeout_s",
        ) from error


_stores: dict[str, Store] = {}
"""The stores through which this process met the other ranks. They stay here because the server must live as long as
rank 0: another rank may still be leaving a group."""
_joined = itertools.count()


def _store(config: RunConfig, env: RankEnv, timeout: timedelta) -> Store:
    """The store through which the ranks meet. Each time it has new keys: old ones lead to groups that are gone."""
    if env.world_size == 1:
        return HashStore()
    folder = os.environ.get(rendezvous.STORE)
    if folder and env.source == "torchelastic":
        file = FileStore(f"{folder}/ranks.{env.restart_count}", env.world_size)
        file.set_timeout(timeout)
        return file
    if env.master_addr is not None and env.master_port is not None:
        key = f"{env.master_addr}:{env.master_port}"
        if key not in _stores:
            serve = env.rank == 0 and not _agent_serves()
            _stores[key] = TCPStore(env.master_addr, env.master_port, None, serve, timeout, wait_for_workers=False)
    else:
        key = str(_meeting_place(config))
        if key not in _stores:
            _stores[key] = _published_store(config, env, timeout)
    # An agent's store outlives its workers. Nodes that join later count restarts from 0, but they use no agent's store.
    restart = env.restart_count if _agent_serves() else 0
    return PrefixStore(f"shardkit/{restart}/{next(_joined)}", _stores[key])


def _agent_serves() -> bool:
    """Whether torchrun's agent serves the store, as it usually does; then every rank, rank 0 too, is a client."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meeting_place(config: RunConfig) -> Path:
    """The file in which rank 0 publishes its address."""
    return Path(config.run.dir) / rendezvous.FOLDER / job_name()


def _published_store(config: RunConfig, env: RankEnv, timeout: timedelta) -> Store:
    """A store for ranks without an address (plain srun, MPI): rank 0 publishes a free port in the run directory.

    The file also has a random word, which the store must know: an address that an earlier run left may lead to another
    server.
    """
    path = _meeting_place(config)
    if env.rank == 0:
        host, word = rendezvous.reachable_name(), secrets.token_hex(8)
        store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        store.set(word, "")
        rendezvous.publish(path, f"{host} {store.port} {word}")
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    silent: dict[str, list[Store]] = {}
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            reached = _reached(path.read_text(), timeout, silent)
            if reached is not None:
                return reached
        time.sleep(0.1)
    raise LaunchError(
        f"rank {env.rank} found no address of rank 0 in {path} within {timeout.total_seconds():g} s",
        "look at rank 0's log for an earlier error, and check that run.dir lies on a file system all nodes share",
    )


def _reached(address: str, timeout: timedelta, silent: dict[str, list[Store]]) -> Store | None:
    """The store at an address `HOST PORT WORD`; None if no server listens there, or none has answered that knows the
    word.

    A thread asks, because a TCPStore client would wait forever for the answer of a server of another kind. `silent`:
    addresses whose servers did not answer at once, each with the store that comes late: rank 0's, if its machine is
    busy. They are not asked again.
    """
    if address in silent:
        return silent[address][0] if silent[address] else None
    stores: list[Store] = []

    def ask() -> None:
        with suppress(dist.DistError):
            store = TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
            if store.check([word]):
                stores.append(store)

    try:
        host, port, word = address.split()
        with socket.create_connection((host, int(port)), _PATIENCE_S):
            pass  # a TCPStore would keep trying
    except (OSError, ValueError):
        return None
    asking = threading.Thread(target=ask, name="rendezvous", daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    if asking.is_alive():
        silent[address] = stores
    return stores[0] if stores else None


def _leave(failed: bool) -> None:
    """Leave all groups; after a failure without waiting for the other ranks."""
    if not dist.is_initialized():
        return
    # Wrapped models are reference cycles that hold gloo's threads, which abort the process if they outlive the group.
    gc.collect()
    if failed and "nccl" in dist.get_backend():
        # A peer may be stuck in a collective: destroying would wait for it, aborting does not.
        compat.abort_groups()
    else:
        dist.destroy_process_group()
