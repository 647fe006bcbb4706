"""Open the sources of a run: tokenise them into the cache the first time, and check them against the model."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.libraries import is_first_rank
from ...config.load import load_config
from ...config.schema import DataConfig, RunConfig, SourceConfig
from ...errors import ConfigError, DataError, ShardkitError, printable, report
from ..rows.format import Piece
from ..rows.pieces import cut, survey
from ..store.cache import META, build_entry, cached_entry, read_meta
from ..store.tokenised import FORMAT_VERSION, Choice, Documents, LongSamples, Split, Store
from .encode import Recipe
from .source_plan import plan_source, text_digest
from .tokenizer import check_vocabulary, load_tokenizer, more_rows, tokenizer_digest, tokenizer_path

_LOG = logging.getLogger(__name__)


def reads_documents(config: RunConfig) -> bool:
    """Whether the run's text has documents: it has a tokenizer, or the data are a tokenised corpus."""
    data = config.data
    paths = [data.path, *(source.path for source in data.sources)]
    if any(path is not None and path.endswith(".bin") for path in paths):
        return False
    return tokenizer_path(config) is not None or any(_is_corpus(path) for path in paths)


@dataclass(frozen=True)
class Sources:
    """The tokenised sources of a run, and how it uses them.

    Attributes:
        weights: passes over each source in an epoch.
        plain_text: every token is to be predicted, and windows may begin and end within documents.
    """

    data: DataConfig
    train: tuple[Store, ...]
    val: tuple[Store, ...]
    manifests: tuple[dict[str, Any], ...]
    weights: tuple[float, ...]

    @property
    def plain_text(self) -> bool:
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

    def by_weight(self, documents: Documents, split: Split) -> list[Documents]:
        """The documents as one set, or of training data one for each source if their weights differ from 1."""
        if split == "val" or all(weight == 1 for weight in self.weights):
            return [documents]
        return [documents.of_source(i) for i in range(len(documents.sources))]

    def digests(self) -> dict[str, str]:
        """Digests of the tokenizer and the data, which must be the same when a run resumes."""
        together = json.dumps([[m["digest"], w] for m, w in zip(self.manifests, self.weights, strict=True)])
        tokenizers = {str(manifest["tokenizer"]) for manifest in self.manifests}
        return {
            "tokenizer": ",".join(sorted(tokenizers)),
            "data": text_digest(together),
        }


def open_sources(config: RunConfig, vocab_size: int, key: str) -> Sources:
    """Tokenise what is not in the cache yet, and map all sources.

    Raises:
        ConfigError: the tokenizer cannot be used, or has more ids than the model.
        DataError: a source cannot be read, has too many bad rows, or was tokenised by another tokenizer.
    """
    data = config.data
    location = tokenizer_path(config)
    tokenizer = None if location is None else load_tokenizer(location)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config, vocab_size, key)
    # With streaming only the validation data are tokenised beforehand.
    train_sources: list[SourceConfig | None] = [] if data.streaming else list(data.sources) or [None]
    train = [
        open_source(data, tokenizer, data.path)
        if source is None
        else open_source(data, tokenizer, source.path, source.called)
        for source in train_sources
    ]
    val = []
    if data.val_path is not None:
        val = [open_source(data, tokenizer, data.val_path, "data.val_path")]
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
        weights=tuple(1.0 if source is None else source.weight for source in train_sources),
    )


@dataclass(frozen=True)
class Stream:
    """A set of records that is tokenised while it is read: its pieces, their rows, and the recipe.

    Attributes:
        contents: digest of the files' contents, see `survey`.
    """

    source: str
    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]
    recipe: Recipe
    facts: dict[str, Any]
    contents: str

    def digests(self) -> dict[str, str]:
        """Digests of the tokenizer, and of recipe, sizes and contents; a resumed run must have the same."""
        about = [self.facts, self.recipe.eos, self.recipe.columns.names, self.contents]
        sizes = [[os.path.basename(p.path), p.start, p.size, n] for p, n in zip(self.pieces, self.sizes, strict=True)]
        return {"tokenizer": self.facts["tokenizer"], "data": text_digest(json.dumps([about, sizes], sort_keys=True))}


def open_stream(config: RunConfig, vocab_size: int, key: str) -> Stream:
    """Count the rows of the set and take a digest of it, once a node; nothing is tokenised.

    Raises:
        ConfigError: the run has no tokenizer, or one with more ids than the model; other settings do not fit.
        DataError: the data are no records, or cannot be read.
    """
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
    return Stream(
        data.path,
        tuple(p for p, _ in filled),
        tuple(n for _, n in filled),
        plan.recipe,
        plan.facts,
        counted["contents"],
    )


def open_source(
    data: DataConfig, tokenizer: Any, path: str | None, name: str | None = None
) -> tuple[Store, dict[str, Any]]:
    """A source's tokens and manifest: a corpus that `shardkit tokenize` made, or an entry of the cache.

    Raises:
        DataError: see `open_sources`.
    """
    called = name or (path if path is not None else "Python's standard library")
    if _is_corpus(path):
        assert path is not None
        directory = Path(path).expanduser()
        manifest = read_manifest(directory)
        if tokenizer is not None and manifest["tokenizer"] != tokenizer_digest(tokenizer):
            raise DataError(
                f"{path} was tokenised by another tokenizer (digest {manifest['tokenizer']}) than the run's "
                f"({tokenizer_digest(tokenizer)})",
                "tokenise the data again with this one (shardkit tokenize), or set data.tokenizer to the other",
            )
    else:
        if tokenizer is None:
            raise DataError(f"{called} is not tokenised, and the run has no tokenizer", "set data.tokenizer")
        plan = plan_source(data, tokenizer, path, called)
        files = [file.path for file in plan.files]
        directory, manifest = cached_entry(data.cache_dir, f"documents-{plan.key}", plan.build, files)
    _judge(data, called, manifest)
    return Store(str(directory), called, manifest["dtype"], manifest["masked"], manifest["kind"]), manifest


def write_corpus(data: DataConfig, tokenizer: Any, path: str, out: Path) -> dict[str, Any]:
    """Tokenise a data set into a new folder; returns its manifest. Nothing is left behind on an error.

    Raises:
        DataError: see `open_sources`; the folder exists and holds something, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not empty", "name a new folder")
    plan = plan_source(data, tokenizer, path, path)

    def build(directory: Path) -> dict[str, Any]:
        manifest = plan.build(directory)
        _judge(data, path, manifest)
        return manifest

    try:
        return build_entry(out, build)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}", "name another folder") from error


def _judge(data: DataConfig, called: str, manifest: dict[str, Any]) -> None:
    """Refuse a source with too many bad rows or no document; warn of those that are left out."""
    n_bad, n_rows = manifest["n_bad"], max(manifest["n_rows"], 1)
    if n_bad:
        file, line, reason = manifest["bad"][0]
        first_bad = f"{file}:{line}: {reason}"
        share = f" ({n_bad:,} of {n_rows:,} rows are bad)" if n_bad > 1 else ""
        if n_bad > data.max_bad_rows * n_rows and not manifest["skips"]:
            correct = "save the file as UTF-8" if reason.startswith("invalid UTF-8") else "correct the rows"
            raise DataError(
                f"{first_bad}{share}; data.max_bad_rows={data.max_bad_rows:g} allows "
                f"{int(data.max_bad_rows * n_rows):,}",
                correct + (", or the chat template" if manifest["template"] else "")
                if n_bad == n_rows
                else f"{correct}, or leave them out: data.max_bad_rows={_at_least(n_bad / n_rows)} or more",
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


def _at_least(share: float) -> str:
    """A share in two digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(share)) - 1)
    return f"{math.ceil(share / unit) * unit:.2g}"


def _is_corpus(path: str | None) -> bool:
    return path is not None and (Path(path).expanduser() / META).is_file()


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a corpus that `shardkit tokenize` made.

    Raises:
        DataError: it is of another version, or a file of the corpus is missing or cut short.
    """
    manifest = read_meta(directory)
    if manifest is None or manifest.get("format") != FORMAT_VERSION:
        raise DataError(
            f"{directory} is no whole tokenised corpus of this version", "make it again: shardkit tokenize SRC DIR"
        )
    return manifest


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
