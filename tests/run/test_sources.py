"""What is not there is refused before anything is built; a hub's name stands for its files where one can be reached."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkit.checkpoint.formats.convert import convert
from shardkit.checkpoint.formats.detect import open_source
from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.data.tokenizer import tokenizer_path, with_local_folders
from shardkit.errors import CheckpointError, ConfigError, ShardkitError
from shardkit.run.checks import check_sources
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.checkpoint.formats import hub
from tests.commands import python_m
from tests.data.chats import conversation, write_lines, write_tokenizer

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")


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


@pytest.fixture
def reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub with the model `some/model`, which also has code and a pickle."""
    remote = tmp_path / "remote"
    hub.make_folder(remote, "llama")
    for name in ("evil.py", "pytorch_model.bin"):
        (remote / name).write_text("raise SystemExit")

    def download(name: str, repo_type: str, revision: str | None, allow_patterns: list[str]) -> str:
        if name != "some/model" or revision not in (None, "v1.0"):
            raise OSError("no such\nmodel")
        local = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0a1b" if revision is None else "2c3d")
        local.mkdir(parents=True, exist_ok=True)
        for file in remote.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, local)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return tmp_path


def keys_of(root: Path, **more: Any) -> dict[str, Any]:
    (root / "text.txt").write_text("import os, sys\ndef main(args):\n" * 200)
    return {
        "task.name": "hf_causal_lm", "model.init_from": "some/model", "data.path": str(root / "text.txt"),
        "data.cache_dir": str(root / "cache"), "train.seq_len": 32, "train.max_steps": 1, "train.eval_samples": 0,
        "run.dir": str(root / "run"), "run.device": "cpu", "parallel.strategy": "single", "logging.tensorboard": False,
        **more,
    }  # fmt: skip


def test_a_run_begins_with_a_hubs_model_and_its_tokenizer(reachable: Path) -> None:
    with start(None, keys_of(reachable)) as job:
        folder = Path(str(job.config.model.init_from))
        assert tokenizer_path(job.config) == folder and not list(folder.glob("*.py")) + list(folder.glob("*.bin"))
        assert len(list(Trainer(job).recorded_steps())) == 1
    convert(reachable / "run", "safetensors", reachable / "out")
    assert 'base_model: "some/model"' in (reachable / "out" / "README.md").read_text()
    assert json.loads((reachable / "out" / "config.json").read_text())["model_type"] == "llama"


def test_a_revision_of_a_hubs_model_can_be_named(reachable: Path) -> None:
    names = {"model.init_from": "some/model@v1.0", "data.tokenizer": "some/model"}
    with start(None, keys_of(reachable, **names)) as job:
        assert Path(str(job.config.model.init_from)).name == "2c3d" and tokenizer_path(job.config).name == "0a1b"
    keys = keys_of(reachable, **{"model.init_from": "some/model@nowhere"})
    with pytest.raises(ConfigError, match="init_from=some/model@nowhere is not a folder here"), start(None, keys):
        pass


@pytest.mark.parametrize("key", ["model.init_from", "model.hf_config", "data.tokenizer"])
def test_a_name_that_no_hub_has_is_two_lines(key: str, reachable: Path) -> None:
    keys = keys_of(reachable, **{key: "no/such"})
    says = rf"{key}=no/such is not a folder here, and no hub has it: OSError"
    with pytest.raises(ConfigError, match=says) as caught, start(None, keys) as job:
        Trainer(job)
    assert "\n" not in caught.value.cause + caught.value.fix and f"set {key}" in caught.value.fix


def test_local_names_and_other_tasks_ask_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    for keys in ({"task.name": "hf_causal_lm", "model.init_from": "some/model"}, {"model.init_from": "no/run"}):
        config = load_config(None, keys).config
        assert with_local_folders(config) is config
