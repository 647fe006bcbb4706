"""The login-node case: a CUDA build of torch on a machine without a GPU plans the same bytes as a CPU build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_packaging import REPO, build, copy_tree

_REFERENCE = "model.preset=355m"
_LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "vocab_size": 32000,
}  # fmt: skip
CASES = {
    "fsdp": ["fsdp", _REFERENCE],
    "zero2": ["zero2", _REFERENCE],
    "zero3_offload": ["zero3_offload", _REFERENCE, "train.seq_len=1024"],
    "Llama": [
        "fsdp", "model.preset=null", "task.name=hf_causal_lm", f"model.hf={json.dumps(_LLAMA)}", "precision.mode=bf16",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def cuda_python() -> Path:
    """A Python with a CUDA build of this torch: SHARDKIT_CUDA_PYTHON, or that of the Makefile's environment."""
    python = Path(os.environ.get("SHARDKIT_CUDA_PYTHON", REPO / ".venv-cuda/bin/python"))
    if not python.exists():
        pytest.skip(f"{python} is not there: make test-cuda installs it")
    return python


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from that holds what the wheel installs."""
    base = tmp_path_factory.mktemp("cuda-wheel")
    wheel = next(path for path in build(copy_tree(base / "tree"), base / "dist", "--wheel") if path.suffix == ".whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", str(base / "site"), str(wheel)]
    subprocess.run(pip, check=True)
    return base / "site"


def planned(python: Path, site: Path, config: str, *overrides: str) -> dict[str, Any]:
    target = ["--gpus", "8", "--gpu", "h100", "--json", "--no-advice"]
    command = [str(python), "-m", "shardkit.cli", "plan", str(site / f"shardkit/configs/{config}.yaml"), *target]
    env = {**os.environ, "PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, cwd=site.parent, env=env)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.release
@pytest.mark.deepspeed
@pytest.mark.timeout(3600)
@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch to compare with")
@pytest.mark.parametrize("case", CASES)
def test_a_cuda_wheel_without_a_gpu_plans_what_a_cpu_wheel_plans(case: str, cuda_python: Path, installed: Path) -> None:
    ask = "import torch; print(torch.version.cuda, torch.cuda.is_available())"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    built = subprocess.run([str(cuda_python), "-c", ask], capture_output=True, text=True, env=env, check=True)
    version, available = built.stdout.split()
    assert version != "None" and available == "False"
    config, *overrides = CASES[case]
    with_cuda = planned(cuda_python, installed, config, *overrides)
    assert with_cuda["method"] == "cuda"
    assert with_cuda == planned(Path(sys.executable), installed, config, *overrides)
