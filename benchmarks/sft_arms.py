"""Fine-tuning under each library, written as in its documentation: the same model, conversations, order and settings.

An arm is a generator: it sets a rank up, then yields (loss, tokens) of each optimizer step. The ranks' mean of the
losses is the mean over the step's targets; the ranks' sum of the tokens is the number of these targets.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .turns import RANKS

SEQ, MICRO, LR, MAX_NORM = 512, 4, 1e-3, 1.0
R, ALPHA, TARGETS = 8, 16, ("q_proj", "k_proj", "v_proj", "o_proj")
TOKENISERS = 2  # processes that tokenise
ADAPTER = "adapter"
"""Beside the model's folder: the initial LoRA weights of every arm, as peft saves them."""

Taken = tuple[float, float]


@dataclass(frozen=True)
class Setting:
    """What is compared.

    Attributes:
        tuned: "full", "lora", or "qlora": LoRA over a base in 4 bits (NF4).
        layout: "padded": each conversation is a row; "packed": rows of SEQ tokens, best-fit decreasing.
        model: the folder of weights and tokenizer.
        data: JSON lines of `messages`.
    """

    tuned: str
    layout: str
    model: str
    data: str

    @property
    def adapter(self) -> str | None:
        return None if self.tuned == "full" else str(Path(self.model).parent / ADAPTER)


def _model(setting: Setting) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    packing = None
    if setting.tuned == "qlora":
        packing = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        setting.model, dtype=torch.float32, attn_implementation="sdpa", quantization_config=packing
    )
    if setting.adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, setting.adapter, is_trainable=True)


class Turns:
    """Steps of a library's own loop, which runs in a thread and waits before each until it is asked for.

    Args:
        takes_turns: false: nothing waits, and all steps are taken in the calling thread, which a profiler follows.
    """

    def __init__(self, takes_turns: bool) -> None:
        self._takes_turns = takes_turns
        self._requests: queue.Queue[bool] = queue.Queue()
        self._taken: queue.Queue[Taken | BaseException] = queue.Queue()

    def begins(self) -> None:
        """A step of the loop begins."""
        if self._takes_turns and not self._requests.get():
            raise KeyboardInterrupt

    def ends(self, taken: Taken) -> None:
        self._taken.put(taken)

    def steps(self, loop: Callable[[], object], count: int) -> Iterator[Taken]:
        if not self._takes_turns:
            loop()
            yield from (self._next() for _ in range(count))
            return
        thread = threading.Thread(target=self._run, args=(loop,))
        thread.start()
        try:
            for _ in range(count):
                self._requests.put(True)
                yield self._next()
        finally:
            self._requests.put(False)  # ends a loop that was not asked for all of its steps
            thread.join()

    def _run(self, loop: Callable[[], object]) -> None:
        try:
            loop()
        except BaseException as error:  # a thread's error is raised where its losses are read
            self._taken.put(error)

    def _next(self) -> Taken:
        taken = self._taken.get()
        if isinstance(taken, BaseException):
            raise taken
        return taken


def trl(setting: Setting, steps: int, in_turns: bool = True) -> Iterator[Taken]:
    """TRL's SFTTrainer; `in_turns`: see `Turns`."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    turns = Turns(in_turns)

    class Recorded(SFTTrainer):  # type: ignore[misc]
        taken: Taken

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = int((inputs["labels"] != -100).sum())
            loss = super().training_step(model, inputs, *args, **kwargs)
            self.taken = float(loss), tokens
            return loss

    class Reported(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.begins()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.ends(trainer.taken)

    arguments = SFTConfig(
        output_dir=str(Path(setting.data).parent / "trl"), use_cpu=True, max_length=SEQ, assistant_only_loss=True,
        packing=setting.layout == "packed", per_device_train_batch_size=MICRO, max_steps=steps, learning_rate=LR,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=MAX_NORM, optim="adamw_torch", bf16=False,
        gradient_checkpointing=False, train_sampling_strategy="sequential", dataset_num_proc=TOKENISERS,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no", ddp_timeout=240,
    )  # fmt: skip
    trainer = Recorded(
        model=_model(setting),
        args=arguments,
        train_dataset=load_dataset("json", data_files=setting.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(setting.model),
        callbacks=[Reported()],
    )
    yield from turns.steps(trainer.train, steps)


def tokenised(data: str, model: str) -> Any:
    """The conversations as rows of `input_ids` and `labels`, by `datasets`."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokenise(example: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer.apply_chat_template(
            example["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        return {
            "input_ids": encoded["input_ids"],
            "labels": [token if counts else -100 for token, counts in pairs],
        }

    rows = load_dataset("json", data_files=data, split="train")
    return rows.map(tokenise, remove_columns=rows.column_names, num_proc=TOKENISERS)


def accelerate(setting: Setting, steps: int) -> Iterator[Taken]:
    """Accelerate around a loop by hand, with peft and datasets."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    accelerator = Accelerator(cpu=True)
    tokenizer = AutoTokenizer.from_pretrained(setting.model)

    with accelerator.main_process_first():
        rows = tokenised(setting.data, setting.model)
    if setting.layout == "packed":
        from trl import pack_dataset

        with accelerator.main_process_first():
            rows = pack_dataset(rows, SEQ, "bfd")

    def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        filled: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
        for sample in samples:
            missing = longest - len(sample["input_ids"])
            filled["input_ids"].append(sample["input_ids"] + [tokenizer.pad_token_id] * missing)
            filled["labels"].append(sample["labels"] + [-100] * missing)
            filled["attention_mask"].append([1] * len(sample["input_ids"]) + [0] * missing)
        return {key: torch.tensor(value) for key, value in filled.items()}

    def flat(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = [length for sample in samples for length in sample["seq_lengths"]]
        labels = torch.tensor([label for sample in samples for label in sample["labels"]])
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        labels[starts] = -100
        positions = torch.cat([torch.arange(length) for length in lengths])
        tokens = torch.tensor([token for sample in samples for token in sample["input_ids"]])
        return {"input_ids": tokens[None], "labels": labels[None], "position_ids": positions[None]}

    model = _model(setting)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    loader = DataLoader(rows, batch_size=MICRO, collate_fn=flat if setting.layout == "packed" else padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for _, batch in zip(range(steps), loader, strict=False):
        targets = accelerator.reduce((batch["labels"][:, 1:] != -100).sum())
        loss = model(**batch, num_items_in_batch=targets / accelerator.num_processes).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss), float(targets) / accelerator.num_processes


def ours(setting: Setting, steps: int, folder: str) -> Iterator[Taken]:
    """shardkit, with all files of a run."""
    from .overhead import Ours

    run = Ours(overrides(setting, steps, folder))
    try:
        for _ in range(steps):
            record = run.record()
            yield record["loss"], record["tokens"] / RANKS
    finally:
        run.close()


LORA = (
    "adapter.type=lora", f"adapter.r={R}", f"adapter.alpha={ALPHA}", f"adapter.targets={json.dumps(TARGETS)}",
)  # fmt: skip


def overrides(setting: Setting, steps: int, folder: str) -> list[str]:
    """shardkit's settings."""
    return [
        "task.name=hf_causal_lm", f"model.init_from={setting.model}", "parallel.strategy=ddp",
        "run.device=cpu", f"run.dir={folder}/run", f"data.path={setting.data}",
        f"data.cache_dir={folder}/cache", "data.shuffle=false", "data.loss_on=assistant",
        f"data.packing={'packed' if setting.layout == 'packed' else 'none'}", f"train.seq_len={SEQ}",
        f"train.micro_batch_size={MICRO}", f"train.max_norm={MAX_NORM}", f"train.max_steps={steps}",
        "train.eval_samples=0", f"optim.lr={LR}", "optim.betas=[0.9, 0.999]", "optim.weight_decay=0",
        "optim.schedule=constant", *([] if setting.adapter is None else LORA),
        *(["model.quantize.bits=4"] if setting.tuned == "qlora" else []),
    ]  # fmt: skip


PEERS: dict[str, Callable[[Setting, int], Iterator[Taken]]] = {"TRL": trl, "peft + Accelerate": accelerate}
AT_ONCE = {"TRL": partial(trl, in_turns=False)}
"""Peers that take all steps in the calling thread, for a profiler."""

if __name__ == "__main__":
    tokenised(*sys.argv[1:3]).save_to_disk(sys.argv[3])
