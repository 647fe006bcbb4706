"""A job as text for Kubernetes: a JobSet, whose controller Kubeflow Trainer brings along.

Pure functions; nothing here talks to a cluster. The manifest sets the variables through which pods find each other
(PET_…); Kubeflow's torch runtime sets the same ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import LaunchError
from .failures import exit_codes
from .local import restart
from .ranks.env import integer
from .spec import JobSpec, Rendezvous

NODE = "node"
"""The replicated job and the container of the ranks, as in Kubeflow's runtime `torch-distributed`."""
_PORT = 29400  # inside a pod's own network, where nothing else listens
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
GRACE_S = 120.0
"""Seconds that the ranks of a config have for their last save, unless the user sets them."""
_END_S = 60  # the launcher's own time to end the ranks, after theirs
_UID = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"  # JobSet 0.9 and later; empty before
_ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


def render_job_set(spec: JobSpec) -> str:
    """The manifest of a JobSet (jobset.x-k8s.io/v1alpha2), one pod per node.

    A pod that fails ends its job, and the set starts again as a whole, `max_restarts` times. Two kinds of ends do not
    count: a pod that is disrupted (preempted, drained), and a pod that saved and stopped, as all pods of a disrupted
    job do. Pods that stopped may be seen before the disrupted one.
    """
    import yaml

    options = spec.kubernetes
    if not _NAME.fullmatch(spec.name):
        raise LaunchError(
            f"--name {spec.name!r}: Kubernetes takes up to 40 lower-case letters, digits and '-', a letter first",
            "pass --name with such a name",
        )
    if not options.image:
        raise LaunchError("a job on Kubernetes needs an image", "pass --container IMAGE, whose python3 has shardkit")
    # A pod's own /dev/shm has 64 MiB, too little for loaders and NCCL.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, volume in enumerate(options.volumes):
        claim, colon, path = volume.partition(":")
        if not colon or not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim) or not path.startswith("/"):
            raise LaunchError(f"--volume {volume!r} is not CLAIM:/PATH", "name a PersistentVolumeClaim and its path")
        volumes.insert(number, {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.insert(number, {"name": f"volume-{number}", "mountPath": path})
    grace_s = GRACE_S if spec.grace_s is None else spec.grace_s
    if spec.script is not None:
        grace_s = spec.script.grace_s
    # By these variables the pods meet, and know their job, how often JobSet has started it, and their time to save.
    variables: dict[str, str | dict[str, Any]] = {
        "PET_NNODES": str(spec.nodes[1]),
        "PET_NPROC_PER_NODE": str(spec.nproc_per_node),
        "PET_NODE_RANK": _field(_INDEX),
        "PET_MASTER_ADDR": f"{spec.name}-{NODE}-0-0.{spec.name}",
        "PET_MASTER_PORT": str(_PORT),
        restart.JOB_ID: _field(_UID),
        restart.RESTARTS: _field(_ATTEMPT),
        restart.GRACE: f"{grace_s:g}",
    }
    amounts = {
        "nvidia.com/gpu": str(spec.gpus_per_node) if spec.gpus_per_node else None,
        "cpu": options.cpus,
        "memory": options.memory,
    }
    limits = {name: value for name, value in amounts.items() if value is not None}
    # Kubernetes replaces $(NAME) by a variable of the container, and $$ by $: a $ of the user's stays one.
    words = [word.replace("$", "$$") for word in _words(spec)]
    container = {
        "name": NODE,
        "image": options.image,
        "command": words[:4],
        "args": words[4:],
        "env": [
            {"name": name, **({"value": value} if isinstance(value, str) else value)}
            for name, value in variables.items()
        ],
        "volumeMounts": mounts,
        **({"resources": {"limits": limits, "requests": dict(limits)}} if limits else {}),
    }
    stopped = {"containerName": NODE, "operator": "In", "values": [exit_codes.PREEMPTED]}
    job = {
        "parallelism": spec.nodes[1],
        "completions": spec.nodes[1],
        "completionMode": "Indexed",
        "backoffLimit": 0,
        **({} if options.limit_s is None else {"activeDeadlineSeconds": options.limit_s}),
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": stopped},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": _END_S + math.ceil(grace_s),
                "containers": [container],
                "volumes": volumes,
            }
        },
    }
    disrupted = {
        "name": "disrupted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": spec.name, "annotations": {"shardkit/run-dir": spec.run_dir}},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": options.max_restarts, "rules": [disrupted]},
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
        },
    }
    return str(yaml.safe_dump(manifest, sort_keys=False, width=4096, allow_unicode=True))


def _field(path: str) -> dict[str, Any]:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def _words(spec: JobSpec) -> list[str]:
    """The launcher's command line in a pod; the first four words are the program."""
    launch = ["python3", "-m", "shardkit.cli", "launch"]
    sizes = ["--nnodes", str(spec.nodes[1]), "--nproc-per-node", str(spec.nproc_per_node)]
    sizes += ["--max-restarts", str(spec.max_restarts)]
    if spec.script is None:
        return [*launch, spec.config or "-", *sizes, *spec.overrides]
    return [*launch, *sizes, "--run-dir", spec.run_dir, *spec.script.launch_options(), "--", *spec.script.argv]


def meeting(environ: Mapping[str, str], run_id: str) -> Rendezvous | None:
    """Where the nodes of a pod's job meet, and which of them this pod is; None outside such a job."""
    host = environ.get("PET_MASTER_ADDR")
    if not host:
        return None
    rank_var = "PET_NODE_RANK" if "PET_NODE_RANK" in environ else "JOB_COMPLETION_INDEX"
    node_rank, port = integer(environ, rank_var), integer(environ, "PET_MASTER_PORT")
    return Rendezvous(f"{host}:{port}", node_rank, node_rank == 0, run_id)


def sizes(environ: Mapping[str, str], nnodes: str | None, nproc_per_node: str) -> tuple[str, str]:
    """(nodes, ranks per node) of a launcher: as asked, else those of the pod's job, else one node."""
    job_nodes = environ.get("PET_NNODES") if environ.get("PET_MASTER_ADDR") else None
    if job_nodes is not None and nnodes is not None and nnodes != job_nodes:
        raise LaunchError(f"--nnodes {nnodes}, but this pod's job has PET_NNODES={job_nodes}", "leave --nnodes out")
    per_node = environ.get("PET_NPROC_PER_NODE", "")
    if job_nodes is not None and nproc_per_node == "auto" and per_node.isdigit():
        nproc_per_node = per_node
    return nnodes or job_nodes or "1", nproc_per_node
