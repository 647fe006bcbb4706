"""The source of a conversion: named tensors, of which any range can be read alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...errors import CheckpointError
from ...files import open_regular
from ..native.manifest import RunState
from ..native.reader import TensorSpec

RESTORE = "restore it from a copy"
PIECE_BYTES = 8 * 2**20
"""Most bytes of a tensor that a conversion holds at once."""


@contextmanager
def reading(path: Path, fix: str = RESTORE) -> Iterator[None]:
    """Turn what a damaged or malformed file makes a reader raise into an error that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be read: {reason}", "check its path, owner and mode") from error
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {words}", fix) from error


@dataclass
class Source:
    """An open checkpoint of any kind, with shardkit's names: `model.<fqn>`, `buffer.<fqn>`, `optim.<fqn>.<state>`."""

    kind: str  # name of the format in messages and in the manifest of a converted checkpoint
    path: Path
    tensors: Mapping[str, TensorSpec]
    # (name, start, out) fills the 1-D CPU tensor `out`, of the tensor's dtype, from element `start` on
    read_into: Callable[[str, int, torch.Tensor], None]
    close: Callable[[], None]
    scalars: dict[str, float] = field(default_factory=dict)  # optimizer states that are one number, by name
    step: int = 0  # number of optimizer steps; 0 if the source does not say
    # further name of a tied weight (`head.weight`) → its name in `tensors`; both without `model.`
    ties: dict[str, str] = field(default_factory=dict)
    run: RunState | None = None  # state of the run, if shardkit saved it; `None` for other sources
    notes: list[str] = field(default_factory=list)  # one line on each part of the checkpoint that is left out
    bytes_read: Callable[[], int] = lambda: 0  # returns the bytes requested from files of other tools so far

    def read(self, name: str, start: int = 0, length: int | None = None) -> torch.Tensor:
        """The elements [start, start + length) of the flattened tensor, 1-D; `None` = to its end."""
        spec = self.tensors[name]
        elements = torch.empty(math.prod(spec.shape) - start if length is None else length, dtype=spec.dtype)
        self.read_into(name, start, elements)
        return elements

    def pieces(self, name: str, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """Yield the flattened tensor in order, in pieces of at most `PIECE_BYTES`, each a new 1-D tensor on the CPU."""
        return self.range_of(name, 0, math.prod(self.tensors[name].shape), dtype)

    def by_plain_name(self) -> dict[str, tuple[str, TensorSpec]]:
        """Each tensor with its name, by its name without the kind; tied ones by each name."""
        plain = {name.partition(".")[2]: (name, spec) for name, spec in self.tensors.items()}
        return plain | {alias: plain[name] for alias, name in self.ties.items() if name in plain}

    def range_of(self, name: str, start: int, length: int, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """Yield the elements [start, start + length) of the flattened tensor, in pieces as `pieces` does."""
        spec = self.tensors[name]
        step = PIECE_BYTES // spec.dtype.itemsize
        for at in range(start, start + length, step):
            piece = self.read(name, at, min(step, start + length - at))
            yield piece if dtype is None or dtype == spec.dtype else cast(piece, dtype, name)


def cast(piece: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast a piece of the tensor `name` to another type."""
    out = piece.to(dtype)
    if not torch.equal(torch.isfinite(out), torch.isfinite(piece)):
        largest = piece[torch.isfinite(piece)].abs().max().item()
        raise CheckpointError(
            f"{name} holds {largest:.3g}, more than {str(dtype).removeprefix('torch.')} can hold",
            "use --dtype bf16 or fp32",
        )
    return out


@dataclass(frozen=True)
class Extent:
    """Runs of consecutive elements of a flattened tensor, which lie one after another in a mapped file."""

    content: npt.NDArray[np.uint8]  # the bytes of all runs
    # index of each run's first element in the flattened tensor, ascending
    starts: tuple[int, ...] | npt.NDArray[np.int64]
    run: int  # number of elements in each run

    @cached_property
    def run_starts(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.starts, dtype=np.int64)


@dataclass(frozen=True)
class FileTensor(TensorSpec):
    """A tensor whose elements lie in mapped files, in one or several extents."""

    extents: tuple[Extent, ...] = ()


def map_file(file: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file, of which the kernel reads those that are used."""
    with open_regular(file) as opened:
        return np.memmap(opened, np.uint8, "r")


def mapped(tensor: torch.Tensor) -> FileTensor:
    """A contiguous tensor whose memory is a mapped file, as safetensors and `torch.load(mmap=True)` give it."""
    content = tensor.detach().view(-1).view(torch.uint8).numpy()
    return FileTensor(tuple(tensor.shape), tensor.dtype, (Extent(content, (0,), tensor.numel()),))


def file_source(kind: str, path: Path, tensors: Mapping[str, FileTensor], **fields: Any) -> Source:
    """A source whose tensors lie in mapped files; ranges are read from any thread. `fields`: its further attributes."""
    for name, tensor in tensors.items():  # its extents have to hold each element exactly once
        spans = [np.stack([e.run_starts, e.run_starts + e.run], axis=1) for e in tensor.extents if e.run]
        ordered = np.concatenate([np.empty((0, 2), np.int64), *spans])
        ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
        ends, starts = np.append(0, ordered[:, 1]), np.append(ordered[:, 0], math.prod(tensor.shape))
        wrong = np.flatnonzero(ends != starts)
        if len(wrong):
            at = min(ends[wrong[0]], starts[wrong[0]])
            raise CheckpointError(f"element {at} of {name} is missing from {path}", RESTORE)
    n_bytes = 0

    def read_into(name: str, start: int, out: torch.Tensor) -> None:
        nonlocal n_bytes
        tensor, target, stop = tensors[name], out.view(torch.uint8).numpy(), start + out.numel()
        size = tensor.dtype.itemsize
        for extent in tensor.extents:
            low = max(0, int(np.searchsorted(extent.run_starts, start, side="right")) - 1)
            high = int(np.searchsorted(extent.run_starts, stop, side="left"))
            for index, begin in enumerate(extent.run_starts[low:high].tolist(), low):
                first, end = max(start, begin), min(stop, begin + extent.run)
                if first < end:
                    offset = (index * extent.run + first - begin) * size
                    target[(first - start) * size : (end - start) * size] = extent.content[
                        offset : offset + (end - first) * size
                    ]
        n_bytes += out.nbytes

    return Source(kind, path, tensors, read_into, lambda: None, bytes_read=lambda: n_bytes, **fields)


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def canonical(names: Iterable[str]) -> dict[str, str]:
    """Map each name to the same name without the parts that DDP, FSDP1, torch.compile and checkpoint wrappers add."""
    all_names = list(names)
    wrapped = bool(all_names) and all(name.startswith("module.") for name in all_names)
    out = {}
    for name in all_names:
        plain = name.removeprefix("module.") if wrapped else name
        for wrapper in _WRAPPERS:
            plain = plain.replace(wrapper, "")
        out[name] = plain
    return out


def logical(fqn: str, dtype: torch.dtype) -> str:
    """shardkit's name of a tensor, `model.<fqn>` or `buffer.<fqn>`, from a source that does not tell them apart.
    Batch-norm statistics and tensors that are not floats are buffers."""
    is_buffer = not dtype.is_floating_point or fqn.rpartition(".")[2] in _BUFFERS
    return f"{'buffer' if is_buffer else 'model'}.{fqn}"


Prefix = tuple[str, str]
"""(prefix to remove from the model's names, prefix to add instead): gives the names in the file."""


def find_prefix(names: list[str], saved: Mapping[str, object]) -> Prefix:
    """The prefix change that turns every name of the model into a saved name; ("", "") if no change does. `names`: the
    model's parameters. `saved`: the tensors of the file, by name."""
    if any(name in saved for name in names):
        return "", ""
    for name in names:
        for saved_name in saved:
            if saved_name.endswith(f".{name}"):
                prefix = "", saved_name.removesuffix(name)
            elif name.endswith(f".{saved_name}"):
                prefix = name.removesuffix(saved_name), ""
            else:
                continue
            if all(with_prefix(name, prefix) in saved for name in names):
                return prefix
    return "", ""


def with_prefix(name: str, prefix: Prefix) -> str:
    """The name in the file of a parameter of the model."""
    removed, added = prefix
    return added + name.removeprefix(removed)
