"""Manifests for Kubernetes: the recorded ones, read back through the published models; who a pod is; real launchers
with the environment and the command of pods, preempted and started again.

tests/launch/golden holds the rules by which Kubernetes judges their exit codes. The labels are those of
labelAndAnnotateObject in kubernetes-sigs/jobset pkg/controllers (08dfbdf, v0.12).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.cli.__main__ import main
from shardkit.errors import LaunchError
from shardkit.launch.kubernetes import meeting, render_job_set, sizes
from shardkit.launch.local.launcher import _with_meeting
from shardkit.launch.local.rendezvous import ReservedPort
from shardkit.launch.ranks.env import RankEnv, detect
from shardkit.launch.script import Script
from shardkit.launch.spec import JobSpec, KubernetesOptions
from tests.commands import python_m
from tests.launch.jobs import REPO, environment, losses, settings

GOLDEN = Path(__file__).with_name("golden")
BASE = JobSpec(
    config=None, run_dir="/data/runs/a", nproc_per_node=8, nodes=(2, 2), gpus_per_node=8, name="pretrain-a",
    script=Script(("train.py", "--text", "it's: 'yes' # {no}"), on_preempt="usr1", heartbeat="auto", grace_s=90),
    kubernetes=KubernetesOptions("registry.lab/train:3", volumes=("team-data:/data",), cpus="32", memory="400Gi",
                                 limit_s=14400, max_restarts=2),
)  # fmt: skip
CONFIG = replace(
    BASE, script=None, config="configs/fsdp.yaml", overrides=("optim.lr=1e-4",), nodes=(1, 1), gpus_per_node=0,
    kubernetes=KubernetesOptions("train:3"),
)  # fmt: skip
CASES = {"script.jobset": BASE, "config.jobset": CONFIG}


@pytest.mark.parametrize("name", sorted(CASES))
def test_manifest_is_the_recorded_one(name: str) -> None:
    """Record anew, after looking at the difference: SHARDKIT_RECORD=1 pytest tests/launch/test_kubernetes.py."""
    path, text = GOLDEN / f"{name}.yaml", render_job_set(CASES[name])
    if os.environ.get("SHARDKIT_RECORD") == "1":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_published_models_read_every_key(name: str) -> None:
    """They drop keys that they do not know without a word: only an equal dictionary shows that there was none."""
    models: Any = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    manifest = yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())
    model = models.JobsetV1alpha2JobSet
    assert model.from_dict(manifest).to_dict() == manifest
    manifest["spec"]["replicasTypo"] = 1
    assert model.from_dict(manifest).to_dict() != manifest


def test_kubernetes_expands_nothing_in_the_users_words() -> None:
    """Kubernetes replaces $(NAME) by a variable of the container, and reads $$ as a $, in command, args and env."""
    words = ["train.py", "--title", "$(HF_TOKEN)", "$$(HF_TOKEN)", "costs $5", "$$"]
    node = _container(yaml.safe_load(render_job_set(replace(BASE, script=Script(tuple(words))))))
    escaped = node["args"][-len(words) :]
    assert escaped != words
    # As a kubelet gives them to a container (k8s.io/kubernetes/third_party/forked/golang/expansion).
    variables = {None: "$", "HF_TOKEN": "secret"}
    assert [re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: variables[found[1]], word) for word in escaped] == words


def _container(manifest: dict[str, Any]) -> dict[str, Any]:
    (job,) = manifest["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "Pretrain_A"}, "--name 'Pretrain_A': Kubernetes takes"),
        ({"name": "a" * 41}, "up to 40"),
        ({"kubernetes": KubernetesOptions()}, "needs an image"),
        ({"kubernetes": KubernetesOptions("i", volumes=("data",))}, "'data' is not CLAIM:/PATH"),
        ({"kubernetes": KubernetesOptions("i", volumes=("data:runs",))}, "is not CLAIM:/PATH"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(change: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        render_job_set(replace(BASE, **change))
    assert said in caught.value.cause and caught.value.fix


POD = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a-node-0-0.a",
    "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "1",
}  # fmt: skip


def test_the_launchers_of_pods_meet_where_the_operator_says() -> None:
    found, reserved = _with_meeting(BASE, POD, 1)
    assert reserved is None
    assert (found.rendezvous.endpoint, found.rendezvous.node_rank) == ("a-node-0-0.a:29400", 1)
    without = {name: value for name, value in POD.items() if name != "PET_NODE_RANK"}
    assert meeting(without, "x") == meeting(POD, "x")
    assert meeting({"JOB_COMPLETION_INDEX": "1"}, "x") is None, "any indexed job has that"
    with pytest.raises(LaunchError, match="PET_MASTER_PORT"):
        meeting({**POD, "PET_MASTER_PORT": "some"}, "x")


def test_a_launcher_in_a_pod_takes_the_jobs_sizes_and_no_others() -> None:
    assert sizes(POD, None, "auto") == ("2", "8") and sizes(POD, "2", "4") == ("2", "4")
    assert sizes({**POD, "PET_NPROC_PER_NODE": "auto"}, None, "auto") == ("2", "auto")
    assert sizes({}, None, "auto") == ("1", "auto") and sizes({}, "1:2", "3") == ("1:2", "3")
    with pytest.raises(LaunchError, match="--nnodes 1, but this pod's job has PET_NNODES=2"):
        sizes(POD, "1", "auto")


def test_a_pod_with_one_rank_knows_who_it_is_and_one_with_more_needs_a_launcher() -> None:
    assert detect({**POD, "PET_NPROC_PER_NODE": "1"}) == RankEnv(1, 2, 0, 1, 1, 2, "kubernetes", "a-node-0-0.a", 29400)
    for asked in ("8", "auto"):
        with pytest.raises(LaunchError, match="no launcher started ranks"):
            detect({**POD, "PET_NPROC_PER_NODE": asked})
    with pytest.raises(LaunchError, match="no launcher started ranks"):
        detect({**POD, "PET_NNODES": "1", "PET_NODE_RANK": "0"})
    alone = {**POD, "PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"}
    assert detect(alone).source == "single"
    with pytest.raises(LaunchError, match="PET_NODE_RANK=2 does not fit PET_NNODES=2"):
        detect({**POD, "PET_NODE_RANK": "2"})


def test_submit_prints_a_manifest_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main_words = ["--to", "kubernetes", "--container", "train:3", "--nodes", "2", "--mem", "64G", "--time", "4:00:00"]
    with pytest.raises(SystemExit) as ended:
        main(["submit", *main_words, "--run-dir", "/data/My run", "--", "train.py", "--lr", "3"])
    assert ended.value.code == 0 and list(tmp_path.iterdir()) == []
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert manifest["metadata"]["name"] == "shardkit-my-run" and manifest["kind"] == "JobSet"
    (job,) = manifest["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["activeDeadlineSeconds"] == 14400
    assert _container(manifest)["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "64Gi"}


@pytest.mark.parametrize(
    ("asked", "limit"), [("64G", "64Gi"), ("64GiB", "64Gi"), ("64Gi", "64Gi"), ("64GB", "64G"), ("4000", "4000Mi")]
)
def test_sizes_mean_the_same_to_kubernetes(asked: str, limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["submit", "--to", "kubernetes", "--container", "a", "--mem", asked, "--", "train.py"])
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert _container(manifest)["resources"]["limits"]["memory"] == limit


SPEC = JobSpec(
    config=None, run_dir="/data/runs/a", nproc_per_node=1, nodes=(2, 2), name="pretrain-a",
    kubernetes=KubernetesOptions("train:3"),
)  # fmt: skip


def pod_environment(spec: JobSpec, index: int, uid: str, attempt: int) -> dict[str, str]:
    """The variables of a pod's container, its fields filled in as JobSet and the Job's controller label a pod."""
    values = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": uid,
        "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": str(attempt),
    }
    return {
        entry["name"]: entry["value"] if "value" in entry else values[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in _container(yaml.safe_load(render_job_set(spec)))["env"]
    }


def test_a_pod_that_is_started_again_goes_on_and_another_job_overwrites(tmp_path: Path) -> None:
    """One pod with one rank needs no launcher; it is killed in its fourth step, and JobSet starts it again."""
    spec, run_dir = replace(SPEC, nodes=(1, 1)), tmp_path / "run"
    args = settings(
        run_dir, "kill", task__args__rank=0, task__args__calls=4, train__max_steps=5, checkpoint__every_steps=2,
        checkpoint__async_save="false", run__overwrite="true",
    )  # fmt: skip
    first = python_m("shardkit.train", *args, env=pod_environment(spec, 0, "0b6f", 0))
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = python_m("shardkit.train", *args, env=pod_environment(spec, 0, "0b6f", 1))
    assert second.returncode == 0 and "resuming from" in second.stdout, second.stderr
    assert sorted(losses(run_dir)) == [1, 2, 3, 4, 5]
    other = python_m("shardkit.train", *args, "task.args.how=nothing", env=pod_environment(spec, 0, "77aa", 0))
    assert other.returncode == 0 and "resuming" not in other.stdout, other.stderr
    assert "run.overwrite deletes the run in" in other.stderr


@pytest.mark.slow
def test_two_preempted_pods_save_longer_than_torchruns_patience_and_go_on(tmp_path: Path) -> None:
    """The manifest's own command in each pod. The first start's save takes 35 s: torchrun kills 30 s after SIGTERM."""
    run_dir, slow_save = tmp_path / "run", tmp_path / "slow"
    overrides = settings(
        run_dir, train__max_steps=1000, run__overwrite="true", task__factory="tests.launch.tasks:SlowToSave",
        task__args__slow_while=slow_save,
    )  # fmt: skip
    spec = replace(SPEC, overrides=tuple(overrides), grace_s=90, run_dir=str(run_dir))
    slow_save.touch()
    reserved = ReservedPort()  # nobody else is given it, and the first pod can still take it
    first = [start_pod(spec, index, 0, reserved.port) for index in (0, 1)]
    try:
        wait_for_step(run_dir, 5, first)
        first[1].send_signal(signal.SIGTERM)  # the kubelet ends one pod
        said = [pod.communicate(timeout=150)[0] for pod in first]
    finally:
        end(first)
    assert [pod.returncode for pod in first] == [75, 75], said
    assert len(list(run_dir.glob("logs/*-node[01]-*/torchrun.log"))) == 2, "an overwrite leaves every node's logs"
    saved = max(losses(run_dir))
    slow_save.unlink()
    second = [start_pod(spec, index, 1, reserved.port) for index in (0, 1)]
    try:
        said = [pod.communicate(timeout=150)[0] for pod in second]
    finally:
        end(second)
        reserved.close()
    assert [pod.returncode for pod in second] == [0, 0], said
    assert f"resuming from {run_dir}/checkpoints/step_{saved:08d}" in said[0]
    assert sorted(losses(run_dir)) == list(range(1, 1001))


def start_pod(spec: JobSpec, index: int, attempt: int, port: int) -> subprocess.Popen[str]:
    """A pod's container as a process of this machine, where the pods' names mean nothing."""
    container = _container(yaml.safe_load(render_job_set(spec)))
    here = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, *container["command"][1:], *container["args"]], cwd=REPO, text=True, start_new_session=True,
        env=environment(**{**pod_environment(spec, index, "0b6f", attempt), **here}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for_step(run_dir: Path, step: int, pods: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 120
    while not (metrics := run_dir / "metrics.jsonl").exists() or f'"step": {step},' not in metrics.read_text():
        assert all(pod.poll() is None for pod in pods) and time.monotonic() < deadline, end(pods)
        time.sleep(0.05)


def end(pods: list[subprocess.Popen[str]]) -> list[str]:
    for pod in pods:
        if pod.poll() is None:
            pod.kill()
    return [pod.communicate()[0] for pod in pods if pod.stdout is not None and not pod.stdout.closed]
