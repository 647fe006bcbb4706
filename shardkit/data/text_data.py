"""The samples of a task on text: windows over a stream of tokens, documents one by one, or packed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..config.schema import DOCUMENT_KEYS, RunConfig
from ..errors import ConfigError, DataError
from .chat import RefusedRow, RowError
from .corpus import Corpus, unigram_cross_entropy
from .loader import MapDataset, MixOrder, WindowOrder
from .rows import BadRow, PieceReader, find
from .store import Documents, LongCounts, Split
from .tokenize import Encoder, Sources, Stream, open_sources, open_stream, reads_documents, refuse_unread_marks
from .windows import (
    IGNORE_INDEX,
    DocumentWindows,
    PackedDocuments,
    Windows,
    collate_packed,
    corpus_documents,
    nothing_left,
    open_covered,
    plan_packed,
)

_LOG = logging.getLogger(__name__)
_SEVERAL = (
    "the chat template changes earlier turns once later ones follow, so that it makes {} samples, and data.streaming "
    "takes one of a row: train without data.streaming, or with data.loss_on=completion"
)


class Samples:
    """A document a sample: {"tokens": int64 [L - 1], "targets": int64 [L - 1]}, the next tokens that count.

    `IGNORE_INDEX` stands where the next token is not to be predicted.
    """

    def __init__(self, documents: Documents) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        document = self.documents[index]
        targets = document["tokens"][1:].where(document["is_target"][1:], IGNORE_INDEX)
        return {"tokens": document["tokens"][:-1], "targets": targets}


_PAD_TO = 8


def pad_batch(samples: list[dict[str, torch.Tensor]], seq_len: int, fill_rows: bool) -> dict[str, torch.Tensor]:
    """Samples of different lengths as a micro-batch [B, T], padded at their ends with token 0, which is no target.

    T is the longest sample's length, rounded up to a multiple of 8, or `seq_len` with `whole`. A causal model never
    looks at what stands behind a token, so it needs no attention mask.
    """
    longest = max(sample["tokens"].shape[0] for sample in samples)
    size = seq_len if fill_rows else min(seq_len, -(-longest // _PAD_TO) * _PAD_TO)
    fill = {"tokens": 0, "targets": IGNORE_INDEX}

    def padded(tokens: torch.Tensor, value: int) -> torch.Tensor:
        missing = size - tokens.shape[0]
        return torch.nn.functional.pad(tokens, (0, missing), value=value) if missing else tokens

    return {key: torch.stack([padded(sample[key], value) for sample in samples]) for key, value in fill.items()}


class Mixed:
    """Concatenated data sets. An epoch makes `weights[i]` passes over data set i, in a `MixOrder`."""

    def __init__(self, parts: Sequence[Any], weights: Sequence[float]) -> None:
        self.parts, self.weights = list(parts), list(weights)
        self._stops = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._stops[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        of = int(np.searchsorted(self._stops, index, side="right"))
        return self.parts[of][index - (int(self._stops[of - 1]) if of else 0)]

    def describe(self) -> str:
        """How the parts are packed; empty if they are not."""
        return "; ".join(part.describe() for part in self.parts if isinstance(part, PackedDocuments))

    def order(self, seed: int, shuffle: bool) -> MixOrder:
        return MixOrder([len(part) for part in self.parts], self.weights, seed, shuffle)


class Streamed:
    """The rows of a `Stream`, each tokenised when it is asked for: {"tokens": int64 [L - 1], "targets": int64 [L - 1]}.

    A row that cannot be used is a sample without targets, up to a share of the rows that this process has read. What
    became of rows that are too long is said at the first, and in counts after 100, 1,000, 10,000 … rows. A document of
    more than `max_tokens` is truncated, or with `drop` has no targets. DataError from `[]` if more rows are bad than
    `max_bad_rows` allows, or all rows that were read are too long to have a target.
    """

    JUDGED_AFTER = 1000

    def __init__(self, stream: Stream, max_tokens: int, drop: bool, max_bad_rows: float) -> None:
        self.stream, self.max_tokens, self.drop, self.max_bad_rows = stream, max_tokens, drop, max_bad_rows
        self._sizes = np.array(stream.sizes, dtype=np.int64)
        self._stops = np.cumsum(self._sizes)
        self._reader: PieceReader | None = None
        self._encoder: Encoder | None = None
        self._n_read = self._n_bad = 0
        self._long = LongCounts()

    def __len__(self) -> int:
        return int(self._stops[-1])

    def order(self, seed: int, shuffle: bool) -> WindowOrder:
        # A part of a row group can only be read behind the part before it.
        goes_on = np.array([piece.first_row > 0 for piece in self.stream.pieces], dtype=np.bool_)
        return WindowOrder(self._sizes, seed, shuffle, goes_on)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._stops, index, side="right"))
        if self._reader is None or self._encoder is None:
            self._reader = PieceReader(self.stream.pieces, self.stream.recipe.columns.read, WindowOrder.WINDOW)
            self._encoder = Encoder(self.stream.recipe)
        at, row = self._reader.row(number, index - int(self._stops[number] - self._sizes[number]))
        self._n_read += 1
        problem, fix = row.reason if isinstance(row, BadRow) else "", ""
        tokens, targets = np.zeros(1, np.int64), np.zeros(0, np.bool_)
        if not problem:
            try:
                texts = self._encoder.texts(row)
                members = self._encoder.reader.members
                if unknown := members.keys() - self.stream.members:
                    refuse_unread_marks(self._name_of_row(number, at), {name: members.pop(name) for name in unknown})
                if len(texts) > 1:
                    raise RowError(_SEVERAL.format(len(texts)))
                encoded = self._encoder.encode(texts)
                tokens = encoded.tokens[: self.max_tokens].astype(np.int64)
                mask = encoded.is_target if encoded.is_target is not None else np.ones(len(encoded.tokens), np.bool_)
                if not mask[1:].any():
                    raise RowError("no token to predict in it")
                too_long = len(encoded.tokens) > self.max_tokens
                targets = mask[1 : self.max_tokens] & (not self.drop or not too_long)
                if too_long:
                    self._count_long(number, at, len(encoded.tokens), bool(targets.any()))
            except RefusedRow as error:
                raise DataError(f"{self._name_of_row(number, at)}: {error}", error.fix) from error
            except RowError as error:
                problem, fix = str(error), error.fix
        if problem:
            name = self._name_of_row(number, at)
            self._n_bad += 1
            if self._n_bad > self.max_bad_rows * max(self._n_read, self.JUDGED_AFTER):
                raise DataError(
                    f"{name}: {problem} ({self._n_bad:,} of the {self._n_read:,} rows that were read are bad); "
                    f"data.max_bad_rows={self.max_bad_rows:g}",
                    fix or "correct the rows, or raise data.max_bad_rows",
                )
            _LOG.warning("%s is left out: %s", name, problem)
        if self._n_read >= 100 and str(self._n_read).strip("0") == "1" and str(self._long):
            _LOG.warning(
                "%s rows longer than %s tokens, of %s that this process has read: %s",
                self.stream.source, self.max_tokens, f"{self._n_read:,}", self._long,
            )  # fmt: skip
        if len(tokens) < 2:
            return {"tokens": torch.zeros(1, dtype=torch.int64), "targets": torch.full((1,), IGNORE_INDEX)}
        return {
            "tokens": torch.from_numpy(tokens[:-1]),
            "targets": torch.from_numpy(np.where(targets, tokens[1:], IGNORE_INDEX)),
        }

    def _count_long(self, number: int, at: int, n_tokens: int, has_target: bool) -> None:
        counts, longest = self._long, self.max_tokens - 1
        is_first = not str(counts)
        counts.dropped += self.drop
        counts.truncated += not self.drop
        counts.without_target += not self.drop and not has_target
        counts.tokens_left_out += n_tokens - (self.max_tokens if has_target else 0)
        n_useless = counts.dropped + counts.without_target
        if n_useless == self._n_read >= min(self.JUDGED_AFTER, len(self)):
            raise DataError(
                f"{self.stream.source}: none of the {self._n_read:,} rows that were read has a token to predict within "
                f"train.seq_len={longest}",
                "raise train.seq_len, or give shorter rows",
            )
        if is_first:
            outcome = "left out" if self.drop else "truncated" if has_target else "left out: no target would remain"
            name = self._name_of_row(number, at)
            _LOG.warning(
                "%s is longer than %s tokens and is %s; further such rows are counted", name, longest + 1, outcome
            )

    def _name_of_row(self, number: int, at: int) -> str:
        piece = self.stream.pieces[number]
        if piece.n_rows is not None:
            return f"{piece.path}, row {piece.first_row + at + 1} of group {piece.start}"
        return f"{piece.path}, row {at + 1} from {piece.format.unit} {piece.start} on"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_encoder": None}


class TextData:
    """The data of a text task: documents of a tokenizer's tokens, or one stream of bytes or of a `.bin` file's tokens.

    Data are opened on first use: a task can be made for its model alone. `key`: the setting that holds the model's
    vocabulary size. `reserved`: ids at the vocabulary's end that the data may not use.
    """

    def __init__(self, config: RunConfig, vocab_size: int, key: str, reserved: int = 0) -> None:
        self.config = config
        # positions that a token's attention goes over on average, later ones included: `train.seq_len`, or once
        # training documents are packed, their mean length as its tokens see it
        self.context: float = config.train.seq_len
        self._vocabulary = vocab_size, key, reserved

    @cached_property
    def stream(self) -> Stream | None:
        """The training data, if they are tokenised while they are read."""
        if not self.config.data.streaming:
            return None
        _refuse_beside_streaming(self.config)
        vocab_size, key, reserved = self._vocabulary
        return open_stream(self.config, vocab_size - reserved, key)

    @cached_property
    def _opened(self) -> Corpus | Sources:
        vocab_size, key, reserved = self._vocabulary
        if reads_documents(self.config):
            return open_sources(self.config, vocab_size - reserved, key)
        _refuse_keys_of_tokenizers(self.config)
        return open_covered(self.config, vocab_size, key, reserved)

    @property
    def corpus(self) -> Corpus | None:
        """The stream; None with documents."""
        return self._opened if isinstance(self._opened, Corpus) else None

    @property
    def sources(self) -> Sources | None:
        """The documents; None with a stream."""
        return self._opened if isinstance(self._opened, Sources) else None

    def documents(self, split: Split, max_tokens: int | None = None) -> Documents:
        """A split's documents, none longer than `max_tokens`."""
        if self.sources is None:
            assert self.corpus is not None
            raise DataError(
                f"{self.corpus.source} is a stream of tokens without the bounds of its documents",
                "set data.tokenizer, or make a corpus with bounds: shardkit tokenize SOURCE FOLDER",
            )
        return self.sources.documents(split, max_tokens)

    def dataset(self, split: Split) -> MapDataset:
        """Windows over plain text, a document a sample where only parts of it are predicted, or packed documents."""
        if self.stream is not None and split == "train":
            data = self.config.data
            longest = self.config.train.seq_len + 1
            return Streamed(self.stream, longest, data.long_samples == "drop", data.max_bad_rows)
        if self.sources is None:
            assert self.corpus is not None
            datasets: list[MapDataset] = [self._of_stream(self.corpus, split)]
        else:
            documents = self.documents(split, self._max_tokens)
            parts = [documents]
            if split == "train" and any(weight != 1 for weight in self.sources.weights):
                parts = [documents.of_source(i) for i in range(len(documents.sources))]
            datasets = [self._of_documents(part, split) for part in parts]
        if split == "train" and self._packing != "none":
            packed = [part for part in datasets if isinstance(part, PackedDocuments)]
            self.context = sum(part.context * len(part) for part in packed) / sum(map(len, packed))
        return datasets[0] if len(datasets) == 1 or self.sources is None else Mixed(datasets, self.sources.weights)

    def val_parts(self) -> dict[str, MapDataset]:
        """The validation data of each source, where there are several."""
        if self.sources is None or len(self.sources.manifests) == 1:
            return {}
        documents = self.documents("val", self._max_tokens)
        every = [documents.of_source(index) for index in range(len(documents.sources))]
        return {part.sources[0]: self._of_documents(part, "val") for part in every if len(part)}

    @property
    def _packing(self) -> str:
        return self.config.data.packing

    @property
    def _max_tokens(self) -> int | None:
        """The longest document that a sample holds; None for windows, which may begin and end within one."""
        windows = self._packing == "none" and self.sources is not None and self.sources.plain_text
        return None if windows else self.config.train.seq_len + 1

    def _of_stream(self, corpus: Corpus, split: Split) -> Windows | PackedDocuments:
        packing, seq_len = self.config.data.packing, self.config.train.seq_len
        name = _called(split, corpus.source)
        if packing != "none":
            return PackedDocuments(corpus_documents(corpus, split), seq_len, packing, name)
        return Windows(corpus.span(split), seq_len, name, None if split == "train" else 2)

    def _of_documents(self, documents: Documents, split: Split) -> DocumentWindows | Samples | PackedDocuments:
        assert self.sources is not None
        packing, seq_len = self.config.data.packing, self.config.train.seq_len
        name = _called(split, ", ".join(documents.sources))
        if packing != "none":
            return PackedDocuments(documents, seq_len, packing, name)
        if self.sources.plain_text:
            return DocumentWindows(documents, seq_len, name, None if split == "train" else 2)
        if not len(documents):
            raise nothing_left(f"{name} has no document", documents, seq_len)
        return Samples(documents)

    @property
    def n_ids(self) -> int:
        """One more than the largest id that the data may hold."""
        if self.corpus is not None:
            return self.corpus.max_token + 1
        assert self.sources is not None
        return max(int(manifest["n_ids"]) for manifest in self.sources.manifests)

    @property
    def has_windows(self) -> bool:
        """Whether samples are windows of `train.seq_len` tokens, the last of which is padded."""
        if self._packing != "none" or self.config.data.streaming:
            return False
        return self.sources is None or self.sources.plain_text

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """A micro-batch; samples of several lengths are padded, or laid in one row."""
        seq_len = self.config.train.seq_len
        if self._packing == "none":
            return pad_batch(samples, seq_len, self.config.compile.enabled)
        return collate_packed(samples, seq_len if self._packing == "packed" else None)

    def plan_batch(self, n: int) -> dict[str, Any]:
        """A micro-batch of `n` samples without data, in its largest form."""
        packing, seq_len = self.config.data.packing, self.config.train.seq_len
        if packing != "none":
            return plan_packed(n, seq_len, packing)
        empty = torch.zeros(n, seq_len, dtype=torch.int64)
        return {"tokens": empty, "targets": empty.clone()}

    def digests(self) -> dict[str, str]:
        """The tokenizer's, if there is one, and the data's, for checkpoints."""
        if self.stream is not None:
            return self.stream.digests()
        if self.corpus is not None:
            return {"data": self.corpus.digest}
        return {} if self.sources is None else self.sources.digests()

    def describe(self) -> dict[str, float]:
        """The baseline a model must beat: validation cross-entropy of the training unigrams, nats per target."""
        if self.stream is not None:
            return {}  # the training counts would take a pass over all data
        if self.corpus is not None:
            return {"unigram_cross_entropy": self.corpus.unigram_cross_entropy()}
        train, val = (target_counts(self.documents(split)) for split in ("train", "val"))
        return {"unigram_cross_entropy": unigram_cross_entropy(train, val)}


def _refuse_beside_streaming(config: RunConfig) -> None:
    data = config.data
    no_validation = data.val_path is None and config.train.eval_samples > 0
    if no_validation and data.path is not None and Path(data.path).expanduser().is_dir():
        no_validation = not find(data.path).splits.get("validation")
    for key, refused, reason in (
        ("packing", data.packing != "none", "packing needs the lengths of all documents"),
        ("sources", bool(data.sources), "it reads one set"),
        ("long_samples", data.long_samples == "split", "a row is one sample"),
        ("val_path", no_validation, "it holds out no rows"),
    ):
        if refused:
            fix = f"remove data.streaming, or change data.{key}"
            if key == "val_path":
                fix = "set data.val_path to validation data, or train.eval_samples=0"
            setting = f"data.{key}={getattr(data, key)}" if getattr(data, key) is not None else f"data.{key} unset"
            raise ConfigError(f"data.streaming=true with {setting}: {reason}", fix)


def _called(split: Split, source: str) -> str:
    return f"the {'training' if split == 'train' else 'validation'} split of {source}"


_COUNTED = 1 << 24


def target_counts(documents: Documents, most: int = _COUNTED) -> npt.NDArray[np.int64]:
    """How often each token is a target in the first documents of a split, up to `most` tokens or little more."""
    counts = np.zeros(0, dtype=np.int64)
    seen = 0
    for index in range(len(documents)):
        tokens, is_target = documents.piece(index, 0, min(int(documents.lengths[index]), most))
        document_counts = np.bincount(tokens[is_target])
        size = max(len(counts), len(document_counts))
        counts = np.pad(counts, (0, size - len(counts))) + np.pad(document_counts, (0, size - len(document_counts)))
        seen += len(tokens)
        if seen >= most:
            break
    return counts


def _refuse_keys_of_tokenizers(config: RunConfig) -> None:
    data = config.data
    defaults = type(data).model_fields
    for key in DOCUMENT_KEYS:
        if key != "sources" and getattr(data, key) != defaults[key].default:
            raise ConfigError(
                f"{config.setting(f'data.{key}')} would be ignored: the data are read without a tokenizer",
                f"set data.tokenizer, or remove data.{key}",
            )
    if data.sources:
        raise ConfigError(
            "data.sources needs a tokenizer, and the run has none", "set data.tokenizer, or one data.path instead"
        )
