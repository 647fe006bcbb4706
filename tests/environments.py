"""Environments with the oldest or the newest versions that shardkit is tested with, and what the tests run in them."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

from shardkit.config.libraries import TESTED
from tests.ranks import REPO

# Not the byte-exact state: an older DeepSpeed may keep parameters gathered for longer.
CORE = ["tests/strategies/test_parity.py"]
NAMES = ["tests/test_libraries.py"]
ACCELERATE = ["tests/foreign/test_accelerate_files.py"]
_QUANTIZED = "tests/tasks/test_quantized.py::test_"
PACKED = [
    "-m", "slow", f"{_QUANTIZED}every_engine_equals_one_process_over_the_same_bytes",
    f"{_QUANTIZED}under_bf16_the_base_is_sharded_and_its_bytes_stay_bytes",
]  # fmt: skip
LIBRARIES = [
    "setup.cfg", "shardkit/config/libraries.py", "shardkit/parallel/compat.py",
    "shardkit/memory/tracing/compat.py", "shardkit/strategies/zero", "tests/environments.py",
    "shardkit/foreign/translate.py", *NAMES, *ACCELERATE,
]  # fmt: skip
"""What names other libraries' private parts, or says which versions are supported."""
# The fake CUDA device on a wheel for CUDA, without a GPU; `method` says that it was not given up for CPU fakes.
_PLAN = "tests/plan/test_plan.py::"
SHIM = [
    f"{_PLAN}test_categories_sum_to_the_peak_and_state_is_what_the_formulas_say",
    f"{_PLAN}test_a_model_that_was_not_built_on_meta_is_sharded_on_the_gpu",
    f"{_PLAN}test_statistics_of_all_ranks_are_planned",
    "tests/plan/test_world.py",
]
TOOLS = ["pytest", "pytest-timeout", "hypothesis", "bitsandbytes", "peft"]


def versions(end: int) -> dict[str, str]:
    """Library → its oldest (0) or newest (1) tested version."""
    return {library: ends[end] for library, ends in TESTED.items()}


def python_with(pinned: dict[str, str]) -> Path:
    """The interpreter of an environment with these versions; kept between runs, it is gigabytes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardkit-tests"
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / f"torch-{pinned['torch']}-deepspeed-{pinned['deepspeed']}-{python}"
    interpreter = folder / "bin" / "python"
    exactly = [f"{name}=={version}" for name, version in pinned.items()]
    installed, tools = folder / ".installed", " ".join([*exactly, *TOOLS])
    if not installed.exists() or installed.read_text() != tools:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        parser = configparser.ConfigParser()
        parser.read(REPO / "setup.cfg")
        requirements = parser["options"]["install_requires"].split()
        others = [line for line in requirements if re.split("[>=<]", line)[0] not in pinned]
        # A pip that builds DeepSpeed in isolation; torch before it, whose setup.py imports it.
        for packages in (["pip>=25.3"], exactly[:1], [*exactly, *others, *TOOLS]):
            # These versions on purpose, whatever constraints pip is configured with.
            env = {**os.environ, "PIP_CONSTRAINT": os.devnull}
            subprocess.run([str(interpreter), "-m", "pip", "install", "-q", "-U", *packages], check=True, env=env)
        installed.write_text(tools)
    if not (folder / ".built").exists():
        build = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"  # minutes, once
        subprocess.run([str(interpreter), "-c", build], check=True, env=_environment(interpreter))
        (folder / ".built").touch()
    return interpreter


def _environment(interpreter: Path) -> dict[str, str]:
    """Its own tools first (ninja), and ops compiled against one torch are not shared with another."""
    ops = interpreter.parent.parent / "ops"
    path = f"{interpreter.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(REPO),  # some tests work in a folder of their own
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(ops),
    }


def check_versions(python: Path, pinned: dict[str, str]) -> None:
    """The environment has what it was made for, and a torch for CUDA, as the package index has it."""
    code = "import torch, importlib.metadata as m; print(*(m.version(n) for n in {!r}), torch.version.cuda)"
    command = [str(python), "-c", code.format(list(pinned))]
    *found, cuda = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert [version.partition("+")[0] for version in found] == list(pinned.values())
    assert cuda != "None"


def run_tests(python: Path, files: list[str]) -> None:
    """Run test files, or what other arguments of pytest name."""
    command = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=REPO, env=_environment(python), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-500:]
