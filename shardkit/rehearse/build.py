"""Build the emulated CUDA for the torch of an environment, and install it there: `python -m tests.emulated_cuda.build`.

Needs a C++ compiler with its `nm`; headers come from the wheels of CUDA that torch depends on, and two more.
"""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
PACKAGE = Path(__file__).parent / "package"
SITE = Path(sysconfig.get_paths()["purelib"])
WORK = Path(sys.prefix) / "emucuda-build"
"""Object files, kept between builds."""
CORE = [
    "counters", "lost", "memory", "streams", "runtime_errors", "runtime_devices", "runtime_memory", "runtime_copies",
    "runtime_streams", "runtime_graphs", "runtime_kernels", "driver", "driver_memory",
]  # fmt: skip
SHARED = ["ops/bridge", "ops/boxed", "ops/record"]
OPERATORS = [*SHARED, "ops/generic", "ops/copies", "ops/matmul", "ops/attention", "ops/norms"]
NO_COMPUTE = [*SHARED, "ops/no_compute", "ops/control", "ops/validity"]


class BuildError(Exception):
    """What is missing, and how to get it."""


def main() -> None:
    try:
        Build().run()
    except BuildError as error:
        sys.exit(f"error: {error}")


class Build:
    def __init__(self) -> None:
        self.compiler = os.environ.get("CXX", "g++")
        for tool in (self.compiler, "nm"):
            if shutil.which(tool) is None:
                raise BuildError(f"{tool} was not found\n  fix: apt-get install g++")
        runtimes = list(SITE.glob("nvidia/*/lib/libcudart.so.*"))
        if not runtimes:
            raise BuildError(f"the torch in {sys.prefix} is not a CUDA build\n  fix: install the package index's wheel")
        self.runtime = runtimes[0]
        self.major = self.runtime.name.rpartition(".")[2]
        install_headers(self.major)
        self.includes = [*sorted(SITE.glob("nvidia/*/include")), SITE / "torch/include"]
        self.includes.append(SITE / "torch/include/torch/csrc/api/include")
        self.package = WORK / "emucuda"
        """What will be installed, once it is whole: processes that run now keep what they have loaded."""
        self.lib = self.package / "lib"

    def run(self) -> None:
        WORK.mkdir(exist_ok=True)
        shutil.rmtree(self.package, ignore_errors=True)
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        self.lib.mkdir()
        names = [*CORE, "nvml", "nccl", "nccl_communicator", "cupti", "cublas", *OPERATORS, *NO_COMPUTE[len(SHARED) :]]
        flags = {"runtime_kernels": [f"-DEMU_COMPILED_FOR={','.join(architectures())}"]}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda name: self.compile(name, name, *flags.get(name, ())), names))
        self.compile("cublas", "cublasLt", "-DLT")
        self.link_all()
        cuda_home(self.package / "cuda")
        install(self.package)
        print(f"emulated CUDA {self.major} for torch {importlib.metadata.version('torch')}: EMUCUDA=1 turns it on")

    def compile(self, source: str, name: str = "", *flags: str) -> None:
        """One object file, unless it is newer than what it is made of."""
        target = self.object(name or source)
        parts = made_of(SOURCES / f"{source}.cpp") | {Path(__file__), self.runtime}
        newest = max(path.stat().st_mtime for path in parts)
        if target.exists() and target.stat().st_mtime > newest:
            return
        wheels = [argument for path in self.includes for argument in ("-isystem", str(path))]
        optimise = "-O1" if source.startswith("ops/") else "-O2"
        run(
            self.compiler, "-std=c++20", optimise, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
            "-D_GLIBCXX_USE_CXX11_ABI=1", *flags, *wheels, "-c", str(SOURCES / f"{source}.cpp"), "-o", str(target),
        )  # fmt: skip

    def object(self, name: str) -> Path:
        return WORK / f"{name.replace('/', '_')}.o"

    def link_all(self) -> None:
        core = [self.object(name) for name in CORE]
        cudart, cublas = f"libcudart.so.{self.major}", f"libcublas.so.{self.major}"
        stubs = failing(exports(self.runtime, r"_*cuda") | driver_functions(self.includes), core, 801)
        self.link(cudart, core, stubs, version="cuda*; __cuda*; cu[A-Z]*; emucuda_*", uses=[])
        # The driver's functions lie in the runtime, which libcuda stands in front of.
        self.link("libcuda.so.1", [], "int emucuda_driver;", uses=[cudart])
        self.link("libnvidia-ml.so.1", [self.object("nvml")], "", uses=[cudart])
        cupti = next(SITE.glob("nvidia/*/lib/libcupti.so.*"))
        cupti_object = [self.object("cupti")]
        stubs = failing(exports(cupti, "cupti"), cupti_object, 999)
        self.link(cupti.name, cupti_object, stubs, version="cupti*", uses=[cudart])
        nccl_objects = [self.object("nccl"), self.object("nccl_communicator")]
        nccl = next(SITE.glob("nvidia/nccl/lib/libnccl.so.*"))
        self.link(nccl.name, nccl_objects, failing(exports(nccl, "nccl"), nccl_objects, 4), uses=[cudart])
        for name in ("cublasLt", "cublas"):
            real = next(SITE.glob(f"nvidia/*/lib/lib{name}.so.*"))
            stubs = succeeding(exports(real, "cublas"), [self.object(name)])
            self.link(real.name, [self.object(name)], stubs, version="cublas*", uses=[cudart])
        torch = ["-L" + str(SITE / "torch/lib"), "-ltorch_cpu", "-lc10", "-lc10_cuda", "-Wl,--no-as-needed"]
        torch += ["-ltorch_cuda", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
        self.link("libemucuda_operators.so", [self.object(name) for name in OPERATORS], "", uses=[cudart], also=torch)
        no_compute = [self.object(name) for name in NO_COMPUTE]
        self.link("libemucuda_no_compute.so", no_compute, "", uses=[cudart], also=torch)
        preload = [cudart, "libcuda.so.1", "libnvidia-ml.so.1", cupti.name, nccl.name]
        lines = [f"always {name}" for name in preload] + [f"no-compute libcublasLt.so.{self.major}"]
        (self.lib / "preload").write_text("\n".join([*lines, f"no-compute {cublas}"]) + "\n")

    def link(
        self, name: str, objects: list[Path], stubs: str, uses: list[str], version: str = "", also: Iterable[str] = ()
    ) -> None:
        """A library under the name that torch asks for; `version`: which functions carry that name as their version."""
        source, stub_object = WORK / f"{name}.stubs.c", WORK / f"{name}.stubs.o"
        source.write_text(stubs)
        run(
            self.compiler,
            "-x",
            "c",
            "-O1",
            "-fPIC",
            "-fvisibility=hidden",
            "-w",
            "-c",
            str(source),
            "-o",
            str(stub_object),
        )
        flags = [f"-Wl,-soname,{name}"]
        if version:
            script = WORK / f"{name}.map"
            script.write_text(f"{name} {{ global: {version}; local: *; }};\n")
            flags.append(f"-Wl,--version-script={script}")
        flags += [
            "-Wl,--no-as-needed",
            f"-L{self.lib}",
            *(f"-l:{used}" for used in uses),
            *(also or []),
            "-lpthread",
            "-ldl",
        ]
        inputs = [str(path) for path in [*objects, stub_object]]
        run(self.compiler, "-shared", "-o", str(self.lib / name), *inputs, *flags)


def architectures() -> list[str]:
    """What torch's kernels were compiled for, such as "90"."""
    found = run(sys.executable, "-c", "import torch; print(torch._C._cuda_getArchFlags())")
    return re.findall(r"sm_(\d+)", found)


def made_of(source: Path) -> set[Path]:
    """A source and the files of this folder that it includes, themselves or in others."""
    found, look_at = set(), [source]
    while look_at:
        path = look_at.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
            look_at += [(path.parent / name).resolve() for name in names]
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:1])} failed with exit code {done.returncode}")
    return done.stdout


def install_headers(major: str) -> None:
    """The headers that torch's wheels leave out, of the same CUDA version; DeepSpeed asks nvcc for its version."""
    if list(SITE.glob("nvidia/*/include/crt/host_defines.h")) and list(SITE.glob("nvidia/*/bin/nvcc")):
        return
    suffix = "" if int(major) >= 13 else f"-cu{major}"
    version = ".".join(importlib.metadata.version(f"nvidia-cuda-runtime{suffix}").split(".")[:2])
    wheels = ["nvcc", "cccl", "crt"] if int(major) >= 13 else ["nvcc", "cccl"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if subprocess.run([*pip, *(f"nvidia-cuda-{wheel}{suffix}=={version}.*" for wheel in wheels)]).returncode:
        raise BuildError(f"pip could not install the headers of CUDA {version}")


def exports(library: Path, prefix: str) -> set[str]:
    """Names of the functions of a library that begin like this."""
    names = (
        line.split()[-1].partition("@")[0] for line in run("nm", "-D", "--defined-only", str(library)).splitlines()
    )
    return {name for name in names if re.match(prefix, name)}


def defined(objects: list[Path]) -> set[str]:
    lines = [line.split() for path in objects for line in run("nm", str(path)).splitlines()]
    return {line[-1] for line in lines if len(line) == 3 and line[1] == "T"}


def driver_functions(includes: list[Path]) -> set[str]:
    """Names that cuda.h declares, and those that it gives them with macros (`cuMemFree` is `cuMemFree_v2`)."""
    text = next(path for folder in includes if (path := folder / "cuda.h").exists()).read_text(errors="replace")
    declared = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w*)\s*\(", text))
    return declared | {
        name for name in re.findall(r"\b(cu[A-Z]\w*_v\d)\b", text) if name.rpartition("_")[0] in declared
    }


def failing(wanted: set[str], objects: list[Path], result: int) -> str:
    """Functions for what is not emulated: they say their name and return an error."""
    have = defined(objects)
    plain = {re.sub(r"_v\d$", "", name) for name in have}
    missing = [name for name in sorted(wanted - have) if re.sub(r"_v\d$", "", name) not in plain]
    lines = [
        "#include <stdio.h>",
        "static int fail(const char* name) {",
        f'  fprintf(stderr, "[emucuda] not emulated: %s\\n", name); return {result};',
        "}",
        *(f'__attribute__((visibility("default"))) int {name}() {{ return fail("{name}"); }}' for name in missing),
    ]
    return "\n".join(lines) + "\n"


def succeeding(wanted: set[str], objects: list[Path]) -> str:
    """cuBLAS's functions that are not in cublas.cpp: products are counted, all succeed."""
    product = re.compile("gemm|gemv|dot|trsm|geqrf|getrf|getrs|gels", re.IGNORECASE)
    lines = ["void emucuda_gemm(void* stream);"]
    for name in sorted(wanted - defined(objects)):
        # A handle begins with its stream.
        body = "emucuda_gemm(*handle); return 0;" if product.search(name) else "return 0;"
        lines.append(f'__attribute__((visibility("default"))) int {name}(void** handle) {{ {body} }}')
    return "\n".join(lines) + "\n"


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
    about = SITE / "emucuda-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: emucuda\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nemucuda = emucuda:attach\n")
    (SITE / "emucuda.pth").write_text("import emucuda; emucuda.preload()\n")


if __name__ == "__main__":
    main()
