"""Pipes, devices, links and bytes that are no text, where a stranger's folder should have a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkit.cli.__main__ import main
from shardkit.config.load import load_config
from shardkit.config.schema import ModelConfig
from shardkit.data.rows import find
from shardkit.data.tokenizer import _settings
from shardkit.errors import ConfigError, DataError
from shardkit.files import read_object
from shardkit.foreign.translate import _read_model, read_job
from shardkit.launch.failures import failure as failures
from shardkit.launch.failures.failure import of_launcher
from shardkit.launch.local.restart import wrote
from shardkit.models.hf import _file_keys
from shardkit.run.directory import _rewind
from shardkit.run.owner import FOLDER, claim
from tests.report.samples import write_run
from tests.report.test_read import launched


@pytest.fixture(params=["pipe", "device"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    os.mkfifo(path) if request.param == "pipe" else path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize(
    "reader",
    [lambda path: read_job([path]), load_config, lambda path: _file_keys(ModelConfig(hf_config=path))],
    ids=["tool", "config", "model"],
)
def test_a_config_is_a_regular_file(reader: Callable[[str], object], odd: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: .*not a regular file"):
        reader(str(odd))


def test_a_description_nested_too_deeply_is_two_lines(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("[" * 200_000)
    for reader in (lambda: _file_keys(ModelConfig(hf_config=str(tmp_path))), lambda: _read_model(str(tmp_path)),
                   lambda: _settings(tmp_path / "tokenizer_config.json")):  # fmt: skip
        with pytest.raises(ConfigError, match="cannot be read: maximum recursion depth exceeded"):
            reader()


def test_the_environment_of_an_earlier_start_is_a_regular_file_of_an_object(odd: Path) -> None:
    assert read_object(odd) == {}
    for content in ("[" * 200_000, "[1]", "{", ""):
        (odd.parent / "env.json").write_text(content)
        assert read_object(odd.parent / "env.json") == {}
        assert wrote(odd.parent, {}) is False


def test_the_logs_of_ranks_are_regular_files(odd: Path, tmp_path: Path) -> None:
    folder = launched(tmp_path / "run", "110000", failed=True)
    for log in folder.rglob("*.log"):
        if log.name == "stderr.log":
            log.unlink()
            log.symlink_to(odd)
    assert [failure.rank for failure in of_launcher(folder)] == [1]
    (folder / "torchrun.log").unlink()
    (folder / "torchrun.log").symlink_to(odd)
    assert of_launcher(folder) == []


def test_the_target_of_a_link_is_not_in_a_report(tmp_path: Path) -> None:
    secret = tmp_path / "environ"
    secret.write_text("HF_TOKEN=hf_secret\n")
    folder = launched(tmp_path / "script", "110000", failed=True)
    for log in folder.rglob("stderr.log"):
        log.unlink()
        log.symlink_to(secret)
    (write_run(tmp_path / "run") / "config.yaml").unlink()
    (tmp_path / "run" / "config.yaml").symlink_to(secret)
    for run in (tmp_path / "script", tmp_path / "run"):
        with pytest.raises(SystemExit, match="0"):
            main(["report", str(run)])
        assert "hf_secret" not in (run / "report.html").read_text()


def test_records_that_are_no_text_are_dropped_when_a_run_resumes(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step}).encode() + b"\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(lines[0] + b'{"step": 1, "x": "\xff"}\n' + lines[1] + lines[2])
    _rewind(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines[0] + lines[1]


def test_the_record_of_a_directorys_owner_is_a_regular_file(odd: Path, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    odd.rename(tmp_path / FOLDER / "owner.json")
    with pytest.raises(OSError, match="not a regular file"):
        claim(tmp_path)


def test_post_mortems_of_ranks_are_regular_files(odd: Path, tmp_path: Path) -> None:
    (tmp_path / failures.OOM_FOLDER).mkdir()
    odd.rename(tmp_path / failures.OOM_FOLDER / "rank1.json")
    (tmp_path / failures.OOM_FOLDER / "rank0.json").write_text('{"schema": 1, "time": 5, "rank": 0}')
    assert list(failures.read_post_mortems(tmp_path, since=1)) == [0]


@pytest.mark.parametrize("text", ["[" * 200_000, "{", "[1]", '{"splits": 3}', "{}"])
def test_a_damaged_list_of_splits_is_two_lines(text: str, tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset_dict\.json is damaged"):
        find(str(tmp_path))
