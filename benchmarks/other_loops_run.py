"""Run jobs of `benchmarks.other_loops` as the tool's user writes them; each rank prints its peaks.

`python -m benchmarks.other_loops_run RANKS`: imports the libraries once, then forks RANKS ranks for each folder that a
line of its input names, and answers with a line when they have ended. The files of the job and `asked.json` lie in the
folder; the words of its processes go into `said` there.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch

STEPS = 3
MICRO = 2


def serve(ranks: int) -> None:
    """Answer each folder with `{"ended": reason}`; empty if the job ended well."""
    # torchao asks for the device's properties, and a process that has opened a device cannot be forked.
    with patch("torch.cuda.is_available", lambda: False):
        for name in ("transformers", "accelerate.commands.launch", "peft", "shardkit.memory.tracing.tracker"):
            importlib.import_module(name)
        from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM, Trainer  # noqa: F401
    assert not torch.cuda.is_initialized()
    print(json.dumps({"ended": ""}), flush=True)  # it is ready
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"ended": _job(Path(asked["folder"]), ranks, asked["limit_s"])}), flush=True)


def _job(folder: Path, ranks: int, limit_s: float) -> str:
    leader = os.fork()
    if leader == 0:
        _in_child(lambda: _lead(folder, ranks), folder / "said")
    deadline = time.monotonic() + limit_s
    ended = ""
    while os.waitpid(leader, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            ended = f"not done after {limit_s:.0f} s"
            os.killpg(leader, signal.SIGKILL)
            os.waitpid(leader, 0)
            break
        time.sleep(0.05)
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(leader, signal.SIGKILL)
    return ended


def _in_child(work: Callable[[], None], said: Path | None = None) -> NoReturn:
    """Do the work of a forked process, and end it."""
    code = 1
    try:
        if said is not None:
            os.setsid()
            sink = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (sink, 1), (sink, 2)):
                os.dup2(source, target)
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _lead(folder: Path, ranks: int) -> None:
    """Start the ranks as the job's tool does."""
    asked = json.loads((folder / "asked.json").read_text())
    if asked["tool"] != "accelerate" or asked["on"] == "cpu":
        _start(ranks, lambda: one_rank(folder, asked))
        return
    from accelerate.commands.launch import launch_command, launch_command_parser

    words = ["--config_file", str(folder / "accelerate.yaml"), "--num_processes", str(ranks), "-m", __name__]
    # Its command sets the variables of its config, then calls torchrun in this process.
    with patch("torch.distributed.run.run", lambda args: _start(ranks, lambda: one_rank(folder, asked))):
        launch_command(launch_command_parser().parse_args(words))


def _start(ranks: int, work: Callable[[], None]) -> None:
    """Fork ranks with torchrun's variables, and wait; one alone has none of them, as under `python train.py`."""
    if ranks == 1:
        work()
        return
    listener = socket.create_server(("127.0.0.1", 0))
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), "GROUP_RANK": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    waiting = set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update({**here, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            _in_child(work)
        waiting.add(pid)
    port = listener.getsockname()[1]
    store = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    while waiting:
        pid, status = os.wait()
        waiting.discard(pid)
        if status:
            raise SystemExit(1)  # the others are killed with the session
    del store


def one_rank(folder: Path, asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cpu = asked["on"] == "cpu"
    tracker: Any = nullcontext()
    if cpu:
        import deepspeed.ops as ops

        from shardkit.memory.tracing.tracker import TensorTracker

        ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes minutes
        tracker = TensorTracker()
    run = {"trainer": trainer, "accelerate": accelerate, "deepspeed": deepspeed}[asked["tool"]]
    run(folder, asked, tracker)
    if cpu:
        peaks = {"allocated": tracker.peak("cpu")}
    else:
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print("\n" + json.dumps(peaks), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def network(folder: Path, asked: dict[str, Any]) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.AutoModelForMaskedLM if asked["masked"] else transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=config.dtype or torch.float32)
    if asked["peft"]:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig.from_pretrained(str(folder)))
    return model


def samples(model: Any, asked: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    tokens = [torch.randint(0, model.config.vocab_size, (asked["seq_len"],)) for _ in range(64)]
    return [{"input_ids": one, "labels": one} for one in tokens]


def see(tracker: Any, model: Any) -> None:
    if hasattr(tracker, "see"):
        shards = [param.ds_tensor for param in model.parameters() if hasattr(param, "ds_tensor")]
        tracker.see([*model.parameters(), *model.buffers(), *shards])


def trainer(folder: Path, asked: dict[str, Any], tracker: AbstractContextManager[Any]) -> None:
    import transformers

    given: dict[str, Any] = json.loads((folder / "args.json").read_text())
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    args = transformers.TrainingArguments(**given, **quiet, max_steps=STEPS)
    model = network(folder, asked)
    job = transformers.Trainer(model=model, args=args, train_dataset=samples(model, asked))
    with tracker:
        see(tracker, model)
        job.train()


def accelerate(folder: Path, asked: dict[str, Any], tracker: AbstractContextManager[Any]) -> None:
    from accelerate import Accelerator

    given: dict[str, Any] = json.loads((folder / "accelerate.yaml").read_text())
    job = Accelerator(cpu=True, mixed_precision=given["mixed_precision"]) if asked["on"] == "cpu" else Accelerator()
    model = network(folder, asked)
    data = torch.utils.data.DataLoader(samples(model, asked), batch_size=MICRO)
    with tracker:
        see(tracker, model)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, data = job.prepare(model, optimizer, data)
        for step, batch in enumerate(data):
            if step == STEPS:
                break
            loss = model(**batch).loss
            job.backward(loss)
            job.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def deepspeed(folder: Path, asked: dict[str, Any], tracker: AbstractContextManager[Any]) -> None:
    import deepspeed as tool

    given: dict[str, Any] = json.loads((folder / "ds_config.json").read_text())
    if asked["on"] != "cpu":  # it formats all weights for a line of its log, and these have no values
        torch.Tensor.__repr__ = lambda tensor, **_: f"tensor {tuple(tensor.shape)}"  # type: ignore[method-assign]
    tool.init_distributed()
    model = network(folder, asked)
    data = torch.utils.data.DataLoader(samples(model, asked), batch_size=MICRO)
    with tracker:
        see(tracker, model)
        engine, *_ = tool.initialize(model=model, model_parameters=model.parameters(), config=given)
        for step, batch in enumerate(data):
            if step == STEPS * given.get("gradient_accumulation_steps", 1):
                break
            loss = engine(**{key: one.to(engine.device) for key, one in batch.items()}).loss
            engine.backward(loss)
            engine.step()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
