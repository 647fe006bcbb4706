"""Write a state dict in the format of torch.save, a piece of a tensor at a time.

`torch.load(file, weights_only=True)` reads the file, also with `mmap=True`.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from ..native.reader import TensorSpec
from ..native.writer import byte_view

_FIXED_HEADER, _ZIP64_EXTRA, _ALIGNMENT = 30, 20, 64
Pieces = Callable[[str], Iterable[torch.Tensor]]


def write_state_dict(file: Path, tensors: Mapping[str, TensorSpec], ties: Mapping[str, str], pieces: Pieces) -> None:
    """Write tensors to a new file, each under all of its names.

    Args:
        ties: further name of a tensor → its name in `tensors`; both share their elements when the file is loaded.
        pieces: gives a tensor's elements in order, as 1-D tensors of the type that `tensors` says.
    """
    # torch.save itself writes the pickle and the small entries, to a file of holes: the tensors are never touched.
    # That file cannot be filled in place: readers that look at checksums (llama.cpp's, unzip) would find wrong ones.
    layout = file.with_name(f"{file.name}.layout")
    state = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in tensors.items()}
    state.update({alias: state[name] for alias, name in ties.items()})
    with torch.serialization.skip_data():
        torch.save(state, layout)
    del state
    names = list(tensors)  # arrays are numbered in this order
    with zipfile.ZipFile(layout) as holes, zipfile.ZipFile(file, "x", allowZip64=True) as archive:
        for entry in holes.infolist():
            part = entry.filename.partition("/")[2]
            new = zipfile.ZipInfo(f"{file.stem}/{part}", date_time=(1980, 1, 1, 0, 0, 0))
            if part.startswith("data/"):
                # An extra field ("FB", as torch's own), which readers skip, aligns the array for a memory map.
                at = archive.start_dir + _FIXED_HEADER + len(new.filename) + _ZIP64_EXTRA + 4
                padding = -at % _ALIGNMENT
                new.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
                with archive.open(new, "w", force_zip64=True) as out:
                    for piece in pieces(names[int(part.removeprefix("data/"))]):
                        out.write(byte_view(piece))
            elif not part.startswith("."):  # `.format_version` and the like promise torch's own order of bytes
                archive.writestr(new, holes.read(entry))
    layout.unlink()
