"""`python -m shardkit.launch.doctor.libraries`: checks of torch and DeepSpeed on this machine, as a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

from ...files.children import code_command
from .finding import Check, warning

# In its own process: DeepSpeed prints, and an op of another build can crash.
_OPS = """
import json, os
os.environ.setdefault("DS_ACCELERATOR", "{accelerator}")
from deepspeed.ops.op_builder import CPUAdamBuilder
print("OPS " + json.dumps(bool(CPUAdamBuilder().is_compatible(False))))
"""


def examine() -> list[Check]:
    """Checks of versions and GPUs, and whether this build of torch has code for them."""
    import torch

    builds = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "nccl": _nccl(), "path": torch.__path__[0]}
    shown = f"{builds['torch']}, CUDA {builds['cuda'] or 'none'}, NCCL {builds['nccl'] or 'none'}"
    checks = [Check("torch", "pass", shown, data=builds)]
    present = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    if present and not torch.cuda.is_available():
        cause = (
            "a CPU build" if torch.version.cuda is None else f"its CUDA {torch.version.cuda} does not fit the driver"
        )
        fix = "install torch for this driver's CUDA (nvidia-smi shows the highest): https://pytorch.org"
        checks.append(Check("torch GPUs", "fail", f"{present} GPU(s), but torch sees none: {cause}", fix))
    else:
        checks.append(Check("torch GPUs", "pass", str(torch.cuda.device_count() or "none")))
    checks += [_gpu(index) for index in range(torch.cuda.device_count())]
    return [*checks, _cpu_adam(torch.cuda.is_available())]


def _nccl() -> str | None:
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


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
        return Check(
            "DeepSpeed ops", "warn", f"cannot be checked: {last_line}", "pip install --force-reinstall deepspeed"
        )
    if json.loads(answers[-1][4:]):
        return Check("DeepSpeed ops", "pass", "CPUAdam can be built here")
    fix = "install a C++ compiler, and for DeepSpeed up to 0.19.6 CUDA's toolkit (nvcc, CUDA_HOME) of torch's version"
    return Check("DeepSpeed ops", "warn", "CPUAdam cannot be built: offload_optimizer=cpu will not work", fix)


if __name__ == "__main__":
    print(json.dumps([asdict(check) for check in examine()]))
