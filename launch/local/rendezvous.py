"""Where ranks meet: on one node in a private folder; nodes of a Slurm step on a free port that node 0 reserves and
publishes in the run directory.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import LaunchError, system_errors
from ...files import write_whole
from ..spec import split_endpoint

FOLDER = ".rendezvous"
"""The folder in a run directory where node 0 or rank 0 publishes its address."""
_OLD_S = 3600  # nobody waits that long for an address
STORE = "SHARDKIT_STORE"
"""The variable that names the folder where the ranks of a single node meet."""


@contextmanager
def private_folder() -> Iterator[str]:
    """A temporary folder on this machine that only this user can enter."""
    fix = "free space there, or set TMPDIR to a folder of this machine that you can write"
    with system_errors(LaunchError, f"cannot make a folder in {tempfile.gettempdir()}", fix):
        made = tempfile.TemporaryDirectory(prefix="shardkit-", ignore_cleanup_errors=True)
    with made as folder:
        yield folder


def one_node_environment(folder: str, on_gpus: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make the ranks of a single node meet in `folder` and accept no connections from outside."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo", **({"NCCL_SOCKET_IFNAME": "lo"} if on_gpus else {})}
    return {
        STORE: folder,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else torchrun serves a store for the ranks, on every interface
        **{name: value for name, value in loopback.items() if name not in environ},
    }


class ReservedPort:
    """A free port that no other process gets: bound, but not listening, which lets the store take it over.

    The store (libuv) binds with SO_REUSEADDR; Linux allows this if the other socket also has it and does not listen.
    `path`: where the port is published; `close` withdraws it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()
        if self._path is not None:
            withdraw(self._path)


def reachable_name(environ: Mapping[str, str] = os.environ) -> str:
    """A name by which other nodes reach this one: its host name if that resolves, else Slurm's address."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    return name


def publish(path: Path, endpoint: str) -> None:
    """Write `endpoint` for the other nodes, atomically."""
    with system_errors(LaunchError, f"cannot write {path}", "set run.dir to a directory that every node can write"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, endpoint)
        except FileNotFoundError:  # another start has just removed the empty folder
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, endpoint)


def withdraw(path: Path) -> None:
    """Remove an address that nobody needs any more, and its folder once it is empty."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def sweep(run_dir: Path) -> None:
    """Remove the addresses of starts that were killed. Young ones stay: another start may be meeting there."""
    folder = run_dir / FOLDER
    with suppress(OSError):  # no such folder
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        now = probe.stat().st_mtime  # by the clock of the file system
        probe.unlink()
        for file in folder.iterdir():
            if now - file.stat().st_mtime > _OLD_S:
                file.unlink(missing_ok=True)
        folder.rmdir()


def trouble(endpoint: str) -> str:
    """Why nodes do not meet at HOST:PORT, as seen from this node."""
    host, port = split_endpoint(endpoint)
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        return f"{host} does not resolve on this machine ({error.strerror})"
    try:
        socket.create_connection((host, port), 5).close()
    except OSError as error:
        return f"nothing answers there ({error.strerror or error})"
    return "something listens there: the first node while others are missing, or another program that took the port"


def wait_for(path: Path, timeout_s: float) -> str:
    """The endpoint that node 0 published."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            return path.read_text()
        except FileNotFoundError:
            # Listing the directory refreshes NFS's cache of missing names.
            os.listdir(path.parent if path.parent.is_dir() else path.parent.parent)
        time.sleep(0.1)
    raise LaunchError(
        f"node 0 published no address in {path} within {timeout_s:g} s",
        "check that run.dir is on a file system that all nodes share, and node 0's log for an earlier error",
    )
