"""Planning on fake tensors: what the pretended world answers without values and pinned memory; whose code reads one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

import pytest

from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.plan.client import Planner
from shardkit.plan.simulate.unplannable import refuse_value
from shardkit.plan.target import choose_target
from tests.commands import environment, python_m
from tests.plan.test_plan import config
from tests.ranks import REPO

_PROGRAM = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from shardkit.plan.simulate.fakes import Fakes

def facts(t):
    return t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad, t.untyped_storage().nbytes()

def asked_of_torch(run):
    with FakeTensorMode():
        wanted = run()
    dispatch, rounds = FakeTensorMode.__torch_dispatch__, []
    def noted(self, func, *arguments):
        rounds[-1].append(func.name())
        return dispatch(self, func, *arguments)
    FakeTensorMode.__torch_dispatch__ = noted
    for again in range(4):
        rounds.append([])
        with Fakes():
            assert run() == wanted, again
    return rounds
"""


def run_program(folder: Path, code: str) -> str:
    """The output of a program in a process of its own; it may count the operators that torch's fakes are asked."""
    (folder / "program.py").write_text(_PROGRAM + code)
    done = python_m(f"{folder}/program.py", code=0)
    return done.stdout


@pytest.fixture(scope="module")
def h100() -> Iterator[Planner]:
    with Planner(choose_target(config(), 1, gpu="h100")) as planner:
        yield planner


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["parallel.strategy=single", "optim.implementation=foreach"],
        ["parallel.strategy=zero2"],
        ["parallel.strategy=zero3"],
    ],
)
def test_a_planned_fp16_step_is_not_skipped(settings: list[str], h100: Planner) -> None:
    """Loss scaling skips steps whose gradients are not finite; then there would be no optimizer states."""
    half, brain = (h100.predict(config(f"precision.mode={mode}", *settings)) for mode in ("fp16", "bf16"))
    assert half.categories["optimizer"] == brain.categories["optimizer"]


@pytest.mark.parametrize("policy", ["full", "every_k", "selective", "selective_op"])
def test_every_policy_is_planned_on_a_gpu(policy: str, h100: Planner) -> None:
    """The random state that recomputing restores is the pretended card's."""
    given = ("parallel.strategy=single", "model.n_layers=6", "model.dropout=0.1", "train.micro_batch_size=8")
    less, most = (
        h100.predict(config(f"activation.policy={kept}", *given)).categories["activations"].device
        for kept in (policy, "none")
    )
    assert 0 < less < most


@pytest.mark.slow
def test_pinned_memory_on_the_host_is_planned_as_torch_rounds_it_up(h100: Planner) -> None:
    offload = config("parallel.strategy=zero2", "parallel.offload_optimizer=cpu", "precision.mode=bf16")
    pageable = config(
        "parallel.strategy=zero2", "parallel.offload_optimizer=cpu", "precision.mode=bf16",
        "parallel.ds_config={zero_optimization: {offload_optimizer: {pin_memory: false}}}",
    )  # fmt: skip
    pinned, plain = h100.predict(offload), h100.predict(pageable)
    # A flat master of each group of parameters, with weight decay (more than 2 MiB) and without (more than 256 KiB).
    assert pinned.categories["master_params"].host == (4 << 20) + (512 << 10)
    assert plain.categories["master_params"].host == 4 * plain.n_params
    assert pinned.categories["optimizer"] == plain.categories["optimizer"]  # the kernel's moments are not pinned
    assert pinned.host_peak > plain.host_peak


@pytest.mark.slow
def test_a_share_of_the_optimizer_states_is_planned_on_each_side(h100: Planner) -> None:
    shared = h100.predict(
        config(
            "parallel.strategy=zero3", "parallel.offload_optimizer=cpu", "parallel.offload_ratio=0.5",
            "precision.mode=bf16", "parallel.ds_config={zero_optimization: {sub_group_size: 100000}}",
        )
    )  # fmt: skip
    moments = shared.categories["optimizer"]
    assert moments.device + moments.host == pytest.approx(8 * shared.n_params, rel=0.01)
    assert 0.3 < moments.host / (8 * shared.n_params) < 0.7


@pytest.mark.slow
def test_heads_that_share_keys_are_planned_as_torch_runs_them(tmp_path: Path, h100: Planner) -> None:
    """No kernel takes them in fp32: torch keeps whole attention weights, queries × keys for each head."""
    shape = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
             "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 512}  # fmt: skip
    peaks = {}
    for heads in (2, 4):
        (tmp_path / "config.json").write_text(json.dumps({**shape, "num_key_value_heads": heads}))
        for mode in ("fp32", "bf16"):
            job = ["task.name=hf_causal_lm", f"model.hf_config={tmp_path}/config.json", f"precision.mode={mode}",
                   "train.seq_len=512", "train.micro_batch_size=2", "parallel.strategy=single"]  # fmt: skip
            peaks[mode, heads] = h100.predict(load_config(None, job).config).peak.allocated
    weights = 4 * 2 * 4 * 512 * 512 * 4  # of four layers
    assert 0.9 * weights < peaks["fp32", 2] - peaks["fp32", 4] < 1.75 * weights  # one layer has some three times
    assert peaks["bf16", 2] <= peaks["bf16", 4]


def test_results_made_again_from_memory_are_those_of_torch(tmp_path: Path) -> None:
    """Every operator of a small step, three times: from the third on nothing is asked of torch's own dispatch."""
    code = """
def run():
    x = torch.empty(4, 6, dtype=torch.bfloat16)
    made = [x, x.t(), x[1:, ::2], x.float(), x.view(-1).unsqueeze(0), *x.split(2), *x.float().sort(-1)]
    made += [x.add(1), x.add(1.0)]
    y = x.float().transpose(0, 1)
    made += [y.contiguous(), y @ y.t(), torch.nn.functional.layer_norm(y, (4,)), y.mul_(2), y.to(torch.int64)]
    assert made[-2] is y and made[1].untyped_storage()._cdata == x.untyped_storage()._cdata
    assert made[-1].untyped_storage()._cdata != y.untyped_storage()._cdata
    return [facts(t) for t in made]

asked = asked_of_torch(run)
assert len(asked[-1]) <= 2, asked
"""
    run_program(tmp_path, code)


def test_operators_with_cuda_kernels_are_not_taken_apart_on_a_cpu_build(tmp_path: Path) -> None:
    """A CPU build composes these three of others, which keep more: 3 % of a Llama's peak."""
    code = """
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from shardkit.hardware.cards import GPUS
from shardkit.plan.model.predict import prepare
from shardkit.plan.target import Target

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func.name())
        return func(*args, **kwargs or {})

assert prepare(Target(1, GPUS["h100"], 1)) == "cuda"
with Fakes(), Seen():
    x = torch.empty(4, 8, device="cuda", requires_grad=True)
    for layer in (nn.SiLU(), nn.Mish(), nn.RMSNorm(8, device="cuda")):
        layer(x).sum().backward()
"""
    seen = set(run_program(tmp_path, code).split())
    assert {"aten::silu_backward", "aten::mish_backward", "aten::_fused_rms_norm"} <= seen
    assert not {"aten::sigmoid", "aten::tanh", "aten::rsqrt"} & seen


def test_views_are_made_again_anywhere_in_a_storage(tmp_path: Path) -> None:
    """ZeRO cuts thousands of slices out of flat buffers, each at another place: torch describes one of each length."""
    code = """
def run():
    flat, made = torch.empty(48), []
    for at in range(0, 48, 6):
        part = flat[at : at + 6]
        made += [part, part[-2:], part[4:99], part[5:2], part[::4], part.view(2, 3), part.view(2, 3).t(), part.add(1)]
        made += [flat.as_strided((2, 2), (3, 1), at), part.view(torch.int16), torch.view_as_complex(part.view(3, 2))]
    return [facts(t) for t in made]

asked = asked_of_torch(run)
assert sum(names.count("aten::slice.Tensor") for names in asked) == 4 * 2  # of four lengths and steps
"""
    run_program(tmp_path, code)


def test_waiting_for_a_collective_takes_no_memory(tmp_path: Path) -> None:
    """With a second tensor for each exchange of heads for positions, blocks lay elsewhere than on a card."""
    code = """
import torch.distributed
from torch.multiprocessing.reductions import StorageWeakRef

with Fakes():
    x = torch.empty(8)
    waited = torch.ops._c10d_functional.wait_tensor(x)
    assert StorageWeakRef(waited.untyped_storage()) == StorageWeakRef(x.untyped_storage())
"""
    run_program(tmp_path, code)


def test_a_planner_ends_without_a_crash() -> None:
    """libtorch destroys the hooks that planning changed after Python has freed all that they pointed to.

    A thread of autograd that is still busy with a backward pass at that time would need the interpreter, and abort.
    """
    code = """
import atexit
import threading
import torch
from shardkit.hardware.cards import GPUS
from shardkit.plan.simulate import compat
from shardkit.plan.simulate.fakes import Fakes
from shardkit.plan.model.predict import prepare
from shardkit.plan.target import Target

threads = []
atexit.register(compat._alive.clear)  # runs last
assert prepare(Target(1, GPUS["h100"], 1)) == "cuda"
assert compat._alive
with Fakes():
    loss = torch.ones(1, device="cuda", requires_grad=True) * 2
    loss.grad_fn.register_hook(lambda *_: threads.append(threading.get_ident()))
    loss.backward()
assert threads == [threading.get_ident()]
"""
    overwriting_freed = environment({"MALLOC_PERTURB_": "165"})
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=overwriting_freed, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)


def frame_of(path: Path) -> FrameType:
    """A call that stands in line 2 of a file there."""
    found: dict[str, FrameType] = {}
    exec(compile("import sys\nframe = sys._getframe()", str(path), "exec"), found)
    return found["frame"]


def test_a_users_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs the value of a tensor at .*/mine.py:2"):
        refuse_value(frame_of(tmp_path / "mine.py"))


def test_a_package_in_a_folder_of_pythonpath_is_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("deepspeed")
    package.__file__ = str(tmp_path / "deepspeed" / "__init__.py")
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    refuse_value(frame_of(tmp_path / "deepspeed" / "runtime" / "engine.py"))


@pytest.mark.slow
def test_an_environment_behind_a_link_is_a_library(tmp_path: Path) -> None:
    link = tmp_path / "env"
    link.symlink_to(sys.prefix)
    code = (
        "import sys, sysconfig; from tests.plan.test_world import frame_of; from pathlib import Path\n"
        "from shardkit.plan.simulate.unplannable import refuse_value\n"
        "assert Path(sys.prefix) == Path(sys.argv[1]), sys.prefix\n"
        "refuse_value(frame_of(Path(sysconfig.get_path('purelib')) / 'somebodys.py'))"
    )
    words = [str(link / "bin" / "python"), "-c", code, str(link)]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
