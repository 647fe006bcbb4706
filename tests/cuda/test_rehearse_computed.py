"""`shardkit rehearse --compute`: tests that need GPUs run without one, and what a GPU shows by chance is shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cuda.rehearsals import linked_cache, rehearsed
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation, pytest.mark.timeout(300)]
TESTS = """
import torch
from torch import nn

def test_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 16, device="cuda")
    losses = []
    for _ in range(100):
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    open("trained", "w").close()

def test_two_devices():
    assert torch.cuda.device_count() == 2 and "A100" in torch.cuda.get_device_name()
    assert torch.arange(10, device="cuda:0").to("cuda:1").sum().item() == 45

def test_waits_for_its_copy():
    out, device = torch.zeros(1 << 16).pin_memory(), torch.full((1 << 16,), 3.0, device="cuda")
    for _ in range(20):  # a program that gets no processor between the two lines reads what has come meanwhile
        out.zero_()
        torch.cuda.synchronize()
        out.copy_(device, non_blocking=True)
        assert out[0].item() == 3.0

def test_reads_what_it_wrote():
    assert not torch.empty(1 << 22, device="cuda").isnan().any()
"""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_gpu.py"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_cache(tmp_path_factory.mktemp("cache"), "-computing")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_gpu.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_tests_that_need_two_gpus_pass_without_one(cache: Path, folder: Path) -> None:
    words = [*PYTEST, "-k", "trains or devices"]
    done, verdict = rehearsed(cache, folder, "--compute", "--gpu", "a100", "--gpus", "2", command=words)
    assert "2 passed" in done.stderr and "building" not in done.stderr
    assert verdict["verdict"] == "passed" and verdict["processes_with_gpus"] == 1
    assert not (folder / "trained").exists() and any("trained" in note for note in verdict["notes"])


def test_a_missing_wait_and_memory_that_nobody_wrote_are_seen(cache: Path, folder: Path) -> None:
    options = ["--compute", "--late-copies", "--poison", "--gpu", "a100"]
    done, verdict = rehearsed(cache, folder, *options, command=[*PYTEST, "-k", "waits or reads"], code=8)
    assert verdict["program_exit_code"] == 1
    assert "2 failed" in done.stderr


def test_an_operator_without_a_stand_in_fails_by_its_name(cache: Path, folder: Path) -> None:
    (folder / "test_gpu.py").write_text("import torch\ntorch.nn.LSTM(8, 8).cuda()(torch.zeros(2, 1, 8).cuda())\n")
    done, verdict = rehearsed(cache, folder, "--compute", command=[sys.executable, "test_gpu.py"], code=8)
    assert verdict["verdict"] == "failed"
    assert "not emulated" in done.stderr and "rnn" in done.stderr


def test_a_program_that_uses_no_gpu_has_not_passed(cache: Path, folder: Path) -> None:
    (folder / "test_gpu.py").write_text("import torch\ntorch.zeros(1)\n")
    done, _ = rehearsed(cache, folder, "--compute", command=[sys.executable, "test_gpu.py"], code=2)
    assert "ended without using CUDA" in done.stderr


def test_a_program_that_does_not_end_is_ended(cache: Path, folder: Path) -> None:
    program = "import time, torch\ntorch.zeros(1).cuda()\nwhile True: time.sleep(1)\n"
    (folder / "test_gpu.py").write_text(program)
    options = ["--compute", "--time-limit", "15"]
    _, verdict = rehearsed(cache, folder, *options, command=[sys.executable, "test_gpu.py"], code=7)
    assert verdict["reason"] == "not known: the time limit of 15 s came"
