"""What the ranks reach together: collectives, latency, matrix products and copies, and which rank is slow.

Collectives are reported as bus bandwidth, which does not depend on the number of ranks n: bytes/s × 2(n−1)/n for
all-reduce, × (n−1)/n for all-gather (NVIDIA nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .config import RunConfig
from .dist import World, process_groups, rank_env
from .launch.doctor import Check

SLOW = 1.2
"""A rank that takes this many times the median is named."""
_SIZES = (2**10, 2**16, 2**20, 2**24, 2**28)
_LARGEST_ON_CPU = 2**24
_ROUNDS = 5


def measure(config: RunConfig) -> tuple[list[Check], dict[str, Any]] | None:
    """Measure together with the other ranks; (findings, constants) on rank 0, None on the others; collective.

    Constants: `all_reduce` and `all_gather` as [[bytes, bus bytes/s], …], `latency_s` to each rank, `matmul_flops`
    and `copy_bytes_per_s` of each rank, `clock_skew_s`.

    Raises:
        LaunchError: ranks cannot find each other.
    """
    with process_groups(config, rank_env()) as world:
        sizes = [size for size in _SIZES if world.device.type == "cuda" or size <= _LARGEST_ON_CPU]
        constants: dict[str, Any] = {
            "world_size": world.size,
            "device": _device_name(world.device),
            "clock_skew_s": _clock_skew(world),
            "matmul_flops": world.gather(_matmul_flops(world.device)),
            "copy_bytes_per_s": world.gather(_copy_speed(world.device)),
            "latency_s": _latency(world),
            "all_reduce": [[size, _all_reduce(world, size)] for size in sizes] if world.size > 1 else [],
            "all_gather": [[size, _all_gather(world, size)] for size in sizes] if world.size > 1 else [],
        }
        hosts = [str(host) for host in world.gather(os.uname().nodename)]
    return (findings(constants, hosts), constants) if world.is_main else None


def findings(constants: dict[str, Any], hosts: list[str]) -> list[Check]:
    """The constants judged: slow ranks by name, clocks that differ."""
    checks = []
    for key, what, unit, scale in (
        ("matmul_flops", "matmul", "TFLOP/s", 1e12),
        ("copy_bytes_per_s", "copies", "GB/s", 1e9),
    ):
        values = [float(v) for v in constants[key]]
        middle = statistics.median(values)
        slow = [f"rank {rank}@{hosts[rank]}" for rank, value in enumerate(values) if value * SLOW < middle]
        found = f"median {middle / scale:.3g} {unit}, slowest {min(values) / scale:.3g}"
        fix = "look for other processes, heat or power limits there (nvidia-smi -q -d PERFORMANCE)" if slow else ""
        found += f"; slow: {', '.join(slow)}" if slow else ""
        checks.append(Check(f"{what} per rank", "warn" if slow else "pass", found, fix))
    for key in ("all_reduce", "all_gather"):
        for size, speed in constants[key]:
            checks.append(Check(f"{key} {_size(size)}", "pass", f"{speed / 1e9:.3g} GB/s bus bandwidth"))
    if len(constants["latency_s"]) > 1:
        far = max(range(1, len(hosts)), key=lambda rank: float(constants["latency_s"][rank]))
        worst = float(constants["latency_s"][far])
        checks.append(Check("latency", "pass", f"rank 0 to rank {far}@{hosts[far]}: {worst * 1e6:.0f} µs, the longest"))
    skew = float(constants["clock_skew_s"])
    late = skew > 1.0
    fix = "run chrony or ntpd on every node" if late else ""
    checks.append(Check("clocks", "warn" if late else "pass", f"differ by at most {skew:.3f} s", fix))
    return checks


def save(constants: dict[str, Any], path: Path) -> None:
    """Keep the constants for planning, beside those of other devices and world sizes."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    known[f"{constants['device']} x {constants['world_size']}"] = constants
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(known, indent=1) + "\n")
    draft.replace(path)


def calibration_path() -> Path:
    """Where `save` keeps constants: $XDG_CACHE_HOME/shardkit/calibration.json."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardkit" / "calibration.json"


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median time of `work`, after one round to warm up."""
    times = []
    for _ in range(_ROUNDS + 1):
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul_flops(device: torch.device) -> float:
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / _seconds(device, lambda: a @ b)


def _copy_speed(device: torch.device) -> float:
    """Host to device from pinned memory; on CPU a copy within host memory."""
    cuda = device.type == "cuda"
    source = torch.zeros(2**28 if cuda else 2**24, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty_like(source, device=device)
    return source.numel() / _seconds(device, lambda: target.copy_(source, non_blocking=True))


def _all_reduce(world: World, n_bytes: int) -> float:
    tensor = torch.zeros(n_bytes // 4, device=world.device)
    slowest = _together(world, lambda: dist.all_reduce(tensor))
    return n_bytes / slowest * 2 * (world.size - 1) / world.size


def _all_gather(world: World, n_bytes: int) -> float:
    """`n_bytes` is what every rank has in the end."""
    part = torch.zeros(max(1, n_bytes // 4 // world.size), device=world.device)
    whole = torch.empty(part.numel() * world.size, device=world.device)
    slowest = _together(world, lambda: dist.all_gather_into_tensor(whole, part))
    return whole.numel() * 4 / slowest * (world.size - 1) / world.size


def _together(world: World, work: Callable[[], object]) -> float:
    """The slowest rank's median."""
    return max(float(str(value)) for value in world.gather(_seconds(world.device, work)))


def _latency(world: World) -> list[float]:
    """Half a round trip of one number between rank 0 and each rank, in seconds; 0 for rank 0 itself."""
    ball = torch.zeros(1, device=world.device)
    found = [0.0]
    for peer in range(1, world.size):
        if world.rank == 0:

            def round_trip(peer: int = peer) -> None:
                dist.send(ball, peer)
                dist.recv(ball, peer)

            found.append(_seconds(world.device, round_trip) / 2)
        elif world.rank == peer:
            for _ in range(_ROUNDS + 1):
                dist.recv(ball, 0)
                dist.send(ball, 0)
        dist.barrier(world.books)
    return found


def _clock_skew(world: World) -> float:
    dist.barrier(world.books)
    clocks = [float(str(value)) for value in world.gather(time.time())]
    return max(clocks) - min(clocks)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({os.uname().machine})"


def _size(n_bytes: int) -> str:
    return f"{n_bytes // 2**20} MiB" if n_bytes >= 2**20 else f"{n_bytes // 2**10} KiB"
