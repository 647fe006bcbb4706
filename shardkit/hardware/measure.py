"""Measure this hardware: each device on its own, and the ranks together by collectives and latency.

Collectives are reported as bus bandwidth, which does not depend on the number of ranks n: bytes/s × 2(n−1)/n for
all-reduce, × (n−1)/n for the others (NVIDIA nccl-tests, doc/PERFORMANCE.md). The collectives of parallel.cp, tp and ep
are measured in the groups that these make, all groups of an axis at once, as in training.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..config.capability import check
from ..config.schema import RunConfig
from ..parallel.compat import scaled_product
from ..parallel.world import World, choose_device, process_groups, rank_env
from . import calibration

_SIZES = (2**10, 2**13, 2**16, 2**20, 2**24, 2**28)
_LARGEST_ON_CPU = 2**24
_SMALL = 2**20
"""Collectives below this many bytes are repeated within a round."""
_ROUNDS = 5
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
_ROUND_S = 0.02
"""A round repeats the timed work for about this long, so that starting and stopping the clock does not count."""
_BUDGET_S = 1.0
_PRODUCT = {"cuda": 8192, "cpu": 1024}
_ELEMENTS = {"cuda": 2**27, "cpu": 2**25}
"""Elements of a tensor that no cache holds: 512 and 128 MiB in fp32."""
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure(config: RunConfig) -> tuple[calibration.Constants, list[str]] | None:
    """Measure together with the other ranks; (constants, each rank's host) on rank 0, None on the others; collective.
    Constants are medians over ranks, which all measure at once; docs/launch.md lists them."""
    env = rank_env()
    device = choose_device(config, env)
    check(config, device=device.type, world_size=env.world_size, local_world_size=env.local_world_size)
    context = _context(device)
    with process_groups(config, env) as world:
        sizes = [size for size in _SIZES if device.type == "cuda" or size <= _LARGEST_ON_CPU]
        sizes = sizes if world.size > 1 else []
        clocks = _measured_on_each(world, time.time)
        constants: dict[str, Any] = {
            "world_size": world.size,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else calibration.cpu_name(),
            "threads": torch.get_num_threads(),
            "clock_skew_s": max(clocks) - min(clocks),
            "collective_s": _collective(world, "all_reduce", 4) if world.size > 1 else None,
            "late_s": _late(world) if world.size > 1 and device.type == "cpu" else None,
            **{name: [[size, _bus_speed(world, name, size)] for size in sizes] for name in _COLLECTIVES},
            **_outside(world, context),
            **_speeds(world),
        }
        # After `_outside`, which counts the memory of one communicator.
        axes = {
            axis: {
                "collective": name,
                "ranks": group.size(),
                "bus": [[size, _bus_speed(world, name, size, group)] for size in sizes],
            }
            for axis, (name, group) in _axes(world).items()
        }
        exchanges = axes.get("cp") or axes.get("ep") or {"bus": [], "ranks": 1}
        constants |= {"axes": axes, "all_to_all": exchanges["bus"], "all_to_all_ranks": exchanges["ranks"]}
        hosts = [str(host) for host in world.gather(os.uname().nodename)]
    return (constants, hosts) if world.is_main else None


def _speeds(world: World) -> dict[str, Any]:
    """The speeds of each rank's device, measured while the others are equally busy."""
    on_cpu = torch.device("cpu")
    kinds = [set(map(str, types)) for types in world.gather(matmul_types(world.device)) if isinstance(types, list)]
    products = {
        kind: _measured_on_each(world, lambda kind=kind: matmul_flops(world.device, kind))  # type: ignore[misc]
        for kind in matmul_types(world.device)
        if all(kind in supported for supported in kinds)
    }

    def median(figure: Callable[[], float]) -> float:
        return statistics.median(_measured_on_each(world, figure))

    memory = median(lambda: memory_speed(world.device))
    return {
        "matmul_flops": products["bf16" if world.device.type == "cuda" else "fp32"],
        "matmul_flops_by_dtype": {kind: statistics.median(speeds) for kind, speeds in products.items()},
        "memory_bytes_per_s": memory,
        "host_bytes_per_s": memory if world.device.type == "cpu" else median(lambda: memory_speed(on_cpu)),
        "new_page_bytes_per_s": median(new_page_speed),
        "copy_bytes_per_s": _measured_on_each(world, lambda: copy_speed(world.device)),
        "operator_s": median(lambda: operator_seconds(world.device)),
    }


def _measured_on_each(world: World, figure: Callable[[], float]) -> list[float]:
    """Every rank's figure, measured on all of them at the same time."""
    dist.barrier(world.control_group)
    return _all(world, figure())


def _all(world: World, value: float) -> list[float]:
    return [float(str(figure)) for figure in world.gather(value)]


def _context(device: torch.device) -> int | None:
    """Bytes in use on the card outside torch's allocator, according to the driver, after torch's first computation.
    Other processes' memory on the card counts too: `shardkit doctor` names them."""
    if device.type != "cuda":
        return None
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(256, 256, device=device, dtype=dtype)
        (x @ x).add_(x).sum().item()
    return _beyond_allocator(device)


def _outside(world: World, context: int | None) -> dict[str, float | None]:
    """Bytes that a card needs beyond torch's allocator; call it after the ranks' one communicator was used."""
    now = _beyond_allocator(world.device)
    if context is None or now is None:
        return {"context_bytes": None, "communicator_bytes": None}
    contexts, communicators = _all(world, context), _all(world, max(0, now - context))
    return {
        "context_bytes": statistics.median(contexts),
        "communicator_bytes": statistics.median(communicators) if world.size > 1 else None,
    }


def _beyond_allocator(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free) - torch.cuda.memory_reserved(device)


def _axes(world: World) -> dict[str, tuple[str, dist.ProcessGroup]]:
    """(the collective of a layer, this rank's group) of each axis that ranks share."""
    axes = {}
    if world.context is not None:
        axes["cp"] = "all_to_all", world.context.group
    if world.mesh is not None:
        axes["tp"] = "all_reduce", world.mesh.get_group(2)
    if world.experts is not None:
        axes["ep"] = "all_to_all", world.experts.in_group.get_group()
    return axes


def _bus_speed(world: World, name: str, n_bytes: int, group: dist.ProcessGroup | None = None) -> float:
    factor, ranks = 2 if name == "all_reduce" else 1, world.size if group is None else group.size()
    return n_bytes / _collective(world, name, n_bytes, group) * factor * (ranks - 1) / ranks


def _collective(world: World, name: str, n_bytes: int, group: dist.ProcessGroup | None = None) -> float:
    """Seconds of one collective over `n_bytes` in total, in `group`, or among all ranks; for a gather, that is each
    rank's result, for an all-to-all what each rank sends."""
    ranks = world.size if group is None else group.size()
    part = torch.zeros(max(1, n_bytes // 4 // ranks), device=world.device)
    full = torch.zeros(max(1, n_bytes // 4) if name == "all_reduce" else part.numel() * ranks, device=world.device)
    received = torch.empty_like(full) if name == "all_to_all" else full
    works: dict[str, Callable[[], object]] = {
        "all_to_all": lambda: dist.all_to_all_single(received, full, group=group),
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: _ALL_GATHER(full, part, group=group),
        "reduce_scatter": lambda: _REDUCE_SCATTER(part, full, group=group),
    }
    calls = 1 if n_bytes >= _SMALL else 20
    times = [timed(world.device, works[name], calls) for _ in range(_ROUNDS + 1)]
    return max(_all(world, statistics.median(times[1:])))  # the slowest rank's, after one round to warm up


def _late(world: World) -> float:
    """Extra seconds of a collective after some work, compared with back to back: CPUs do not finish together."""
    square, tensor = torch.ones(1024, 1024), torch.zeros(2**14)

    def product_and_reduction() -> None:
        square @ square
        dist.all_reduce(tensor)

    def mean(work: Callable[[], object]) -> float:
        dist.barrier(world.control_group)
        return statistics.mean(_all(world, timed(world.device, work, 10)))

    rounds = [
        mean(product_and_reduction) - mean(lambda: square @ square) - mean(lambda: dist.all_reduce(tensor))
        for _ in range(_ROUNDS + 2)
    ]
    return max(0.0, statistics.median(rounds))


# The names since torch 2.13, which warns about the older ones.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# One device on its own


def matmul_types(device: torch.device) -> list[str]:
    """The compute types whose products can be timed; on the CPU, those it trains in."""
    if device.type != "cuda":
        return ["fp32", "bf16"]
    fp8 = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    return ["fp32", "tf32", "bf16", "fp16", *(["fp8"] if fp8 else [])]


def matmul_flops(device: torch.device, kind: str) -> float:
    """FLOP/s of products of two large square matrices of one of `matmul_types`."""
    n, before = _PRODUCT[device.type], torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    # Random numbers: a GPU multiplies ones a tenth faster, with less power.
    dtype, scale = _DTYPES.get(kind, torch.float8_e4m3fn), torch.ones((), device=device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    try:
        return 2 * n**3 / seconds(device, lambda: scaled_product(a, b.t(), scale) if kind == "fp8" else a @ b)
    finally:
        torch.set_float32_matmul_precision(before)


def memory_speed(device: torch.device) -> float:
    """Bytes read and written per second by an element-wise kernel."""
    n = _ELEMENTS[device.type]
    if device.type == "cuda":
        n = min(n, torch.cuda.mem_get_info(device)[0] // 32)
    a, b, c = (torch.ones(n, device=device) for _ in range(3))
    return 3 * 4 * n / seconds(device, lambda: torch.add(a, b, out=c))


def new_page_speed() -> float:
    """Bytes per second at which the system supplies new host memory to a large tensor."""
    n, on_cpu = 2**26, torch.device("cpu")
    new_s = seconds(on_cpu, lambda: torch.empty(n, dtype=torch.uint8).fill_(1))
    scratch = torch.empty(n, dtype=torch.uint8)
    return n / max(new_s - seconds(on_cpu, lambda: scratch.fill_(1)), 1e-9)


def copy_speed(device: torch.device) -> float:
    """Bytes per second from pinned host memory to the device; on the CPU, of a copy within host memory."""
    cuda = device.type == "cuda"
    source = torch.zeros(2**28 if cuda else 2**26, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty_like(source, device=device)
    return source.numel() / seconds(device, lambda: target.copy_(source, non_blocking=True))


def operator_seconds(device: torch.device) -> float:
    """Seconds per operator with next to nothing to compute, issued back to back: dispatch, or a kernel's launch."""
    x = torch.zeros(1, device=device)
    return seconds(device, lambda: x.add_(1.0))


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median seconds of one call, over rounds, after one call to warm up."""
    timed(device, work)
    once = max(timed(device, work), 1e-9)
    calls = max(1, min(1000, int(_ROUND_S / once)))
    rounds = max(1, min(_ROUNDS, int(_BUDGET_S / (once * calls))))
    return statistics.median(timed(device, work, calls) for _ in range(rounds))


def timed(device: torch.device, work: Callable[[], object], calls: int = 1) -> float:
    """Mean seconds per call, over `calls` in a row; on a GPU by its clock, which waiting for it does not add to."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - began) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    begin.record(torch.cuda.current_stream(device))
    for _ in range(calls):
        work()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls
