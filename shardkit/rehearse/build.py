"""Build the emulated CUDA for one torch, once: C++ sources of `native/`, into a folder that PYTHONPATH can name.

It needs a C++ compiler with its `nm`. Headers come from the wheels that torch depends on.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ..errors import BuildError
from ..files import cache_dir, code_command, locked
from .environment import Torch

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE / "native"
INJECT = PACKAGE / "inject"
CORE = [
    "counters", "lost", "account", "memory", "streams", "runtime_errors", "runtime_devices", "runtime_memory",
    "runtime_copies", "runtime_streams", "runtime_graphs", "runtime_kernels", "driver", "driver_memory",
]  # fmt: skip
SHARED = ["ops/bridge", "ops/boxed", "ops/record"]
OPERATORS = [*SHARED, "ops/generic", "ops/copies", "ops/matmul", "ops/attention", "ops/norms"]
NO_COMPUTE = [*SHARED, "ops/no_compute", "ops/control", "ops/validity", "ops/assumptions", "ops/sparse"]


def built(torch: Torch, cache: Path | None = None, computing: bool = False) -> Path:
    """The folder of the emulated CUDA for a torch. It is built where no complete one is in the cache.

    With `computing` it has the operators that compute as well, and a folder of its own.

    Whoever builds holds a lock, and the folder gets its name when it is complete. A build that was killed leaves
    nothing under that name; the next one deletes its remains.
    """
    parent = (cache or cache_dir()) / "rehearse"
    mode = "-computing" if computing else ""
    folder = parent / f"torch-{torch.version}-cuda{torch.cuda_major}-{digest(torch)}{mode}"
    if folder.is_dir():
        return folder
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with locked(parent / f"{folder.name}.lock"):
            if not folder.is_dir():
                minutes = "2 to 4" if computing else "1 to 2"
                print(
                    f"building the emulated CUDA for torch {torch.version} (once, {minutes} minutes)", file=sys.stderr
                )
                draft = parent / f"{folder.name}.draft"
                shutil.rmtree(draft, ignore_errors=True)
                Build(torch, draft / "package", draft / "objects").run(computing)
                (draft / "package").rename(folder)
                shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise BuildError(
            f"cannot write {error.filename}: {error.strerror}", "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def digest(torch: Torch) -> str:
    """What a build depends on beside the names in its folder's: sources, what is injected, and the exact CUDA."""
    summary = hashlib.sha256(f"{torch.version} {torch.cuda}".encode())
    for path in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h"), *INJECT.rglob("*.py"), Path(__file__)]):
        summary.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return summary.hexdigest()[:12]


class Build:
    """One build.

    `package`: a new folder for what PYTHONPATH names: the package `emucuda` with its libraries, and what is injected.
    `objects`: object files, which a later build into the same folder uses again where their sources are older.
    """

    def __init__(self, torch: Torch, package: Path, objects: Path) -> None:
        self.torch, self.package, self.objects = torch, package, objects
        self.compiler = os.environ.get("CXX", "g++")
        for tool in (self.compiler, "nm"):
            if shutil.which(tool) is None:
                raise BuildError(
                    f"{tool} was not found; it builds the emulated GPUs", "apt-get install g++, or set CXX"
                )
        self.runtime = self.library("cudart")
        self.major = self.runtime.name.rpartition(".")[2]
        self.includes = include_folders(torch)
        self.abi, self.architectures = compiled_for(torch.python)
        self.lib = package / "emucuda" / "lib"

    def library(self, name: str) -> Path:
        paths = sorted(self.torch.site.glob(f"nvidia/*/lib/lib{name}.so.*"))
        if not paths:
            cause = f"torch {self.torch.version} of {self.torch.python} does not use NVIDIA's wheels: no lib{name}"
            raise BuildError(cause, "rehearse with a torch that pip or uv installed, in an environment of its own")
        return paths[0]

    def run(self, computing: bool = True) -> None:
        """Build it.

        `computing`: with the operators that compute, which take more than half of the time.
        """
        self.objects.mkdir(parents=True, exist_ok=True)
        shutil.copytree(INJECT, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        (self.package / "__init__.py").unlink()
        self.lib.mkdir()
        # The slowest first, so that no core is left with one at the end.
        names = [*NO_COMPUTE, *CORE, "nvml", "nccl", "nccl_communicator", "cupti", "cublas"]
        if computing:
            names = [*OPERATORS[len(SHARED) :], *names]
        flags = {"runtime_kernels": [f"-DEMU_COMPILED_FOR={self.architectures}"]}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda name: self.compile(name, name, *flags.get(name, ())), names))
        self.compile("cublas", "cublasLt", "-DLT")
        self.link_all(computing)
        entry_points(self.package, "emucuda", "emucuda = emucuda:attach")
        entry_points(self.package, "shardkit_rehearsal", "shardkit_rehearsal = shardkit_rehearsal:attach")

    def compile(self, source: str, name: str = "", *flags: str) -> None:
        """One object file, unless it is newer than what it is made of."""
        target = self.object(name or source)
        parts = made_of(SOURCES / f"{source}.cpp") | {Path(__file__), self.runtime}
        newest = max(path.stat().st_mtime for path in parts)
        if target.exists() and target.stat().st_mtime > newest:
            return
        wheels = [argument for path in self.includes for argument in ("-isystem", str(path))]
        optimise = "-O1" if source.startswith("ops/") else "-O2"
        draft = target.with_suffix(".draft.o")
        run(
            self.compiler, "-std=c++20", optimise, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
            f"-D_GLIBCXX_USE_CXX11_ABI={self.abi}", *flags, *wheels, "-c", str(SOURCES / f"{source}.cpp"),
            "-o", str(draft),
        )  # fmt: skip
        draft.replace(target)

    def object(self, name: str) -> Path:
        return self.objects / f"{name.replace('/', '_')}.o"

    def link_all(self, computing: bool) -> None:
        core = [self.object(name) for name in CORE]
        cudart, cublas = f"libcudart.so.{self.major}", f"libcublas.so.{self.major}"
        stubs = failing(exports(self.runtime, r"_*cuda") | driver_functions(self.includes), core, 801)
        self.link(cudart, core, stubs, version="cuda*; __cuda*; cu[A-Z]*; emucuda_*", uses=[])
        # The driver's functions lie in the runtime, which libcuda stands in front of.
        self.link("libcuda.so.1", [], "int emucuda_driver;", uses=[cudart])
        (self.lib / "libcuda.so").symlink_to("libcuda.so.1")  # Triton before 3.3 links against it
        self.link("libnvidia-ml.so.1", [self.object("nvml")], "", uses=[cudart])
        cupti = self.library("cupti")
        cupti_object = [self.object("cupti")]
        stubs = failing(exports(cupti, "cupti"), cupti_object, 999)
        self.link(cupti.name, cupti_object, stubs, version="cupti*", uses=[cudart])
        nccl_objects = [self.object("nccl"), self.object("nccl_communicator")]
        nccl = self.library("nccl")
        self.link(nccl.name, nccl_objects, failing(exports(nccl, "nccl"), nccl_objects, 4), uses=[cudart])
        declared = prototypes(self.includes)
        for name in ("cublasLt", "cublas"):
            real = self.library(name)
            stubs = succeeding(exports(real, "cublas") - defined([self.object(name)]), declared, products=True)
            self.link(real.name, [self.object(name)], stubs, version="cublas*", uses=[cudart])
        math = [self.library("cufft"), self.library("cusolver")]
        for real in math:
            prefix = real.name.partition(".")[0].removeprefix("lib")
            names = exports(real, prefix)
            stubs = failing(names - declared.keys(), [], 1) + succeeding(names & declared.keys(), declared)
            self.link(real.name, [], stubs, uses=[cudart], version=f"{prefix}*")
        torch = ["-L" + str(self.torch.site / "torch/lib"), "-ltorch_cpu", "-lc10", "-lc10_cuda", "-Wl,--no-as-needed"]
        torch += ["-ltorch_cuda", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
        operators = [self.object(name) for name in OPERATORS]
        if computing:
            self.link("libemucuda_operators.so", operators, "", uses=[cudart], also=torch)
        no_compute = [self.object(name) for name in NO_COMPUTE]
        self.link("libemucuda_no_compute.so", no_compute, "", uses=[cudart], also=torch)
        preload = [cudart, "libcuda.so.1", "libnvidia-ml.so.1", cupti.name, nccl.name]
        lines = [f"always {name}" for name in preload]
        lines += [
            f"no-compute {name}" for name in (f"libcublasLt.so.{self.major}", cublas, *(real.name for real in math))
        ]
        (self.lib / "preload").write_text("\n".join(lines) + "\n")

    def link(
        self, name: str, objects: list[Path], stubs: str, uses: list[str], version: str = "", also: Iterable[str] = ()
    ) -> None:
        """A library under the name that torch asks for; `version`: which functions carry that name as their version."""
        source, stub_object = self.objects / f"{name}.stubs.c", self.objects / f"{name}.stubs.o"
        source.write_text(stubs)
        stub_flags = ["-x", "c", "-O1", "-fPIC", "-fvisibility=hidden", "-w"]
        run(self.compiler, *stub_flags, "-c", str(source), "-o", str(stub_object))
        flags = [f"-Wl,-soname,{name}"]
        if version:
            script = self.objects / f"{name}.map"
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


def include_folders(torch: Torch) -> list[Path]:
    """Folders of headers. Where no wheel of CUDA's has those that its runtime includes, Triton's copy does."""
    folders = sorted(torch.site.glob("nvidia/*/include"))
    if not any((folder / "crt" / "host_defines.h").is_file() for folder in folders):
        triton = torch.site / "triton" / "backends" / "nvidia" / "include"
        if not (triton / "crt" / "host_defines.h").is_file():
            wheel = "nvidia-cuda-crt" if int(torch.cuda_major) >= 13 else f"nvidia-cuda-nvcc-cu{torch.cuda_major}"
            cause = f"the environment of {torch.python} lacks a header of CUDA {torch.cuda}: crt/host_defines.h"
            raise BuildError(cause, f"{torch.python} -m pip install triton, or '{wheel}=={torch.cuda}.*'")
        folders.append(triton)
    return [*folders, torch.site / "torch/include", torch.site / "torch/include/torch/csrc/api/include"]


def compiled_for(python: str) -> tuple[str, str]:
    """The ABI of C++'s strings that torch was compiled with, "0" or "1"; architectures of its kernels: "80,90"."""
    asked = "import torch; print(int(torch._C._GLIBCXX_USE_CXX11_ABI), torch._C._cuda_getArchFlags())"
    flags = run(*code_command(asked, python))
    return flags[0], ",".join(re.findall(r"sm_(\d+)", flags))


def made_of(source: Path) -> set[Path]:
    """A source and the files of this folder that it includes, themselves or in others."""
    paths, queue = set[Path](), [source]
    while queue:
        path = queue.pop()
        if path not in paths:
            paths.add(path)
            names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
            queue += [(path.parent / name).resolve() for name in names]
    return paths


def run(*command: str) -> str:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if "error" in line.lower()] or process.stderr.splitlines()
        cause = f"{Path(command[0]).name} failed with exit code {process.returncode}: {lines[0] if lines else ''}"
        raise BuildError(cause, "the emulation builds with g++ 11 or later and torch 2.5 or later")
    return process.stdout


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


def failing(exported: set[str], objects: list[Path], error_code: int) -> str:
    """Functions for what is not emulated: they say their name and return an error."""
    have = defined(objects)
    plain = {re.sub(r"_v\d$", "", name) for name in have}
    missing = [name for name in sorted(exported - have) if re.sub(r"_v\d$", "", name) not in plain]
    lines = [
        "#include <stdio.h>",
        "static int fail(const char* name) {",
        f'  fprintf(stderr, "[emucuda] not emulated: %s\\n", name); return {error_code};',
        "}",
        *(f'__attribute__((visibility("default"))) int {name}() {{ return fail("{name}"); }}' for name in missing),
    ]
    return "\n".join(lines) + "\n"


def prototypes(includes: list[Path]) -> dict[str, list[str]]:
    """What the headers of cuBLAS, cuFFT and cuSOLVER declare: function → its parameters, such as `int *lwork`."""
    text = "".join(path.read_text(errors="replace") for folder in includes for path in folder.glob("cu[bfs]*.h"))
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    matches = re.findall(r"(?:CUBLASWINAPI|CUFFTAPI|CUSOLVERAPI)\s+(\w+)\s*\(([^;]*?)\)\s*;", text)
    return {name: [" ".join(param.split()) for param in params.split(",")] for name, params in matches}


def succeeding(exported: set[str], declared: dict[str, list[str]], products: bool = False) -> str:
    """Functions that compute nothing and report success: no workspace is needed, every factorisation succeeds.

    `products`: count products of matrices. The handles of their library begin with their stream.
    """
    product = re.compile("gemm|gemv|dot|trsm|geqrf|getrf|getrs|gels", re.IGNORECASE)
    lines = ["#include <string.h>", "void emucuda_gemm(void* stream);"]
    for name in sorted(exported):
        params, body = [], "emucuda_gemm(*(void**)a0); " if products and product.search(name) else ""
        declarations = declared.get(name, ["void* handle"])
        batch = next((f"a{i}" for i, param in enumerate(declarations) if re.search("batch(Size|Count)$", param)), "1")
        for index, param in enumerate(declarations):
            floating = re.match(r"(float|double) \w+$", param)
            params.append(f"{floating[1] if floating else 'long'} a{index}")
            if re.match(r"size_t ?\*|int ?\* ?[lL]work$", param):
                body += f"if (a{index}) *({param.partition('*')[0]}*)a{index} = 0; "
            elif re.match(r"int ?\* ?(d_|dev)?[iI]nfo(Array)?$", param):  # a card's memory is this process' own
                body += f"if (a{index}) memset((void*)a{index}, 0, 4 * (int){batch}); "
            elif re.match(r"(cufft|cusolver|\w*Info)\w* ?\*", param) and re.search("Create|Plan", name):
                body += f"*({'int' if 'cufft' in param else 'long'}*)a{index} = 1; "  # a handle: nobody looks into it
        lines.append(f'__attribute__((visibility("default"))) int {name}({", ".join(params)}) {{ {body}return 0; }}')
    return "\n".join(lines) + "\n"


def entry_points(folder: Path, name: str, *lines: str) -> None:
    """Make torch call functions of a package in this folder when it has been imported."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines]) + "\n")
