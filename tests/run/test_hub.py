"""A hub's name stands for its files where a hub can be reached; nothing needs one."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardkit.checkpoint.formats.convert import convert
from shardkit.data.tokenizer import tokenizer_path, with_local_folders
from shardkit.errors import ConfigError
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.checkpoint.formats import hub

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")


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
    from shardkit.config.load import load_config

    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    for keys in ({"task.name": "hf_causal_lm", "model.init_from": "some/model"}, {"model.init_from": "no/run"}):
        config = load_config(None, keys).config
        assert with_local_folders(config) is config
