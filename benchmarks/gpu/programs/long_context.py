"""One layer stack over 32,768 tokens: flash attention, checkpointed blocks, a loss in chunks, 8-bit AdamW if --bnb."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HEADS, DEPTH, SEQ, CHUNK = 32000, 2048, 16, 8, 32768, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 5632, bias=False), nn.Linear(WIDTH, 5632, bias=False)
        self.down = nn.Linear(5632, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def chunk_loss(head: nn.Linear, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(x).float(), targets, reduction="sum")


with torch.device("cuda"):
    embed, blocks, head = (
        nn.Embedding(VOCAB, WIDTH),
        nn.ModuleList(Block() for _ in range(DEPTH)),
        nn.Linear(WIDTH, VOCAB),
    )
model = nn.ModuleList([embed, blocks, head]).bfloat16()
if "--bnb" in sys.argv:
    import bitsandbytes

    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-4)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(3):
    ids = torch.randint(VOCAB, (1, SEQ + 1), device="cuda")
    x = embed(ids[:, :-1])
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    total = torch.zeros((), device="cuda")
    for start in range(0, SEQ, CHUNK):
        part = slice(start, start + CHUNK)
        total = total + checkpoint(chunk_loss, head, x[0, part], ids[0, 1:][part], use_reentrant=False)
    (total / SEQ).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {total.item() / SEQ:.4f}")
