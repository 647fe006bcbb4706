"""The templates on a real Slurm cluster, with plain sbatch: from a checkout, and from an installed wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.launch.jobs import REPO, environment, losses, settings
from tests.slurm.cluster import Cluster, read, tiny
from tests.test_packaging import build
from tests.texts import copy_checkout

RELEASE = pytest.mark.release


@pytest.mark.parametrize(
    ("style", "strategy"),
    [
        pytest.param("torchrun", "fsdp", marks=RELEASE),
        pytest.param("srun", "ddp", marks=pytest.mark.slow),
        pytest.param("torchrun", "ddp", marks=RELEASE),
        pytest.param("torchrun", "zero2", marks=RELEASE),
        pytest.param("srun", "fsdp", marks=RELEASE),
        pytest.param("srun", "zero2", marks=RELEASE),
    ],
)
def test_both_templates_train_as_one_process_does(
    style: str, strategy: str, cluster: Cluster, alone: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    """2 nodes × 2 ranks."""
    text, expected = alone
    output = tmp_path / "out"
    job = cluster.sbatch(style, output, tiny(tmp_path / "my run", text, strategy))
    assert cluster.wait(job, output) == "COMPLETED", read(output)
    assert losses(tmp_path / "my run") == pytest.approx(expected, abs=1e-5)
    assert "step 5/5" in read(output) and "could not be checked" not in read(output)


@pytest.mark.parametrize(
    "style", [pytest.param("torchrun", marks=RELEASE), pytest.param("srun", marks=pytest.mark.slow)]
)
def test_a_user_error_ends_the_job_with_its_two_lines(style: str, cluster: Cluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    args = [*settings(tmp_path / "run", "refuse"), "train.micro_batch_size=2"]
    job = cluster.sbatch(style, output, args, ranks=1)
    assert cluster.wait(job, output) == "FAILED"
    assert cluster.field(job, "ExitCode") == "2:0", read(output)
    assert "error: sample 7 is empty\n  fix: remove it\n" in read(output)
    assert "Traceback" not in read(output)


@pytest.mark.parametrize("style", ["torchrun", "srun"])
def test_ranks_that_do_not_fit_the_mesh_are_refused_before_they_start(
    style: str, cluster: Cluster, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    mesh = ["parallel.strategy=hsdp", "parallel.dp_replicate=3", "parallel.dp_shard=2"]
    job = cluster.sbatch(style, output, [*settings(tmp_path / "run"), *mesh])
    assert cluster.wait(job, output) == "FAILED"
    assert cluster.field(job, "ExitCode") == "2:0", read(output)
    said = read(output).splitlines()
    assert len(said) == 2 and said[0].startswith("error: parallel.dp_replicate=3") and said[1].startswith("  fix: ")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel in it, and this environment's packages behind it; its `bin`."""
    base = tmp_path_factory.mktemp("installed")
    wheel = next(
        path for path in build(copy_checkout(base / "tree"), base / "dist", "--wheel") if path.suffix == ".whl"
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(base / "venv")], check=True)
    site = next((base / "venv/lib").glob("python*/site-packages"))
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(base / "venv/bin/python"), "install", "--no-deps", "-q"]
    subprocess.run([*pip, "--no-index", "--ignore-installed", str(wheel)], check=True)
    shutil.rmtree(base / "tree")
    return base / "venv/bin"


@RELEASE
@pytest.mark.parametrize(
    ("template", "options", "config"),
    [
        ("train", ["--cpus-per-task=2"], "fsdp"),
        ("train_srun", ["--ntasks-per-node=1", "--cpus-per-task=1"], "ddp"),
        ("single_gpu_offload", ["--cpus-per-task=2"], "single_gpu_offload"),
    ],
)
def test_templates_of_an_installed_wheel(
    template: str, options: list[str], config: str, installed: Path, cluster: Cluster,
    alone: tuple[Path, dict[int, float]], tmp_path: Path,
) -> None:  # fmt: skip
    """`shardkit init DIR`, then plain sbatch with the environment active: no checkout anywhere."""
    path, slurm_conf = f"{installed}:{cluster.env['PATH']}", cluster.env["SLURM_CONF"]
    env = environment(PATH=path, VIRTUAL_ENV=str(installed.parent), SLURM_CONF=slurm_conf, NPROC_PER_NODE="1")
    del env["PYTHONPATH"]
    subprocess.run([str(installed / "shardkit"), "init", "my project"], cwd=tmp_path, env=env, check=True)
    project = tmp_path / "my project"
    ours = ("parallel.", "train.eval_samples=", "train.global_batch_size=")
    overrides = [item for item in tiny(Path("runs/first"), alone[0], "") if not item.startswith(ours)]
    argv = ["sbatch", "--parsable", "--gpus-per-node=0", *options, f"slurm/{template}.sbatch", f"configs/{config}.yaml"]
    process = subprocess.run([*argv, *overrides], cwd=project, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    job = process.stdout.strip()
    output = project / f"slurm-{job}.out"
    assert cluster.wait(job, output, 180) == "COMPLETED", read(output)
    assert sorted(losses(project / "runs/first")) == [1, 2, 3, 4, 5]
    assert str(REPO) not in read(project / "runs/first/env.json"), "the checkout was used"
