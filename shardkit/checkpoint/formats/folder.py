"""Write the files of a Hugging Face folder beside the weights: configs, the tokenizer, and a model card.

With them, `AutoModelForCausalLM`, `AutoTokenizer`, vLLM and llama.cpp's `convert_hf_to_gguf.py` can read the folder
(docs/checkpoint.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...config.schema import RunConfig
from ...data.tokenizer import tokenizer_path
from ...errors import CheckpointError, ConfigError
from ...files import parse_json, read_object, read_objects, read_regular
from ..native.manifest import Manifest
from .tensor_source import reading

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "tokenizer.model.v3", "tekken.json", "spiece.model",
    "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of tokenizers; a folder has some of them."""
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
"""Files that a derived model passes on."""
GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of the generation settings that `model.hf` may have changed for a run."""
CARD = "README.md"


def write_configs(model: Any, config: RunConfig | None, folder: Path, dtype: torch.dtype) -> None:
    """Write `config.json` and the generation settings, which `AutoModel*.from_pretrained(folder)` looks for.

    The generation settings come from the folder from which the run started, if it has any. `model`: a transformers
    model, for its config.
    """
    model_config = model.config
    model_config.architectures = [type(model).__name__]
    model_config.dtype = dtype
    if hasattr(model_config, "use_cache"):
        model_config.use_cache = True  # off while training
    if hasattr(model_config, "auto_map"):
        del model_config.auto_map  # names code that is neither run nor copied
    model_config.save_pretrained(folder)
    described = config.model.described_by if config is not None else None
    if config is not None and described is not None and (described.parent / GENERATION).is_file():
        _copy_of(described.parent, GENERATION, folder)
        changed = {key: value for key, value in config.model.hf.items() if key in _IDS}
        keys = parse_json(read_regular(folder / GENERATION)) if changed else None
        if isinstance(keys, dict):
            (folder / GENERATION).write_text(json.dumps({**keys, **changed}, indent=2, ensure_ascii=False) + "\n")
    elif getattr(model, "can_generate", lambda: False)() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def copy_tokenizer(config: RunConfig, folder: Path, is_named: bool = True) -> str:
    """Copy the run's tokenizer, its chat template and the base model's licence.

    `is_named`: whether the user named the run. Another config may be a stranger's, and name any file of the user's.
    Returns the reason why there is no tokenizer to copy; empty if there is one.
    """
    try:
        source = tokenizer_path(config)
    except ConfigError as error:
        return f"{error.cause}: no tokenizer is written"
    if source is None:
        return "the run has no tokenizer (data are bytes or token ids), so none is written"
    template = config.data.chat_template
    alone = source if source.is_file() else template
    if alone is not None and not is_named:
        return (
            f"the run's config names {alone}, a file that is copied only if the run is named: no tokenizer is written"
        )
    if source.is_file():
        _copy(source, folder / "tokenizer.json")
        source = source.parent
    for name in TOKENIZER:
        if (source / name).is_file() and not (folder / name).exists():
            _copy_of(source, name, folder)
    for file in sorted(source.glob("additional_chat_templates/*.jinja")):
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        _copy_of(source, f"additional_chat_templates/{file.name}", folder)
    if template is not None:
        _copy(Path(template).expanduser(), folder / "chat_template.jinja")
        # The tokenizer's own template goes: llama.cpp takes it before `chat_template.jinja`.
        (folder / "chat_template.json").unlink(missing_ok=True)
        keys = read_object(folder / "tokenizer_config.json")
        if "chat_template" in keys:
            del keys["chat_template"]
            text = json.dumps(keys, indent=2, ensure_ascii=False) + "\n"
            (folder / "tokenizer_config.json").write_text(text)
    for file in sorted(path for pattern in LICENCES for path in source.glob(pattern) if path.is_file()):
        _copy_of(source, file.name, folder)
    return ""


def _copy_of(model: Path, name: str, folder: Path) -> None:
    """Copy a file of a model's folder, which may be a stranger's, to the same name in `folder`."""
    file = model / name
    target, root = file.resolve(), model.resolve()
    blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
    if not target.is_relative_to(root) and not target.is_relative_to(blobs):
        raise CheckpointError(
            f"{file} is a link to {target}, outside of the model's folder", "replace the link by a file, or remove it"
        )
    _copy(file, folder / name)


def _copy(file: Path, target: Path) -> None:
    with reading(file):
        content = read_regular(file)
    target.write_bytes(content)


def write_card(manifest: Manifest, config: RunConfig, run: Path, model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the model card: facts about the run, below the header that model hubs and llama.cpp read."""
    base = _base(config)
    header: dict[str, Any] = {"library_name": "transformers", "tags": ["shardkit"]}
    if getattr(model, "can_generate", lambda: False)():
        header["pipeline_tag"] = "text-generation"
    if base:
        header["base_model"] = base
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", ""]
    lines += [f"# {run.name}", "", "| | |", "|---|---|"]
    for name, value in facts(manifest, config, run, model, dtype):
        cell = str(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {cell} |")
    (folder / CARD).write_text("\n".join(lines) + "\n")


def facts(
    manifest: Manifest, config: RunConfig, run: Path, model: Any, dtype: torch.dtype
) -> Iterator[tuple[str, object]]:
    """Yield the rows of the model card: the model, its data, the length of training, and the losses."""
    train, optim, state = config.train, config.optim, manifest.run
    yield "base model", _base(config) or "none: trained from random weights"
    if config.adapter.type != "none":
        adapter = config.adapter
        yield (
            "trained",
            f"{adapter.type} adapter, r={adapter.r}, alpha={adapter.alpha}, added to the base model's weights",
        )
    yield "architecture", type(model).__name__
    yield "type of these weights", str(dtype).removeprefix("torch.")
    sources: list[str | None] = [source.name or source.path for source in config.data.sources]
    names = [Path(name).name for name in sources or [config.data.path] if name]
    yield "data", ", ".join(names) or "the source of Python's standard library"
    of = f"of {train.max_steps:,}" if train.epochs is None else f"for {train.epochs:g} passes over the data"
    yield "optimizer steps", f"{state.step:,} {of}"
    yield "target tokens seen", f"{state.tokens_total:,}"
    records = [r for r in read_objects(run / "metrics.jsonl") if r.get("step") == state.step]
    if records and isinstance(loss := records[-1].get("loss"), float):
        yield f"training loss of step {state.step:,}", f"{loss:.4f}"
    if state.val_loss is not None:
        yield "validation loss", f"{state.val_loss:.4f}"
    yield "optimizer", f"{optim.name}, learning rate {optim.lr:g}, {optim.schedule} schedule"
    yield "precision in training", config.precision.mode
    yield "engine", f"{manifest.strategy} on {manifest.world_size} ranks"
    yield "made with", ", ".join(f"{name} {value}" for name, value in sorted(manifest.versions.items()))


def _base(config: RunConfig) -> str:
    """The name of the folder from which the run took its weights; empty for random weights."""
    if not config.model.init_from:
        return ""
    folder = Path(config.model.init_from).expanduser().resolve()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):  # a hub's, once downloaded
        return folder.parents[1].name.removeprefix("models--").replace("--", "/")
    return folder.name


def folder_dtype(config: RunConfig) -> str | None:
    """The type of the weights according to the config.json that describes the model; None if it does not say."""
    described = config.model.described_by
    if described is None:
        return None
    keys = read_object(described)  # building the model has reported a file that cannot be read
    dtype = keys.get("dtype", keys.get("torch_dtype"))
    return dtype if isinstance(dtype, str) else None
