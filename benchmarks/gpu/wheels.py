"""Wheels for a machine that has torch and no network: `python -m benchmarks.gpu.wheels --out DIR`.

shardkit's requirements are read from the packages installed here, except torch and its own requirements; their versions
are the ones tested here. shardkit and DeepSpeed (without compiled operators: DS_BUILD_OPS=0) are built, the others are
downloaded for the other machine's Python.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..common import REPO

REQUIREMENT = "shardkit[hf,vision]"
THERE = "torch"
BUILT = {"shardkit": str(REPO), "deepspeed": ""}
GLIBC = (34, 31, 28, 27, 24, 17)
"""manylinux_2_N that a current x86-64 Linux runs."""


def needed(requirement: str, python: str, have: Mapping[str, str | None]) -> dict[str, str]:
    """Name → version here of everything that the requirement needs and the other machine lacks.

    Args:
        python: the other machine's version, 3.12 for example.
        have: name → version of its packages (`None`: any), besides torch.

    Raises:
        PackageNotFoundError: a requirement is not installed here.
    """
    versions: dict[str, str] = {}
    seen: set[Requirement] = set()
    pending = [Requirement(requirement)]
    while pending:
        needed_by = pending.pop()
        name = canonicalize_name(needed_by.name)
        if needed_by in seen or name == THERE or _satisfied(needed_by, have):
            continue
        seen.add(needed_by)
        versions[name] = version(name)
        pending += _requirements(needed_by, python)
    return versions


def _satisfied(requirement: Requirement, have: Mapping[str, str | None]) -> bool:
    name = canonicalize_name(requirement.name)
    if name not in have:
        return False
    there = have[name]
    return there is None or requirement.specifier.contains(there, prereleases=True)


def _requirements(requirement: Requirement, python: str) -> Iterator[Requirement]:
    """The requirements of an installed package on that Python, with the requested extras."""
    there = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    for text in requires(requirement.name) or ():
        required = Requirement(text)
        extras = requirement.extras or {""}
        if required.marker is None or any(
            required.marker.evaluate({**there, "extra": extra}) for extra in (*extras, "")
        ):
            yield required


def read_have(path: Path | None) -> dict[str, str | None]:
    """Read the output of `pip list --format=freeze` on the other machine; a line may be a name alone."""
    versions: dict[str, str | None] = {}
    for line in path.read_text().splitlines() if path else ():
        name, _, there = line.strip().partition("==")
        if name and not name.startswith("#"):
            versions[canonicalize_name(name)] = there or None
    return versions


def make(out: Path, python: str, have: Mapping[str, str | None]) -> None:
    """Fill `out` with wheels.

    Raises:
        CalledProcessError: pip could not build or download; it printed the reason.
    """
    out.mkdir(parents=True, exist_ok=True)
    wheels = needed(REQUIREMENT, python, have)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    for name in [name for name in BUILT if name in wheels]:
        source = BUILT[name] or f"{name}=={wheels.pop(name)}"
        wheels.pop(name, None)
        build = [*pip, "wheel", "--no-deps", "--wheel-dir", str(out), source]
        subprocess.run(build, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    for left in (REPO / "build" / "lib", *(REPO / "build").glob("bdist.*")):
        shutil.rmtree(left, ignore_errors=True)  # setuptools would put their files into the next wheel
    platforms = [option for n in GLIBC for option in ("--platform", f"manylinux_2_{n}_x86_64")]
    platforms += ["--platform", "manylinux2014_x86_64", "--platform", "linux_x86_64"]
    download = [*pip, "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    download += ["--python-version", python, *platforms, "--dest", str(out)]
    if wheels:
        subprocess.run([*download, *(f"{name}=={there}" for name, there in sorted(wheels.items()))], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wheels", description=__doc__)
    parser.add_argument("--out", type=Path, default=REPO / "build" / "wheels", metavar="DIR")
    parser.add_argument(
        "--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", metavar="3.12", help="on the other machine"
    )
    parser.add_argument("--have", type=Path, metavar="FILE", help="output of `pip list --format=freeze` there")
    args = parser.parse_args()
    make(args.out, args.python, read_have(args.have))
    files = sorted(args.out.glob("*.whl"))
    size = sum(file.stat().st_size for file in files)
    print(f"{args.out}: {len(files)} wheels, {size / 2**20:.1f} MiB; on the other machine:")
    print(f"  python3 -m pip install --no-index --find-links {args.out.name} '{REQUIREMENT}'")


if __name__ == "__main__":
    main()
