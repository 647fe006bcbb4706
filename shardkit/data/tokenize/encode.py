"""Tokenise a data set once a node: processes of one thread each encode pieces, and one process writes them in order."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ...errors import DataError, printable
from ...files.children import module_command
from ..chat import TEMPLATE_S, LossOn, RowReader, Template, Text, limits, renderer
from ..rows.columns import Columns, RowError
from ..rows.format import BadRow, Piece
from ..rows.pieces import rows
from ..store.tokenised import Writer

_LOG = logging.getLogger(__name__)
SHOWN = 20
"""Bad rows of a piece, and of a manifest, that are named."""
_BATCH, _BATCH_CHARACTERS = 512, 1 << 22
"""Most texts that are encoded together, and most characters before the last of them."""
_SMALL = 1 << 20
"""At most this many bytes are encoded in this process: starting others would take longer."""


@dataclass(frozen=True)
class Recipe:
    """Everything that turns a row into tokens, in plain values that travel to the workers.

    Attributes:
        tokenizer: the rules of a fast tokenizer, as its JSON.
        eos: the id that ends a document; None = none is added.
    """

    tokenizer: str
    columns: Columns
    loss_on: LossOn
    eos: int | None
    dtype: str
    template: Template | None = None
    ends: tuple[str, ...] = ()

    @property
    def masked(self) -> bool:
        """Whether only some tokens are to be predicted."""
        return self.columns.kind != "text" and self.loss_on != "all"


@dataclass
class Encoded:
    """Some documents in order: their tokens one after the other, lengths, hashes of their text, and targets."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    places: npt.NDArray[np.uint64]
    is_target: npt.NDArray[np.bool_] | None


class Encoder:
    """Encodes rows by a recipe, in this process."""

    def __init__(self, recipe: Recipe) -> None:
        from tokenizers import Tokenizer

        self.recipe = recipe
        self.tokenizer = Tokenizer.from_str(recipe.tokenizer)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.reader = RowReader(recipe.columns, recipe.loss_on, recipe.template, recipe.ends)
        if recipe.template is not None:
            renderer()
        self.prefix, self.suffix = self._around()
        if recipe.eos is not None and (not self.suffix or self.suffix[-1] != recipe.eos):
            self.suffix = [*self.suffix, recipe.eos]

    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer itself puts before and after a text."""
        alone = self.tokenizer.encode("a", add_special_tokens=False).ids
        whole = self.tokenizer.encode("a", add_special_tokens=True).ids
        if not alone:
            return [], []
        start = next((i for i in range(len(whole)) if whole[i : i + len(alone)] == alone), 0)
        return whole[:start], whole[start + len(alone) :]

    def limits(self, seconds: float) -> AbstractContextManager[None]:
        """Bounds for `text`, see `chat.limits`; none without a template."""
        return nullcontext() if self.recipe.template is None else limits(seconds)

    def texts(self, row: Any) -> list[Text]:
        """The row's text, as one sample or several.

        Raises:
            RowError: the row cannot be used.
        """
        texts = [Text(row)] if isinstance(row, str) else self.reader.read(row)
        try:
            for text in texts:
                text.text.encode()
        except UnicodeEncodeError:
            raise RowError("half of a surrogate pair, which is no character, in its text") from None
        return texts

    def encode(self, texts: list[Text], *, starts: bool = True, ends: bool = True) -> Encoded:
        """Tokens of texts; a document that goes on gets no prefix (`starts`) or no end (`ends`).

        A prompt and its completion are tokenised together, as the model reads them. A token with characters of both
        belongs to the completion: otherwise nothing would teach the completion's first characters.
        """
        recipe = self.recipe
        batch = self.tokenizer.encode_batch if recipe.masked else self.tokenizer.encode_batch_fast
        with _one_thread():
            encodings = batch([text.text for text in texts], add_special_tokens=False)
        tokens, targets, lengths = [], [], []
        for text, encoding in zip(texts, encodings, strict=True):
            before = self.prefix if starts and not text.rendered else []
            after = self.suffix if ends and not text.rendered else []
            ids = np.array([*before, *encoding.ids, *after], dtype=recipe.dtype)
            tokens.append(ids)
            lengths.append(len(ids))
            if recipe.masked:
                mask = np.ones(len(ids), dtype=np.bool_)
                mask[: len(before)] = False
                if text.spans is not None:
                    mask[len(before) : len(before) + len(encoding.ids)] = _in_spans(encoding.offsets, text.spans)
                targets.append(mask)
        return Encoded(
            tokens=np.concatenate([np.empty(0, recipe.dtype), *tokens]),
            lengths=np.array(lengths, dtype=np.int64),
            places=np.array([_place(text) for text in texts], dtype=np.uint64),
            is_target=np.concatenate([np.empty(0, np.bool_), *targets]) if recipe.masked else None,
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Without the threads of tokenizers, which would not outlive the fork of a loader's workers."""
    key = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(key)
    os.environ[key] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def _in_spans(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Which tokens have a character within a span.

    A tokenizer that trims offsets gives a token of white space an empty range at that token's end.
    """
    starts, stops = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    starts = np.where(starts == stops, starts - 1, starts)
    inside = np.zeros(len(starts), dtype=np.bool_)
    for begin, end in spans:
        inside |= (starts < end) & (stops > begin)
    return inside


def _place(text: Text) -> int:
    return int.from_bytes(hashlib.blake2b((text.row_text or text.text).encode(), digest_size=8).digest(), "big")


def encode_piece(encoder: Encoder, piece: Piece) -> tuple[Encoded, dict[str, Any]]:
    """The documents of a piece, and what to say of it: rows, bad rows, the digest of its documents."""
    parts: list[Encoded] = []
    bad: list[tuple[int, str]] = []
    n_rows = n_bad = n_seen = n_several = characters = 0
    goes_on = piece.format.continues
    waiting: list[Text] = []
    numbers: list[int] = []

    def flush() -> None:
        parts.append(encoder.encode(waiting, starts=not goes_on or piece.start == 0, ends=piece.ends))
        waiting.clear()

    for number, row in enumerate(rows(piece, encoder.recipe.columns.read)):
        n_seen += 1
        if row is None:
            continue
        n_rows += 1
        problem = row.reason if isinstance(row, BadRow) else ""
        if not problem:
            try:
                with encoder.limits(TEMPLATE_S):
                    texts = encoder.texts(row)
                waiting += texts
                numbers += [number] * len(texts)
                characters += sum(len(text.text) for text in texts)
                n_several += len(texts) > 1
            except RowError as error:
                problem = str(error)
        if problem:
            n_bad += 1
            if len(bad) < SHOWN:
                bad.append((number, printable(problem)))
        if len(waiting) >= _BATCH or characters >= _BATCH_CHARACTERS:
            flush()
            characters = 0
    if goes_on and not waiting and not (piece.start == 0 and piece.ends):
        waiting.append(Text(""))  # the document's other pieces still need its start or its end
    if waiting:
        flush()
    encoded = _join(parts, encoder.recipe)
    if not goes_on:
        encoded, empty = _without_empty(encoded)
        without_target = sorted({numbers[i] for i in empty})
        n_bad += len(without_target)
        bad = sorted([*bad, *((number, "no token to predict in it") for number in without_target)])[:SHOWN]
    digest = hashlib.blake2b(encoded.tokens.tobytes(), digest_size=16)
    digest.update(encoded.lengths.tobytes())
    if encoded.is_target is not None:
        digest.update(np.packbits(encoded.is_target).tobytes())
    said = {
        "rows": n_rows,
        "seen": n_seen,
        "bad": bad,
        "n_bad": n_bad,
        "digest": digest.hexdigest(),
        "several": n_several,
    }
    return encoded, said


def _join(parts: list[Encoded], recipe: Recipe) -> Encoded:
    masks = [part.is_target for part in parts if part.is_target is not None]
    return Encoded(
        tokens=np.concatenate([np.empty(0, recipe.dtype), *(part.tokens for part in parts)]),
        lengths=np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)]),
        places=np.concatenate([np.empty(0, np.uint64), *(part.places for part in parts)]),
        is_target=np.concatenate([np.empty(0, np.bool_), *masks]) if recipe.masked else None,
    )


def _without_empty(encoded: Encoded) -> tuple[Encoded, list[int]]:
    """Without the documents that have nothing to predict behind their first token; which they were."""
    has = encoded.lengths >= 2
    if encoded.is_target is not None:
        starts = np.cumsum(encoded.lengths) - encoded.lengths
        counted = np.concatenate([[0], np.cumsum(encoded.is_target)])
        stops = starts + encoded.lengths
        has = counted[stops] > counted[np.minimum(starts + 1, stops)]
    if has.all():
        return encoded, []
    of_token = np.repeat(has, encoded.lengths)
    mask = None if encoded.is_target is None else encoded.is_target[of_token]
    kept = Encoded(encoded.tokens[of_token], encoded.lengths[has], encoded.places[has], mask)
    return kept, np.flatnonzero(~has).tolist()


@dataclass
class Totals:
    """What the manifest says of a whole data set."""

    rows: int = 0
    n_bad: int = 0
    n_several: int = 0
    bad: list[tuple[str, int, str]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


def encode_all(directory: Path, source: str, pieces: list[Piece], recipe: Recipe, workers: int) -> dict[str, Any]:
    """Write the corpus of `pieces` to an empty directory; returns what its manifest says of the documents.

    Args:
        source: name for messages.
        workers: most processes to start.

    Raises:
        DataError: see `encode_piece`; a worker ended.
    """
    total = sum(piece.size for piece in pieces)
    in_process = total <= _SMALL
    totals, lines = Totals(), 0
    started = time.monotonic()
    with Writer(directory, recipe.dtype, recipe.masked) as writer:
        results = _here(pieces, recipe) if in_process else _by_workers(directory, pieces, recipe, workers)
        bar = _Progress(source, total)
        for piece, encoded, said in results:
            ends = piece.ends
            writer.append(encoded.tokens, encoded.lengths, encoded.places, encoded.is_target, ends=ends)
            lines = 0 if piece.start == 0 else lines
            # An excerpt of a table counts rows within its piece; lines count within the file.
            totals.bad += [(piece.path, lines + row + 1, why) for row, why in said["bad"]]
            del totals.bad[SHOWN:]
            totals.rows += said["rows"] if ends else 0
            totals.n_bad += said["n_bad"]
            totals.n_several += said["several"]
            totals.digests.append(said["digest"])
            lines += said["seen"]
            bar.advance(piece.size, writer.n_tokens)
        bar.close()
    seconds = time.monotonic() - started
    _LOG.info("tokenised %s: %s tokens in %.1f s", source, f"{writer.n_tokens:,}", seconds)
    digest = hashlib.blake2b("".join(totals.digests).encode(), digest_size=16).hexdigest()
    return {
        "digest": digest,
        "n_documents": writer.n_documents,
        "n_tokens": writer.n_tokens,
        "n_targets": writer.n_targets,
        "n_rows": totals.rows,
        "n_bad": totals.n_bad,
        "n_several": totals.n_several,
        "bad": totals.bad,
    }


def _here(pieces: list[Piece], recipe: Recipe) -> Iterator[tuple[Piece, Encoded, dict[str, Any]]]:
    encoder = Encoder(recipe)
    for piece in pieces:
        yield piece, *encode_piece(encoder, piece)


def _by_workers(
    directory: Path, pieces: list[Piece], recipe: Recipe, workers: int
) -> Iterator[tuple[Piece, Encoded, dict[str, Any]]]:
    """Encode in processes of their own; results come in the order of the pieces."""
    with ExitStack() as at_end:
        scratch = Path(at_end.enter_context(tempfile.TemporaryDirectory(dir=directory.parent, prefix=".building-")))
        ready: dict[int, dict[str, Any]] = {}
        waiting = selectors.DefaultSelector()
        at_end.callback(waiting.close)
        queue = iter(enumerate(pieces))
        for _ in range(max(1, min(workers, len(pieces)))):
            worker = _Worker(recipe, scratch)
            at_end.callback(worker.end)
            worker.give(next(queue, None))
            waiting.register(worker.answers, selectors.EVENT_READ, worker)
        for number, piece in enumerate(pieces):
            while number not in ready:
                for key, _ in waiting.select():
                    worker = key.data
                    done, said = worker.answer()
                    ready[done] = said
                    worker.give(next(queue, None))
                    if worker.doing is None:
                        waiting.unregister(key.fileobj)
            said = ready.pop(number)
            file = scratch / f"{number}.npz"
            with np.load(file) as arrays:
                mask = arrays["is_target"] if recipe.masked else None
                encoded = Encoded(arrays["tokens"], arrays["lengths"], arrays["places"], mask)
            file.unlink()
            yield piece, encoded, said


class _Worker:
    """One process that encodes a piece at a time."""

    def __init__(self, recipe: Recipe, scratch: Path) -> None:
        self.process = subprocess.Popen(
            module_command("shardkit.data.tokenize.worker"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.orders: IO[bytes] = self.process.stdin
        self.answers: IO[bytes] = self.process.stdout
        self.doing: tuple[int, Piece] | None = None
        self._send((recipe, scratch))

    def give(self, order: tuple[int, Piece] | None) -> None:
        self.doing = order
        if order is not None:
            self._send(order)

    def answer(self) -> tuple[int, dict[str, Any]]:
        line = self.answers.readline()
        number, piece = self.doing or (0, None)
        if not line:
            where = f" at {piece.path}" if piece is not None else ""
            raise DataError(
                f"a tokenising process ended with exit code {self.process.wait()}{where}",
                "its last lines are above; if it was killed, memory was short: lower data.tokenize_workers",
            )
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise DataError(*said["error"])
        return number, said

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
            pass  # it has ended: `answer` says so


class _Progress:
    """A line on a terminal that is written again, else a line every half minute."""

    EVERY_S = 30.0

    def __init__(self, source: str, total: int) -> None:
        self.source, self.total, self.done = source, max(total, 1), 0
        self.live = sys.stderr.isatty()
        self.started = self.said = time.monotonic()

    def advance(self, size: int, tokens: int) -> None:
        self.done += size
        now = time.monotonic()
        if now - self.said < (0.2 if self.live else self.EVERY_S):
            return
        self.said = now
        share, rate = self.done / self.total, tokens / max(now - self.started, 1e-9)
        text = f"tokenising {printable(self.source)}: {share:4.0%}, {tokens:,} tokens, {rate:,.0f} a second"
        bar = "#" * round(20 * share)
        if self.live:
            print(f"\r[{bar:<20}] {text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.live and self.said > self.started:
            print(file=sys.stderr, flush=True)
