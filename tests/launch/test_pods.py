"""Pods of a JobSet that are preempted: real launchers with the environment and the command of its pods.

tests/launch/golden holds the rules by which Kubernetes judges their exit codes. The labels are those of
labelAndAnnotateObject in kubernetes-sigs/jobset pkg/controllers (08dfbdf, v0.12).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.launch.kubernetes import render_job_set
from shardkit.launch.local.rendezvous import ReservedPort
from shardkit.launch.spec import JobSpec, KubernetesOptions
from tests.commands import python_m
from tests.launch.jobs import REPO, environment, losses, settings

SPEC = JobSpec(
    config=None, run_dir="/data/runs/a", nproc_per_node=1, nodes=(2, 2), name="pretrain-a",
    kubernetes=KubernetesOptions("train:3"),
)  # fmt: skip


def container_of(spec: JobSpec) -> Any:
    """The container of a pod, as the manifest describes it."""
    (job,) = yaml.safe_load(render_job_set(spec))["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return container


def pod_environment(spec: JobSpec, index: int, uid: str, attempt: int) -> dict[str, str]:
    """The variables of a pod's container, its fields filled in as JobSet and the Job's controller label a pod."""
    values = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": uid,
        "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": str(attempt),
    }
    return {
        entry["name"]: entry["value"] if "value" in entry else values[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container_of(spec)["env"]
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
    container = container_of(spec)
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
