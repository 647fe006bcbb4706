"""Find and load a run's fast tokenizer, and check that it fits the model. Code in its folder never runs.

`tokenizers` and `transformers` are imported where they are used: a run on bytes needs neither.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..config.schema import RunConfig
from ..errors import ConfigError, importing

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Any of these makes a folder one with a tokenizer; tokenizer_config.json alone holds no vocabulary."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
"""`org/model`, or `org/model@REVISION` with a branch, a tag or a commit."""
_FIX = "set data.tokenizer to a tokenizer.json, or to a folder that holds one"


def tokenizer_path(config: RunConfig) -> Path | None:
    """The run's tokenizer.json or its folder: of `data.tokenizer`, else of `model.init_from` or `model.hf_config`.

    None if the run has no tokenizer and text is read as bytes.
    """
    name = config.data.tokenizer
    if name is not None:
        path = Path(name).expanduser()
        if path.exists():
            return path
        if _HUB_NAME.fullmatch(name):
            return _from_hub(name)
        raise ConfigError(f"data.tokenizer={name} does not exist", _FIX)
    if config.task.factory is not None or config.task.name == "causal_lm":
        return None  # the reference transformer has no folder
    for beside in (config.model.init_from, config.model.hf_config):
        folder = None if beside is None else Path(beside).expanduser()
        if folder is not None and folder.is_file():
            folder = folder.parent
        if folder is not None and any((folder / name).is_file() for name in FILES):
            return folder
    return None


def load_tokenizer(path: str | Path) -> Any:
    """The fast tokenizer of a folder or a tokenizer.json, as transformers makes it (`PreTrainedTokenizerFast`).

    Nothing is downloaded, and code in the folder does not run.
    """
    with importing(f"the tokenizer in {path} needs transformers", "pip install shardkit[hf]"):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    path = Path(path).expanduser()
    if not path.exists():
        raise ConfigError(f"the tokenizer {path} does not exist", _FIX)
    folder = path if path.is_dir() else path.parent
    settings = _settings(folder / "tokenizer_config.json")
    if "AutoTokenizer" in (settings.get("auto_map") or {}):
        raise ConfigError(
            f"the tokenizer in {folder} is code of its own (auto_map in tokenizer_config.json), which never runs here",
            "save it as a tokenizer.json with the library it came from, and set data.tokenizer to that file",
        )
    alone = path.is_file() or not (settings or (folder / "config.json").is_file())
    try:
        if alone:
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_file=str(path if path.is_file() else folder / "tokenizer.json"), **_special(settings)
            )
            if not tokenizer.chat_template and (folder / "chat_template.jinja").is_file():
                tokenizer.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
            elif not tokenizer.chat_template and isinstance(settings.get("chat_template"), str):
                tokenizer.chat_template = settings["chat_template"]
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if getattr(tokenizer, "is_fast", False):
            tokenizer("a b")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the libraries raise anything; panics of tokenizers are no Exceptions
        raise ConfigError(f"the tokenizer in {path} cannot be read: {' '.join(str(error).split())}", _FIX) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"the tokenizer in {path} is a slow one ({type(tokenizer).__name__})", _FIX)
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash of everything that decides which ids a text gets: vocabulary, merges, rules, and the special tokens."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for key in ("truncation", "padding"):  # settings of the last call
        rules.pop(key, None)
    text = json.dumps([rules, tokenizer.bos_token_id, tokenizer.eos_token_id], sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def n_ids(tokenizer: Any) -> int:
    """The size of a vocabulary that holds every id: the largest id plus one."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def embedding_rows(config: RunConfig) -> int | None:
    """The number of embedding rows that `model.resize_embeddings` asks for; None if it does not."""
    if not config.model.resize_embeddings:
        return None
    location = tokenizer_path(config)
    if location is None:
        raise ConfigError(
            "model.resize_embeddings=true, but the run has no tokenizer whose ids could be counted",
            "set data.tokenizer, or remove model.resize_embeddings",
        )
    return n_ids(load_tokenizer(location))


def check_vocabulary(tokenizer: Any, config: RunConfig, vocab_size: int, key: str) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for, or whose texts start or end with another id.

    A padded, larger embedding is fine, and so are several end tokens of which the tokenizer has one. `key` is the
    setting that holds the model's vocabulary size.
    """
    needed = n_ids(tokenizer)
    if needed > vocab_size:
        raise ConfigError(
            f"the tokenizer in {tokenizer_path(config)} has {needed} ids, but {key}={vocab_size}: "
            "they do not belong together",
            f"use the model's own tokenizer, or {more_rows(config, key, needed)}",
        )
    for name in ("eos_token_id", "bos_token_id"):
        token_id, stated = getattr(tokenizer, name), _stated_ids(config, name)
        if token_id is not None and stated and token_id not in stated:
            raise ConfigError(
                f"{name} of the tokenizer in {tokenizer_path(config)} is {token_id}, but the model's is "
                f"{' or '.join(map(str, stated))}: they do not belong together",
                f"use the model's own tokenizer, or change the model's config: model.hf.{name}={token_id}",
            )


def _stated_ids(config: RunConfig, name: str) -> list[int]:
    """The ids of a special token in `model.hf`, else in the files that describe the model; none if neither has any."""
    file = config.model.described_by
    if name in config.model.hf:
        stated = [config.model.hf[name]]
    elif file is not None:
        stated = [_settings(path).get(name) for path in (file, file.with_name("generation_config.json"))]
    else:
        stated = []
    flat = [token_id for ids in stated for token_id in (ids if isinstance(ids, list) else [ids])]
    return list(dict.fromkeys(token_id for token_id in flat if isinstance(token_id, int)))


def more_rows(config: RunConfig, key: str, needed: int) -> str:
    """How to give the run's model rows for `needed` ids; `key` is the setting that holds its vocabulary size."""
    if key != "model.hf.vocab_size":
        return f"set {key}={needed}"
    if config.adapter.type != "none":
        return "train the model without an adapter and with model.resize_embeddings=true first"
    beside = "" if config.data.tokenizer or tokenizer_path(config) else " and data.tokenizer"
    return f"add the missing rows: model.resize_embeddings=true{beside}"


def _settings(file: Path) -> dict[str, Any]:
    """The keys of a tokenizer_config.json; empty without one."""
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "copy the tokenizer's files again") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} is not a mapping of keys", "copy the tokenizer's files again")
    return settings


def _special(settings: dict[str, Any]) -> dict[str, Any]:
    """The special tokens of a tokenizer_config.json, as arguments of `PreTrainedTokenizerFast`."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "sep_token", "cls_token")
    tokens = {name: settings.get(name) for name in names}
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in tokens.items()
        if isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))
    }


def with_local_folders(config: RunConfig) -> RunConfig:
    """The config with a folder on this machine in place of a hub's name in `model.init_from` or `model.hf_config`.

    The folder has the model's files as the hub's library keeps them: downloaded once a node, never code.
    """
    folders = {}
    for key in ("init_from", "hf_config"):
        name = getattr(config.model, key)
        local = name is None or Path(name).expanduser().exists() or not _HUB_NAME.fullmatch(name)
        if not local and config.task.factory is None and config.task.name.startswith("hf_"):
            weights = ["*.safetensors"] if key == "init_from" else []
            folders[key] = str(_from_hub(name, f"model.{key}", [*_TEXTS, *weights]))
    if not folders:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update=folders)})


_TEXTS = (*FILES, "*.json", "*.jinja", "merges.txt", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def data_folder(path: str) -> str:
    """The folder of a hub's data set, downloaded once a node, if `path` is its name and no path here; else `path`."""
    is_name = _HUB_NAME.fullmatch(path) and not Path(path).expanduser().exists()
    if not is_name or Path(path.partition("@")[0]).suffix in (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".txt"):
        return path
    return str(_from_hub(path, "data.path", _DATA, repo_type="dataset"))


_DATA = ("*.jsonl", "*.ndjson", "*.json", "*.parquet", "*.arrow", "*.feather", "*.csv", "*.tsv", "*.txt", "README.md")


def _from_hub(
    name: str, key: str = "data.tokenizer", patterns: Sequence[str] = _TEXTS, repo_type: str = "model"
) -> Path:
    """The files of a model or a data set on a hub, downloaded once; only where a hub can be reached."""
    repository, _, revision = name.partition("@")
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(repository, repo_type=repo_type, revision=revision or None, allow_patterns=list(patterns))
        )
    except Exception as error:  # no network, no such name, no permission: each has an exception of its own
        reason = " ".join(str(error).split())
        fix = _FIX if key == "data.tokenizer" else f"set {key} to a folder of transformers, a run or a checkpoint"
        if key == "data.path":
            fix = "set data.path to a file of text or records, a directory, a glob or a .bin file"
        folders = [str(path) for path in Path(name).parent.glob("*/")]
        if near := get_close_matches(name, folders, 1):
            fix = f"did you mean {key}={near[0]}?"
        raise ConfigError(
            f"{key}={name} is not a folder here, and no hub has it: {type(error).__name__}: {reason}", fix
        ) from error
