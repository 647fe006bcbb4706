"""Model folders whose weights are holes: what transformers loads from them, and what they cost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardkit.checkpoint.formats.pretended import write_pretended_weights
from shardkit.errors import ConfigError
from tests.cli.test_main import shardkit
from tests.data.chats import write_tokenizer

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip


def described(folder: Path, **keys: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SIZES, **keys}))
    return folder


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "llama", "tie_word_embeddings": True, "dtype": "float16"},
        {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2},
        {"model_type": "bert", "architectures": ["BertForMaskedLM"], "dtype": "float32"},
    ],
    ids=lambda keys: keys["model_type"],
)
def test_transformers_loads_every_weight_of_it(keys: dict[str, Any], tmp_path: Path) -> None:
    written = write_pretended_weights(described(tmp_path / "source", **keys), tmp_path / "model")
    model_class = getattr(transformers, written.class_name)
    model, info = model_class.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values()), info
    dtype = getattr(torch, keys.get("dtype", "bfloat16"))
    assert {param.dtype for param in model.parameters()} == {dtype}
    assert not any(param.any() for param in model.parameters())
    assert written.n_bytes >= written.n_parameters * dtype.itemsize > 0


def test_a_large_model_takes_no_space_and_brings_its_tokenizer(tmp_path: Path) -> None:
    source = described(
        tmp_path / "source", model_type="llama", num_hidden_layers=16, hidden_size=4096, num_attention_heads=32,
        intermediate_size=14336, vocab_size=128256,
    )  # fmt: skip
    write_tokenizer(source)
    written = write_pretended_weights(source, tmp_path / "model", "bf16")
    files = [*(tmp_path / "model").glob("*.safetensors")]
    assert len(files) > 1 and sum(file.stat().st_size for file in files) > written.n_bytes > 8e9
    assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "model").iterdir()) < 10e6
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.n_bytes
    tokenizers = [
        transformers.AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (source, tmp_path / "model")
    ]
    assert tokenizers[0] == tokenizers[1]


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"model_type": "llama", "architectures": ["OtherForCausalLM"]}, "has no OtherForCausalLM"),
        ({"model_type": "vit"}, "vit has no causal language model"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantised model"),
        ({}, "no model_type"),
    ],
)
def test_a_config_without_a_class_is_refused(keys: dict[str, Any], cause: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=cause):
        write_pretended_weights(described(tmp_path / "source", **keys), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = described(tmp_path / "source", model_type="llama")
    assert shardkit("pretend-weights", source, tmp_path / "model", "--dtype", "fp16") == 0
    assert re.fullmatch(
        rf"{tmp_path}/model: LlamaForCausalLM, [\d,]+ numbers, 0\.3 MiB by name\n", capsys.readouterr().out
    )
    for words, said in (
        ((source, tmp_path / "other", "--dtype", "int4"), "--dtype int4"),
        ((tmp_path / "missing", tmp_path / "other"), f"{tmp_path}/missing cannot be read: "),
        ((source, source), f"{source} exists already"),
    ):
        assert shardkit("pretend-weights", *words) == 2
        assert f"error: {said}" in capsys.readouterr().err
    assert not (tmp_path / "other").exists() and [file.name for file in source.iterdir()] == ["config.json"]
