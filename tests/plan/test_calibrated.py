"""What this machine has measured replaces what is typical of a card."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.hardware import calibration
from shardkit.launch.ranks.env import model_names
from shardkit.plan import target
from shardkit.plan.target import choose_target

MIB = 2**20
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/shardkit"


def known(gpus: int) -> tuple[int, int, str]:
    gpu = choose_target(load_config(None, []).config, gpus, gpu="h100").gpu
    assert gpu is not None
    return gpu.context, gpu.per_communicator, gpu.overhead_from


def calibrated(context: int | None, communicator: int | None, world_size: int = 8, device: str = H100) -> None:
    found = {"context_bytes": context, "communicator_bytes": communicator}
    calibration.save({"device": device, "world_size": world_size, **found})


def test_a_calibration_of_the_card_replaces_the_table(cache: Path) -> None:
    typical = known(8)
    assert typical[2] == "typical"
    calibrated(1, 2, device="NVIDIA A100-SXM4-80GB")
    assert known(8) == typical, "another card"
    calibrated(600 * MIB, 300 * MIB)
    assert known(16) == (600 * MIB, 300 * MIB, "measured here by shardkit doctor")
    calibrated(610 * MIB, None, world_size=1)
    assert known(1)[0] == 610 * MIB, "a world of one knows no communicators, but a context"
    calibrated(None, None)
    assert known(8) == typical, "a calibration before cards were measured"


def test_the_card_of_this_machine_is_known_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:07:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA L4\nIRQ:   \t 103\n")
    assert model_names({}, tmp_path) == ["NVIDIA L4"]
    monkeypatch.setattr("shardkit.launch.ranks.env.model_names", lambda: ["NVIDIA L4"])
    monkeypatch.setattr("shardkit.launch.ranks.env.visible_gpus", lambda: 1)
    here = target.target_here(load_config(None, []).config, 1, None, None)
    assert here.gpu is not None and here.gpu.name == "l4"
    monkeypatch.setattr("shardkit.launch.ranks.env.model_names", lambda: ["NVIDIA Whatever"])
    with pytest.raises(ConfigError, match=r"card \(NVIDIA Whatever\) is not one that planning knows"):
        target.target_here(load_config(None, []).config, 1, None, None)
    capped = target.target_here(load_config(None, []).config, 1, None, "10GiB")
    assert capped.device_memory == 10 * 2**30
