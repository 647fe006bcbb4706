"""Install the emulated CUDA into this environment, for tests: `python -m tests.emulated_cuda.build`.

`shardkit.rehearse.build` makes it. Here a `.pth` file loads it in place of PYTHONPATH, so that EMUCUDA=1 is enough.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from shardkit.errors import BuildError, ShardkitError, report
from shardkit.rehearse.build import Build, entry_points
from shardkit.rehearse.environment import ask, check

SITE = Path(sysconfig.get_paths()["purelib"])
WORK = Path(sys.prefix) / "emucuda-build"
"""Object files, kept between builds."""


def main() -> None:
    try:
        torch = check(ask([sys.executable], os.environ))
        install_headers(torch.cuda_major)
        package = WORK / "package"
        shutil.rmtree(package, ignore_errors=True)
        Build(torch, package, WORK).run()
        cuda_home(package / "emucuda" / "cuda")
        install(package / "emucuda")
    except ShardkitError as error:
        sys.exit(report(error))
    print(f"emulated CUDA {torch.cuda_major} for torch {torch.version}: EMUCUDA=1 turns it on")


def install_headers(major: str) -> None:
    """CUDA's tools and headers that torch's wheels leave out, of the same version: DeepSpeed compiles with them."""
    if list(SITE.glob("nvidia/*/include/crt/host_defines.h")) and list(SITE.glob("nvidia/*/bin/nvcc")):
        return
    suffix = "" if int(major) >= 13 else f"-cu{major}"
    version = ".".join(importlib.metadata.version(f"nvidia-cuda-runtime{suffix}").split(".")[:2])
    wheels = ["nvcc", "cccl", "crt"] if int(major) >= 13 else ["nvcc", "cccl"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if subprocess.run([*pip, *(f"nvidia-cuda-{wheel}{suffix}=={version}.*" for wheel in wheels)]).returncode:
        raise BuildError(f"pip could not install the headers of CUDA {version}", "check the package index")


def cuda_home(folder: Path) -> None:
    """Links that look like an installed CUDA toolkit, for what compiles against one."""
    for part, into in (("include", "include"), ("lib", "lib64"), ("bin", "bin"), ("nvvm", "nvvm")):
        (folder / into).mkdir(parents=True)
        for source in SITE.glob(f"nvidia/*/{part}"):
            for path in source.iterdir():
                names = {path.name}
                if part == "lib" and ".so." in path.name:
                    names.add(path.name.partition(".so.")[0] + ".so")  # the name that a linker looks for
                for name in names:
                    if not (folder / into / name).exists():
                        (folder / into / name).symlink_to(path)


def install(package: Path) -> None:
    """Make Python load it: the `.pth` file before torch, the entry point after."""
    old = WORK / "replaced"
    shutil.rmtree(old, ignore_errors=True)
    if (SITE / "emucuda").exists():
        (SITE / "emucuda").rename(old)
    package.rename(SITE / "emucuda")
    shutil.rmtree(old, ignore_errors=True)
    entry_points(SITE, "emucuda", "emucuda = emucuda:attach")
    (SITE / "emucuda.pth").write_text("import emucuda; emucuda.preload()\n")


if __name__ == "__main__":
    main()
