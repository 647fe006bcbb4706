"""A causal language model of transformers in your own loop, under any strategy:

torchrun --standalone --nproc-per-node 2 examples/transformers_model.py zero2

It learns the order of the alphabet from random windows. Nothing is downloaded: the weights are random. To begin with
pretrained ones, call `job.wrap(AutoModelForCausalLM.from_pretrained(NAME))`.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import shardkit

LETTERS = 26


def build() -> nn.Module:
    torch.manual_seed(0)  # the same initial weights on every rank
    sizes = {"n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=LETTERS, bos_token_id=None, eos_token_id=None, **sizes))


def loss_fn(model: nn.Module, letters: torch.Tensor) -> torch.Tensor:
    """The sum over the batch's targets, as `job.step` expects it."""
    logits = model(input_ids=letters[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), letters[:, 1:].flatten(), reduction="sum")


def main(strategy: str, steps: int = 20) -> float:
    settings = {"parallel.strategy": strategy, "optim.lr": 3e-3, "activation.policy": "full"}
    with shardkit.start(overrides=settings) as job:
        job.wrap(build)
        data = torch.Generator().manual_seed(1 + job.world.rank)
        for _ in range(steps):
            first = torch.randint(LETTERS, (8, 1), generator=data)
            batch = (first + torch.arange(17)) % LETTERS
            result = job.step([batch], loss_fn, n_targets=lambda letters: letters[:, 1:].numel())
        if job.world.is_main:
            print(f"loss {result.loss:.3f}, gradient norm {result.grad_norm:.3f}")
        return result.loss


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ddp")
