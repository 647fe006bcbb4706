"""From rows to tokens: how a source is read (`plan_source`), encoded (`Encoder`), kept in the cache and checked.

Tokens are computed once a node, before the first step, piece by piece; `datasets` runs the processes for it. A stream
(`data.streaming`) is encoded row by row while it is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config.libraries import is_first_rank
from ..config.load import load_config
from ..config.schema import DataConfig, RunConfig
from ..errors import ConfigError, DataError, ShardkitError, importing, listed, printable, report, system_errors
from ..files import fork_without_garbage, n_cpus, open_regular
from .chat import (
    READS_CLOCK,
    Columns,
    LossOn,
    RefusedRow,
    RowError,
    RowReader,
    Template,
    Text,
    UnknownColumnsError,
    at_date,
    choose_columns,
    names_to_find,
    no_template,
)
from .rows import (
    PLAIN_TEXT,
    BadRow,
    Found,
    Piece,
    RowFormat,
    TextFile,
    cut,
    find,
    find_text_files,
    json_layout,
    nested_rows,
    reading,
    survey,
)
from .store import (
    FORMAT_VERSION,
    META,
    Choice,
    Documents,
    LongSamples,
    Split,
    Store,
    Writer,
    build_entry,
    cache_key,
    cached_entry,
    read_meta,
)
from .tokenizer import check_vocabulary, data_folder, load_tokenizer, more_rows, n_ids, tokenizer_digest, tokenizer_path

_LOG = logging.getLogger(__name__)
_RULES = 3
"""Version of the rules by which rows become tokens, and of what a manifest says; another one makes other entries of the
cache."""
_LOOKED_AT_ONCE = 1 << 20
"""Bytes of records whose columns are found faster than an entry of the cache."""
_SMALL = 1 << 20
"""Sets of at most this many bytes are encoded by this process: starting others would take longer."""
SHOWN = 20
"""Most bad rows that a piece's report, and a manifest, name."""
_BATCH, _BATCH_CHARACTERS = 512, 1 << 22
"""Most texts that are encoded together, and most characters before the last of them."""


# One piece.


@dataclass(frozen=True)
class Recipe:
    """Everything that turns a row into tokens, in plain values that travel to other processes."""

    tokenizer: str  # the rules of a fast tokenizer, as its JSON
    columns: Columns
    loss_on: LossOn
    eos: int | None  # the id that ends a document; None = none is added
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

    @property
    def digest(self) -> str:
        """The data digest in checkpoints is made of these, one for each piece."""
        digest = hashlib.blake2b(self.tokens.tobytes(), digest_size=16)
        digest.update(self.lengths.tobytes())
        if self.is_target is not None:
            digest.update(np.packbits(self.is_target).tobytes())
        return digest.hexdigest()


class Encoder:
    """Encodes rows by a recipe, in this process."""

    def __init__(self, recipe: Recipe) -> None:
        from tokenizers import Tokenizer

        self.recipe = recipe
        self.tokenizer = Tokenizer.from_str(recipe.tokenizer)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.reader = RowReader(recipe.columns, recipe.loss_on, recipe.template, recipe.ends)
        # The ids that the tokenizer itself puts before and after a text.
        bare = self.tokenizer.encode("a", add_special_tokens=False).ids
        full = self.tokenizer.encode("a", add_special_tokens=True).ids
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        self.prefix, self.suffix = (full[:start], full[start + len(bare) :]) if bare else ([], [])
        if recipe.eos is not None and (not self.suffix or self.suffix[-1] != recipe.eos):
            self.suffix = [*self.suffix, recipe.eos]

    def texts(self, row: Any) -> list[Text]:
        """The row's text, as one sample or several."""
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
        hashes = (hashlib.blake2b((t.row_text or t.text).encode(), digest_size=8).digest() for t in texts)
        return Encoded(
            tokens=np.concatenate([np.empty(0, recipe.dtype), *tokens]),
            lengths=np.array(lengths, dtype=np.int64),
            places=np.array([int.from_bytes(text_hash, "big") for text_hash in hashes], dtype=np.uint64),
            is_target=np.concatenate([np.empty(0, np.bool_), *targets]) if recipe.masked else None,
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Without the threads of tokenizers, which would not outlive a fork: of the loader's workers, or of `map`'s."""
    key, environ = "TOKENIZERS_PARALLELISM", os.environ  # the object: `map` puts another one in its place
    before = environ.get(key)
    environ[key] = "false"
    try:
        yield
    finally:
        if before is None:
            del environ[key]
        else:
            environ[key] = before


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


@dataclass
class Report:
    """The rows of a piece, counted and judged."""

    n_rows: int = 0  # rows that are not blank
    n_lines: int = 0  # all rows, blank ones included
    n_bad: int = 0  # rows that cannot be used
    # the first `SHOWN` of these: the number within the piece, from 0, the reason and a fix or ""
    bad_rows: list[tuple[int, str, str]] = field(default_factory=list)
    n_several: int = 0  # rows that became several samples
    refused: tuple[int, str, str] | None = None  # number, cause and fix of a row that refuses the whole set
    further: list[str] = field(default_factory=list)  # as of `RowReader`
    members: dict[str, bool] = field(default_factory=dict)  # as of `RowReader`
    digest: str = ""  # of the documents' tokens, lengths and targets

    def add_bad(self, number: int, reason: str, fix: str = "") -> None:
        """Count a bad row; name it if it is among the first."""
        self.n_bad += 1
        self.bad_rows = sorted([*self.bad_rows, (number, printable(reason), printable(fix))])[:SHOWN]


def encode_piece(encoder: Encoder, piece: Piece) -> tuple[Encoded, Report]:
    """The documents of a piece, and a report of its rows."""
    report, reader = Report(), encoder.reader
    reader.further, reader.members = set(encoder.recipe.columns.further), {}
    parts: list[Encoded] = []
    batch: list[Text] = []
    row_of_document: list[int] = []
    n_characters = 0
    is_text = not piece.format.has_columns

    def encode_batch() -> None:
        nonlocal n_characters
        parts.append(encoder.encode(batch, starts=not is_text or piece.starts, ends=piece.ends))
        batch.clear()
        n_characters = 0

    rows = piece.format.rows(piece, encoder.recipe.columns.read)
    for number in range(sys.maxsize):
        with reading(piece.path):
            row = next(rows, StopIteration)
        if row is StopIteration:
            break
        report.n_lines += 1
        if row is None:
            continue
        report.n_rows += 1
        if isinstance(row, BadRow):
            report.add_bad(number, row.reason)
            continue
        try:
            texts = encoder.texts(row)
        except RowError as error:
            report.add_bad(number, str(error), error.fix)
            continue
        except RefusedRow as error:
            report.refused = number, str(error), error.fix
            break
        report.n_several += len(texts) > 1
        batch += texts
        row_of_document += [number] * len(texts)
        n_characters += sum(len(text.text) for text in texts)
        if len(batch) >= _BATCH or n_characters >= _BATCH_CHARACTERS:
            encode_batch()
    if is_text and not batch and not (piece.starts and piece.ends):
        batch.append(Text(""))  # the document's other pieces still need its start or its end
    if batch:
        encode_batch()
    # Empty arrays in front: there may be no part, and concatenate wants one.
    masks = [part.is_target for part in parts if part.is_target is not None]
    encoded = Encoded(
        tokens=np.concatenate([np.empty(0, encoder.recipe.dtype), *(part.tokens for part in parts)]),
        lengths=np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)]),
        places=np.concatenate([np.empty(0, np.uint64), *(part.places for part in parts)]),
        is_target=np.concatenate([np.empty(0, np.bool_), *masks]) if encoder.recipe.masked else None,
    )
    if not is_text:
        encoded, empty = _without_empty(encoded)
        for number in sorted({row_of_document[i] for i in empty}):
            report.add_bad(number, "no token to predict in it")
    report.further, report.members = sorted(reader.further), reader.members
    report.digest = encoded.digest
    return encoded, report


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


# All pieces.


def encode_all(
    directory: Path, source: str, pieces: list[Piece], recipe: Recipe, workers: int | None
) -> dict[str, Any]:
    """Write the corpus of `pieces` to an empty directory; returns the documents' part of its manifest.

    `source` is its name in messages; `workers` the most processes to start, None = one for each CPU.
    """
    bad: list[tuple[str, int, str, str]] = []
    n_rows = n_bad = n_several = first_line = 0
    further: set[str] = set()
    members: dict[str, bool] = {}
    digest = hashlib.blake2b(digest_size=16)
    started = time.monotonic()
    with Writer(directory, recipe.dtype, recipe.masked) as writer:
        for piece, (encoded, report) in zip(pieces, _encoded(directory, source, pieces, recipe, workers), strict=True):
            writer.append(encoded.tokens, encoded.lengths, encoded.places, encoded.is_target, ends=piece.ends)
            first_line = 0 if piece.starts else first_line
            if report.refused is not None:
                number, cause, fix = report.refused
                raise DataError(f"{piece.path}:{first_line + number + 1}: {cause}", fix)
            bad += [(piece.path, first_line + row + 1, reason, fix) for row, reason, fix in report.bad_rows]
            del bad[SHOWN:]
            first_line += report.n_lines
            n_rows += report.n_rows if piece.ends else 0
            n_bad += report.n_bad
            n_several += report.n_several
            further.update(report.further)
            for name, is_mark in report.members.items():
                members[name] = is_mark and members.get(name, True)
            digest.update(report.digest.encode())
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
        "further": sorted(further),
        "members": members,
    }


class _PieceEncoder:
    """Encodes pieces by their number, and packs the result into bytes: a row of the table that `map` writes."""

    def __init__(self, pieces: list[Piece], recipe: Recipe) -> None:
        self.pieces, self.recipe = pieces, recipe
        self.encoder: Encoder | None = None  # made after the fork: tokenizers have threads and locks

    def __call__(self, number: int) -> dict[str, bytes]:
        self.encoder = self.encoder or Encoder(self.recipe)
        encoded, report = encode_piece(self.encoder, self.pieces[number])
        return {
            "tokens": encoded.tokens.tobytes(), "lengths": encoded.lengths.tobytes(),
            "places": encoded.places.tobytes(),
            "is_target": b"" if encoded.is_target is None else encoded.is_target.tobytes(),
            "report": json.dumps(asdict(report)).encode(),
        }  # fmt: skip


def _encoded(
    directory: Path, source: str, pieces: list[Piece], recipe: Recipe, workers: int | None
) -> Iterator[tuple[Encoded, Report]]:
    """The documents and the report of each piece, in their order."""
    is_small = sum(piece.size for piece in pieces) <= _SMALL
    workers = 1 if is_small else min(workers or n_cpus(), len(pieces))
    if workers < 2:
        encoder = Encoder(recipe)
        yield from (encode_piece(encoder, piece) for piece in pieces)
        return
    words = f"tokenising {source} in {workers} processes needs datasets"
    with importing(words, "pip install 'shardkit[finetune]', or set data.tokenize_workers=1", DataError):
        import datasets
    features = datasets.Features(
        {name: datasets.Value("large_binary") for name in ("tokens", "lengths", "places", "is_target", "report")}
    )
    numbers = datasets.Dataset.from_dict({"number": list(range(len(pieces)))})
    shows_bars = datasets.are_progress_bars_disabled() is False
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    environ = os.environ  # `map` leaves a copy in its place, and other modules hold the object itself
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".building-") as scratch:
        try:
            with _one_thread(), fork_without_garbage():
                table = numbers.map(
                    _PieceEncoder(pieces, recipe), input_columns="number", remove_columns=["number"], num_proc=workers,
                    features=features, cache_file_name=f"{scratch}/tokens.arrow", load_from_cache_file=False,
                    new_fingerprint="shardkit", writer_batch_size=1, desc=f"tokenising {printable(source)}",
                )  # fmt: skip
        except RuntimeError as error:  # one of the processes was killed
            raise DataError(
                f"a process that tokenised {source} ended: {error}",
                "if it was killed, memory was short: lower data.tokenize_workers",
            ) from error
        finally:
            os.environ = environ  # noqa: B003 - the same object, put back
            if shows_bars:
                datasets.enable_progress_bars()
        for row in table:
            report = Report(**json.loads(row["report"]))
            mask = np.frombuffer(row["is_target"], np.bool_) if recipe.masked else None
            tokens, lengths = np.frombuffer(row["tokens"], recipe.dtype), np.frombuffer(row["lengths"], np.int64)
            yield Encoded(tokens, lengths, np.frombuffer(row["places"], np.uint64), mask), report


# One source.


@dataclass(frozen=True)
class Plan:
    """How a source is tokenised: its files, the recipe, and the key of its place in the cache."""

    source: str
    files: list[TextFile]
    format: RowFormat
    recipe: Recipe
    facts: dict[str, Any]
    workers: int | None
    left_out: list[str]  # names of the files beside the data
    layout: str  # the files, their format and splits in words

    @property
    def key(self) -> str:
        """A hash of the recipe, of every file's path, size and modification time, and of how records are cut: the data
        digest depends on it."""
        columns = self.recipe.columns
        kind = self.format.name if self.format.has_columns else None
        return cache_key(
            [FORMAT_VERSION, _RULES, kind, [columns.kind, columns.names, columns.ignore], self.facts, self.recipe.eos,
             self.recipe.loss_on, self.files, self.format.encoded_piece_bytes(self.files)]
        )  # fmt: skip

    def build(self, directory: Path) -> dict[str, Any]:
        """Write the corpus; returns its manifest."""
        pieces = cut(self.files, self.format, self.format.encoded_piece_bytes(self.files))
        if not pieces:
            raise DataError(f"{self.source} holds no text", "point it at text, JSON lines, parquet or arrow files")
        return {**self.facts, **encode_all(directory, self.source, pieces, self.recipe, self.workers)}

    def describe(self, further: Sequence[str], members: Sequence[str]) -> str:
        """One line: the files, the kind of rows, the columns in use, and everything that is left out, by name."""
        columns = self.recipe.columns
        used = list(dict.fromkeys(columns.names.values()))
        parts = [f"{self.source}: {self.layout}"]
        if self.format.has_columns:
            parts.append(f"{_NOUNS[columns.kind]} from column{'s' * (len(used) > 1)} {', '.join(used)}")
        template = self.recipe.template
        if "tools" in columns.names and columns.kind != "text" and template is not None and not template.reads("tools"):
            parts.append("the chat template does not write the tools")
        unread = sorted({*further, *columns.further} - set(used))
        for words, names in (("columns", unread), ("members of turns", sorted(members)), ("files", self.left_out)):
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                parts.append(f"ignored {words}: {', '.join(names[:_NAMED])}{more}")
        return "; ".join(parts)


_NAMED = 20
"""Most ignored names in the line on a source."""
_NOUNS = {"text": "text", "messages": "conversations", "prompt": "prompts with completions"}
_FITTING: dict[str, tuple[LossOn, ...]] = {
    "messages": ("assistant", "all", "completion"), "prompt": ("completion", "all"), "text": ("all",),
}  # fmt: skip
"""Kind of rows → the values of data.loss_on that fit them; `auto` is the first."""


def plan_source(data: DataConfig, tokenizer: Any, path: str | None, called: str, split: str = "train") -> Plan | None:
    """Decide how a source's rows become tokens; None if it has no files of a split other than "train"."""
    found = Found("", PLAIN_TEXT, {"train": find_text_files(None)}) if path is None else find(data_folder(path))
    if split != "train" and not found.splits.get(split):
        return None
    files, row_format = found.train if split == "train" else found.splits[split], found.format
    columns = Columns("text", {})
    if row_format.has_columns:
        columns = _columns(data, files, row_format, called)
    elif data.columns:
        raise DataError(f"data.columns is set, but {called} is plain text", "remove data.columns, or give records")
    source = None
    if columns.kind == "messages" or data.chat_template is not None:
        source = _template_source(data, tokenizer)
    elif columns.kind == "prompt":
        source = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    if columns.kind == "messages" and source is None:
        raise no_template()
    if source is not None and columns.kind != "text":
        source = _dated(source, data, called)
    for key in ("chat_template", "chat_date"):
        if columns.kind == "text" and getattr(data, key) is not None and is_first_rank():
            _LOG.warning("data.%s=%s does not apply to %s: it has plain text", key, getattr(data, key), called)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    template = None if source is None or columns.kind == "text" else Template(source, special)
    fitting = _FITTING[columns.kind]
    loss_on = fitting[0] if data.loss_on == "auto" else data.loss_on
    if loss_on not in fitting:
        raise DataError(
            f"data.loss_on={loss_on} does not fit {called}, which holds {_NOUNS[columns.kind]}",
            f"set data.loss_on to auto or {' or '.join(fitting)}",
        )
    recipe = Recipe(
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        columns=columns,
        loss_on=loss_on,
        eos=tokenizer.eos_token_id if data.add_eos else None,
        dtype="<u4" if n_ids(tokenizer) > 1 << 16 else "<u2",
        template=template,
        ends=tuple(sorted(token.content for token in tokenizer.added_tokens_decoder.values())),
    )
    facts = {
        "format": FORMAT_VERSION,
        "kind": columns.kind,
        "masked": recipe.masked,
        "dtype": recipe.dtype,
        "tokenizer": tokenizer_digest(tokenizer),
        "n_ids": n_ids(tokenizer),
        "loss_on": recipe.loss_on,
        "skips": not row_format.has_columns and len(files) > 1,  # a folder of text may hold a file of another encoding
        "template": None if template is None else text_digest(json.dumps([template.source, template.special])),
    }
    others = {name: members for name, members in found.splits.items() if name != split}
    parts = [f"{name}: {listed([file.name for file in members])}" for name, members in others.items()]
    plural = "s" * (len(files) != 1)
    named = f" ({listed([file.name for file in files])})" if found.path.rstrip("/") != files[0].path or plural else ""
    layout = f"{len(files)} file{plural} of {'JSON' if row_format.name == 'jsonl' else row_format.name}{named}"
    layout += f", split {split}; other splits: {'; '.join(parts)}" if parts else ""
    left_out = [] if split != "train" else found.left_out
    return Plan(called, files, row_format, recipe, facts, data.tokenize_workers, left_out, layout)


def _columns(data: DataConfig, files: list[TextFile], row_format: RowFormat, called: str) -> Columns:
    """The columns to read, of those that any row has: looked for once a node where this takes a while."""
    candidates = names_to_find(data.columns)
    if sum(file.size for file in files) <= _LOOKED_AT_ONCE:
        names = row_format.columns(files, candidates)
    else:

        def look(_: Path) -> dict[str, Any]:
            return {"columns": row_format.columns(files, candidates)}

        key = cache_key([_RULES, row_format.name, sorted(candidates), files])
        names = cached_entry(data.cache_dir, f"columns-{key}", look, [file.path for file in files])[1]["columns"]
    try:
        return choose_columns(names, data.columns, called, data.ignore)
    except UnknownColumnsError as error:
        rows = row_format.rows(cut(files[:1], row_format)[0], None)
        first = next((row for row in rows if isinstance(row, dict)), {})
        if row_format.name != "jsonl" or not (path := nested_rows(first)):
            raise
        array = ".[]" * (json_layout(files[0]) == "array")
        raise DataError(
            f"{called} is an export, whose rows lie under {(array + path).removeprefix('.')}",
            f"write a row a line: jq -c '{array}{path}' FILE.json > FILE.jsonl",
        ) from error


def _dated(source: str, data: DataConfig, called: str) -> str:
    """The template with the run's date, if it asks for one."""
    if READS_CLOCK not in source:
        if data.chat_date is not None:
            raise ConfigError(
                f"data.chat_date={data.chat_date} would be ignored: the chat template for {called} writes no date "
                f"({READS_CLOCK})",
                "remove data.chat_date",
            )
        return source
    if data.chat_date is None:
        raise ConfigError(
            f"the chat template for {called} writes the date of the day ({READS_CLOCK}) into the text, so that the "
            "tokens would depend on when a node reads the data",
            f"set the day that it takes for today, such as data.chat_date={date.today()}",
        )
    return at_date(source, data.chat_date)


def _template_source(data: DataConfig, tokenizer: Any) -> str | None:
    if data.chat_template is None:
        source = tokenizer.chat_template
        if isinstance(source, dict):
            source = source.get("default")
        return source if isinstance(source, str) else None
    try:
        with open_regular(Path(data.chat_template).expanduser()) as file:
            return TextIOWrapper(file, encoding="utf-8").read()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.chat_template={data.chat_template} cannot be read: {error}", "name a file with a chat template"
        ) from error


def text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


# The sources of a run.


def reads_documents(config: RunConfig) -> bool:
    """Whether the run's text has documents: it has a tokenizer, or the data are a tokenised corpus."""
    data = config.data
    paths = [data.path, *(source.path for source in data.sources)]
    if any(path is not None and path.endswith(".bin") for path in paths):
        return False
    return tokenizer_path(config) is not None or any(_is_corpus(path) for path in paths)


@dataclass(frozen=True)
class Sources:
    """The tokenised sources of a run, and how it uses them."""

    data: DataConfig
    train: tuple[Store, ...]
    val: tuple[Store, ...]
    manifests: tuple[dict[str, Any], ...]
    weights: tuple[float, ...]  # passes over each source in an epoch

    @property
    def plain_text(self) -> bool:
        """Whether every token is to be predicted, and windows may begin and end within documents."""
        return all(manifest["kind"] == "text" for manifest in self.manifests)

    def documents(self, split: Split, max_tokens: int | None = None) -> Documents:
        """The documents of a split, none longer than `max_tokens`; warns of those that were longer."""
        stores, fraction = self.train, self.data.val_fraction
        chosen: Split | None = split
        if self.val:
            stores, chosen = (self.val, None) if split == "val" else (self.train, None)
        how: LongSamples = "split" if self.plain_text else "truncate"
        if self.data.long_samples != "auto":
            how = self.data.long_samples
        documents = Documents(stores, Choice(chosen, fraction, max_tokens, how))
        if str(documents.long) and is_first_rank():
            name = "training" if split == "train" else "validation"
            _LOG.warning("%s %s longer than %s tokens: %s", name, documents.noun, max_tokens, documents.long)
        return documents

    def digests(self) -> dict[str, str]:
        """Digests of the tokenizer and the data, which must be the same when a run resumes."""
        together = json.dumps([[m["digest"], w] for m, w in zip(self.manifests, self.weights, strict=True)])
        tokenizers = {str(manifest["tokenizer"]) for manifest in self.manifests}
        return {"tokenizer": ",".join(sorted(tokenizers)), "data": text_digest(together)}


def open_sources(config: RunConfig, vocab_size: int, key: str) -> Sources:
    """Tokenise what is not in the cache yet, and map all sources."""
    data = config.data
    location = tokenizer_path(config)
    tokenizer = None if location is None else load_tokenizer(location)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config, vocab_size, key)
    # With streaming only the validation data are tokenised beforehand.
    named: list[tuple[str | None, str | None]] = [(source.path, source.called) for source in data.sources]
    named = named or [(data.path, None)]
    train = [] if data.streaming else [open_source(data, tokenizer, path, name) for path, name in named]
    val = []
    if data.val_path is not None:
        val = [open_source(data, tokenizer, data.val_path, "data.val_path", validates=True)]
    elif data.val_fraction:
        # Folders with a validation split validate by it alone, and nothing else is held out.
        for path, name in named if tokenizer is not None else ():
            if path is not None and not _is_corpus(path):
                plan = plan_source(data, tokenizer, path, name or path, "validation")
                val += [] if plan is None else [_open(data, plan)]
    for store, manifest in [*train, *val]:
        if manifest["n_ids"] > vocab_size:
            raise ConfigError(
                f"{key}={vocab_size}, but {store.source} was tokenised with {manifest['n_ids']} ids",
                f"tokenise the data with the model's tokenizer, or {more_rows(config, key, manifest['n_ids'])}",
            )
    return Sources(
        data=data,
        train=tuple(store for store, _ in train),
        val=tuple(store for store, _ in val),
        manifests=tuple(manifest for _, manifest in train or val),
        weights=tuple(source.weight for source in data.sources) or (1.0,) * len(train),
    )


@dataclass(frozen=True)
class Stream:
    """A set of records that is tokenised while it is read: its pieces, their rows, and the recipe."""

    source: str
    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]
    recipe: Recipe
    facts: dict[str, Any]
    contents: str  # digest of the files' contents, see `survey`
    # members of turns that nothing reads and that are no marks, as the first rows show them
    members: frozenset[str] = frozenset()

    def digests(self) -> dict[str, str]:
        """Digests of the tokenizer, and of recipe, sizes and contents; a resumed run must have the same."""
        about: list[Any] = [self.facts, self.recipe.eos, self.recipe.columns.names, self.contents]
        about += [self.recipe.columns.ignore] if self.recipe.columns.ignore else []
        sizes = [[os.path.basename(p.path), p.start, p.size, n] for p, n in zip(self.pieces, self.sizes, strict=True)]
        return {"tokenizer": self.facts["tokenizer"], "data": text_digest(json.dumps([about, sizes], sort_keys=True))}


def open_stream(config: RunConfig, vocab_size: int, key: str) -> Stream:
    """Count the rows of the set and take a digest of it, once a node; nothing is tokenised."""
    data = config.data
    location = tokenizer_path(config)
    if location is None or data.path is None or _is_corpus(data.path):
        raise ConfigError(
            "data.streaming=true reads records through a tokenizer, and the run has none or is given tokens",
            "set data.path to JSON lines, parquet or arrow files and data.tokenizer, or remove data.streaming",
        )
    tokenizer = load_tokenizer(location)
    check_vocabulary(tokenizer, config, vocab_size, key)
    plan = plan_source(data, tokenizer, data.path, data.path)
    assert plan is not None
    if not plan.format.has_columns:
        raise DataError(f"data.streaming=true, but {data.path} is plain text", "give JSON lines, parquet or arrow")
    pieces = cut(plan.files, plan.format, split_groups=True)

    def count(_: Path) -> dict[str, Any]:
        rows, contents = survey(pieces)
        return {"rows": rows, "contents": contents}

    _, counted = cached_entry(data.cache_dir, f"survey-{plan.key}", count, [file.path for file in plan.files])
    filled = [(piece, n) for piece, n in zip(pieces, counted["rows"], strict=True) if n]
    if not filled:
        raise DataError(f"{data.path} has no rows", "give data that are not empty")
    encoder, piece = Encoder(plan.recipe), filled[0][0]
    reader = encoder.reader  # it notes the columns and members of turns that the first rows have
    with reading(piece.path):
        first = list(islice(piece.format.rows(piece, plan.recipe.columns.read), _FIRST_ROWS))
    for number, row in enumerate(first):
        if isinstance(row, dict):
            try:
                encoder.texts(row)
            except RowError:
                continue  # it is counted when it is read
            except RefusedRow as error:
                raise DataError(f"{piece.path}:{number + 1}: {error}", error.fix) from error
    refuse_unread_marks(plan.source, reader.members)
    if is_first_rank():
        print(printable(plan.describe(sorted(reader.further), list(reader.members))), flush=True)
    return Stream(
        data.path,
        tuple(p for p, _ in filled),
        tuple(n for _, n in filled),
        plan.recipe,
        plan.facts,
        counted["contents"],
        frozenset(name for name, is_mark in reader.members.items() if not is_mark),
    )


_FIRST_ROWS = 100


def refuse_unread_marks(source: str, members: Mapping[str, bool]) -> None:
    """Refuse turns with a member that is true or false, or 0 or 1, throughout, and that nothing reads."""
    marks = sorted(name for name, is_mark in members.items() if is_mark)
    if marks:
        plural = "s" * (len(marks) > 1)
        raise DataError(
            f"{source}: turns have the member{plural} {listed(marks)}, true or false in each of them: it may say "
            "whether a turn is to be predicted, and nothing reads it",
            f"'data.ignore=[{', '.join(marks)}]' trains as if it were not there; weight, train, training, trainable, "
            "loss and loss_mask are obeyed",
        )


def open_source(
    data: DataConfig, tokenizer: Any, path: str | None, name: str | None = None, validates: bool = False
) -> tuple[Store, dict[str, Any]]:
    """A source's tokens and manifest: a corpus that `shardkit tokenize` made, or an entry of the cache."""
    called = name or (path if path is not None else "Python's standard library")
    if _is_corpus(path):
        assert path is not None
        directory = Path(path).expanduser()
        manifest = read_meta(directory)
        if manifest is None or manifest.get("format") != FORMAT_VERSION:
            raise DataError(
                f"{directory} is no whole tokenised corpus of this version", "make it again: shardkit tokenize SRC DIR"
            )
        if tokenizer is not None and manifest["tokenizer"] != tokenizer_digest(tokenizer):
            raise DataError(
                f"{path} was tokenised by another tokenizer (digest {manifest['tokenizer']}) than the run's "
                f"({tokenizer_digest(tokenizer)})",
                "tokenise the data again with this one (shardkit tokenize), or set data.tokenizer to the other",
            )
        _judge(data, called, manifest)
        return Store(str(directory), called, manifest["dtype"], manifest["masked"], manifest["kind"]), manifest
    if tokenizer is None:
        raise DataError(f"{called} is not tokenised, and the run has no tokenizer", "set data.tokenizer")
    split = "train"
    if validates and path is not None:
        # Of a folder with splits its validation data are meant, and else the only split that it has.
        splits = find(data_folder(path)).splits
        split = "validation" if "validation" in splits else next(iter(splits))
        if len(splits) > 1 and split != "validation":
            raise DataError(
                f"data.val_path={path} has the splits {', '.join(splits)}, and none of them is for validation",
                "name the files to validate with: data.val_path=FOLDER/NAME, or a glob of them",
            )
    plan = plan_source(data, tokenizer, path, called, split)
    assert plan is not None
    return _open(data, plan)


def _open(data: DataConfig, plan: Plan) -> tuple[Store, dict[str, Any]]:
    files = [file.path for file in plan.files]
    directory, manifest = cached_entry(data.cache_dir, f"documents-{plan.key}", plan.build, files)
    if is_first_rank():
        print(printable(plan.describe(manifest["further"], list(manifest["members"]))), flush=True)
    _judge(data, plan.source, manifest)
    return Store(str(directory), plan.source, manifest["dtype"], manifest["masked"], manifest["kind"]), manifest


def write_corpus(data: DataConfig, tokenizer: Any, path: str, out: Path) -> dict[str, Any]:
    """Tokenise a data set into a new folder; returns its manifest. Nothing is left behind on an error."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not empty", "name a new folder")
    plan = plan_source(data, tokenizer, path, path)
    assert plan is not None

    def build(directory: Path) -> dict[str, Any]:
        manifest = plan.build(directory)
        print(printable(plan.describe(manifest["further"], list(manifest["members"]))), flush=True)
        _judge(data, path, manifest)
        return manifest

    with system_errors(DataError, f"{out} cannot be written", "name another folder"):
        return build_entry(out, build)


def _judge(data: DataConfig, called: str, manifest: dict[str, Any]) -> None:
    """Refuse a source with too many bad rows or no document; warn of those that are left out."""
    refuse_unread_marks(called, manifest.get("members", {}))
    n_bad, n_rows = manifest["n_bad"], max(manifest["n_rows"], 1)
    if n_bad:
        file, line, reason, *fixes = manifest["bad"][0]  # corpora of earlier versions have no fix
        first_bad = f"{file}:{line}: {reason}"
        share = f" ({n_bad:,} of {n_rows:,} rows are bad)" if n_bad > 1 else ""
        if n_bad > data.max_bad_rows * n_rows and not manifest["skips"]:
            correct = "save the file as UTF-8" if reason.startswith("invalid UTF-8") else "correct the rows"
            digit = 10.0 ** (math.floor(math.log10(n_bad / n_rows)) - 1)
            enough = math.ceil(n_bad / n_rows / digit) * digit  # the share in two digits, rounded up
            fix = f"{correct}, or leave them out: data.max_bad_rows={enough:.2g} or more"
            if n_bad == n_rows:
                fix = correct + (", or the chat template" if manifest["template"] else "")
            raise DataError(
                f"{first_bad}{share}; data.max_bad_rows={data.max_bad_rows:g} allows "
                f"{int(data.max_bad_rows * n_rows):,}",
                "".join(fixes) or fix,
            )
        if is_first_rank():
            unit = "files" if manifest["skips"] else "rows"
            _LOG.warning(
                "%s: %s of %s %s are left out, the first: %s", called, f"{n_bad:,}", f"{n_rows:,}", unit, first_bad
            )
    n_several = manifest.get("n_several", 0)
    if n_several and is_first_rank():
        n_samples = manifest["n_documents"]
        _LOG.warning(
            "%s: the chat template changes earlier turns once later ones follow: %s of %s conversations are trained as "
            "several samples (%s samples together), each of which ends with a reply as the model would have given it",
            called, f"{n_several:,}", f"{n_rows - n_bad:,}", f"{n_samples:,}",
        )  # fmt: skip
    if not manifest["n_documents"]:
        raise DataError(f"{called} has no document", "give data that are not empty")


def _is_corpus(path: str | None) -> bool:
    return path is not None and (Path(path).expanduser() / META).is_file()


def _main(source: str, directory: str, tokenizer: str, *overrides: str) -> int:
    """The command `shardkit tokenize`; returns the exit code."""
    try:
        for override in overrides:
            if re.match(r"(?!data\.)\w+\.\w+=|data\.(path|tokenizer)=", override):
                fix = "pass keys of data alone; SRC is the data, --tokenizer the tokenizer"
                raise ConfigError(f"{override} would change nothing here", fix)
        data = load_config(None, [*overrides, f"data.tokenizer={tokenizer}"]).config.data
        made = write_corpus(data, load_tokenizer(tokenizer), source, Path(directory))
    except ShardkitError as error:
        fix = error.fix.replace("set data.tokenizer to a", "pass --tokenizer with a")
        fix = fix.replace("set data.path to ", "name as SRC ")
        fix = fix.replace("data.tokenizer", "--tokenizer")  # the run's key has the command's option here
        return report(type(error)(error.cause.replace("data.tokenizer=", "--tokenizer "), fix))
    print(
        f"{made['n_documents']:,} documents, {made['n_tokens']:,} tokens, {made['n_targets']:,} to predict; "
        f"{made['n_bad']:,} of {made['n_rows']:,} rows left out"
    )
    print(printable(f"wrote {directory} (tokenizer {made['tokenizer']}, data {made['digest']})"))
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
