"""This node's GPUs, without torch."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ...errors import LaunchError


def visible_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """GPUs that a process started here would see: CUDA_VISIBLE_DEVICES, else the driver's devices. The emulated GPUs of
    a rehearsal have no device files: there their number is a variable."""
    emulated = environ.get("SHARDKIT_REHEARSAL") or environ.get("SHARDKIT_COMPUTED")
    if emulated and environ.get("EMUCUDA_DEVICES", "").isdecimal():
        return int(environ["EMUCUDA_DEVICES"])
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    present = len([path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    if listed is None:
        return present
    named = itertools.takewhile(lambda entry: _is_device(entry.strip(), present), listed.split(","))
    return min(present, len(list(named)))


def _is_device(entry: str, present: int) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES can be a device: CUDA ignores entries from the first invalid one on."""
    return int(entry) < present if entry.isdigit() else entry.startswith(("GPU-", "MIG-"))


def grow_segments(environ: MutableMapping[str, str], root: Path = Path("/")) -> None:
    """Let the segments of torch's CUDA allocator grow, against fragmentation, unless the user set the allocator up.
    Call it before torch is imported. Does nothing without a GPU."""
    if visible_gpus(environ, root) and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def pci_addresses(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """PCI addresses of the GPUs that a process started here would see, in order; empty if the driver does not say.
    CUDA's default order is by speed: on machines with different GPUs this order may differ."""
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [folder.name for folder in folders]
    addresses = []
    for entry in (entry.strip() for entry in listed.split(",")):
        if entry.isdigit() and int(entry) < len(folders):
            addresses.append(folders[int(entry)].name)
        elif entry.startswith("GPU-"):
            addresses += [folder.name for folder in folders if f" {entry}" in _information(folder)]
    return addresses


def model_names(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """The driver's names of the GPUs of `pci_addresses`; torch uses the same names."""
    names = []
    for address in pci_addresses(environ, root):
        information = _information(root / "proc/driver/nvidia/gpus" / address)
        names += re.findall(r"^Model:\s*(.+?)\s*$", information, re.MULTILINE)
    return names


def _information(folder: Path) -> str:
    try:
        return (folder / "information").read_text().replace("\t", " ")
    except OSError:
        return ""


def flight_recorder(run_dir: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Settings that make NCCL's last collectives readable after a timeout, unless the user has set them. torch 2.9 and
    later read them, and also the older names; it writes a file per rank, for `torchfrtrace`."""
    defaults = {
        "TORCH_FR_BUFFER_SIZE": ("2000", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", ""),
        "TORCH_FR_DUMP_TEMP_FILE": (
            str(Path(run_dir).absolute() / "logs" / "nccl_rank_"), "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        ),
    }  # fmt: skip
    return {
        name: value
        for name, (value, older) in defaults.items()
        if name not in environ and (not older or older not in environ)
    }


def ranks_per_node(option: str, device: str, environ: Mapping[str, str] = os.environ) -> int:
    """`auto` → one rank per visible GPU; a number stays."""
    if re.fullmatch(r"[0-9]{1,5}", option) and int(option) > 0:
        return int(option)
    if option != "auto":
        raise LaunchError(f"--nproc-per-node {option!r} is not a number of ranks", "pass a number from 1, or auto")
    count = 0 if device == "cpu" else visible_gpus(environ)
    if count == 0:
        cause = "run.device=cpu" if device == "cpu" else "this machine has no GPU"
        raise LaunchError(f"--nproc-per-node auto means one rank per GPU, but {cause}", "pass --nproc-per-node N")
    return count
