"""Tokenise a data set once a node: processes of one thread each encode pieces, and one process writes them in order."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import numpy as np

from ...errors import DataError, printable
from ...files.bounded import in_child, slow_row
from ...files.children import module_command
from ..rows.format import Piece
from ..store.tokenised import Writer
from .encode import SHOWN, Encoded, Encoder, Recipe, Report, encode_piece

_LOG = logging.getLogger(__name__)
_SMALL = 1 << 20
"""Sets whose files have at most this many bytes, packed or not, are encoded by a forked child, within limits of time,
too: starting processes anew would take longer."""
Result = tuple[Piece, Encoded, Report]


def encode_all(directory: Path, source: str, pieces: list[Piece], recipe: Recipe, workers: int) -> dict[str, Any]:
    """Write the corpus of `pieces` to an empty directory; returns the documents' part of its manifest.

    Args:
        source: name for messages.
        workers: most processes to start.

    Raises:
        DataError: a file cannot be read, a template cannot be used, or a process ended.
    """
    total = sum(piece.size for piece in pieces)
    bad: list[tuple[str, int, str]] = []
    n_rows = n_bad = n_several = first_line = 0
    digest = hashlib.blake2b(digest_size=16)
    started = time.monotonic()
    with Writer(directory, recipe.dtype, recipe.masked) as writer:
        is_small = min(total, sum(Path(path).stat().st_size for path in {piece.path for piece in pieces})) <= _SMALL
        results = _small(source, pieces, recipe) if is_small else _large(directory, pieces, recipe, workers)
        bar = _Progress(source, total)
        for piece, encoded, report in results:
            writer.append(encoded.tokens, encoded.lengths, encoded.places, encoded.is_target, ends=piece.ends)
            # Of tables, rows are counted within the piece; lines are counted within the file.
            first_line = 0 if piece.start == 0 else first_line
            bad += [(piece.path, first_line + row + 1, reason) for row, reason in report.bad_rows]
            del bad[SHOWN:]
            first_line += report.n_lines
            n_rows += report.n_rows if piece.ends else 0
            n_bad += report.n_bad
            n_several += report.n_several
            digest.update(report.digest.encode())
            bar.advance(piece.size, writer.n_tokens)
        bar.close()
    seconds = time.monotonic() - started
    _LOG.info("tokenised %s: %s tokens in %.1f s", source, f"{writer.n_tokens:,}", seconds)
    return {
        "digest": digest.hexdigest(),
        "n_documents": writer.n_documents,
        "n_tokens": writer.n_tokens,
        "n_targets": writer.n_targets,
        "n_rows": n_rows,
        "n_bad": n_bad,
        "n_several": n_several,
        "bad": bad,
    }


def _small(source: str, pieces: list[Piece], recipe: Recipe) -> list[Result]:
    """Encode in a child within the limits of `files.bounded`."""

    def encode() -> list[Result]:
        encoder = Encoder(recipe)
        return [(piece, *encode_piece(encoder, piece)) for piece in pieces]

    return in_child("data file", source, {Path(piece.path) for piece in pieces}, encode, DataError)


def _large(directory: Path, pieces: list[Piece], recipe: Recipe, n_workers: int) -> Iterator[Result]:
    """Encode in several processes, a thread waiting for each; the results have the order of the pieces."""
    n_workers = max(1, min(n_workers, len(pieces)))
    with ExitStack() as at_end:
        scratch = Path(at_end.enter_context(tempfile.TemporaryDirectory(dir=directory.parent, prefix=".building-")))
        threads = ThreadPoolExecutor(n_workers)
        at_end.callback(threads.shutdown, cancel_futures=True)
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(n_workers):
            worker = _Worker(recipe, scratch)
            at_end.callback(worker.end)
            idle.put(worker)

        def encode(number: int, piece: Piece) -> Report:
            worker = idle.get()
            try:
                return worker.encode(number, piece)
            finally:
                idle.put(worker)

        for number, report in enumerate(threads.map(encode, range(len(pieces)), pieces)):
            file = scratch / f"{number}.npz"
            with np.load(file) as arrays:
                is_target = arrays["is_target"] if recipe.masked else None
                encoded = Encoded(arrays["tokens"], arrays["lengths"], arrays["places"], is_target)
            file.unlink()
            yield pieces[number], encoded, report


class _Worker:
    """One process that encodes a piece at a time; see `worker.py`."""

    def __init__(self, recipe: Recipe, scratch: Path) -> None:
        command = module_command("shardkit.data.tokenize.worker")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.orders: IO[bytes] = self.process.stdin
        self.answers: IO[bytes] = self.process.stdout
        self._send((recipe, scratch))

    def encode(self, number: int, piece: Piece) -> Report:
        """Encode a piece into the file NUMBER.npz of the scratch folder.

        Raises:
            DataError: the piece cannot be encoded, or the process ended.
        """
        self._send((number, piece))
        line = self.answers.readline()
        if not line:
            code = self.process.wait()
            if code == -signal.SIGPROF:
                raise slow_row(piece.path, DataError)
            raise DataError(
                f"a tokenising process ended with exit code {code} at {piece.path}",
                "its last lines are above; if it was killed, memory was short: lower data.tokenize_workers",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DataError(*answer["error"])
        return Report(**answer)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.orders.close()
        self.answers.close()

    def _send(self, order: tuple[Any, Any]) -> None:
        try:
            pickle.dump(order, self.orders)
            self.orders.flush()
        except BrokenPipeError:
            pass  # the process has ended: `encode` reports it


class _Progress:
    """Draws a bar on a terminal; elsewhere prints a line every half minute."""

    EVERY_S = 30.0

    def __init__(self, source: str, total: int) -> None:
        self.source, self.total, self.n_bytes = source, max(total, 1), 0
        self.live = sys.stderr.isatty()
        self.started = self.drawn = time.monotonic()

    def advance(self, size: int, tokens: int) -> None:
        """Note `size` more bytes, and `tokens` in all."""
        self.n_bytes += size
        now = time.monotonic()
        if now - self.drawn < (0.2 if self.live else self.EVERY_S):
            return
        self.drawn = now
        share, rate = self.n_bytes / self.total, tokens / max(now - self.started, 1e-9)
        text = f"tokenising {printable(self.source)}: {share:4.0%}, {tokens:,} tokens, {rate:,.0f} a second"
        bar = "#" * round(20 * share)
        if self.live:
            print(f"\r[{bar:<20}] {text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.live and self.drawn > self.started:
            print(file=sys.stderr, flush=True)
