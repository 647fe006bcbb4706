"""A language model of three LSTM layers (cuDNN) in fp32, Adam with one kernel a parameter."""

import torch
from torch import nn

VOCAB, WIDTH = 20000, 1024


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=3, dropout=0.1, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


model = Model().cuda()
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for step in range(3):
    ids = torch.randint(VOCAB, (32, 129), device="cuda")
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
