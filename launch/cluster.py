"""The clusters that take a job: for each a pure function from the job to text, and the command that queues the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import LaunchError
from .kubernetes import render_job_set
from .slurm.script import render_sbatch
from .spec import JobSpec


@dataclass(frozen=True)
class Cluster:
    """One kind of cluster.

    Attributes:
        file_name: the text's name in a snapshot.
        render: the job's whole text; writes nothing and asks nobody. It raises LaunchError for a job that the cluster
            cannot take.
        queue: the command that queues the job, without the file's name.
    """

    file_name: str
    render: Callable[[JobSpec], str]
    queue: tuple[str, ...]


CLUSTERS = {
    "slurm": Cluster("job.sbatch", render_sbatch, ("sbatch", "--parsable")),
    "kubernetes": Cluster("job.yaml", render_job_set, ("kubectl", "create", "-f")),
}


def choose(name: str) -> Cluster:
    """The cluster that `--to` names.

    Raises:
        LaunchError: there is none of that name.
    """
    if name == "jobset":
        raise LaunchError("--to jobset is written --to kubernetes now", "pass --to kubernetes: it prints a JobSet")
    if name not in CLUSTERS:
        raise LaunchError(f"--to {name!r} is not a kind of cluster", f"pass one of {', '.join(CLUSTERS)}")
    return CLUSTERS[name]
