"""The files that vLLM and llama.cpp's converter open in a local folder of a model, and their complaints.

Facts read in the projects' own sources, for a folder of safetensors without quantisation:

- vLLM, vllm/model_executor/model_loader/default_loader.py at 00b5ad0712629374e6352e2b31de0460be0fdf17 (the choice of
  weights), weight_utils.py as that calls it (the index), vllm/transformers_utils/config.py at
  0036026e7171bd02e3c1d4687b102dec9c446049 and repo_utils.py at 01775b5e80803029340451effd0ca6d3a6c3d1d2 (the config).
- llama.cpp, conversion/base.py at 00bd27a621f92be9a99d24d7c5117a263b9b3c01, conversion/llama.py at
  0274f0fc7d7fbab69c33ccf757cf7f3d036c17aa and gguf-py/gguf/vocab.py at 0c1c9d33a805aad92c28cc15213a0dc5867f8818.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

INDEX = "model.safetensors.index.json"


def names_in(file: Path) -> set[str]:
    """Names of the tensors of a safetensors file."""
    with safe_open(file, "pt") as opened:
        return set(opened.keys())


def _architecture(folder: Path) -> str:
    """Both projects choose the model's class by the first entry of `architectures`."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures
    assert found, f"{folder}/config.json has no architectures"
    return str(found[0])


def _indexed(folder: Path) -> dict[str, str]:
    file = folder / INDEX
    return json.loads(file.read_text())["weight_map"] if file.is_file() else {}


def for_vllm(folder: Path) -> dict[str, Any]:
    """The architecture, the tensors and the tokenizer that vLLM takes from a folder with `load_format=auto`.

    A file `consolidated*.safetensors` in the folder or below it selects Mistral's format. Otherwise all `*.safetensors`
    count; one that is not in the index, if there is an index, is left out. `config.json` must be there. Every parameter
    of the model must be among the tensors, whose names the model's class maps from transformers'.
    """
    from transformers import AutoTokenizer

    below = [path.name for path in folder.rglob("*") if path.is_file()]
    assert not fnmatch.filter(below, "consolidated*.safetensors"), "Mistral's format"
    assert (folder / "config.json").is_file()
    placed = _indexed(folder)
    files = [path for path in sorted(folder.glob("*.safetensors")) if not placed or path.name in placed.values()]
    assert files, "no weights"
    tensors = [name for file in files for name in sorted(names_in(file))]
    assert len(tensors) == len(set(tensors)), "a tensor is in two files"
    return {
        "architecture": _architecture(folder), "tensors": set(tensors), "files": {file.name for file in files},
        "tokenizer": AutoTokenizer.from_pretrained(folder),
    }  # fmt: skip


def for_llama_cpp(folder: Path) -> dict[str, Any]:
    """The architecture, the tensors and the vocabulary that `convert_hf_to_gguf.py` takes from a folder.

    Weights are the files `model*.safetensors`; with an index, those that it names, and then the index and the files
    must have the same tensors. Llama takes `tokenizer.model` if there is one, else `tokenizer.json`; Qwen3 takes the
    latter. All token ids must be below `vocab_size`. A chat template in `tokenizer_config.json` wins over
    `chat_template.jinja`. (A byte-level BPE must besides be one that the converter knows by the hash of a sample text.)
    """
    from transformers import AutoConfig, AutoTokenizer

    placed = _indexed(folder)
    files = [path.name for path in folder.iterdir() if fnmatch.fnmatchcase(path.name, "model*.safetensors")]
    tensors = {name for file in (set(placed.values()) or files) for name in names_in(folder / file)}
    assert tensors, "no weights"
    if placed:
        assert tensors == set(placed), "index and parts disagree"
    assert (folder / "tokenizer.model").is_file() or (folder / "tokenizer.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = AutoConfig.from_pretrained(folder).vocab_size
    assert max(tokenizer.get_vocab().values()) < size, "a token id beyond vocab_size"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    jinja = folder / "chat_template.jinja"
    template = settings.get("chat_template", jinja.read_text() if jinja.is_file() else None)
    added = {one["content"]: one["id"] for one in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    special = {kind: added.get(settings.get(f"{kind}_token")) for kind in ("bos", "eos")}
    return {"architecture": _architecture(folder), "tensors": tensors, "template": template, "special": special}


LOADERS: dict[str, Callable[[Path], dict[str, Any]]] = {"vllm": for_vllm, "llama.cpp": for_llama_cpp}
