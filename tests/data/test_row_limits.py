"""Tables, templates and configs of strangers that ask for gigabytes or minutes: two lines, whoever reads them."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from shardkit.config.yaml import read_yaml
from shardkit.data.rows.formats import find_records
from shardkit.data.rows.pieces import PieceReader, cut
from shardkit.data.tokenize import pool
from shardkit.errors import ConfigError, DataError
from shardkit.files.bounded import LIMITS, VARIABLE
from shardkit.launch.failures.exit_codes import likely_cause

from .chats import conversation, write_lines, write_tokenizer
from .test_templates import needs_limits
from .test_text import opened

pytest.importorskip("transformers")

COMPARED = (
    "{% set a = namespace(l=[]) %}{% set b = namespace(l=[]) %}{% for i in range(40) %}"
    "{% set a.l = [a.l, a.l] %}{% set b.l = [b.l, b.l] %}{% endfor %}{{ a.l == b.l }}"
)
"""Compares 2⁴⁰ pairs of lists in one operation in C, which Python does not interrupt."""


_BOMB = """
import sys, pyarrow
from pyarrow import parquet
column = {
    "many texts": lambda: pyarrow.array(["x" * 3_000_000] * 100),
    "short texts": lambda: pyarrow.array(["x" * 3_000] * 100_000),
    "objects": lambda: pyarrow.array([[{"a": 1}] * 1_000_000]),
}[sys.argv[2]]()
parquet.write_table(pyarrow.table({"text": column}), sys.argv[1], compression="zstd")
"""


def write_bomb(path: Path, content: str = "many texts") -> Path:
    """A Parquet file of some KB: its rows refer to one text, 300 MB in all, or one row is a million objects.

    Another process writes it: this one could read it into the memory that the writer has used.
    """
    pytest.importorskip("pyarrow")
    subprocess.run([sys.executable, "-c", _BOMB, str(path), content], check=True)
    assert path.stat().st_size < 1 << 16
    return path


def read_a_row(path: Path) -> None:
    """Read as a rank does that streams the file."""
    files, row_format = find_records(str(path))
    PieceReader(cut(files, row_format), ["text"], 4).row(0, 0)


def lower_limits(monkeypatch: pytest.MonkeyPatch, factor: float, *timed: str) -> None:
    """Multiply the limits, but only these kinds' time: a busy machine may leave a child waiting, or slow it down."""
    monkeypatch.setenv(VARIABLE, str(factor))
    for kind, limit in list(LIMITS.items()):
        if kind not in timed:
            monkeypatch.setitem(LIMITS, kind, limit._replace(seconds=limit.seconds / factor))


@pytest.mark.slow
@needs_limits
@pytest.mark.parametrize("reader", ["a child", "workers", "a rank"])
def test_a_small_parquet_file_of_gigabytes_is_refused(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bomb(tmp_path / "rows.parquet")
    lower_limits(monkeypatch, 0.1)
    monkeypatch.setattr(pool, "_SMALL", 1 << 40 if reader == "a child" else 0)

    def read() -> None:
        if reader == "a rank":  # a new process: this one may have memory at hand that earlier tests have freed
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as ranks:
                ranks.submit(read_a_row, path).result()
        else:
            opened(tmp_path, path)

    with pytest.raises(DataError, match=r"rows.parquet takes more than 0\.10 GiB of memory") as caught:
        read()
    assert "\n" not in caught.value.cause + caught.value.fix


@pytest.mark.slow
@needs_limits
def test_a_small_parquet_file_of_many_short_texts_takes_no_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bomb(tmp_path / "rows.parquet", "short texts")
    lower_limits(monkeypatch, 0.1, "data file")
    with pytest.raises(DataError, match=r"rows.parquet takes more than (2(\.\d+)? s|0\.10 GiB of memory)"):
        opened(tmp_path, path)


@pytest.mark.slow
@needs_limits
def test_a_row_that_is_small_in_its_file_and_large_in_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bomb(tmp_path / "rows.parquet", "objects")
    lower_limits(monkeypatch, 0.1)
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as ranks,
        pytest.raises(DataError, match=r"rows.parquet takes more than 0\.10 GiB of memory"),
    ):
        ranks.submit(read_a_row, path).result()


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["a child", "workers"])
def test_an_operation_in_c_that_does_not_end_is_killed(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower_limits(monkeypatch, 0.2, "data file", "chat template")
    path = write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i)} for i in range(9)))
    write_tokenizer(tmp_path / "tok", COMPARED)
    monkeypatch.setattr(pool, "_SMALL", 1 << 20 if reader == "a child" else 0)
    with pytest.raises(DataError, match=r"chat.jsonl takes (the chat template )?more than 4(\.\d+)? s") as caught:
        opened(tmp_path, path)
    assert "\n" not in caught.value.cause + caught.value.fix


_RANK = """
import os, sys
from shardkit.data.chat import Template, limits, renderer
from shardkit.files import bounded
bounded.LIMITS["chat template"] = bounded.Limit(1 << 30, 0, 0.2, 1)
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
renderer()
with limits():
    Template(sys.argv[1], {}).render([{"role": "user", "content": "a"}])
"""


@pytest.mark.slow
@needs_limits
def test_an_operation_in_c_that_does_not_end_is_killed_in_a_rank_that_streams() -> None:
    rank = subprocess.run([sys.executable, "-c", _RANK, COMPARED], timeout=120)
    assert rank.returncode == -signal.SIGPROF
    cause, fix = likely_cause(rank.returncode)
    assert "chat template" in cause and "data.chat_template" in fix


@pytest.mark.parametrize(
    "text",
    ["a: " + "[" * 400_000, "{" * 400_000, "a: " + "1:" * 200_000 + "1", "- " * 20_000, "a: 1\n" * 20_000],
    ids=["brackets", "braces", "colons", "dashes", "one key"],
)
def test_a_config_of_a_stranger_takes_no_minutes(text: str) -> None:
    began = time.process_time()
    with suppress(ConfigError):
        read_yaml(text, "config.yaml")
    assert time.process_time() - began < 10
