"""Rows tokenised while they are read: each once an epoch, whatever the number of ranks and of interruptions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.data.loader import BatchSchedule, State, StepLoader, WindowOrder
from shardkit.data.rows import Piece, RowFormat
from shardkit.data.text_data import Streamed
from shardkit.data.tokenizer import load_tokenizer
from shardkit.data.windows import IGNORE_INDEX
from shardkit.errors import ConfigError, DataError

from .chats import conversation, write_lines
from .test_text import config, everything, opened

pytest.importorskip("transformers")


@pytest.mark.parametrize("sizes", [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], list(range(1, 30))])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_each_row_once_window_by_window(sizes: list[int], shuffle: bool) -> None:
    order = WindowOrder(np.array(sizes), seed=5, shuffle=shuffle)
    epochs = [order.indices(epoch, 0, order.n) for epoch in range(3)]
    piece_of = np.repeat(np.arange(len(sizes)), sizes)
    for epoch, rows in enumerate(epochs):
        assert sorted(rows.tolist()) == list(range(sum(sizes)))
        again = WindowOrder(np.array(sizes), 5, shuffle)
        assert rows.tolist() == [int(again.indices(epoch, i, i + 1)[0]) for i in range(order.n)]
        held: list[int] = []
        n_loads = 0
        for piece in piece_of[rows].tolist():
            n_loads += piece not in held
            held = [*(p for p in held if p != piece), piece][-WindowOrder.WINDOW :]
        assert n_loads == len(sizes), "a reader that holds a window's pieces reads each once"
    assert (epochs[0].tolist() == epochs[1].tolist()) is (not shuffle)


def stream_of(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Streamed:
    monkeypatch.setattr(RowFormat, "piece_bytes", 2000)
    data = opened(tmp_path, path, **{"streaming": True, "val_path": str(path), **keys})
    found = data.dataset("train")
    assert isinstance(found, Streamed)
    return found


def ids_of(tmp_path: Path, batch: Any) -> list[int]:
    tokenizer = load_tokenizer(tmp_path / "tok")
    texts = [tokenizer.decode(sample["tokens"].tolist()) for sample in batch]
    return [int(re.search(r"ask (\d+) ", text).group(1)) for text in texts]


def test_interruptions_and_other_world_sizes_repeat_and_skip_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 130
    rows = [{"messages": conversation(i)} for i in range(n)]
    path = tmp_path / "shards"
    for shard in range(2):
        part = rows[shard * 65 : shard * 65 + 65]
        write_lines(path / f"{shard}.jsonl", [*part[:9], "", *part[9:]])
    taken: list[int] = []
    state, step = State(), 0
    for world, steps in ((2, 4), (3, 3), (1, 5), (2, 10)):  # global batches of 12
        after: list[State] = []
        for rank in range(world):
            data = stream_of(tmp_path, path, monkeypatch)
            schedule = BatchSchedule(len(data), 12, 12 // world, 1, rank, world, 3, True, False, data.order(3, True))
            loader = StepLoader(data, schedule, list, state=state, n_steps=steps)
            for batch in loader:
                for micro, is_filler in batch.micro_batches:
                    taken += [] if is_filler else ids_of(tmp_path, micro)
            after.append(batch.state_after)
            loader.close()
        assert len(set(after)) == 1
        state, step = after[0], step + steps
    assert step == 22 and (state.epoch, state.next_sample) == (2, 0)
    assert sorted(taken) == sorted([*range(n), *range(n)])


def test_rows_are_those_of_the_tokenised_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i, turns=1 + i % 2)} for i in range(40)))
    few = write_lines(tmp_path / "few.jsonl", ({"messages": conversation(i)} for i in range(4)))
    streamed = stream_of(tmp_path, path, monkeypatch, seq_len=200, val_path=str(few))
    entries = [entry for entry in (tmp_path / "cache").glob("documents-*") if entry.is_dir()]
    assert len(entries) <= 1, "no more than the validation data is tokenised beforehand"
    whole = everything(opened(tmp_path, path))
    assert len(streamed.stream.pieces) > 3
    for (tokens, mask), sample in zip(whole, map(streamed.__getitem__, range(40)), strict=True):
        assert sample["tokens"].tolist() == tokens[:-1]
        expected = [token if counts else IGNORE_INDEX for token, counts in zip(tokens[1:], mask[1:], strict=True)]
        assert sample["targets"].tolist() == expected
    middle = sorted(len(tokens) for tokens, _ in whole)[20]
    short = stream_of(tmp_path, path, monkeypatch, seq_len=middle - 1, long_samples="drop")
    kept = [bool((short[i]["targets"] != IGNORE_INDEX).any()) for i in range(40)]
    assert kept == [len(tokens) <= middle for tokens, _ in whole] and 20 < sum(kept) < 40


def test_bad_rows_of_a_stream_have_no_targets_up_to_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[Any] = [{"messages": conversation(i)} for i in range(20)]
    path = write_lines(tmp_path / "chat.jsonl", [*rows[:7], "{", *rows[7:]])
    val = write_lines(tmp_path / "val.jsonl", rows)
    with pytest.raises(DataError, match=r"chat.jsonl, row 8 from byte 0 on: not JSON"):
        stream_of(tmp_path, path, monkeypatch, val_path=str(val))[7]
    data = stream_of(tmp_path, path, monkeypatch, val_path=str(val), max_bad_rows=0.01)
    assert [bool((data[i]["targets"] != IGNORE_INDEX).any()) for i in range(21)] == [i != 7 for i in range(21)]
    assert "row 8 from byte 0 on is left out: not JSON" in caplog.text


def test_a_stream_of_rows_that_are_all_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "ask " * 99, "completion": "answer"} for _ in range(9)]
    val = write_lines(tmp_path / "val.jsonl", [{"prompt": "ask", "completion": "answer"}] * 4)
    data = stream_of(tmp_path, write_lines(tmp_path / "long.jsonl", rows), monkeypatch, val_path=str(val))
    assert all((data[i]["targets"] == IGNORE_INDEX).all() for i in range(8))
    first = "row 1 from byte 0 on is longer than 65 tokens and is left out: no target would remain"
    assert caplog.text.count("is longer than") == caplog.text.count(first) == 1
    with pytest.raises(DataError, match=r"none of the 9 rows .* train.seq_len=64"):
        data[8]


@pytest.mark.parametrize(("how", "done"), [("truncate", "truncated"), ("drop", "dropped")])
def test_rows_of_a_stream_that_are_too_long_are_counted(
    how: str, done: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": "ask " * (200 if i % 4 == 3 else 9)} for i in range(120)]
    val = write_lines(tmp_path / "val.jsonl", [{"text": "ask this"}] * 4)
    path = write_lines(tmp_path / "rows.jsonl", rows)
    whole = [len(tokens) for tokens, _ in everything(opened(tmp_path, path))]
    data = stream_of(tmp_path, path, monkeypatch, val_path=str(val), long_samples=how)
    caplog.clear()
    taken = [data[i] for i in range(100)]
    kept = [len(sample["tokens"]) + 1 for sample in taken if (sample["targets"] != IGNORE_INDEX).any()]
    left_out = sum(whole[:100]) - sum(kept)
    assert left_out > 25 * 100
    assert caplog.text.count("row 4 from byte 0 on is longer than 65 tokens") == 1
    said = f"rows.jsonl rows longer than 65 tokens, of 100 that this process has read: 25 {done} ({left_out:,} tokens"
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_that_is_damaged_between_its_rows_is_refused_by_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    path, table = tmp_path / f"rows.{kind}", pa.Table.from_pylist([{"text": f"ask {i} " * 9} for i in range(400)])
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=50, compression="zstd", use_dictionary=False)
    else:
        with ipc.new_stream(str(path), table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as sink:
            sink.write_table(table, max_chunksize=50)
    val = write_lines(tmp_path / "val.jsonl", [{"text": "ask this"}] * 4)
    content = bytearray(path.read_bytes())
    mark = content.index(b"\x28\xb5\x2f\xfd")  # the first block that zstd wrote
    content[mark : mark + 64] = bytes(64)
    path.write_bytes(bytes(content))
    with pytest.raises(DataError) as raised:
        stream_of(tmp_path, path, monkeypatch, val_path=str(val))[0]
    assert str(path) in raised.value.cause and "\n" not in raised.value.cause


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_the_digest_sees_contents_of_the_same_size(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    def digests(word: str) -> dict[str, str]:
        rows = [{"messages": conversation(i)} for i in range(50)]
        rows[30]["messages"][-1]["content"] = word
        path = tmp_path / f"chat.{kind}"
        if kind == "jsonl":
            write_lines(path, rows)
        elif kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path, compression="none", use_dictionary=False)
        else:
            feather.write_feather(pa.Table.from_pylist(rows), path, compression="uncompressed")
        sizes.append(path.stat().st_size)
        return stream_of(tmp_path, path, monkeypatch, val_path=str(val)).stream.digests()

    sizes: list[int] = []
    val = write_lines(tmp_path / "val.jsonl", ({"messages": conversation(i)} for i in range(4)))
    first, other, again = digests("there"), digests("where"), digests("there")
    assert len(set(sizes)) == 1
    assert first == again and first["tokenizer"] == other["tokenizer"] and first["data"] != other["data"]


@pytest.mark.parametrize("keys", [{"packing": "packed"}, {"long_samples": "split"}, {"val_path": None}])
def test_settings_that_streaming_cannot_have_are_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    from shardkit.data.text_data import TextData

    path = write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i)} for i in range(9)))
    settings = config(tmp_path, path, **{"streaming": True, "val_path": str(path), **keys})
    with pytest.raises(ConfigError, match=r"data.streaming=true with data\."):
        TextData(settings, 512, "model.vocab_size").dataset("train")


@pytest.mark.parametrize("shuffle", [True, False])
def test_parts_of_a_row_group_are_read_once_and_in_order(
    shuffle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row groups of several parts between small ones: every row once, each group decoded once an epoch."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from shardkit.data.rows import Parquet

    rows = [{"messages": conversation(i)} for i in range(300)]
    path = tmp_path / "rows.parquet"
    writer = parquet.ParquetWriter(path, pa.Table.from_pylist(rows).schema)
    for start, stop in ((0, 5), (5, 130), (130, 135), (135, 140), (140, 290), (290, 300)):
        writer.write_table(pa.Table.from_pylist(rows[start:stop]))
    writer.close()
    whole = [tokens[:-1] for tokens, _ in everything(opened(tmp_path, path, seq_len=200))]
    monkeypatch.setattr(Parquet, "part_rows", 20)
    decoded: list[int] = []
    batches = Parquet.batches

    def counted(self: Parquet, piece: Piece, columns: Any) -> Any:
        decoded.append(piece.start)
        yield from batches(self, piece, columns)

    monkeypatch.setattr(Parquet, "batches", counted)
    data = stream_of(tmp_path, path, monkeypatch, seq_len=200)
    assert [piece.n_rows is not None for piece in data.stream.pieces] == [False, *[True] * 7, False, False] + [
        True
    ] * 8 + [False]
    decoded.clear()
    order = data.order(3, shuffle)
    for epoch in range(2):
        taken = order.indices(epoch, 0, order.n).tolist()
        assert sorted(taken) == list(range(300))
        assert all(data[i]["tokens"].tolist() == whole[i] for i in taken)
        assert sorted(decoded) == list(range(6)), "no row group is read from its start again"
        decoded.clear()
        data = stream_of(tmp_path, path, monkeypatch, seq_len=200)
        decoded.clear()
    assert [data[i]["tokens"].tolist() for i in (289, 6, 139, 100)] == [whole[i] for i in (289, 6, 139, 100)]


_STREAMED = """
import json, os, resource, sys
from shardkit.data.rows import PieceReader, cut, find
def peak(): return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
found = find(sys.argv[1])
pieces = cut(found.train, found.format, split_groups=sys.argv[2] == "parts")
reader = PieceReader(pieces, ["text"], 4)
reader.row(0, 0)
open("/proc/self/clear_refs", "w").write("5")
start = peak()
for number, piece in enumerate(pieces):
    reader.row(number, 0)
print(json.dumps([len(pieces), peak() - start]))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_row_groups(tmp_path: Path) -> None:
    """A million rows in one group, 1 GB: without parts a loader holds it whole."""
    import subprocess
    import sys

    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    letters = rng.integers(97, 123, size=1 << 30, dtype=np.uint8)
    offsets = np.linspace(0, 1 << 30, 10**6 + 1).astype(np.int32)
    text = pa.StringArray.from_buffers(10**6, pa.py_buffer(offsets), pa.py_buffer(letters))
    parquet.write_table(pa.table({"text": text}), tmp_path / "rows.parquet", row_group_size=10**6, use_dictionary=False)
    done = subprocess.run(
        [sys.executable, "-c", _STREAMED, str(tmp_path / "rows.parquet"), "parts"],
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    n_pieces, grown = json.loads(done.stdout)
    assert n_pieces > 30 and grown < 300 << 20, f"{grown >> 20} MiB"
