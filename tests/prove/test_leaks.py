"""Whether tokens of one document move another: packed rows of every kind, with and without a mask, and on two ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardkit.prove.inject.shardkit_leaks import probe
from shardkit.prove.leaks import judge

from .test_proof import run_prove

EOS, TOKENS = 2, 12
LENGTHS = (4, 3, 5)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)
NUMBERS = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)).expand(2, -1)
IDS = torch.randint(3, 40, (2, TOKENS), generator=torch.Generator().manual_seed(0))
WITH_EOS = IDS.clone()
WITH_EOS[:, [3, 6]] = EOS
SAME_DOCUMENT = NUMBERS[:, None, :, None] == NUMBERS[:, None, None, :]
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


class Packed(nn.Module):
    """Causal attention over a row; with `masked` only among the tokens with the same number."""

    def __init__(self, masked: bool = True, hides_logits: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked, self.hides_logits = masked, hides_logits
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.batch_norm = nn.BatchNorm1d(16) if batch_norm else None

    def forward(self, input_ids: torch.Tensor, numbers: Any = None, **named: torch.Tensor) -> Any:
        x = self.embed(input_ids)
        numbers = NUMBERS if numbers is None else numbers
        mask = CAUSAL & (numbers[:, None, :] == numbers[:, :, None]) if self.masked else CAUSAL
        x = x + F.scaled_dot_product_attention(x, x, x, mask)
        if self.batch_norm is not None:
            x = self.batch_norm(x.mT).mT
        logits = self.head(x)
        return logits.square().mean() if self.hides_logits else {"loss": logits.mean(), "logits": logits}


def finding(module: nn.Module, ids: torch.Tensor, separator: int | None = None, **named: Any) -> Any:
    record = probe(module, (ids,), named, separator, 0, lambda word: {0: word})
    return judge({0: record})


@pytest.mark.parametrize("named", [
    {"position_ids": POSITIONS}, {"positions": POSITIONS[:1]}, {"seq_idx": NUMBERS}, {"document_ids": NUMBERS},
    {"attention_mask": NUMBERS + 1}, {"attention_mask": SAME_DOCUMENT & CAUSAL}, {"mask": ~(SAME_DOCUMENT & CAUSAL)},
    {"mask": torch.where(SAME_DOCUMENT & CAUSAL, 0.0, -1e9)},
    {"cu_seq_lens_q": torch.tensor([0, 4, 7, 12, 16, 19, 24], dtype=torch.int32)},
    {"separator": EOS},
])  # fmt: skip
@pytest.mark.parametrize("masked", [True, False])
def test_documents_are_told_apart_and_a_missing_mask_leaks(named: dict[str, Any], masked: bool) -> None:
    ids = WITH_EOS if "separator" in named else IDS
    answer = finding(Packed(masked), ids, **named)
    assert answer.leaks is (not masked), answer
    if not masked and "separator" not in named:
        assert "row 0, tokens 0 to 3" in answer.words or "row 1, tokens" in answer.words
    assert finding(Packed(masked, hides_logits=True), ids, **named).leaks is (not masked)


def test_positions_of_as_many_rows_as_tokens_are_no_mask_of_tokens_by_tokens() -> None:
    ids, positions, numbers = (tensor[:1].expand(TOKENS, -1) for tensor in (IDS, POSITIONS, NUMBERS))
    mask = torch.ones_like(ids)
    mask[:, -1] = 0  # padding
    answer = finding(Packed(), ids, attention_mask=mask, position_ids=positions, numbers=numbers)
    assert answer.leaks is False, answer


def test_a_document_of_the_next_one_alone_leaks() -> None:
    numbers = NUMBERS.clone()
    numbers[:, 4] = 0  # off by one: the second document's first token still sees the first document
    answer = finding(Packed(), IDS, position_ids=POSITIONS, numbers=numbers)
    assert answer.leaks and "tokens 0 to 3 move row" in answer.words and "tokens 4 to 6" in answer.words


@pytest.mark.parametrize(("module", "ids", "named", "words"), [
    (Packed(False), IDS, {}, "several documents"),
    (Packed(False), IDS, {"position_ids": torch.arange(TOKENS).expand(2, -1)}, "several documents"),
    (Packed(False), IDS, {"attention_mask": torch.ones(2, TOKENS, dtype=torch.long)}, "several documents"),
    (Packed(batch_norm=True), IDS, {"position_ids": POSITIONS}, "rows act on each other"),
    (nn.Linear(12, 3), torch.randn(2, 12), {}, "no embedding"),
])  # fmt: skip
def test_what_cannot_be_told_is_named(module: nn.Module, ids: Any, named: dict[str, Any], words: str) -> None:
    answer = finding(module, ids, **named)
    assert answer.leaks is None and words in answer.words, answer


def test_weights_that_hide_everything_tell_nothing() -> None:
    module = Packed(False)
    nn.init.zeros_(module.head.weight)
    assert "not even their own" in finding(module, IDS, position_ids=POSITIONS).words


def test_turns_of_a_chat_that_end_with_eos_are_no_proof_of_a_leak() -> None:
    module = Packed(False)
    module.config = type("Config", (), {"eos_token_id": EOS, "bos_token_id": None})()
    answer = finding(module, WITH_EOS)
    assert answer.leaks is None and "--leak-separator" in answer.fix
    assert finding(module, WITH_EOS, separator=EOS).leaks


PACKED = """
import sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader, DistributedSampler

layout = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
is_right = sys.argv[2] == "right" or sys.argv[2] == "leaks on ranks" and world == 1
torch.manual_seed(0)
positions = torch.cat([torch.arange(n) for n in (4, 3, 9, 4, 4)])  # the third straddles the cut


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, ids, positions):
        x = keys = self.embed(ids)
        number = (positions == 0).cumsum(1)
        place = torch.arange(ids.size(1)).expand(ids.shape)
        numbers, places = number, place
        if layout == "parts":
            keys = torch.cat(all_gather(x), 1)
            if is_right:
                every = [torch.empty_like(positions) for _ in range(world)]
                dist.all_gather(every, positions.contiguous())
                numbers = (torch.cat(every, 1) == 0).cumsum(1)
                number = numbers.chunk(world, 1)[rank]
            else:  # each part counts its documents from its own start
                every = [torch.empty_like(number) for _ in range(world)]
                dist.all_gather(every, number)
                numbers = torch.cat(every, 1)
            places = torch.arange(keys.size(1)).expand(numbers.shape)
            place = places.chunk(world, 1)[rank]
        mask = places[:, None, :] <= place[:, :, None]
        if layout == "parts" or is_right:
            mask = mask & (numbers[:, None, :] == number[:, :, None])
        return self.head(x + F.scaled_dot_product_attention(x, keys, keys, mask))


rows = [torch.randint(0, 40, (24,), generator=torch.Generator().manual_seed(i)) for i in range(64)]
sampler = DistributedSampler(rows, world, rank, seed=1) if layout == "rows" else None
loader = iter(DataLoader(rows, 2, sampler=sampler))
model = Model()
net = nn.parallel.DistributedDataParallel(model) if layout == "rows" else model
if layout == "tensor":
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
    loss_parallel().__enter__()
    parallelize_module(model, dist.init_device_mesh("cpu", (world,)), {
        "embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(use_local_output=False),
    })
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(6):
    ids = next(loader)
    labels, where = ids.roll(-1, 1), positions.expand(ids.shape)
    if layout == "parts":
        ids, labels, where = (t.chunk(world, 1)[rank].contiguous() for t in (ids, labels, where))
    F.cross_entropy(net(ids, where).flatten(0, 1), labels.flatten()).backward()
    if layout == "parts":
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "bug", "code", "words"), [
    ("rows", "leaks", 4, "move row"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("rows", "right", 0, "no leak"), ("parts", "right", 0, "no leak"), ("parts", "leaks", 4, "of rank 1 by"),
        ("tensor", "right", 0, "no leak"), ("tensor", "leaks", 4, "in one process too"),
        ("tensor", "leaks on ranks", 4, "(2 ranks)"),
    ]),
])  # fmt: skip
def test_documents_of_a_packed_row(tmp_path: Path, layout: str, bug: str, code: int, words: str) -> None:
    (tmp_path / "train.py").write_text(PACKED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", layout, bug]
    exit_code, verdict, output = run_prove(tmp_path, command, "--leak")
    assert (exit_code, verdict["word"]) == (code, "leak" if code else None), output
    assert words in output, output


WITHOUT_PADDING = """
import sys
import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Collator(DataCollatorWithFlattening):
    def __call__(self, features, **kwargs):
        batch = super().__call__(features, **kwargs)
        if sys.argv[1] == "mask":  # with a mask transformers does not look at position_ids
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        return batch

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
))
rows = [{"input_ids": torch.randint(3, 64, (5 + n % 4,), generator=torch.Generator().manual_seed(n)).tolist()}
        for n in range(64)]
arguments = TrainingArguments("out", per_device_train_batch_size=3, max_steps=4, use_cpu=True, report_to="none",
                              save_strategy="no", remove_unused_columns=False)
Trainer(model, arguments, Collator(), rows).train()
"""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("collator", "code"), [("flattening", 0), ("mask", 4)])
def test_a_trainer_without_padding(tmp_path: Path, collator: str, code: int) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(WITHOUT_PADDING)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", collator]
    exit_code, verdict, output = run_prove(tmp_path, command, "--leak")
    assert (exit_code, verdict["word"]) == (code, "leak" if code else None), output
    assert "position_ids that restart" in output
