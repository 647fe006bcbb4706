"""`shardkit rehearse` on whole programs: the peaks are the program's own, the verdict is sharp, nothing is touched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.growing import wrong, wrong_lines
from tests.cuda.programs import draw
from tests.cuda.rehearsals import linked_cache, rehearsed
from tests.emulated_cuda import call, needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation, pytest.mark.timeout(600)]
Rehearse = Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TRAIN = """
import os, sys, torch, torch.distributed as dist
from torch import nn
if "RANK" in os.environ:
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
rank = int(os.environ.get("RANK", "0"))
model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096)).cuda()
if dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    x = torch.randn(64, 4096, device="cuda")
    if rank == 1 and step == 1 and "fail" in sys.argv:
        raise ValueError("a bad batch")
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"PEAK {rank} {allocated} {reserved}\\n", end="", flush=True)  # one write: both ranks print at once
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def rehearse(cache: Path, tmp_path: Path) -> Rehearse:
    """Rehearses a program, which is written to train.py; returns the ended command and its verdict."""

    def rehearse(
        *options: str, program: str = TRAIN, command: Sequence[str] = (sys.executable,), args: Sequence[str] = (),
        code: int = 0,
    ) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:  # fmt: skip
        (tmp_path / "train.py").write_text(program)
        command = [*command, str(tmp_path / "train.py"), *args]
        return rehearsed(cache, tmp_path, *options, command=command, code=code)

    return rehearse


def test_two_ranks_fit_with_their_own_peaks_and_touch_nothing(rehearse: Rehearse, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("trained")
    done, verdict = rehearse("--gpu", "a100", "--gpus", "2", command=TORCHRUN)
    assert not verdict["shared_cards"]  # the watchdog of NCCL goes back to no card that its process has not used
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("PEAK")]
    printed = {int(rank): (int(allocated), int(reserved)) for _, rank, allocated, reserved in lines}
    told = {rank["rank"]: (rank["peak_allocated"], rank["peak_reserved"]) for rank in verdict["ranks"]}
    assert told == printed
    assert [rank["steps"] for rank in verdict["ranks"]] == [3, 3]
    parameters = 2 * (4096 * 4096 + 4096) * 4
    assert verdict["ranks"][0]["at_update"] == {
        "parameters": parameters, "gradients": parameters, "optimizer states": 2 * parameters,
    }  # fmt: skip
    largest = verdict["ranks"][0]["at_peak"]
    assert any("train.py:" in line["source_line"] for line in largest) and not verdict["ranks"][1]["at_peak"]
    assert sum(line["n_bytes"] for line in largest) == pytest.approx(told[0][0], rel=0.01)  # blocks are rounded up
    assert (tmp_path / "model.pt").read_text() == "trained"
    assert f"would have been overwritten: {tmp_path / 'model.pt'}" in verdict["notes"]


def test_a_process_with_several_gpus_is_judged_by_its_fullest(rehearse: Rehearse) -> None:
    """nn.DataParallel, as transformers' Trainer takes it without a launcher: the first GPU holds the optimizer."""
    program = TRAIN.replace("model = nn.Seq", "model = nn.DataParallel(nn.Seq").replace(").cuda()", ").cuda())")
    done, verdict = rehearse("--gpu", "a100", "--gpus", "3", program=program)
    line = next(line for line in reversed(done.stderr.splitlines()) if line.startswith("PEAK"))
    assert [verdict["ranks"][0][key] for key in ("peak_allocated", "peak_reserved")] == [*map(int, line.split()[2:])]
    assert verdict["ranks"][0]["steps"] >= 3


def test_ddps_first_buckets_are_gone_in_the_second_step(rehearse: Rehearse) -> None:
    """NCCL's watchdog holds them for some 100 ms, which a step without computation does not last."""
    program = TRAIN.replace("    torch.save", "    # torch.save")
    _, verdict = rehearse("--gpu", "a100", command=[*TORCHRUN[:-1], "1"], program=program)
    gradients = 2 * (4096 * 4096 + 4096) * 4
    assert verdict["ranks"][0]["peak_categories"]["communication"] < 1.1 * gradients


CUDNN = """
import torch
from torch import nn
LAYERS
model = model.cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for step in range(3):
    x = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.float16):
        y = model(x)
    assert y.shape == x.shape
    scaler.scale(y.float().pow(2).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


SOLVES = """
import torch
from torch import nn
weight = nn.Parameter(torch.randn(1024, 1024, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(3):
    Q, R = torch.linalg.qr(weight)
    U, S, V = torch.linalg.svd(weight.detach())
    torch.linalg.eigh(weight.detach() + weight.detach().T)
    torch.linalg.cholesky(torch.linalg.inv(weight.detach()))
    frequencies = torch.fft.rfft(Q @ R)
    assert (U.shape, S.shape, frequencies.shape) == ((1024, 1024), (1024,), (1024, 513))
    torch.fft.irfft(frequencies).sum().backward()
    optimizer.step()
"""


PREFERS = """
import torch
import torch.nn.functional as F
from torch import nn
model = nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(8, 512, 512, device="cuda")
    mask = (torch.arange(512)[None, :] < torch.arange(8)[:, None]).cuda()
    scores = model(x).logsumexp(-1)
    assert torch.masked_select(scores, mask).shape == (28,) and scores[mask].shape == (28,)
    chosen, rejected = scores.sum(1).chunk(2)
    (-F.logsigmoid(chosen - rejected)).mean().backward()
    (-F.logsigmoid(model.bias[:4])).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


SPARSE = """
import torch
import torch.nn.functional as F
from torch import nn
embedding = nn.EmbeddingBag(100_000, 256, sparse=True).cuda()
head = nn.Linear(256, 40).cuda()
optimizers = torch.optim.SparseAdam(embedding.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)
for step in range(3):
    scores = head(embedding(torch.randint(100_000, (2048, 20), device="cuda")))
    lengths = torch.full((16,), 20)
    labels = torch.randint(1, 40, (16, 20)).cuda()
    F.ctc_loss(scores.view(128, 16, 40).log_softmax(-1), labels, torch.full((16,), 128), lengths).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    edges = torch.randint(50, (2, 5000))
    graph = torch.sparse_coo_tensor(edges, torch.ones(5000), (50, 50))
    assert torch.equal(graph.cuda().coalesce().indices().cpu(), graph.coalesce().indices())
"""


def test_sparse_gradients_and_a_loss_over_alignments_run(rehearse: Rehearse) -> None:
    """How many rows a sparse gradient has follows from its indices; the kernel of the loss, from the lengths."""
    _, verdict = rehearse("--gpu", "a100", program=SPARSE)
    assert verdict["verdict"] == "fits"
    parameters = (100_000 * 256 + 257 * 40) * 4
    assert parameters < verdict["ranks"][0]["peak_allocated"] < 7 * parameters
    assert verdict["ranks"][0]["peak_categories"]["grads"] > 0


CONVOLVES = "nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 2, 2)"
MULTIPLIES_SPARSE = "import torch\nx = torch.randn(8, 8, device='cuda')\ntorch.eye(8).to_sparse_csr().cuda() @ x\n"
LSTM = CUDNN.replace("LAYERS", "model = nn.LSTM(8, 8)")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(CUDNN.replace("LAYERS", f"model = nn.Sequential({CONVOLVES})"), id="cuDNN"),
        # cuSOLVER, cuFFT and cuSPARSE bring a CUDA runtime of their own, which finds no GPU.
        pytest.param(SOLVES, id="linear algebra and Fourier transforms"),
        # logsigmoid keeps nothing for backward on CUDA, and a buffer on the CPU; a mask alone decides a shape.
        pytest.param(PREFERS, id="a loss of preferences, and a selection by a mask"),
    ],
)
def test_what_cudas_libraries_would_compute_is_replaced(program: str, rehearse: Rehearse) -> None:
    _, verdict = rehearse("--gpu", "a100", program=program)
    assert verdict["verdict"] == "fits"
    assert verdict["ranks"][0]["steps"] == 3


CAPTURES = """
import torch
from torch import nn
model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
x = torch.randn(1024, 1024, device="cuda")
def train():
    optimizer.zero_grad(set_to_none=True)
    model(x).pow(2).mean().backward()
    optimizer.step()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        train()
torch.cuda.current_stream().wait_stream(side)
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    train()
"""


def test_steps_before_the_capture_of_a_graph_are_told(rehearse: Rehearse) -> None:
    _, verdict = rehearse("--gpu", "a100", program=CAPTURES)
    assert any("--steps 4 shows" in note for note in verdict["notes"])
    _, more = rehearse("--gpu", "a100", "--steps", "4", program=CAPTURES)
    assert not more["notes"]
    assert more["ranks"][0]["peak_reserved"] > verdict["ranks"][0]["peak_reserved"]


def test_the_programs_own_exception_names_its_rank(rehearse: Rehearse) -> None:
    _, verdict = rehearse("--gpus", "2", command=TORCHRUN, args=["fail"], code=8)
    assert verdict["verdict"] == "failed"
    assert verdict["reason"].startswith("rank 1: ValueError: a bad batch")
    assert 'raise ValueError("a bad batch")' in verdict["reason"]


READS = """
import torch
print(torch.randn(4096, 4096, device="cuda").mul(2).gt(3).nonzero().shape)
"""
SLEEPS = """
import subprocess, sys, time, torch
torch.zeros(1, device="cuda")
subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", __file__])
"""
NO_CUDA = """
print("on the CPU")
"""


@pytest.mark.parametrize(
    ("program", "options", "code", "words"),
    [
        (READS, [], 7, "values that were not computed"),
        (LSTM, [], 7, "aten::_cudnn_rnn_flatten_weight runs in cuDNN, which is not emulated"),
        (MULTIPLIES_SPARSE, [], 7, "cusparseCreate"),
        (SLEEPS, ["--time-limit", "30"], 7, "the time limit of 30 s came"),
        (NO_CUDA, [], 2, "ended without using CUDA"),
    ],
    ids=["reads", "lstm", "sparse", "sleeps", "no-cuda"],
)
def test_what_cannot_be_judged_is_said(
    program: str, options: list[str], code: int, words: str, rehearse: Rehearse
) -> None:
    done, verdict = rehearse(*options, program=program, code=code)
    assert words in (verdict["reason"] if verdict else done.stderr)


def test_it_ends_once_a_step_follows_the_first_save(rehearse: Rehearse, tmp_path: Path) -> None:
    _, verdict = rehearse("--gpus", "2", "--until", "save", command=TORCHRUN)
    assert verdict["ranks"][0]["steps"] == 2 and not (tmp_path / "model.pt").exists()
    written = next(note for note in verdict["notes"] if "went to an overlay" in note)
    assert str(tmp_path / "model.pt") in written


DECIDES = """
import torch
x = torch.randn(4096, 4096, device="cuda")
torch.nn.init.trunc_normal_(x)
if not x.isfinite().all() or x.isnan().any():
    raise ValueError("an overflow")
print((x.bfloat16() @ x.bfloat16()).shape)
print("WRITTEN", x)
print("WRITTEN", torch.arange(3, device="cuda"), [(x[:2, :2] > 0)])
assert not x.cpu().any()
"""


SELECTS = """
import torch
scores = torch.randn(4096, 4096, device="cuda").sigmoid()
boxes = scores[scores > 0.5]
counts = (scores > 0.9).sum(1).tolist()
rows = (scores > 0.7).nonzero()
names = (scores * 50).long().unique()
print("SIZES", len(boxes), set(counts), len(rows), len(names), int((scores > 2).sum()))
"""


def test_a_bound_stands_for_what_nobody_computed(rehearse: Rehearse) -> None:
    done, verdict = rehearse(program=SELECTS, code=7)
    assert any("--assume 'train.py:4=N'" in note for note in verdict["notes"]), verdict
    bounds = ["train.py:4=1000", "train.py:5=7", "train.py:6=100", "train.py:7=50", "train.py:8=3", "train.py:1=9"]
    options = [word for bound in bounds for word in ("--assume", bound)]
    done, verdict = rehearse(*options, program=SELECTS)
    assert "SIZES 1000 {7} 100 50 3" in done.stderr
    assert "--assume train.py:1=9: that line read nothing that nobody computed" in verdict["notes"]
    given = [row["source_line"] for row in verdict["assumptions"] if row["kind"] == "given"]
    assert {line.split(":")[1] for line in given} == set("45678")


def test_what_it_assumed_is_told_with_its_line(rehearse: Rehearse) -> None:
    done, verdict = rehearse("--gpu", "t4", program=DECIDES)
    told = {(row["kind"], row["source_line"].split(":")[1]) for row in verdict["assumptions"]}
    assert {("any", "4"), ("any", "5"), ("all", "5"), ("printed", "8"), ("printed", "9"), ("zeros", "10")} <= told, told
    written = [line for line in done.stderr.splitlines() if line.startswith("WRITTEN")]
    known = "tensor([0, 1, 2], device='cuda:0')"
    assert written == ["WRITTEN tensor(..., device='cuda:0')", f"WRITTEN {known} [tensor(..., device='cuda:0')]"]
    assert "but t4 has no bf16: torch emulates it slowly" in verdict["reason"]


ON_CARD_0 = """
import os, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
weights = torch.empty(1 << 28, device="cuda:0")  # 1 GiB: torch.load(map_location="cuda")
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
dist.barrier()
"""


def test_ranks_that_load_on_the_first_card_share_its_memory(rehearse: Rehearse) -> None:
    options = ["--gpu", "a100", "--gpus", "2", "--gpu-memory"]
    _, verdict = rehearse(*options, "4GiB", command=TORCHRUN, program=ON_CARD_0)
    (shared,) = verdict["shared_cards"]
    assert shared["card"] == 0 and len(shared["held"]) == 2
    assert 2 * 2**30 < shared["peak"] < verdict["needed"] < 4 * 2**30
    _, verdict = rehearse(*options, "2560MiB", command=TORCHRUN, program=ON_CARD_0, code=4)
    assert "OutOfMemoryError" in verdict["reason"]
    assert verdict["needed"] > 3 * 2**30  # found on cards without a limit


def test_processes_beside_the_trainer_take_their_part(rehearse: Rehearse) -> None:
    """An inference engine on the same card; what a process held is free once it has ended."""
    program = """
import subprocess, sys, time, torch
if len(sys.argv) == 1:
    first = subprocess.run([sys.executable, __file__, "first"], check=True)
    beside = subprocess.Popen([sys.executable, __file__, "beside"], stdout=subprocess.PIPE)
    beside.stdout.readline()
weights = torch.empty(1 << 28, device="cuda")
if len(sys.argv) > 1:
    print("ready", flush=True)
    if sys.argv[1] == "beside":
        time.sleep(600)
    sys.exit()
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
    _, verdict = rehearse("--gpu", "a100", program=program)
    (shared,) = verdict["shared_cards"]
    assert len(shared["held"]) == 2 and 2 * 2**30 < shared["peak"] < 3.5 * 2**30


GAN = """
import torch
from torch import nn
G, D = nn.Linear(2048, 2048).cuda(), nn.Linear(2048, 1).cuda()
g, d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for step in range(400):
    with torch.no_grad():
        fake = G(torch.randn(8, 2048, device="cuda"))
    D(fake).mean().backward(); d.step(); d.zero_grad()
    if step % EVERY == EVERY - 1:
        D(G(torch.randn(8, 2048, device="cuda"))).mean().backward(); g.step(); g.zero_grad()
"""


@pytest.mark.parametrize(("every", "kind"), [(5, "fits"), (100, "not known")])
def test_an_optimizer_that_steps_rarely_is_waited_for(rehearse: Rehearse, every: int, kind: str) -> None:
    program = GAN.replace("EVERY", str(every))
    _, verdict = rehearse("--gpu", "t4", program=program, code=0 if kind == "fits" else 7)
    assert verdict["verdict"] == kind, verdict
    if kind == "fits":
        assert verdict["ranks"][0]["peak_allocated"] > 4 * 4 * 2048 * 2048  # with the generator's states
        assert "evaluation" not in verdict["seen"]
    else:
        assert "Adam of" in verdict["reason"] and "never stepped in" in verdict["reason"]


EVALUATING = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(1, 200):
    model(torch.randn(8, 512, device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()
    if step == 20 and EVALUATES:
        model.eval()
        with torch.no_grad():
            model(torch.randn(1 << 20, 512, device="cuda"))
        model.train()
"""


@pytest.mark.parametrize("evaluates", [True, False])
def test_it_ends_after_an_evaluation(rehearse: Rehearse, evaluates: bool) -> None:
    program = EVALUATING.replace("EVALUATES", str(evaluates))
    _, verdict = rehearse("--gpu", "a100", "--until", "evaluation", program=program, code=0 if evaluates else 7)
    if evaluates:
        assert verdict["ranks"][0]["peak_in"] == "evaluation", verdict
        assert "evaluation" in verdict["seen"]
    else:
        assert "no evaluation" in verdict["reason"]


def test_memory_that_grows_is_told_with_its_line(rehearse: Rehearse) -> None:
    program = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters())
losses = []
for step in range(100):
    loss = model(torch.randn(4096, 1024, device="cuda")).pow(2).mean()
    loss.backward(retain_graph=True); optimizer.step(); optimizer.zero_grad()
    losses.append(loss)
"""
    _, verdict = rehearse("--gpu", "t4", program=program, code=7)
    assert "fills the card at step" in verdict["reason"]
    growth = verdict["ranks"][0]["growth"]
    assert growth["bytes_a_step"] >= 2 * 4 * 4096 * 1024 and "loss = model(" in growth["source_line"]


def test_random_loops_grow_or_do_not() -> None:
    assert call(wrong, 0, 120, EMUCUDA="1", EMUCUDA_COMPUTE="0", EMUCUDA_MEMORY="80G") == []


def test_the_ledger_names_the_line_of_what_grows() -> None:
    assert call(wrong_lines, 0, 60, EMUCUDA="1", EMUCUDA_COMPUTE="0", EMUCUDA_MEMORY="80G") == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 7])
def test_a_random_program_needs_what_its_rehearsal_says(seed: int, cache: Path, tmp_path: Path) -> None:
    program = draw(seed)
    (tmp_path / "drawn.py").write_text(program.text)

    def on_card(n_bytes: float = 0) -> tuple[int, dict[str, Any]]:
        memory = ["--gpu-memory", f"{int(n_bytes / 2**20)}MiB"] if n_bytes else []
        done, verdict = rehearsed(
            cache, tmp_path, *program.options, *memory, command=[sys.executable, "drawn.py"], code=None
        )
        return done.returncode, verdict

    code, plenty = on_card()
    assert code == 0, (program.drawn, plenty)
    need = plenty["needed"]
    code, verdict = on_card(1.01 * need)
    assert code == 0, (program.drawn, verdict)
    tensors = max(rank["peak_allocated"] + rank["outside_estimate"] for rank in plenty["ranks"])
    smaller = [on_card(0.98 * need), on_card(0.98 * tensors)]  # the first may do if the allocator gives its cache back
    refused = [code == 4 or (code == 7 and "of its cache back" in verdict["reason"]) for code, verdict in smaller]
    assert any(refused), (program.drawn, smaller)
