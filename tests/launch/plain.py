"""A training script that knows nothing of shardkit: DDP on the CPU, checkpoints of its own, `how` it goes wrong.

    plain.py FOLDER [--how HOW] [--steps N] [--listen term|usr1|usr2|file] [--wait S] [--save-s S] [--hold]

Rank 1 does HOW at step 3 of its first start. Rank 0 appends each step's loss to FOLDER/losses.jsonl; a start continues
from FOLDER/checkpoints/last.pt. When the job is preempted, all ranks agree, rank 0 saves, and the script ends with 0.
FOLDER/phase says whether rank 0 is training or writing. With --hold, each rank waits after 10 steps until it is told.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

told = False


def listen(how: str) -> None:
    def note(*_: object) -> None:
        global told
        told = True

    if how in ("term", "usr1", "usr2"):
        signal.signal(getattr(signal, f"SIG{how.upper()}"), note)


def is_told(how: str) -> bool:
    return told or (how == "file" and os.path.exists(os.environ["SHARDKIT_PREEMPT_FILE"]))


def is_preempted(how: str) -> bool:
    agreed = torch.tensor([float(is_told(how))])
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return bool(agreed.item())


def go_wrong(how: str) -> None:
    if how == "raise":
        raise ValueError("the cat sat on the GPU")
    if how == "full":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if how in ("kill", "term", "int", "segv"):
        os.kill(os.getpid(), getattr(signal, f"SIG{how.upper()}"))
    if how == "done":
        sys.exit(0)
    if how == "exit":
        print("no sample is left", file=sys.stderr, flush=True)
        os._exit(7)
    if how == "hang":
        wait_for_ever()


def wait_for_ever() -> None:
    while True:
        time.sleep(60)


def train(
    args: argparse.Namespace,
    first: int,
    wrapped: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Path,
) -> None:
    rank = dist.get_rank()
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    for step in range(first, args.steps):
        if args.how and rank == 1 and step == 2 and not again:
            go_wrong(args.how)
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (wrapped(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.wait)
        while step == 9 and args.hold and not is_told(args.listen):
            time.sleep(0.05)
        if "SHARDKIT_HEARTBEAT" in os.environ:
            Path(os.environ["SHARDKIT_HEARTBEAT"], os.environ["LOCAL_RANK"]).touch()
        if rank == 0:
            args.folder.mkdir(parents=True, exist_ok=True)
            with (args.folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps({"step": step + 1, "loss": loss.item()}) + "\n")
            (args.folder / "phase").write_text("training")
            print(f"step {step + 1}", flush=True)
        if args.listen and is_preempted(args.listen):
            if rank == 0:
                saved.parent.mkdir(parents=True, exist_ok=True)
                (args.folder / "phase").write_text("writing")
                time.sleep(args.save_s)
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                    saved.with_suffix(".part"),
                )
                saved.with_suffix(".part").replace(saved)
                print(f"saved after step {step + 1}", flush=True)
            dist.barrier()
            break


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--how", default="")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--listen", default="")
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--save-s", type=float, default=0.0)
    parser.add_argument("--hold", action="store_true")
    args = parser.parse_args()
    listen(args.listen)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    saved, first = args.folder / "checkpoints" / "last.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"continues after step {first}", flush=True)
    wrapped = DistributedDataParallel(model)
    try:
        train(args, first, wrapped, model, optimizer, saved)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        del wrapped
        gc.collect()  # it holds threads of gloo's, which abort the process if they outlive the group
    if "SHARDKIT_HEARTBEAT" in os.environ:
        Path(os.environ["SHARDKIT_HEARTBEAT"], os.environ["LOCAL_RANK"]).unlink(missing_ok=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
