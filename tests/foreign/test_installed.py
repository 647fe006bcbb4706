"""A key that a table lacks is looked up in the tool's installed release, without an import of the tool."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit.config.libraries import installed
from shardkit.foreign import tools
from shardkit.foreign.combine import unknown_key
from shardkit.foreign.installed import installed_release
from shardkit.foreign.show import mapping
from shardkit.foreign.translate import read_job
from tests.texts import write_files

TRL_RECIPE = "model_name_or_path: some/model\nuse_peft: true\nlora_r: 8\nmax_length: 64\n"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    installed_release.cache_clear()
    yield
    installed_release.cache_clear()


def install(folder: Path, package: str, version: str, files: dict[str, str]) -> None:
    write_files(folder / package, {"__init__.py": "raise RuntimeError('imported')\n", **files})
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    write_files(folder / f"{package}-{version}.dist-info", {"METADATA": metadata})


@pytest.fixture
def newer_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for a release of TRL with one key more."""
    pytest.importorskip("transformers")
    config = "@dataclass\nclass SFTConfig(TrainingArguments):\n    max_length: int = 1024\n    new_in_99: int = 0\n"
    install(tmp_path / "site", "trl", "99.1", {"trainer/sft_config.py": config})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def test_a_key_of_a_newer_release_is_not_planned_rather_than_unknown(newer_trl: Path) -> None:
    (newer_trl / "sft.yaml").write_text(TRL_RECIPE + "new_in_99: 1\nnew_in_100: 1\n")
    job = read_job([newer_trl / "sft.yaml"])
    assert len(job.not_planned) == 1 and "new_in_99=1" in job.not_planned[0]
    assert "the installed TRL 99.1 has this key, and shardkit knows the keys of 1.9" in job.not_planned[0]
    assert "trl" not in sys.modules
    (row,) = (line for line in mapping(job) if "new_in_100" in line)
    assert "unknown to the installed TRL 99.1, which refuses it" in row


def test_without_an_installed_release_the_recorded_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = "unknown to axolotl 0.18 (recorded; none is installed), which ignores it"
    assert unknown_key("axolotl", "no_such_key") == expected
    assert installed_release("trl") is None


def test_fields_read_from_the_source_are_those_of_the_classes() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    for tool, keys in (("trainer", transformers.TrainingArguments), ("peft", peft.LoraConfig)):
        release = installed_release(tool)
        assert release is not None and release.version == installed({"trainer": "transformers"}.get(tool, tool))
        declared = {field.name for field in dataclasses.fields(keys) if field.init}
        assert sorted(declared - release.names) == [], tool


def test_installed_trl_declares_the_keys_of_its_scripts() -> None:
    pytest.importorskip("trl", reason="needs trl")
    code = (
        "import dataclasses, json, trl; print(json.dumps([field.name for kind in (trl.SFTConfig, trl.ModelConfig, "
        "trl.ScriptArguments) for field in dataclasses.fields(kind)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    release = installed_release("trl")
    assert release is not None and release.version == installed("trl")
    assert sorted(set(json.loads(done.stdout)) - release.names) == []
    assert tools.KEYS["trl"].keys() & release.names
