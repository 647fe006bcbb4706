"""Weights, a checkpoint or a tokenizer that is not there is refused before anything is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkit.checkpoint.formats.detect import open_source
from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.errors import CheckpointError, ConfigError, ShardkitError
from shardkit.run.checks import check_sources
from tests.commands import python_m
from tests.data.chats import conversation, write_lines, write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama folder with everything; its weights are only looked at by name."""
    model = write_tokenizer(tmp_path / "llama")
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (model / "model.safetensors").write_bytes(b"")
    write_lines(tmp_path / "chats.jsonl", [{"messages": conversation(i)} for i in range(8)])
    return model


def config(folder: Path, **more: Any) -> RunConfig:
    keys = {
        "task.name": "hf_causal_lm", "model.init_from": str(folder), "data.path": str(folder.parent / "chats.jsonl"),
        "run.dir": str(folder.parent / "run"), "run.device": "cpu", **more,
    }  # fmt: skip
    return load_config(None, keys).config


def test_a_whole_folder_passes(folder: Path) -> None:
    check_sources(config(folder))


def test_missing_weights_are_named_before_anything_is_built(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"no \*\.safetensors in {folder}"):
        check_sources(config(folder))
    with pytest.raises(ConfigError, match="safetensors"):
        check_sources(config(folder, **{"run.resume": "auto"}))  # the first start of a run that goes on by itself
    (folder.parent / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    check_sources(config(folder, **{"run.resume": True}))  # a checkpoint of the run has the weights
    with pytest.raises(ConfigError, match="safetensors"):
        check_sources(config(folder, **{"run.resume": True, "adapter.type": "lora"}))
    with pytest.raises(CheckpointError, match=rf"no \*\.safetensors in {folder}"):
        open_source(folder)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model-00001-of-00002.safetensors", "pytorch_model.bin.index.json"]
)
def test_weights_of_other_names_are_weights(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    check_sources(config(folder))


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda path: None, "model.init_from={path} does not exist"),
        (lambda path: path.mkdir(), "model.init_from={path}: {path} holds no checkpoint that shardkit knows"),
        (lambda path: path.write_text(""), "model.init_from={path}: {path} has none of the suffixes"),
    ],
    ids=["nothing", "an empty folder", "a file of text"],
)
def test_a_path_without_weights_is_refused_by_its_names(
    make: Callable[[Path], Any], cause: str, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "weights"
    make(path)
    for task in ("hf_causal_lm", "causal_lm"):
        with pytest.raises(ConfigError) as caught:
            check_sources(config(folder, **{"task.name": task, "model.init_from": str(path)}))
        assert caught.value.cause.startswith(cause.format(path=path)) and caught.value.fix


def test_a_checkpoint_to_resume_from_that_is_not_there_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, cause in (("nowhere", "does not exist"), ("empty", "there is no checkpoint")):
        with pytest.raises(ShardkitError, match=f"run.resume={tmp_path}/{name}.*{cause}"):
            check_sources(config(folder, **{"model.init_from": None, "run.resume": f"{tmp_path}/{name}"}))
    (tmp_path / "empty" / "checkpoints" / "step_00000003").mkdir(parents=True)
    check_sources(config(folder, **{"model.init_from": None, "run.resume": f"{tmp_path}/empty"}))


@pytest.mark.parametrize("rest", [True, False])
def test_a_missing_tokenizer_is_named_with_its_folder(rest: bool, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    if not rest:
        (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=rf"^no tokenizer\.json in {folder}") as caught:
        check_sources(config(folder))
    assert "remove model.init_from" not in caught.value.fix
    write_tokenizer(folder.parent / "other")
    check_sources(config(folder, **{"data.tokenizer": str(folder.parent / "other")}))


def test_the_command_says_so_in_two_lines_and_writes_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    keys = [f"model.init_from={folder}", f"data.path={folder.parent}/chats.jsonl", f"run.dir={folder.parent}/run"]
    done = python_m("shardkit.train", "task.name=hf_causal_lm", "run.device=cpu", *keys, code=2)
    assert done.stderr.startswith(f"error: model.init_from={folder}: no *.safetensors in {folder}")
    assert len(done.stderr.splitlines()) == 2 and "reading the data" not in done.stdout
    assert not (folder.parent / "run").exists()
