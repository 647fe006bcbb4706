"""Known GPUs: the figures that the planner needs for a card that is not here, and peak FLOP/s for MFU.

Figures are from the makers' data sheets; usable memory is the driver's total. Memory outside torch's allocator (CUDA
context, NCCL's buffers) is a typical value until `shardkit doctor --calibrate` or a run measures it.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches

from .. import errors
from ..errors import ConfigError

GIB = 2**30
TYPICAL = "typical"


@dataclass(frozen=True)
class Gpu:
    """One card."""

    name: str
    device_name: str  # the name from `torch.cuda.get_device_name`
    memory: int  # bytes that the driver reports
    capability: tuple[int, int]  # compute capability
    multiprocessors: int  # their number; kernels that share a sum among all of them take memory for each
    hbm_gb_s: float  # memory bandwidth, GB/s
    link_gb_s: float  # GB/s to another card of the machine in one direction (NVLink, or PCIe without it)
    pcie_gb_s: float  # GB/s to host memory in one direction
    network_gb_s: float  # GB/s to other machines in a typical cluster of such cards
    _: KW_ONLY
    context: int  # bytes of a CUDA context with torch's and cuBLAS's kernels
    per_communicator: int = 400 * 2**20  # bytes that NCCL takes for each process group in use
    overhead_from: str = TYPICAL  # source of `context` and `per_communicator`

    @property
    def threads_per_multiprocessor(self) -> int:
        """The most that run at a time (table of compute capabilities in the CUDA programming guide)."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}.get(self.capability, 2048)

    @property
    def blas_workspace(self) -> int:
        """Bytes that torch takes for cuBLAS in each thread that multiplies."""
        return blas_workspace(self.capability)


def blas_workspace(capability: tuple[int, int], requested: str = "") -> int:
    """Bytes that torch takes for cuBLAS, once in each thread that multiplies (torch's CublasHandlePool.cpp)."""
    # CUBLAS_WORKSPACE_CONFIG holds pairs of KiB and their number.
    if pairs := re.findall(r":(\d+):(\d+)", requested):
        return sum(int(kib) * int(number) for kib, number in pairs) * 2**10
    return 32 * 2**20 if capability[0] >= 9 else 8320 * 2**10


def _gpu(
    name: str, device_name: str, gib: float, capability: tuple[int, int], multiprocessors: int,
    hbm: float, link: float, pcie: float, network: float, context_mib: int = 520,
) -> Gpu:  # fmt: skip
    speeds = hbm, link, pcie, network
    return Gpu(name, device_name, int(gib * GIB), capability, multiprocessors, *speeds, context=context_mib * 2**20)


_HOPPER_CONTEXT_MIB = 760
"""What most programs of one process took on an H200 (torch 2.11, CUDA 13; benchmarks/results/gpu_rehearsed.json)."""


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", "NVIDIA B200", 178.4, (10, 0), 148, 8000, 900, 63, 50),
        _gpu("h200", "NVIDIA H200", 139.8, (9, 0), 132, 4800, 450, 63, 50, _HOPPER_CONTEXT_MIB),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 79.1, (9, 0), 132, 3350, 450, 63, 50, _HOPPER_CONTEXT_MIB),
        _gpu("h100-pcie", "NVIDIA H100 PCIe", 79.1, (9, 0), 114, 2000, 63, 63, 25, _HOPPER_CONTEXT_MIB),
        _gpu("gh200", "NVIDIA GH200 480GB", 94.5, (9, 0), 132, 4000, 450, 450, 50, _HOPPER_CONTEXT_MIB),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 79.2, (8, 0), 108, 2039, 300, 31, 25),
        _gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", 39.4, (8, 0), 108, 1555, 300, 31, 25),
        _gpu("a40", "NVIDIA A40", 44.4, (8, 6), 84, 696, 31, 31, 12.5),
        _gpu("a10g", "NVIDIA A10G", 22.1, (8, 6), 80, 600, 31, 31, 3),
        _gpu("l40s", "NVIDIA L40S", 44.4, (8, 9), 142, 864, 31, 31, 12.5),
        _gpu("l4", "NVIDIA L4", 22.0, (8, 9), 58, 300, 16, 16, 3),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 23.5, (8, 9), 128, 1008, 31, 31, 1.2),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 23.6, (8, 6), 82, 936, 31, 31, 1.2),
        _gpu("a6000", "NVIDIA RTX A6000", 47.4, (8, 6), 84, 768, 31, 31, 3),
        _gpu("v100", "Tesla V100-SXM2-32GB", 31.7, (7, 0), 80, 900, 150, 15, 3),
        _gpu("t4", "Tesla T4", 14.6, (7, 5), 40, 320, 15, 15, 3),
    )
}
DEFAULT = "h100"


def find_gpu(name: str) -> Gpu:
    """A card of the table, by its short name or words of the driver's name: rtx4090, RTX 4090, A100-SXM4-40GB."""
    words = _words(name)
    matches = [gpu for gpu in GPUS.values() if words and words <= _words(f"{gpu.name} {gpu.device_name}")]
    if len(matches) > 1:  # "A100" is in several names, and a100 is one of them
        matches = [gpu for gpu in matches if _words(gpu.name) <= words] or matches
    if len(matches) != 1:
        close = [gpu.name for gpu in matches] or get_close_matches(name.lower(), GPUS, n=1)
        raise ConfigError(
            f"--gpu {name!r} is {'more than one card' if matches else 'not'} in the table of GPUs",
            (f"did you mean {' or '.join(close)}? " if close else "")
            + f"it has: {', '.join(GPUS)}; or give --gpu-memory, for example 80GB",
        )
    return matches[0]


def said_of(gpu: Gpu) -> str:
    """The card's short name and the driver's: `a100 (NVIDIA A100-SXM4-80GB)`."""
    return f"{gpu.name} ({gpu.device_name})"


def other_sizes(gpu: Gpu) -> list[Gpu]:
    """Cards of the table that a short name such as `a100` could mean too, with another amount of memory."""
    entry = GPUS.get(gpu.name)
    if entry is None:
        return []
    variants = (variant for variant in GPUS.values() if variant.name.startswith(f"{gpu.name}-"))
    return [variant for variant in variants if variant.memory != entry.memory]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def parse_bytes(text: str, source: str) -> int:
    """Bytes of "80GB" (10⁹), "24GiB" or "24G" (2³⁰), …."""
    try:
        return errors.parse_bytes(text, errors.ANY_UNIT)
    except ValueError:
        raise ConfigError(
            f"{source} {text!r} is not an amount of memory", "write a number and a unit: 80GB, 24GiB, 512MiB"
        ) from None


_COLUMNS = {"fp32": 0, "tf32": 1, "bf16": 2, "pure_bf16": 2, "fp16": 3}  # fp8: the table has no peak for it
# Dense peaks in TFLOP/s without sparsity, from NVIDIA's data sheets and architecture white papers: fp32 outside tensor
# cores, TF32, and bf16/fp16 with fp32 accumulation. None = the chip has no such unit. The first pattern found in the
# device name wins, so variants come before their family.
_PEAKS: tuple[tuple[str, float, float | None, float | None, float | None], ...] = (
    # pattern                     fp32   tf32    bf16    fp16
    (r"\bGB200\b", 80.0, 1250.0, 2500.0, 2500.0),
    (r"\bB200\b", 75.0, 1100.0, 2250.0, 2250.0),
    (r"\bGH200\b", 67.0, 494.7, 989.4, 989.4),
    (r"\bH200 NVL\b", 60.0, 417.5, 835.5, 835.5),
    (r"\bH200\b", 67.0, 494.7, 989.4, 989.4),
    (r"\bH100 NVL\b", 60.0, 417.5, 835.5, 835.5),
    (r"\bH100 PCIe\b", 51.2, 378.0, 756.0, 756.0),
    (r"\bH100( 80GB HBM3|[ -]SXM)", 66.9, 494.7, 989.4, 989.4),
    (r"\bA100\b", 19.5, 156.0, 312.0, 312.0),
    (r"\bA40\b", 37.4, 74.8, 149.7, 149.7),
    (r"\bA30\b", 10.3, 82.0, 165.0, 165.0),
    (r"\bA10G\b", 35.0, 35.0, 70.0, 70.0),
    (r"\bA10\b", 31.2, 62.5, 125.0, 125.0),
    (r"\bL40S\b", 91.6, 183.0, 362.0, 362.0),
    (r"\bL40\b", 90.5, 90.5, 181.0, 181.0),
    (r"\bL4\b", 30.3, 60.0, 121.0, 121.0),
    (r"\bRTX 6000 Ada\b", 91.1, 182.1, 364.2, 364.2),
    (r"\bRTX A6000\b", 38.7, 77.4, 154.8, 154.8),
    (r"\bRTX 4090(?! D| Laptop)\b", 82.6, 82.6, 165.2, 165.2),
    (r"\bRTX 3090(?! Ti)\b", 35.6, 35.6, 71.0, 71.0),
    (r"\bV100S-PCIE\b", 16.4, None, None, 130.0),
    (r"\bV100-SXM[23]\b", 15.7, None, None, 125.0),
    (r"\bV100-PCIE\b", 14.0, None, None, 112.0),
    (r"\bT4\b", 8.1, None, None, 65.0),
)


def gpu_peak_flops(device_name: str, mode: str) -> float | None:
    """Dense peak FLOP/s of a GPU by the name `torch.cuda.get_device_name` gives; None when it is not known.

    `mode` is the matmul type (`precision.mode`). A chip without such a unit (bf16 on V100) gives None too, and so
    does a MIG slice, which has only a part of the chip, and fp8.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    column = _COLUMNS.get(mode)
    if column is None:
        return None
    for pattern, *peaks in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            peak = peaks[column]
            return None if peak is None else peak * 1e12
    return None
