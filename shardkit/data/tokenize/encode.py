"""Turn the rows of a piece into tokens, by a recipe."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import printable
from ...files.bounded import LIMITS
from ..chat import LossOn, RowReader, Template, Text, memory_limits, renderer
from ..rows.columns import Columns, RowError
from ..rows.format import BadRow, Piece
from ..rows.pieces import rows

SHOWN = 20
"""Most bad rows that a piece's report, and a manifest, name."""
_BATCH, _BATCH_CHARACTERS = 512, 1 << 22
"""Most texts that are encoded together, and most characters before the last of them."""


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
        without_special = self.tokenizer.encode("a", add_special_tokens=False).ids
        with_special = self.tokenizer.encode("a", add_special_tokens=True).ids
        if not without_special:
            return [], []
        start = next(
            (i for i in range(len(with_special)) if with_special[i : i + len(without_special)] == without_special), 0
        )
        return with_special[:start], with_special[start + len(without_special) :]

    @contextmanager
    def limits(self) -> Iterator[Callable[[], object]]:
        """Bounds for the rows of a batch, none without a template; yields a function to call before each row.

        SIGPROF ends the process when a row takes more CPU time than `LIMITS["chat template"]` has. Its parent says so.
        """
        if self.recipe.template is None:
            yield lambda: None
            return
        _, seconds = LIMITS["chat template"].at()
        with memory_limits():
            try:
                yield lambda: signal.setitimer(signal.ITIMER_PROF, seconds)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)

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
            places=np.array([_text_hash(text) for text in texts], dtype=np.uint64),
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


def _text_hash(text: Text) -> int:
    return int.from_bytes(hashlib.blake2b((text.row_text or text.text).encode(), digest_size=8).digest(), "big")


@dataclass
class Report:
    """Counts of a piece's rows.

    Attributes:
        n_rows: rows that are not blank.
        n_lines: all rows, blank ones included.
        n_bad: rows that cannot be used.
        bad_rows: the first `SHOWN` of these: the number within the piece, from 0, and the reason.
        n_several: rows that became several samples.
        digest: of the documents' tokens, lengths and targets.
    """

    n_rows: int = 0
    n_lines: int = 0
    n_bad: int = 0
    bad_rows: list[tuple[int, str]] = field(default_factory=list)
    n_several: int = 0
    digest: str = ""

    def add_bad(self, number: int, reason: str) -> None:
        """Count a bad row; name it if it is among the first."""
        self.n_bad += 1
        self.bad_rows = sorted([*self.bad_rows, (number, printable(reason))])[:SHOWN]


def encode_piece(encoder: Encoder, piece: Piece) -> tuple[Encoded, Report]:
    """The documents of a piece, and a report of its rows."""
    report = Report()
    parts: list[Encoded] = []
    batch: list[Text] = []
    row_of_document: list[int] = []
    continues = piece.format.continues

    def encode_batch() -> None:
        parts.append(encoder.encode(batch, starts=not continues or piece.start == 0, ends=piece.ends))
        batch.clear()

    numbered = enumerate(rows(piece, encoder.recipe.columns.read))
    while _read_batch(encoder, numbered, batch, row_of_document, report):
        encode_batch()
    if continues and not batch and not (piece.start == 0 and piece.ends):
        batch.append(Text(""))  # the document's other pieces still need its start or its end
    if batch:
        encode_batch()
    encoded = _join(parts, encoder.recipe)
    if not continues:
        encoded, empty = _without_empty(encoded)
        for number in sorted({row_of_document[i] for i in empty}):
            report.add_bad(number, "no token to predict in it")
    report.digest = _digest(encoded)
    return encoded, report


def _read_batch(
    encoder: Encoder, numbered: Iterator[tuple[int, Any]], batch: list[Text], row_of_document: list[int], report: Report
) -> bool:
    """Add rows to the empty batch until it is full; returns False when there are no more."""
    n_characters = 0
    with encoder.limits() as start_row:
        for number, row in numbered:
            report.n_lines += 1
            if row is None:
                continue
            report.n_rows += 1
            start_row()
            texts = _texts_of_row(encoder, number, row, report)
            batch += texts
            row_of_document += [number] * len(texts)
            n_characters += sum(len(text.text) for text in texts)
            if len(batch) >= _BATCH or n_characters >= _BATCH_CHARACTERS:
                return True
    return False


def _texts_of_row(encoder: Encoder, number: int, row: Any, report: Report) -> list[Text]:
    """The texts of a row; none if it is bad, which the report counts."""
    if isinstance(row, BadRow):
        report.add_bad(number, row.reason)
        return []
    try:
        texts = encoder.texts(row)
    except RowError as error:
        report.add_bad(number, str(error))
        return []
    report.n_several += len(texts) > 1
    return texts


def _digest(encoded: Encoded) -> str:
    digest = hashlib.blake2b(encoded.tokens.tobytes(), digest_size=16)
    digest.update(encoded.lengths.tobytes())
    if encoded.is_target is not None:
        digest.update(np.packbits(encoded.is_target).tobytes())
    return digest.hexdigest()


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
    documents = Encoded(encoded.tokens[of_token], encoded.lengths[has], encoded.places[has], mask)
    return documents, np.flatnonzero(~has).tolist()
