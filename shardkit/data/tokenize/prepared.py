"""The tokenised sources of a run: found, tokenised into the cache the first time, and checked against the model."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ...config.libraries import is_first_rank
from ...config.load import load_config
from ...config.schema import DataConfig, RunConfig, SourceConfig
from ...errors import ConfigError, DataError, ShardkitError, printable, report
from ..chat import READS_CLOCK, LossOn, Template, at_date, no_template
from ..listing import TextFile
from ..rows.columns import Columns, choose_columns, names_to_find
from ..rows.format import Piece, RowFormat
from ..rows.formats import PLAIN_TEXT, find_records, find_text_files
from ..rows.pieces import cut, survey
from ..store.cache import META, build_entry, cached_entry, read_meta
from ..store.tokenised import FORMAT_VERSION, Choice, Documents, LongSamples, Split, Store
from .encode import Recipe, encode_all
from .tokenizer import check_vocabulary, load_tokenizer, more_rows, n_ids, tokenizer_digest, tokenizer_path

_LOG = logging.getLogger(__name__)
_RULES = 2
"""Version of the rules by which rows become tokens; another one makes other entries of the cache."""
_LOOKED_AT_ONCE = 1 << 20
"""Bytes of records whose columns are found faster than an entry of the cache."""


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
        """The documents of a split, none longer than `max_tokens`; says what became of those that were."""
        stores, fraction = self.train, self.data.val_fraction
        chosen: Split | None = split
        if self.val:
            stores, chosen = (self.val, None) if split == "val" else (self.train, None)
        how: LongSamples = "split" if self.plain_text else "truncate"
        if self.data.long_samples != "auto":
            how = self.data.long_samples
        found = Documents(stores, Choice(chosen, fraction, max_tokens, how))
        if str(found.long) and is_first_rank():
            name = "training" if split == "train" else "validation"
            _LOG.warning("%s %s longer than %s tokens: %s", name, found.noun, max_tokens, found.long)
        return found

    def by_weight(self, documents: Documents, split: Split) -> list[Documents]:
        """The documents as one set, or of training data one for each source if their weights differ from 1."""
        if split == "val" or all(weight == 1 for weight in self.weights):
            return [documents]
        return [documents.of_source(i) for i in range(len(documents.sources))]

    def digests(self) -> dict[str, str]:
        """What a resume must find again."""
        together = json.dumps([[m["digest"], w] for m, w in zip(self.manifests, self.weights, strict=True)])
        tokenizers = {str(manifest["tokenizer"]) for manifest in self.manifests}
        return {
            "tokenizer": ",".join(sorted(tokenizers)),
            "data": hashlib.blake2b(together.encode(), digest_size=16).hexdigest(),
        }


def open_sources(config: RunConfig, vocab_size: int, key: str) -> Sources:
    """Tokenise what is not in the cache yet, and map all sources.

    Raises:
        ConfigError: the tokenizer cannot be used, or has more ids than the model.
        DataError: a source cannot be read, has too many bad rows, or was tokenised by another tokenizer.
    """
    data = config.data
    where = tokenizer_path(config)
    tokenizer = None if where is None else load_tokenizer(where)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config, vocab_size, key)
    # With streaming only the validation data are tokenised beforehand.
    given: list[SourceConfig | None] = [] if data.streaming else list(data.sources) or [None]
    train = [
        open_source(data, tokenizer, data.path) if one is None else open_source(data, tokenizer, one.path, one.called)
        for one in given
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
        weights=tuple(1.0 if one is None else one.weight for one in given),
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
        """What a resume must find again: the tokenizer, the recipe, the pieces' sizes, and the contents."""
        about = [self.facts, self.recipe.eos, self.recipe.columns.names, self.contents]
        sizes = [[os.path.basename(p.path), p.start, p.size, n] for p, n in zip(self.pieces, self.sizes, strict=True)]
        return {"tokenizer": self.facts["tokenizer"], "data": _digest(json.dumps([about, sizes], sort_keys=True))}


def open_stream(config: RunConfig, vocab_size: int, key: str) -> Stream:
    """Count the rows of the set and take a digest of it, once a node; nothing is tokenised.

    Raises:
        ConfigError: the run has no tokenizer, or one with more ids than the model; other settings do not fit.
        DataError: the data are no records, or cannot be read.
    """
    data = config.data
    where = tokenizer_path(config)
    if where is None or data.path is None or _is_corpus(data.path):
        raise ConfigError(
            "data.streaming=true reads records through a tokenizer, and the run has none or is given tokens",
            "set data.path to JSON lines, parquet or arrow files and data.tokenizer, or remove data.streaming",
        )
    tokenizer = load_tokenizer(where)
    check_vocabulary(tokenizer, config, vocab_size, key)
    plan = plan_source(data, tokenizer, data.path, data.path)
    if not plan.format.has_columns:
        raise DataError(f"data.streaming=true, but {data.path} is plain text", "give JSON lines, parquet or arrow")
    pieces = cut(plan.files, plan.format, split_groups=True)

    def count(_: Path) -> dict[str, Any]:
        rows, contents = survey(pieces)
        return {"rows": rows, "contents": contents}

    _, found = cached_entry(data.cache_dir, f"survey-{plan.key}", count, [file.path for file in plan.files])
    kept = [(piece, n) for piece, n in zip(pieces, found["rows"], strict=True) if n]
    if not kept:
        raise DataError(f"{data.path} has no rows", "give data that are not empty")
    return Stream(
        data.path, tuple(p for p, _ in kept), tuple(n for _, n in kept), plan.recipe, plan.facts, found["contents"]
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


@dataclass(frozen=True)
class Plan:
    """How a source is tokenised: its files, the recipe, and the key of its place in the cache."""

    source: str
    files: list[TextFile]
    format: RowFormat
    recipe: Recipe
    facts: dict[str, Any]
    workers: int

    @property
    def key(self) -> str:
        """A hash of the recipe, of every file's path, size and modification time, and of how records are cut: the data
        digest depends on it."""
        columns = [self.recipe.columns.kind, self.recipe.columns.names]
        recipe = [self.facts, self.recipe.eos, self.recipe.loss_on]
        kind = self.format.name if self.format.has_columns else None
        return _key([FORMAT_VERSION, _RULES, kind, columns, *recipe, _listing(self.files), self._cut])

    @property
    def _cut(self) -> int | None:
        return self.format.encoded_piece_bytes(self.files)

    def build(self, directory: Path) -> dict[str, Any]:
        """Write the corpus; returns its manifest."""
        pieces = cut(self.files, self.format, self._cut)
        if not pieces:
            raise DataError(f"{self.source} holds no text", "point it at text, JSON lines, parquet or arrow files")
        return {**self.facts, **encode_all(directory, self.source, pieces, self.recipe, self.workers)}


def plan_source(data: DataConfig, tokenizer: Any, path: str | None, called: str) -> Plan:
    """Look at a source, and decide how its rows become tokens.

    Raises:
        DataError: no known columns; conversations without a chat template; `data.loss_on` does not fit.
        ConfigError: `data.chat_template` cannot be read.
    """
    if path is None:
        files, row_format = find_text_files(None), PLAIN_TEXT
    else:
        files, row_format = find_records(path)
    columns = Columns("text", {})
    if row_format.has_columns:
        columns = choose_columns(_column_names(data, files, row_format), data.columns, called)
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
    wide = n_ids(tokenizer) > 1 << 16
    recipe = Recipe(
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        columns=columns,
        loss_on=_loss_on(data, columns, called),
        eos=tokenizer.eos_token_id if data.add_eos else None,
        dtype="<u4" if wide else "<u2",
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
        "template": None if template is None else _digest(json.dumps([template.source, template.special])),
    }
    workers = data.tokenize_workers or len(os.sched_getaffinity(0))
    return Plan(called, files, row_format, recipe, facts, workers)


def _dated(source: str, data: DataConfig, called: str) -> str:
    """The template with the run's date, if it asks for one.

    Raises:
        ConfigError: it asks, and `data.chat_date` is unset; or it is set and nothing asks.
    """
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


def _column_names(data: DataConfig, files: list[TextFile], row_format: RowFormat) -> list[str]:
    """The columns that any row has, looked for once a node where this takes a while."""
    wanted = names_to_find(data.columns)
    if sum(file.size for file in files) <= _LOOKED_AT_ONCE:
        return row_format.columns(files, wanted)

    def look(_: Path) -> dict[str, Any]:
        return {"columns": row_format.columns(files, wanted)}

    key = _key([_RULES, row_format.name, sorted(wanted), _listing(files)])
    names: list[str] = cached_entry(data.cache_dir, f"columns-{key}", look, [file.path for file in files])[1]["columns"]
    return names


def _listing(files: list[TextFile]) -> list[list[Any]]:
    return [[os.path.abspath(file.path), file.name, file.size, file.mtime_ns] for file in files]


def _key(values: list[Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _loss_on(data: DataConfig, columns: Columns, called: str) -> LossOn:
    usual: dict[str, LossOn] = {"text": "all", "messages": "assistant", "prompt": "completion"}
    fitting: dict[str, Sequence[str]] = {
        "text": ("all",), "messages": ("all", "assistant", "completion"), "prompt": ("all", "completion"),
    }  # fmt: skip
    if data.loss_on == "auto":
        return usual[columns.kind]
    if data.loss_on not in fitting[columns.kind]:
        what = {"text": "text", "messages": "conversations", "prompt": "prompts and completions"}[columns.kind]
        raise DataError(
            f"data.loss_on={data.loss_on} does not fit {called}, which holds {what}",
            f"set data.loss_on to auto or {' or '.join(fitting[columns.kind])}",
        )
    return data.loss_on


def _template_source(data: DataConfig, tokenizer: Any) -> str | None:
    if data.chat_template is None:
        source = tokenizer.chat_template
        if isinstance(source, dict):
            source = source.get("default")
        return source if isinstance(source, str) else None
    try:
        return Path(data.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.chat_template={data.chat_template} cannot be read: {error}", "name a file with a chat template"
        ) from error


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _judge(data: DataConfig, called: str, manifest: dict[str, Any]) -> None:
    """Refuse a source with too many bad rows or no document; warn of those that are left out."""
    n_bad, n_rows = manifest["n_bad"], max(manifest["n_rows"], 1)
    if n_bad:
        file, line, why = manifest["bad"][0]
        first = f"{file}:{line}: {why}"
        more = f" ({n_bad:,} of {n_rows:,} rows are bad)" if n_bad > 1 else ""
        if n_bad > data.max_bad_rows * n_rows and not manifest["skips"]:
            raise DataError(
                f"{first}{more}; data.max_bad_rows={data.max_bad_rows:g} allows {int(data.max_bad_rows * n_rows):,}",
                "correct the rows" + (", or the chat template" if manifest["template"] else "")
                if n_bad == n_rows
                else f"correct the rows, or leave them out: data.max_bad_rows={_at_least(n_bad / n_rows)} or more",
            )
        if is_first_rank():
            unit = "files" if manifest["skips"] else "rows"
            _LOG.warning(
                "%s: %s of %s %s are left out, the first: %s", called, f"{n_bad:,}", f"{n_rows:,}", unit, first
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
