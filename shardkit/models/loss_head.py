"""Language models of transformers that return their loss, with the head's logits never held whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ConfigError
from .cross_entropy import chunked_cross_entropy


def attach_loss(model: nn.Module, loss_chunk_size: int) -> nn.Module:
    """Make `model(tokens, targets, positions=None)` return the sum of cross-entropies (fp32 scalar), in place.

    The model's own forward runs, with its output projection replaced by one that knows the targets: a call of the
    backbone from outside would go round the engine's hooks, and miss what the forward does to embeddings. `forward` is
    replaced on the two modules, so that parameters keep the names they have in transformers.

    Args:
        model: a transformers model with an output projection (`get_output_embeddings`).
        loss_chunk_size: positions whose [chunk, vocab] logits exist at once; 0 = all, from the model's own forward.

    tokens: [batch, seq]; targets: [batch, seq] classes, or with `positions` one per position [n]; -100 = not counted;
    positions: [n] indices into the flattened batch × seq, where predictions are wanted.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    own_forward, project = model.forward, head.forward
    wanted: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def losses(hidden: torch.Tensor) -> torch.Tensor:
        if not wanted:
            logits: torch.Tensor = project(hidden)
            return logits
        targets, positions = wanted[-1]
        if positions is not None:
            hidden = hidden.flatten(0, -2).index_select(0, positions)
        if loss_chunk_size:
            return chunked_cross_entropy(hidden, head.weight, targets, loss_chunk_size, bias=head.bias)
        return _whole(project(hidden), targets)

    def forward(
        tokens: torch.Tensor, targets: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        if targets is None or not (loss_chunk_size or positions is not None):
            logits: torch.Tensor = own_forward(input_ids=tokens).logits
            return logits if targets is None else _whole(logits, targets)
        wanted.append((targets, positions))
        try:
            loss: torch.Tensor = own_forward(input_ids=tokens).logits
        finally:
            wanted.pop()
        return loss

    head.forward = losses
    model.forward = forward
    return model


def _whole(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")


def check_loss_fits(model: nn.Module, fix: str) -> None:
    """Refuse a model that changes its logits after the output projection: computed there, the loss would be another.

    Runs the model's own forward once, on meta and with the backbone left out, and looks at what it returns.

    Args:
        model: parameters on meta; not changed.

    Raises:
        ConfigError: the logits are scaled or capped, or the forward cannot be followed.
    """
    name = type(model).__name__
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        found = f"its output projection is {type(head).__name__}, not a linear layer"
        raise ConfigError(f"{name} cannot compute its loss in chunks: {found}", fix)
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    returned: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: returned.append(output))
    try:
        width = getattr(model.config, "hidden_size", head.in_features)
        with _without_backbone(model, torch.empty(1, 2, width, device="meta")), torch.no_grad():
            logits = model(input_ids=tokens).logits
    except Exception as error:
        found = f"its forward cannot be followed ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        raise ConfigError(f"{name} cannot compute its loss in chunks: {found}", fix) from error
    finally:
        hook.remove()
    if len(returned) != 1 or logits is not returned[0] or logits.shape[:2] != tokens.shape:
        found = "its forward changes the logits after the output projection"
        raise ConfigError(f"{name} cannot compute its loss in chunks: {found}", fix)


class _Hidden(dict[str, Any]):
    """What a backbone returns, whatever its class: the hidden states first, nothing else."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self.get("last_hidden_state") if key == 0 else None


@contextmanager
def _without_backbone(model: nn.Module, hidden: torch.Tensor) -> Iterator[None]:
    backbone: Any = model.base_model
    backbone.forward = lambda *args, **kwargs: _Hidden(last_hidden_state=hidden)
    try:
        yield
    finally:
        del backbone.forward
