"""`shardkit doctor`: find problems of this machine that make training fail or crawl.

Imports no torch: a child process does, `python -m shardkit.launch.doctor`.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ..config import libraries
from ..errors import LaunchError
from ..files import code_command, memory_limits, module_command, text_of
from .ranks import affinity
from .ranks.affinity import available_cores
from .ranks.env import detect, visible_gpus

_GIB = 2**30
_OLDEST = {"torch": (2, 9), "deepspeed": (0, 19), "accelerate": (1, 0), "psutil": (5, 9), "pydantic": (2, 11)}


def examine(run_dir: Path, cache_dir: Path) -> list[Check]:
    """All checks of this machine; torch's run in their own process."""
    looks = (
        python, packages, torch_checks, compiler, gpu_driver, gpu_processes, numa, memory, limits, shared_memory,
        network, rank_variables,
    )  # fmt: skip
    disks = [disk("run directory", run_dir), disk("cache directory", cache_dir)]
    return [check for checks in (*(look() for look in looks), *disks) for check in checks]


def torch_checks(python: str = sys.executable, timeout_s: float = 300) -> list[Check]:
    """Checks of torch and DeepSpeed; a crash on import is a finding, not the end."""
    command = module_command("shardkit.launch.doctor", python)
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return [Check("torch", "fail", f"did not answer within {timeout_s:g} s", "look for a hanging GPU: nvidia-smi")]
    lines = [line for line in process.stdout.splitlines() if line.startswith("[{")]
    if process.returncode or not lines:
        last_line = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        fix = "reinstall torch for this CUDA: https://pytorch.org"
        return [Check("torch", "fail", f"cannot be used: {last_line}", fix)]
    return [Check(**item) for item in json.loads(lines[-1])]


def python() -> list[Check]:
    """Interpreter and cores."""
    interpreter = f"{platform.python_version()}, {available_cores()} cores for this process, {platform.platform()}"
    return [Check("python", "pass", interpreter, data={"cores": available_cores()})]


def packages() -> list[Check]:
    """Versions of the packages that shardkit needs."""
    checks = []
    for name, oldest in _OLDEST.items():
        oldest_text = ".".join(map(str, oldest))
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            checks.append(Check(name, "fail", "not installed", f"pip install '{name}>={oldest_text}'"))
            continue
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
        old = numbers < oldest
        fix = f"pip install '{name}>={oldest_text}'" if old else ""
        checks.append(Check(f"{name} version", "fail" if old else "pass", version, fix, {"version": version}))
    return checks


def compiler() -> list[Check]:
    """The tools that DeepSpeed needs to build CPUAdam."""
    missing = [] if any(shutil.which(name) for name in ("c++", "g++", "clang++")) else ["a C++ compiler"]
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("Python's headers")
    if shutil.which("ninja") is None and libraries.installed("ninja") == libraries.ABSENT:
        missing.append("ninja")
    if not missing:
        return [Check("compiler", "pass", "C++ compiler, Python's headers and ninja")]
    problem = f"no {', no '.join(missing)}: offload_optimizer=cpu cannot build its optimizer"
    return [Check("compiler", "warn", problem, "apt-get install g++ python3-dev ninja-build")]


def gpu_driver() -> list[Check]:
    """Driver and topology, from nvidia-smi."""
    listing = _nvidia_smi("--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader")
    if listing is None:
        if visible_gpus():
            fix = "install the driver's tools, or start the container with the nvidia runtime"
            return [Check("driver", "warn", "GPUs, but no nvidia-smi", fix)]
        return [Check("driver", "pass", "no NVIDIA GPU on this machine")]
    topology = _nvidia_smi("topo", "-m") or ""
    nvlink = any(f"NV{n}" in topology for n in range(1, 40))
    lines = [line.strip() for line in listing.splitlines() if line.strip()]
    summary = f"{len(lines)} GPU(s): {lines[0]}" + ("; NVLink" if nvlink else "")
    return [Check("driver", "pass", summary, data={"gpus": lines, "topology": topology})]


def gpu_processes() -> list[Check]:
    """Other processes on the GPUs, which take memory that a plan counts on."""
    listing = _nvidia_smi("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
    if listing is None:
        return []
    lines = [line for line in listing.splitlines() if line.strip()]
    if not lines:
        return [Check("GPU processes", "pass", "none")]
    summary = f"{len(lines)} process(es) use the GPUs, first: {lines[0]}"
    return [Check("GPU processes", "warn", summary, "end them (nvidia-smi shows their ids), or use other GPUs")]


def numa(root: Path = Path("/")) -> list[Check]:
    """NUMA nodes, the node of each GPU, and whether this process may use the CPUs beside its GPUs."""
    nodes: dict[int, list[int]] = {}
    for cpu, location in sorted(affinity.topology(root).items()):
        nodes.setdefault(location[0], []).append(cpu)
    allowed = affinity.allowed_cpus()
    summary = "; ".join(f"node {node}: CPUs {affinity.render(cpus)}" for node, cpus in sorted(nodes.items()))
    summary = summary or "the kernel reports no NUMA nodes"
    gpus = affinity.gpu_nodes(os.environ, root)
    if gpus:
        summary += f"; GPUs on nodes {', '.join('?' if node is None else str(node) for node in gpus)}"
    data = {"nodes": {str(node): cpus for node, cpus in nodes.items()}, "gpus": gpus, "allowed": allowed}
    far = [index for index, node in enumerate(gpus) if node in nodes and not set(nodes[node]) & set(allowed)]
    if far:
        summary += f"; this process may use none of the CPUs beside GPU {', '.join(map(str, far))}"
    fix = "ask for CPUs beside the GPUs (Slurm: --gpu-bind=closest, --cpus-per-gpu; Docker: --cpuset-cpus)"
    return [warning("NUMA", bool(far), summary, fix, data)]


def memory() -> list[Check]:
    """Free host memory, and the cgroup's limit, which the kernel enforces by killing."""
    fields = dict(line.split(":") for line in text_of(Path("/proc/meminfo")).splitlines() if ":" in line)
    total, available = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = min((n_bytes for n_bytes, _ in memory_limits()), default=None)
    bound = min(available, limit) if limit else available
    summary = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    summary += f", cgroup limit {limit / _GIB:.1f} GiB" if limit and limit < total else ""
    data = {"total": total, "available": available, "cgroup_limit": limit}
    fix = "close other programs, or raise the container's or the job's memory (--mem)"
    return [warning("host memory", bound < 4 * _GIB, summary, fix, data)]


def limits() -> list[Check]:
    """Locked memory (pinned buffers, RDMA) and open files."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked // 1024} KiB"
    tight = locked != resource.RLIM_INFINITY and locked < _GIB and visible_gpus() > 0
    fix = "ulimit -l unlimited; under Slurm PropagateResourceLimitsExcept=MEMLOCK; in Docker --ulimit memlock=-1"
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = f"ulimit -n {min(most, 65536)}"
    return [
        warning("memlock", tight, shown, fix, {"bytes": locked}),
        warning("open files", files < 4096, f"at most {files}", raised, {"soft": files}),
    ]


def shared_memory() -> list[Check]:
    """/dev/shm: NCCL and data-loader workers keep buffers there; if it is full, SIGBUS kills them."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return [Check("/dev/shm", "warn", "not mounted", "mount a tmpfs on /dev/shm")]
    usage = shutil.disk_usage(path)
    summary = f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    fix = "start the container with --shm-size=8g or --ipc=host, or set data.workers=0"
    return [warning("/dev/shm", usage.free < _GIB, summary, fix, {"free": usage.free})]


def network() -> list[Check]:
    """Whether other processes can reach this machine under its own name."""
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        fix = f"add {name} to DNS or to /etc/hosts; torchrun: pass an address as --rdzv-endpoint and --local-addr"
        return [Check("host name", "warn", f"{name} does not resolve", fix)]
    try:
        with socket.create_server(("", 0)) as server, socket.create_connection((name, server.getsockname()[1]), 5):
            pass
    except OSError as error:
        fix = "open the firewall between the nodes (all ports from 1024 up), and on the loopback device"
        return [Check("ports", "fail", f"cannot connect to {name} ({address}) on a free port: {error.strerror}", fix)]
    loop = address.startswith("127.") or address == "::1"
    summary = f"{name} is {address}, a free port can be reached"
    summary += "; other nodes need another address" if loop else ""
    return [Check("ports", "pass", summary, data={"address": address})]


def rank_variables() -> list[Check]:
    """Launchers' variables that contradict each other."""
    try:
        env = detect()
    except LaunchError as error:
        return [Check("rank variables", "fail", error.cause, error.fix)]
    return [Check("rank variables", "pass", f"{env.source}: rank {env.rank} of {env.world_size}")]


def disk(name: str, path: Path, n_bytes: int = 64 * 2**20) -> list[Check]:
    """Free space and durable write speed where `path` is or will be."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < 2 * n_bytes:
        return [Check(name, "fail", f"{folder}: {free / _GIB:.2f} GiB free", "free some space, or choose another disk")]
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            block = os.urandom(2**20)
            began = time.perf_counter()
            for _ in range(n_bytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            speed = n_bytes / (time.perf_counter() - began)
    except OSError as error:
        cause = f"{folder} cannot be written: {error.strerror}"
        return [Check(name, "fail", cause, "choose a directory you can write")]
    slow, full = speed < 50e6, free < 20 * _GIB
    fix = "a checkpoint takes 12 bytes per parameter: check that some fit"
    fix = "checkpoints will be slow: use a faster disk, or checkpoint.async_save=true" if slow else fix
    summary = f"{folder}: {free / _GIB:.0f} GiB free, writes {speed / 1e6:.0f} MB/s"
    data = {"free": free, "write_bytes_per_s": speed, "path": str(folder)}
    return [warning(name, slow or full, summary, fix, data)]


def _nvidia_smi(*args: str) -> str | None:
    try:
        process = subprocess.run(["nvidia-smi", *args], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


Status = Literal["pass", "warn", "fail"]
_MARKS = {"pass": "ok  ", "warn": "WARN", "fail": "FAIL"}


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    status: Status
    found: str  # the state found, in one line
    fix: str = ""  # how to correct it; empty if the check passed
    data: dict[str, Any] = field(default_factory=dict)  # the figures, for programs


def warning(name: str, is_bad: bool, found: str, fix: str, data: dict[str, Any] | None = None) -> Check:
    """A check that warns, with its fix, if the state is bad, and passes otherwise."""
    return Check(name, "warn" if is_bad else "pass", found, fix if is_bad else "", data or {})


def render(checks: list[Check]) -> str:
    """One line per finding, its fix below."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.status]}  {check.name.ljust(width)}  {check.found}")
        if check.fix:
            lines.append(f"{' ' * (width + 8)}fix: {check.fix}")
    counts = {status: sum(check.status == status for check in checks) for status in _MARKS}
    lines.append(f"{counts['pass']} ok, {counts['warn']} warnings, {counts['fail']} failures")
    return "\n".join(lines)


def as_json(checks: list[Check], extra: dict[str, Any]) -> str:
    """JSON for programs: `{"status": …, "checks": […], …}`."""
    return json.dumps({"status": worst(checks), "checks": [asdict(check) for check in checks], **extra}, indent=1)


def worst(checks: list[Check]) -> Status:
    """The most severe status."""
    order: tuple[Status, ...] = ("fail", "warn")
    return next((status for status in order if any(check.status == status for check in checks)), "pass")


# In its own process: DeepSpeed prints, and an op of another build can crash.
_OPS = """
import json, os
os.environ.setdefault("DS_ACCELERATOR", "{accelerator}")
from deepspeed.ops.op_builder import CPUAdamBuilder
print("OPS " + json.dumps(bool(CPUAdamBuilder().is_compatible(False))))
"""


def examine_libraries() -> list[Check]:
    """Checks of versions and GPUs, and whether this build of torch has code for them."""
    import torch

    nccl = None
    if torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    builds = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "nccl": nccl, "path": torch.__path__[0]}
    shown = f"{builds['torch']}, CUDA {builds['cuda'] or 'none'}, NCCL {builds['nccl'] or 'none'}"
    checks = [Check("torch", "pass", shown, data=builds)]
    present = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    if present and not torch.cuda.is_available():
        cuda = torch.version.cuda
        cause = "a CPU build" if cuda is None else f"its CUDA {cuda} does not fit the driver"
        fix = "install torch for this driver's CUDA (nvidia-smi shows the highest): https://pytorch.org"
        checks.append(Check("torch GPUs", "fail", f"{present} GPU(s), but torch sees none: {cause}", fix))
    else:
        checks.append(Check("torch GPUs", "pass", str(torch.cuda.device_count() or "none")))
    checks += [_gpu(index) for index in range(torch.cuda.device_count())]
    return [*checks, _cpu_adam(torch.cuda.is_available())]


def _gpu(index: int) -> Check:
    import torch

    name = torch.cuda.get_device_name(index)
    major, minor = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    architecture = f"sm_{major}{minor}"
    covered = any(arch.startswith((f"sm_{major}", f"compute_{major}")) for arch in torch.cuda.get_arch_list())
    summary = f"{name} ({architecture}), {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if not covered:
        return Check(f"GPU {index}", "fail", f"{summary}: torch has no code for it", "install a newer torch")
    data = {"name": name, "free": free, "total": total, "capability": [major, minor]}
    fix = "other processes hold memory there: nvidia-smi"
    return warning(f"GPU {index}", free < 0.9 * total, summary, fix, data)


def _cpu_adam(cuda: bool) -> Check:
    code = _OPS.format(accelerator="cuda" if cuda else "cpu")
    process = subprocess.run(code_command(code), capture_output=True, text=True, env=dict(os.environ))
    answers = [line for line in process.stdout.splitlines() if line.startswith("OPS ")]
    if process.returncode or not answers:
        last_line = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        fix = "pip install --force-reinstall deepspeed"
        return Check("DeepSpeed ops", "warn", f"cannot be checked: {last_line}", fix)
    if json.loads(answers[-1][4:]):
        return Check("DeepSpeed ops", "pass", "CPUAdam can be built here")
    fix = "install a C++ compiler, and for DeepSpeed up to 0.19.6 CUDA's toolkit (nvcc, CUDA_HOME) of torch's version"
    return Check("DeepSpeed ops", "warn", "CPUAdam cannot be built: offload_optimizer=cpu will not work", fix)


SLOW = 1.2
"""A rank that takes this many times the median is named."""


def findings(constants: dict[str, Any], hosts: list[str]) -> list[Check]:
    """Findings from the constants: slow ranks by name, clock skew."""
    checks = []
    for key, label, unit, scale in (
        ("matmul_flops", "matmul", "TFLOP/s", 1e12),
        ("copy_bytes_per_s", "copies", "GB/s", 1e9),
    ):
        values = [float(v) for v in constants[key]]
        middle = statistics.median(values)
        slow = [f"rank {rank}@{hosts[rank]}" for rank, value in enumerate(values) if value * SLOW < middle]
        summary = f"median {middle / scale:.3g} {unit}, slowest {min(values) / scale:.3g}"
        summary += f"; slow: {', '.join(slow)}" if slow else ""
        fix = "look for other processes, heat or power limits there (nvidia-smi -q -d PERFORMANCE)"
        checks.append(warning(f"{label} per rank", bool(slow), summary, fix))
    world = {key: (constants[key], "") for key in ("all_reduce", "all_gather", "reduce_scatter")}
    axes = {
        f"{axis} {figures['collective']}": (figures["bus"], f" in groups of {figures['ranks']} ranks")
        for axis, figures in constants["axes"].items()
    }
    for name, (speeds, groups) in {**world, **axes}.items():
        for size, speed in speeds:
            amount = f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
            checks.append(Check(f"{name} {amount}", "pass", f"{speed / 1e9:.3g} GB/s bus bandwidth{groups}"))
    products = ", ".join(f"{kind} {flops / 1e12:.3g}" for kind, flops in constants["matmul_flops_by_dtype"].items())
    checks.append(Check("matmul by type", "pass", f"{products} TFLOP/s"))
    memories = ("memory", "memory_bytes_per_s"), ("host memory", "host_bytes_per_s")
    rates = ", ".join(f"{label} {constants[key] / 1e9:.3g}" for label, key in memories)
    checks.append(Check("bandwidth of each rank", "pass", f"{rates} GB/s read and written"))
    skew = float(constants["clock_skew_s"])
    summary = f"differ by at most {skew:.3f} s"
    checks.append(warning("clocks", skew > 1.0, summary, "run chrony or ntpd on every node"))
    return checks


if __name__ == "__main__":
    print(json.dumps([asdict(check) for check in examine_libraries()]))
