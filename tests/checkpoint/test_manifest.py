"""The manifest says what was written, and believes nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.checkpoint.native.manifest import (
    Chunk,
    CorruptCheckpoint,
    DataFile,
    Manifest,
    RunState,
    TensorEntry,
    _canonical,
    _digest,
    dump,
    parse,
    storable,
)
from shardkit.errors import CheckpointError

WEIGHT = TensorEntry("model.w", "float32", (10, 3), (Chunk(0, 20, 0, 0, (7,)), Chunk(20, 10, 1, 64, (8,))))
MANIFEST = Manifest(
    run=RunState(5, 100, 1, 0, 40, 1000, 2.5, {"note": "x"}),
    strategy="zero2",
    world_size=2,
    created="2026-01-01T00:00:00+0000",
    versions={"torch": "2.13"},
    files=(DataFile("rank_00000.bin", 80), DataFile("rank_00001.bin", 104)),
    tensors={"model.w": WEIGHT},
    scalars={"optim.w.step": 5},
)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named(number: float) -> None:
    with pytest.raises(CheckpointError, match=rf"^optim\.w\.step is {number} after step 5"):
        storable(MANIFEST.run, {"optim.b.step": 5, "optim.w.step": number})
    assert storable(MANIFEST.run, MANIFEST.scalars) == MANIFEST.run


def changed(**body: Any) -> bytes:
    """The manifest with some keys replaced and the digest made to fit: what a hostile author would write."""
    document = json.loads(dump(MANIFEST))["manifest"]
    for path, value in body.items():
        *parents, last = path.split("__")
        place = document
        for key in parents:
            place = place[key]
        place[last] = value
    text = _canonical(document)
    return f'{{"digest":"{_digest(text)}","manifest":{text}}}'.encode()


def test_what_is_written_is_read() -> None:
    assert parse(dump(MANIFEST), "m") == MANIFEST


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(dump(MANIFEST)) - 1), mask=st.integers(1, 255))
def test_a_flipped_byte_is_noticed_or_means_nothing(at: int, mask: int) -> None:
    content = bytearray(dump(MANIFEST))
    content[at] ^= mask
    try:
        assert parse(bytes(content), "m") == MANIFEST
    except CheckpointError:
        pass


@given(length=st.integers(0, len(dump(MANIFEST)) - 2))
def test_a_truncated_manifest_is_noticed(length: int) -> None:
    with pytest.raises(CorruptCheckpoint):
        parse(dump(MANIFEST)[:length], "m")


def tensor(*chunks: list[Any], dtype: str = "float32", shape: Sequence[int] = (10, 3)) -> dict[str, Any]:
    """The manifest's only tensor, otherwise."""
    return dict(tensors={"model.w": {"dtype": dtype, "shape": list(shape), "chunks": list(chunks)}})


HOSTILE = {
    "path outside": dict(files=[["../../etc/passwd", 80], ["rank_00001.bin", 104]]),
    "absolute path": dict(files=[["/etc/passwd", 80], ["rank_00001.bin", 104]]),
    "huge shape": dict(world_size=10**30),
    "world of none": dict(world_size=0),
    "text as number": dict(run__step="5"),
    "true as number": dict(run__step=True),
    "infinite scalar": dict(scalars={"optim.w.step": "Infinity"}),
    "other byte order": dict(byte_order="big"),
    "tiny blocks": dict(block_bytes=1),
    "dtype": tensor(dtype="complex64"),
    "negative shape": tensor(shape=[-10, 3]),
    "hole": tensor([0, 20, 0, 0, [7]]),
    "overlap": tensor([0, 20, 0, 0, [7]], [10, 20, 1, 0, [8]]),
    "negative offset": tensor([0, 20, 0, -4, [7]], [20, 10, 1, 64, [8]]),
    "behind the end": tensor([0, 20, 0, 4, [7]], [20, 10, 1, 64, [8]]),
    "no such file": tensor([0, 20, 5, 0, [7]], [20, 10, 1, 64, [8]]),
    "no crc": tensor([0, 20, 0, 0, []], [20, 10, 1, 64, [8]]),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_impossible_values_are_refused(case: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        parse(changed(**HOSTILE[case]), "m")


def test_tensors_that_share_bytes_are_refused() -> None:
    """A few megabytes of files would be read as gigabytes of weights, and called intact."""
    entry = {"dtype": "float32", "shape": [20], "chunks": [[0, 20, 0, 0, [7]]]}
    assert parse(changed(tensors={"model.a": entry, "model.b": entry}), "m").n_bytes == 184
    with pytest.raises(CorruptCheckpoint, match="some bytes are used more than once"):
        parse(changed(tensors={f"model.w{i}": entry for i in range(3)}), "m")


def test_a_shape_of_very_many_sizes_is_refused_at_once() -> None:
    entry = {"dtype": "float32", "shape": [2**62 - 1] * 60_000, "chunks": []}
    began = time.process_time()
    with pytest.raises(CorruptCheckpoint, match="60000 dimensions"):
        parse(changed(tensors={"model.w": entry}), "m")
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"digest":1,"manifest":[]}', b"[" * 100_000, b"9" * 10_000],
    ids=["empty", "object", "list", "null", "not utf-8", "wrong types", "deep", "long number"],
)
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        parse(content, "m")
