"""`model.resize_embeddings`: rows for new ids, the same under every engine, in the export, after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint.formats.convert import convert
from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.parallel.weights import parameters_on_meta
from shardkit.tasks.load import load_task
from tests.checkpoint.formats import hub
from tests.checkpoint.formats.test_folder import ZERO3, tensors_of
from tests.ranks import run_ranks

OLD, NEW = 300, 307
CPMANT = {"model_type": "cpmant", "num_hidden_layers": 1}
TOKENS = [f"<new {i}>" for i in range(NEW - OLD)]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"parallel.strategy": "fsdp"}),
    ("llama", {"parallel.strategy": "zero2"}),
    ("mixtral", ZERO3),
    ("mixtral", {"parallel.strategy": "ddp"}),
    ("gpt2-base", {"parallel.strategy": "fsdp"}),
]
"""A tied embedding; one with a head of its own; a folder without a head."""


def write(root: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Folders of models with 300 rows, a tokenizer of 307 ids, a text with all of them; the keys of a run."""
    for kind in kinds:
        hub.make_folder(root / kind, kind)
    tokenizer = hub.make_tokenizer(root / "tokenizer")
    tokenizer.add_tokens(TOKENS)
    tokenizer.save_pretrained(root / "tokenizer")
    for part in ("train", "val"):
        (root / f"{part}.txt").write_text(f"import {' '.join(TOKENS)} os\n" * 40)
    return {
        "model.resize_embeddings": True, "data.tokenizer": str(root / "tokenizer"),
        "data.path": str(root / "train.txt"), "data.val_path": str(root / "val.txt"),
        "data.cache_dir": str(root / "cache"),
    }  # fmt: skip


def train(root: Path, world: int, cases: list[tuple[str, dict[str, Any]]], keys: dict[str, Any]) -> None:
    """A step of each case, in `run-0`, `run-1`, …"""
    full = [(str(root / kind), {**keys, **extra}) for kind, extra in cases]
    run_ranks(world, "tests.checkpoint.formats.hub:train_all", cases=full, root=str(root))


def check_rows(out: Path, folder: Path) -> None:
    """The exported tensors are the folder's, and rows beyond its own are the mean of those."""
    held = tensors_of(folder)
    found = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(out).items()}
    grown = {name for name in held if found[name].shape != held[name].shape}
    assert grown == {name for name in held if "embed_tokens" in name or "lm_head" in name or name == "wte.weight"}
    for name, tensor in held.items():
        assert torch.equal(found[name][: len(tensor)], tensor.float()), name
        if name in grown:
            mean = torch.from_numpy(tensor.double().numpy().sum(axis=0) / OLD).float()
            assert found[name].shape == (NEW, tensor.shape[1])
            assert torch.equal(found[name][OLD:], mean.expand(NEW - OLD, -1)), name


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_new_rows_are_the_mean_under_every_engine_and_loaders_read_the_export(world: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    keys = write(tmp_path, ("llama", "mixtral", "gpt2-base"))
    train(tmp_path, world, CASES, keys)
    for index, (kind, _) in enumerate(CASES):
        convert(tmp_path / f"run-{index}", "safetensors", tmp_path / f"out-{index}")
        check_rows(tmp_path / f"out-{index}", tmp_path / kind)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out-0", dtype=torch.float32)
    assert loaded.config.vocab_size == NEW
    ids = AutoTokenizer.from_pretrained(tmp_path / "out-0")(f"{TOKENS[6]} import", return_tensors="pt").input_ids
    assert ids[0, 0] == NEW - 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    theirs.resize_token_embeddings(NEW)
    with torch.no_grad():
        theirs.get_input_embeddings().weight[OLD:] = tensors_of(tmp_path / "out-0")["model.embed_tokens.weight"][OLD:]
        assert torch.equal(loaded(ids).logits, theirs(ids).logits)


@pytest.mark.slow
def test_new_rows_are_trained_and_resume_keeps_them(tmp_path: Path) -> None:
    keys = write(tmp_path, ("llama",))
    learns = {**keys, "optim.lr": 0.01, "optim.schedule": "constant", "parallel.strategy": "fsdp"}
    stops = {**learns, "run.dir": f"{tmp_path}/stops"}
    cases = [
        {**learns, "run.dir": f"{tmp_path}/whole", "train.max_steps": 2},
        stops,
        {**stops, "train.max_steps": 2, "run.resume": True},
    ]
    run_ranks(
        2, "tests.checkpoint.formats.hub:train_all", root=str(tmp_path),
        cases=[(str(tmp_path / "llama"), case) for case in cases],
    )  # fmt: skip
    found = []
    for name in ("whole", "stops"):
        convert(tmp_path / name, "safetensors", tmp_path / f"out-{name}")
        found.append(tensors_of(tmp_path / f"out-{name}")["model.embed_tokens.weight"])
    assert torch.equal(*found)
    assert len(found[0][OLD:].unique(dim=0)) > 1, "the new ids' rows have learnt to differ"


def test_the_model_that_is_planned_has_the_new_rows(tmp_path: Path) -> None:
    keys = write(tmp_path, ("mixtral",))
    config = load_config(overrides=hub.settings(str(tmp_path / "mixtral"), str(tmp_path), **keys)).config
    with parameters_on_meta():
        model = load_task(config).build_model()
    assert {tuple(p.shape) for n, p in model.named_parameters() if "embed" in n or "head" in n} == {(NEW, 32)}


@pytest.mark.parametrize(
    ("model", "says", "fix"),
    [
        ({}, "307 ids, but model.hf.vocab_size=300", "model.resize_embeddings=true"),
        ({"model.resize_embeddings": True, "adapter.type": "lora"}, "new rows would be frozen", "adapter.type=none"),
        ({"model.resize_embeddings": True, "data.tokenizer": None}, "the run has no tokenizer", "set data.tokenizer"),
        ({"model.resize_embeddings": True, "model.hf": CPMANT}, "CpmAntForCausalLM cannot be resized", "another model"),
    ],
    ids=["not asked", "adapter", "no tokenizer", "class"],
)
def test_what_cannot_be_resized_is_refused(model: dict[str, Any], says: str, fix: str, tmp_path: Path) -> None:
    keys = write(tmp_path, ("mixtral",)) | {"model.resize_embeddings": False}
    settings = hub.settings(str(tmp_path / "mixtral"), str(tmp_path), **{**keys, **model})
    with pytest.raises(ConfigError, match=says) as caught:
        load_task(load_config(overrides=settings).config).dataset("train")
    assert fix in caught.value.fix and "\n" not in caught.value.cause + caught.value.fix
