"""The batch script as text, and what bash and the commands make of hostile names. Real clusters: tests/slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardkit.config.load import load_config
from shardkit.errors import ConfigError, LaunchError
from shardkit.launch.batch import read_batch, step_argv
from shardkit.launch.slurm import commands, submit
from shardkit.launch.slurm.submit import render_sbatch
from shardkit.launch.spec import JobSpec, SlurmOptions
from tests.launch.jobs import REPO, environment, run
from tests.texts import write_files, write_program

GOLDEN = Path(__file__).with_name("golden")
BASE = JobSpec(
    config="/data/runs/a/submit/config.yaml", run_dir="/data/runs/a", nproc_per_node=8, nodes=(2, 2), gpus_per_node=8,
    python="/opt/venv/bin/python", cwd="/home/me/project", name="shardkit-a",
    slurm=SlurmOptions(time="4:00:00", partition="gpu", account="lab"),
)  # fmt: skip
HOSTILE = """a b"c'd $(touch hacked) `id` ; rm -rf x # &|>*?é %j"""
CASES = {
    "torchrun": BASE,
    "srun": replace(BASE, slurm=replace(BASE.slurm, style="srun", cpus_per_task=12, qos="long", mem="500G")),
    "array": replace(
        BASE, overrides=("train.seed=%a",), slurm=SlurmOptions(array="0-3%2", dependency="afterok:12", exclude="n[1-2]")
    ),
    "container": replace(BASE, max_restarts=2, slurm=SlurmOptions(
        container="nvcr.io#nvidia/pytorch", container_mounts="/data:/data", max_requeues=3, signal_s=600
    )),
    "hostile": replace(
        BASE, name=HOSTILE, run_dir=f"/data/{HOSTILE}", config=f"/data/{HOSTILE}/c.yaml", cwd=f"/home/{HOSTILE}",
        python=f"/opt/{HOSTILE}/python", overrides=(f"data.path={HOSTILE}",), slurm=SlurmOptions(extra=("--nice=5",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
def test_script_is_the_recorded_one(name: str) -> None:
    """Record anew, after looking at the difference: SHARDKIT_RECORD=1 pytest tests/launch/test_slurm.py."""
    path, script = GOLDEN / f"{name}.sbatch", render_sbatch(CASES[name])
    if os.environ.get("SHARDKIT_RECORD") == "1":
        path.write_text(script)
    assert script == path.read_text()
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_bash_hands_hostile_words_on_unchanged(tmp_path: Path) -> None:
    python = write_program(tmp_path / "my $(touch hacked) python", '#!/bin/bash\n[ "$#" = 2 ] || printf "%s\\0" "$@"\n')
    script = render_sbatch(replace(CASES["hostile"], python=python))
    process = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    words = process.stdout.split("\0")[:-1]
    assert words[0] == "-c"
    assert words[2:] == ["shardkit.launch.batch", "torchrun", f"/data/{HOSTILE}/c.yaml", f"data.path={HOSTILE}"]
    assert os.listdir(tmp_path) == [os.path.basename(python)]


@pytest.mark.parametrize("change", [{"name": "a\nb"}, {"run_dir": "/a\\b"}, {"run_dir": "/a\n#SBATCH --wrap=id"}])
def test_what_no_quoting_can_carry_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(LaunchError):
        render_sbatch(replace(BASE, **change))


def test_the_srun_command() -> None:
    environ = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "3",
    }  # fmt: skip
    batch = read_batch(["srun", "-", "run.dir=/r/a%b"], environ)
    argv = step_argv(batch, environ)
    assert argv[:5] == ["srun", "--kill-on-bad-exit=1", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4"]
    assert "--cpus-per-task=3" in argv and "--output=/r/a%%b/logs/slurm-7.0/rank-%t.log" in argv
    assert argv[-2:] == ["shardkit.train", "run.dir=/r/a%b"] and "-m" not in argv


@pytest.mark.parametrize("style", ["torchrun", "srun"])
def test_a_container_has_the_run_and_its_own_python(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SHARDKIT_CONTAINER": "nvcr.io#nvidia/pytorch",
        "SHARDKIT_CONTAINER_MOUNTS": "/data:/data:ro",
    }  # fmt: skip
    monkeypatch.chdir("/tmp")
    argv = step_argv(read_batch([style, "-", "run.dir=/runs/a b"], environ), environ)
    assert "--container-image=nvcr.io#nvidia/pytorch" in argv and "--container-workdir=/tmp" in argv
    assert "--container-mounts=/tmp:/tmp,/runs/a b:/runs/a b,/data:/data:ro" in argv
    assert "python3" in argv and sys.executable not in argv
    argv = step_argv(read_batch([style, "-", "run.dir=/tmp/runs/a"], environ), environ)
    assert "--container-mounts=/tmp:/tmp,/data:/data:ro" in argv
    with pytest.raises(LaunchError, match="cannot be mounted"):
        step_argv(read_batch([style, "-", "run.dir=/runs/a:b"], environ), environ)


def test_array_tasks_have_their_own_directory_and_values() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_ARRAY_TASK_ID": "3"}
    batch = read_batch(["torchrun", "-", "run.dir=/r", "train.seed=%a"], environ)
    assert batch.overrides == ("run.dir=/r", "train.seed=3", "run.dir=/r/array_3")
    assert batch.run_dir == Path("/r/array_3")


@pytest.mark.parametrize(
    ("args", "said"), [(["torchrun"], "no config"), (["torchrun", "-"], "not a Slurm job"), (["x", "-"], "no config")]
)
def test_a_template_used_wrongly_says_how(args: list[str], said: str) -> None:
    with pytest.raises(LaunchError, match=said) as caught:
        read_batch(args, {})
    assert "sbatch slurm/train.sbatch CONFIG" in caught.value.fix


@pytest.mark.parametrize("template", ["train", "train_srun", "single_gpu_offload"])
def test_templates_without_shardkit(template: str, tmp_path: Path) -> None:
    argv, env = ["bash", str(REPO / f"slurm/{template}.sbatch"), "-"], environment(SHARDKIT_PYTHON=str(tmp_path / "no"))
    process = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert process.returncode == 2
    assert "error: shardkit and its packages are not installed for any of: " in process.stderr


PYTHON = """#!/bin/bash
if [ "$#" = 2 ]; then echo looking; read -r; exit; fi
echo starting; read -r
exec {python} -c 'from shardkit.launch.slurm.preemption_warning import PreemptionWarning
warning = PreemptionWarning()
print("listening", flush=True)
input()
print("heard", *[number.name for number in warning.came])'
"""


@pytest.mark.parametrize("moment", ["looking", "starting", "listening", "never"])
def test_a_warning_at_any_moment_of_the_scripts_start_is_kept(moment: str, tmp_path: Path) -> None:
    """Between bash, which looks for an interpreter, and Python, which takes its place.

    At each place where the script can keep the signal: as long as its `exec` takes, bash can only ignore it.
    """
    python = write_program(tmp_path / "python", PYTHON.format(python=sys.executable))
    argv, env = ["bash", "-c", f'. "{REPO}/slurm/train.sbatch"'], environment(SHARDKIT_PYTHON=python)
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for place in ("looking", "starting", "listening"):
            assert process.stdout.readline() == f"{place}\n"
            if place == moment:
                process.send_signal(signal.SIGUSR2)
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.stdout.read().split() == ["heard", *(["SIGUSR2"] if moment != "never" else [])]


def shardkit(*args: str, code: int, cwd: Path = REPO, **env: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "shardkit.cli", *args], cwd=cwd, code=code, **env)


def test_a_dry_run_prints_a_script_and_writes_nothing(tmp_path: Path) -> None:
    process = shardkit(
        "submit", "configs/fsdp.yaml", f"run.dir={tmp_path}/run", "--nodes", "2", "--time", "2", "--dry-run", code=0
    )
    assert all(f"#SBATCH --{option}\n" in process.stdout for option in ("nodes=2", "time=2", "signal=B:USR2@120"))
    assert process.stderr.startswith("warning: the time limit leaves 120 s, and the job is told to save 120 s before")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_training_would_refuse_is_refused_before_it_is_queued(tmp_path: Path) -> None:
    def prepare(*overrides: str, **options: Any) -> None:
        settings = [f"run.dir={tmp_path}/run", *overrides]
        submit.prepare("-", settings, submit.Request(1, 2, 2, **options))

    with pytest.raises(ConfigError, match=r"run.resume=true, but run.dir=.*/run does not exist"):
        prepare("run.resume=true")
    with pytest.raises(ConfigError, match=r"array_0 does not exist"):
        prepare("run.resume=true", options=SlurmOptions(array="0-1"))
    prepare("run.resume=auto")
    write_files(tmp_path, {"run/model.safetensors": "mine"})
    for more in ("run.overwrite=true", "run.resume=auto"):
        with pytest.raises(ConfigError, match="is a model folder"):
            prepare(more)
    write_files(tmp_path, {"other/metrics.jsonl": "{}\n"})
    with pytest.raises(ConfigError, match="already holds a run"):
        prepare(f"run.dir={tmp_path}/other")
    prepare(f"run.dir={tmp_path}/other", "run.resume=true")


def test_snapshots_are_kept_and_taken_back(tmp_path: Path) -> None:
    for content in ("a: 1\n", "a: 2\n"):
        submit.write_snapshot(submit.reserve(tmp_path / "run"), content, "#!/bin/bash\n")
    assert (tmp_path / "run/submit/1/config.yaml").read_text() == "a: 1\n", "of a job that may still be queued"
    assert (tmp_path / "run/submit/2/config.yaml").read_text() == "a: 2\n"
    folder = submit.reserve(tmp_path / "new")
    submit.write_snapshot(folder, "a: 1\n", "")
    submit.remove_snapshot(folder)
    assert not (tmp_path / "new").exists()
    submit.remove_snapshot(submit.reserve(tmp_path / "run"))
    assert {path.name for path in (tmp_path / "run/submit").iterdir()} == {"1", "2"}


@pytest.mark.parametrize(
    ("root_mode", "file_mode", "shown"), [(0o755, 0o644, 0o644), (0o700, 0o644, 0o600), (0o755, 0o600, 0o600)]
)
def test_uncommitted_changes_are_as_closed_as_their_files(
    root_mode: int,
    file_mode: int,
    shown: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    outside = tempfile.TemporaryDirectory()  # pytest's own folders are closed to others
    request.addfinalizer(outside.cleanup)
    Path(outside.name).chmod(0o755)
    repo = Path(outside.name) / "repo"
    repo.mkdir()
    (repo / "train.py").write_text("1\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=repo, check=True)
    (repo / "train.py").write_text("token = 1\n")
    (repo / "train.py").chmod(file_mode)
    repo.chmod(root_mode)
    monkeypatch.chdir(repo)
    folder = submit.reserve(tmp_path / "run")
    submit.write_snapshot(folder, "a: 1\n", "")
    assert "token" in (folder / submit.PATCH).read_text()
    assert oct((folder / submit.PATCH).stat().st_mode & 0o777) == oct(shown)


FAKE_SBATCH = '#!/bin/bash\ncat "${@: -1}" > "$FAKE/job.$(ls "$FAKE" | wc -l)"\necho 7\n'


def test_a_later_submission_leaves_an_earlier_job_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    write_program(tmp_path / "bin/sbatch", FAKE_SBATCH)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", f"{tmp_path}/jobs")
    sizes = submit.Request(nodes=1, ranks_per_node=1, gpus_per_node=1)
    for rate in ("0.25", "0.5"):
        submit.submit(submit.prepare("-", [f"run.dir={tmp_path}/run", f"optim.lr={rate}"], sizes))
    for number, rate in enumerate((0.25, 0.5)):
        line = next(x for x in (tmp_path / f"jobs/job.{number}").read_text().splitlines() if x.startswith("set -- "))
        assert load_config(line.split()[2], []).config.optim.lr == rate


def test_a_job_that_is_queued_again_runs_what_it_ran_first(tmp_path: Path) -> None:
    """Whatever became of the file that was submitted; a user's copy of a template passes it on as it is."""
    config, run_dir = tmp_path / "mine.yaml", tmp_path / "run"
    config.write_text(f"run: {{dir: {run_dir}}}\noptim: {{lr: 0.25}}\n")
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}

    def trained(environ: dict[str, str]) -> tuple[float, int]:
        batch = read_batch(["srun", str(config), "train.seed=3"], environ)
        argv = step_argv(batch.pin(), environ)
        found = load_config(argv[argv.index("--config") + 1], argv[argv.index("--config") + 2 :]).config
        return found.optim.lr, found.train.seed

    assert trained(environ) == (0.25, 3)
    config.write_text(f"run: {{dir: {run_dir}}}\noptim: {{lr: 0.5}}\n")
    assert trained({**environ, "SLURM_RESTART_COUNT": "1"}) == (0.25, 3)
    assert trained({**environ, "SLURM_JOB_ID": "8"}) == (0.5, 3)
    assert trained({**environ, "SLURM_RESTART_COUNT": "2"}) == (0.25, 3)
    array = {**environ, "SLURM_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "4"}
    assert trained(array) == (0.5, 3)
    config.unlink()
    config.write_text(f"run: {{dir: {run_dir}}}\n")
    assert trained({**array, "SLURM_RESTART_COUNT": "1"}) == (0.5, 3)


def test_slurms_own_words_reach_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "sbatch: error: Invalid account or account/partition combination"
    write_program(tmp_path / "sbatch", f"#!/bin/bash\necho '{said}' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match="sbatch refused: Invalid account or account/partition") as caught:
        commands.call("sbatch", "x")
    assert caught.value.fix


NO_CLUSTER = {
    "no configuration": "X: error: fetch_config: lookup failed\nX: fatal: Could not establish a configuration source",
    "no controller": "X: error: Unable to contact slurm controller (connect failure)",
    "a dead socket": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "an overloaded controller": "X: error: Batch job submission failed: Socket timed out on send/recv operation",
}
"""What Slurm's client commands write where no controller answers."""


def silent_cluster(folder: Path, kind: str) -> str:
    """A PATH with Slurm's commands in front, which find no cluster."""
    for name in ("sbatch", "squeue", "scontrol", "scancel"):
        write_program(folder / name, f"#!/bin/bash\necho '{NO_CLUSTER[kind].replace('X', name)}' >&2\nexit 1\n")
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("kind", NO_CLUSTER)
@pytest.mark.parametrize("program", ["sbatch", "squeue"])
def test_a_cluster_that_does_not_answer_is_no_wrong_option(
    kind: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", silent_cluster(tmp_path / "bin", kind))
    with pytest.raises(LaunchError, match=f"^no Slurm cluster answers this machine's {program}: ") as caught:
        commands.call(program, "x")
    assert "correct the option" not in caught.value.fix and "shardkit launch CONFIG" in caught.value.fix
    assert "fatal:" not in caught.value.cause


@pytest.mark.parametrize("installed", [True, False])
def test_the_advice_without_a_cluster_keeps_the_users_script(installed: bool, tmp_path: Path) -> None:
    path = silent_cluster(tmp_path / "bin", "no configuration") if installed else str(tmp_path)
    (tmp_path / "train.py").write_text("")
    words = ["--gpus-per-node", "0", "--run-dir", "out", "--", "train.py", "--lr", "1e-3", "--name", "a b"]
    process = shardkit("submit", *words, cwd=tmp_path, code=2, PATH=path)
    assert "shardkit launch --run-dir out -- train.py --lr 1e-3 --name 'a b'" in process.stderr
    assert ("error: Slurm is not installed on this machine: there is no sbatch" in process.stderr) != installed
    assert not (tmp_path / "out").exists()
    config = shardkit(
        "submit", "-", f"run.dir={tmp_path}/run", "optim.lr=0.5", "--gpus-per-node", "0", code=2, PATH=path
    )
    assert f"shardkit launch - run.dir={tmp_path}/run optim.lr=0.5" in config.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("array", "indices"), [("0-3", [0, 1, 2, 3]), ("7", [7]), ("1,5-9:2%4", [1, 5, 7, 9]), ("0-4%2", [0, 1, 2, 3, 4])]
)
def test_the_indices_of_an_array(array: str, indices: list[int], tmp_path: Path) -> None:
    assert submit.array_indices(array) == indices
    (tmp_path / f"array_{indices[-1]}").mkdir()
    assert submit.array_folders(tmp_path, array) == [tmp_path / f"array_{indices[-1]}"]


def test_gpus_of_each_task_beside_those_of_a_node_are_refused() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_PER_NODE": "8"}
    with pytest.raises(LaunchError, match="--gpus-per-task=1"):
        read_batch(["srun", "-"], environ)


def ask(
    tmp_path: Path, host: str = "n2", python: str = sys.executable, word: str = "right"
) -> list[commands.NodeReport]:
    """The findings of one task, where another node has written `word`."""
    folder = tmp_path / "run dir"
    folder.mkdir(exist_ok=True)
    (folder / ".shardkit-nodes.right").touch()
    argv = commands.script_argv(word, python, ["shardkit", "torch"], [folder])
    process = subprocess.run(argv, cwd=REPO, env=environment(SLURMD_NODENAME=host), capture_output=True, text=True)
    assert process.returncode == 0 and process.stderr == "", process
    assert os.listdir(folder) == [".shardkit-nodes.right"], "a task leaves nothing"
    return commands.parse(process.stdout)


def test_a_node_that_is_as_it_should_be_tells_its_versions(tmp_path: Path) -> None:
    (finding,) = ask(tmp_path)
    assert (finding.host, finding.kind) == ("n2", "versions") and finding.detail.startswith("Python 3.")
    assert " torch 2." in finding.detail and commands.judge([finding], "python") is None


def test_a_directory_that_is_another_one_there_is_named(tmp_path: Path) -> None:
    unseen, versions = ask(tmp_path, word="another node's")
    problem = commands.judge([unseen, versions], "python")
    assert problem is not None and problem.cause.startswith("node n2 does not see what ")
    assert problem.cause.endswith("run dir") and "run.dir" in problem.fix


def test_two_jobs_check_one_directory_at_once(tmp_path: Path) -> None:
    """Each took the other's mark for a file system that is not shared, and blamed its own node as well."""
    folder = tmp_path / "run"
    folder.mkdir()
    both = f'cd {tmp_path}; touch $0; until [ -e a ] && [ -e b ]; do sleep 0.02; done; cd {REPO}; exec "$@"'

    def check(name: str) -> str | None:
        srun = ["env", "SLURMD_NODENAME=n1", "bash", "-c", both, name]
        return commands.check(srun, sys.executable, ["shardkit"], [folder], environment())

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(check, "ab")] == [None, None]
    assert not os.listdir(folder)


def test_an_interpreter_that_is_missing_or_lacks_packages_is_named(tmp_path: Path) -> None:
    problem = commands.judge(ask(tmp_path, python="/nowhere/python"), "/nowhere/python")
    assert problem is not None and problem.cause == "node n2 has no interpreter /nowhere/python"
    bare = write_program(tmp_path / "bare", f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    problem = commands.judge(ask(tmp_path, python=bare), bare)
    assert problem is not None and problem.cause == f"node n2: {bare}: no module shardkit"


def test_nodes_with_other_versions_are_refused_by_name() -> None:
    versions = {"n1": "torch 2.13.0", "n2": "torch 2.12.0"}
    findings = [commands.NodeReport(node, "versions", version) for node, version in versions.items()]
    problem = commands.judge(findings, "python")
    assert problem is not None and problem.cause == "the nodes differ: n2 has torch 2.12.0; n1 has torch 2.13.0"


def test_a_check_that_cannot_run_is_a_warning_and_ends_no_job(tmp_path: Path) -> None:
    assert "could not be checked" in (commands.check(["/nowhere/srun"], None, [], [tmp_path], {}) or "")
    assert "no such partition" in (commands.check(["bash", "-c", "echo no such partition >&2"], None, [], [], {}) or "")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LaunchError, match="node n9 has no interpreter"):
        commands.check(["env", "SLURMD_NODENAME=n9"], "/nowhere/python", [], [tmp_path], os.environ)
