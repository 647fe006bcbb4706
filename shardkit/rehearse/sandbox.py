"""Start a command whose writes are thrown away and that reaches no network: `sandbox.py SETTINGS.json COMMAND…`.

Runs as a file of its own, and imports nothing of shardkit. In namespaces of its own (a user's, unless this process may
make the others without) it builds a file tree in which each folder of the machine is the lower part of an overlay. What
the command writes lands in a folder beside the records of the rehearsal; files of the machine are never opened for
writing. A file system that no overlay can lie over is read-only to the command.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import NoReturn

NEWNS, NEWUSER, NEWNET = 0x20000, 0x10000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
KERNELS = frozenset(
    [
        "proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "debugfs", "tracefs", "securityfs", "bpf",
        "pstore", "hugetlbfs", "fusectl", "autofs", "configfs", "binfmt_misc", "nsfs", "efivarfs",
    ]
)  # fmt: skip
"""File systems that hold no files of a user."""
LO_UP = 0x8914, struct.pack("16sh", b"lo", 1)

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    settings, command = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]
    try:
        enter_namespaces(settings["overlay"], settings["network"])
        if settings["overlay"]:
            Tree(Path(settings["folder"]), settings["records"]).enter()
    except OSError as error:
        Path(settings["refusal"]).write_text(str(error))
        sys.exit(125)
    os.execvp(command[0], command)


def enter_namespaces(overlay: bool, network: bool) -> None:
    """Leave the machine's mounts, and its network unless `network`."""
    flags = (NEWNS if overlay else 0) | (0 if network else NEWNET)
    if not flags:
        return
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(flags):
        check(_libc.unshare(flags | NEWUSER), "the kernel gives this user no namespaces")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    if not network:
        with socket.socket() as lo:
            fcntl.ioctl(lo, *LO_UP)


def check(failed: int, purpose: str) -> None:
    """Raise the error of a call into libc that failed."""
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, f"{purpose}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [os.fsencode(word) for word in (source, target, kind)]
    check(
        _libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)), f"mount {kind or 'of'} {source} at {target}"
    )


def mount_points() -> dict[str, str]:
    """Folder → kind of file system, of what is mounted in this process's tree; the last mount at a folder wins."""
    kinds = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        kinds[point] = after.split()[0]
    return kinds


class Tree:
    """The file tree of a rehearsal, and what lies where.

    `folder`: of the rehearsal; `upper` in it takes what the command writes, `overlays.json` tells where it belongs.
    `records`: a folder in it that the command really writes to.
    """

    def __init__(self, folder: Path, records: str) -> None:
        self.folder, self.records = folder, records
        self.kinds = mount_points()
        self.root = folder / "root"
        self.overlays: list[str] = []
        self.read_only: list[str] = []

    def enter(self) -> None:
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
        self.root.mkdir()
        mount("tmpfs", str(self.root), "tmpfs", options="mode=755")
        cwd = os.getcwd()
        self.add_folder("/")
        mount("tmpfs", f"{self.root}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        mount(self.records, f"{self.root}{self.records}", flags=MS_BIND)
        layout = {"overlays": self.overlays, "read_only": self.read_only}
        (self.folder / "overlays.json").write_text(json.dumps(layout))
        os.chdir(self.root)
        check(_libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
        check(_libc.umount2(b".", MNT_DETACH), "leave the machine's tree")
        os.chdir(cwd)

    def add_folder(self, path: str) -> None:
        """Put a folder of the machine in the tree; one with mounts below it is made anew, and its entries added."""
        target = f"{self.root}{path}"
        if self.kinds.get(path) in KERNELS:
            mount(path, target, flags=MS_BIND | MS_REC)
        elif any(point.startswith(path.rstrip("/") + "/") for point in self.kinds):
            for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
                self.add(entry)
        else:
            self.overlay(path, target)

    def add(self, entry: os.DirEntry[str]) -> None:
        target = f"{self.root}{entry.path}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
        elif entry.is_dir():
            os.mkdir(target)
            os.chmod(target, stat.S_IMODE(entry.stat().st_mode))
            self.add_folder(entry.path)
        elif entry.is_file():
            Path(target).touch()
            self.bind_read_only(entry.path, target)

    def overlay(self, path: str, target: str) -> None:
        number = len(self.overlays)
        upper, work = self.folder / "upper" / str(number), self.folder / "work" / str(number)
        upper.mkdir(parents=True)
        work.mkdir(parents=True)
        os.chmod(upper, stat.S_IMODE(os.stat(path).st_mode))
        options = f"lowerdir={escaped(path)},upperdir={escaped(str(upper))},workdir={escaped(str(work))}"
        try:
            try:
                mount("overlay", target, "overlay", options=options + ",userxattr")
            except OSError:  # before Linux 5.11
                mount("overlay", target, "overlay", options=options)
        except OSError:
            if self.folder.is_relative_to(path) or Path.cwd().is_relative_to(path):
                raise
            self.bind_read_only(path, target)
            return
        self.overlays.append(path)

    def bind_read_only(self, path: str, target: str) -> None:
        mount(path, target, flags=MS_BIND)
        locked = os.statvfs(target).f_flag
        flags = MS_NOSUID * bool(locked & os.ST_NOSUID) | MS_NODEV * bool(locked & os.ST_NODEV)
        flags |= MS_NOEXEC * bool(locked & os.ST_NOEXEC) | MS_NOATIME * bool(locked & os.ST_NOATIME)
        flags |= MS_NODIRATIME * bool(locked & os.ST_NODIRATIME) | MS_RELATIME * bool(locked & os.ST_RELATIME)
        mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
        self.read_only.append(path)


def escaped(path: str) -> str:
    """A path as an option of a mount: commas and colons there separate."""
    return path.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:")


if __name__ == "__main__":
    main()
