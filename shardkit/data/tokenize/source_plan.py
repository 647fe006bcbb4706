"""How a source is tokenised: its files, columns, template and the key of its place in the cache."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ...config.libraries import is_first_rank
from ...config.schema import DataConfig
from ...errors import ConfigError, DataError
from ...files import open_regular
from ...files.cgroups import n_cpus
from ..chat import READS_CLOCK, LossOn, Template, at_date, no_template
from ..listing import TextFile
from ..rows.columns import Columns, choose_columns, names_to_find
from ..rows.format import RowFormat
from ..rows.formats import PLAIN_TEXT, find_records, find_text_files
from ..rows.pieces import cut
from ..store.cache import cache_key, cached_entry
from ..store.tokenised import FORMAT_VERSION
from .encode import Recipe
from .pool import encode_all
from .tokenizer import n_ids, tokenizer_digest

_LOG = logging.getLogger(__name__)
_RULES = 2
"""Version of the rules by which rows become tokens; another one makes other entries of the cache."""
_LOOKED_AT_ONCE = 1 << 20
"""Bytes of records whose columns are found faster than an entry of the cache."""


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
        return cache_key([FORMAT_VERSION, _RULES, kind, columns, *recipe, self.files, self._cut])

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
        "template": None if template is None else text_digest(json.dumps([template.source, template.special])),
    }
    workers = data.tokenize_workers or n_cpus()
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
    candidates = names_to_find(data.columns)
    if sum(file.size for file in files) <= _LOOKED_AT_ONCE:
        return row_format.columns(files, candidates)

    def look(_: Path) -> dict[str, Any]:
        return {"columns": row_format.columns(files, candidates)}

    key = cache_key([_RULES, row_format.name, sorted(candidates), files])
    names: list[str] = cached_entry(data.cache_dir, f"columns-{key}", look, [file.path for file in files])[1]["columns"]
    return names


def _loss_on(data: DataConfig, columns: Columns, called: str) -> LossOn:
    usual: dict[str, LossOn] = {"text": "all", "messages": "assistant", "prompt": "completion"}
    fitting: dict[str, Sequence[str]] = {
        "text": ("all",), "messages": ("all", "assistant", "completion"), "prompt": ("all", "completion"),
    }  # fmt: skip
    if data.loss_on == "auto":
        return usual[columns.kind]
    if data.loss_on not in fitting[columns.kind]:
        content = {"text": "text", "messages": "conversations", "prompt": "prompts and completions"}[columns.kind]
        raise DataError(
            f"data.loss_on={data.loss_on} does not fit {called}, which holds {content}",
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
        with open_regular(Path(data.chat_template).expanduser()) as file:
            return TextIOWrapper(file, encoding="utf-8").read()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.chat_template={data.chat_template} cannot be read: {error}", "name a file with a chat template"
        ) from error


def text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
