"""Running a job's ranks in a container, through pyxis (srun's --container-image)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ...errors import LaunchError

PYTHON = "python3"
"""The image's interpreter, for which shardkit has to be installed there."""


def srun_options(image: str, paths: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """srun's options for `image`, with `paths` where they are outside.

    Args:
        environ: SHARDKIT_CONTAINER_MOUNTS holds more mounts as pyxis writes them, `SRC:DST[:ro],...`.

    Raises:
        LaunchError: a path that a list of mounts cannot carry.
    """
    mounts: list[str] = []
    for path in paths:
        if any(c in path for c in ":,"):
            raise LaunchError(f"{path} cannot be mounted in a container: it has a ':' or ','", "rename it")
        if not any(path == outer or path.startswith(outer + os.sep) for outer in mounts):
            mounts.append(path)
    more = [environ["SHARDKIT_CONTAINER_MOUNTS"]] if environ.get("SHARDKIT_CONTAINER_MOUNTS") else []
    listed = ",".join([*(f"{path}:{path}" for path in mounts), *more])
    return [f"--container-image={image}", f"--container-mounts={listed}", f"--container-workdir={mounts[0]}"]
