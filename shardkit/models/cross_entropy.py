"""Cross-entropy of a linear head over a large vocabulary, without ever holding all logits.

It is a custom autograd function of the head's weight, called inside the head module's forward. A checkpointed call of
the head per chunk would do the same, but:

- The head module is called once per forward. ZeRO-3 gathers its weight once (not once per chunk and once more per
  recomputed chunk), FSDP2 and DDP see one use of the parameter, and a weight tied to the embedding needs nothing
  special.
- The gradient of a sum of cross-entropies follows from the logits alone, up to the scalar that backward brings. So
  forward computes it chunk by chunk, and nothing is recomputed: a second [tokens, d] × [d, vocab] product would be a
  tenth of all FLOPs of a 124M model. The peak of memory is no higher: the weight's gradient, which exists from the end
  of forward on, is the first tensor that backward would allocate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ..errors import ConfigError
from .packed_attention import BatchDocuments, DocumentLayout, check_seen


def chunked_cross_entropy(
    hidden: torch.Tensor,  # [..., d], floating point
    weight: torch.Tensor,  # [vocab, d]
    targets: torch.Tensor,  # [...] integer class per position
    chunk_size: int,  # tokens whose [chunk_size, vocab] fp32 logits exist at once, > 0
    ignore_index: int = -100,  # targets that do not count
    bias: torch.Tensor | None = None,  # [vocab]
) -> torch.Tensor:
    """Sum of cross-entropies of `hidden @ weight.T + bias` against `targets`, `chunk_size` tokens at a time.

    Call it inside the forward of the module that owns `weight`, so that an engine's gather hooks have run. Returns a
    0-d fp32 tensor (fp64 for fp64 input), differentiable once with respect to `hidden`, `weight` and `bias`.

    On the CPU, logits are computed for the positions that count alone; finding them would make a GPU's host wait.

    Memory beyond inputs: one fp32 [chunk_size, vocab], its copy in the compute type if that is narrower, and, if
    gradients are wanted, those of hidden and of weight (in fp32, so that chunks add up without rounding).
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be positive")
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} differ in leading sizes")
    grad = torch.is_grad_enabled()
    wants = grad and hidden.requires_grad, grad and weight.requires_grad
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(hidden, weight, targets, chunk_size, ignore_index, *wants, bias)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        chunk_size: int,
        ignore_index: int,
        want_hidden: bool,
        want_weight: bool,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        # The type in which `F.linear` would compute here; autocast does not cast the inputs of a custom function.
        compute = torch.promote_types(hidden.dtype, weight.dtype)
        if torch.is_autocast_enabled(hidden.device.type):
            compute = torch.get_autocast_dtype(hidden.device.type)
        wide = torch.promote_types(compute, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            flat = hidden.reshape(-1, hidden.shape[-1])
            flat_targets = targets.reshape(-1)
            matrix = weight.to(compute)
            loss = flat.new_zeros((), dtype=wide)
            counted = None  # indices of the rows whose targets count; None: all, or not known (on a GPU, in a plan)
            if targets.device.type == "cpu" and type(flat_targets) is torch.Tensor:
                indices = (flat_targets != ignore_index).nonzero().squeeze(1)
                counted = indices if len(indices) < len(flat_targets) else None
            make = torch.empty_like if counted is None else torch.zeros_like
            grad_hidden = make(flat, dtype=compute) if want_hidden else None
            grad_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
            grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
            for start in range(0, flat.shape[0] if counted is None else len(counted), chunk_size):
                chunk = slice(start, start + chunk_size)
                rows = chunk if counted is None else counted[chunk]
                inputs = flat[rows].to(compute)
                logits = (inputs @ matrix.t()).to(wide)
                if bias is not None:
                    logits += bias
                loss += _losses_then_gradient_(logits, flat_targets[rows], ignore_index).sum()
                if grad_bias is not None:
                    grad_bias += logits.sum(0)
                grad_logits = logits.to(compute)
                del logits
                if grad_hidden is not None and counted is None:
                    torch.mm(grad_logits, matrix, out=grad_hidden[chunk])
                elif grad_hidden is not None:
                    grad_hidden[rows] = grad_logits @ matrix
                if grad_weight is not None and compute == wide:
                    grad_weight.addmm_(grad_logits.t(), inputs)
                elif grad_weight is not None:
                    grad_weight += grad_logits.t() @ inputs
                del grad_logits  # else it would live on while the next chunk's logits are made
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        ctx.like = (hidden.shape, hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("chunked_cross_entropy: backward was run a second time; the first frees its gradients")
        grad_hidden, grad_weight, grad_bias = ctx.gradients
        ctx.gradients = None
        shape, hidden_dtype, weight_dtype, bias_dtype = ctx.like
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(grad_loss).to(hidden_dtype).view(shape)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss).to(weight_dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.mul_(grad_loss).to(bias_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, grad_bias


def _losses_then_gradient_(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Per-row loss [n]; on return `logits` [n, vocab] holds d(sum of losses)/d(logits), written in place. loss = log Σ
    exp(z) - z_target and its gradient softmax(z) - onehot(target), both shifted by the row's maximum."""
    counted = targets != ignore_index
    columns = targets.where(counted, 0).unsqueeze(1).long()
    logits.sub_(logits.amax(dim=1, keepdim=True))
    target_logits = logits.gather(1, columns)
    sums = logits.exp_().sum(dim=1, keepdim=True)
    losses = (sums.log() - target_logits).squeeze(1)
    weights = counted.to(logits.dtype).unsqueeze(1)
    logits.mul_(weights / sums).scatter_add_(1, columns, -weights)
    return losses.where(counted, 0)


def attach_loss(model: nn.Module, loss_chunk_size: int) -> nn.Module:
    """Make `model(tokens, targets, positions=None, documents=None)` return the sum of cross-entropies (fp32), in place.

    The model's own forward runs, with a `forward` of the output projection that knows the targets. A call of the
    backbone alone would bypass the engine's hooks, and miss what the model's forward does to embeddings. `forward` is
    replaced on the two modules, so that parameters keep their names.

    `loss_chunk_size`: positions whose [chunk, vocab] logits exist at once; 0 = all, from the model's own forward.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    model_forward, project = model.forward, head.forward
    requests: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []

    def losses(hidden: torch.Tensor) -> torch.Tensor:
        if not requests:
            logits: torch.Tensor = project(hidden)
            return logits
        targets, positions = requests[-1]
        if positions is not None:
            hidden = hidden.flatten(0, -2).index_select(0, positions)
        if targets is None:
            chosen: torch.Tensor = project(hidden)
            return chosen
        if loss_chunk_size:
            return chunked_cross_entropy(hidden, head.weight, targets, loss_chunk_size, bias=head.bias)
        return summed_loss(project(hidden), targets)

    def forward(
        tokens: torch.Tensor,  # [batch, seq]
        targets: torch.Tensor | None = None,  # [batch, seq], or [n] with `positions`; -100 is not counted; None: logits
        positions: torch.Tensor | None = None,  # [n] indices into the flattened batch × seq to predict at; None = all
        documents: DocumentLayout | None = None,  # those of a packed batch
    ) -> torch.Tensor:
        if positions is None and (targets is None or not loss_chunk_size):
            outputs = _run(model, model_forward, tokens, documents)  # freed after the loss, as in transformers
            logits: torch.Tensor = outputs.logits
            return logits if targets is None else summed_loss(logits, targets)
        requests.append((targets, positions))
        try:
            logits_at: torch.Tensor = _run(model, model_forward, tokens, documents).logits
            return logits_at
        finally:
            requests.pop()

    head.forward = losses
    model.forward = forward
    return model


def _run(model: nn.Module, model_forward: Any, tokens: torch.Tensor, documents: DocumentLayout | None) -> Any:
    """Call a transformers model's own forward; check that all its layers use the documents, if there are any."""
    if documents is None:
        return model_forward(input_ids=tokens)
    batch_documents = BatchDocuments(*documents[1:])
    outputs = model_forward(input_ids=tokens, position_ids=documents[0], documents=batch_documents)
    check_seen(batch_documents, model)
    return outputs


def summed_loss(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """The sum of cross-entropies of all logits at once, in fp32."""
    flat = logits.flatten(0, -2).float()
    return F.cross_entropy(flat, targets.flatten(), ignore_index=ignore_index, reduction="sum")


def check_loss_fits(model: nn.Module, fix: str) -> None:
    """Refuse a model that changes its logits after the output projection, where chunks of the loss are computed. Runs
    the model's own forward once, on meta and without the backbone, and checks its result."""
    name = type(model).__name__
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        problem = f"its output projection is {type(head).__name__}, not a linear layer"
        raise ConfigError(f"{name} cannot compute its loss in chunks: {problem}", fix)
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    backbone: Any = model.base_model
    returned: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: returned.append(output))
    try:
        width = getattr(model.config, "hidden_size", head.in_features)
        hidden = _Hidden(last_hidden_state=torch.empty(1, 2, width, device="meta"))
        backbone.forward = lambda *args, **kwargs: hidden
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
    except Exception as error:
        problem = f"its forward cannot be followed ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        raise ConfigError(f"{name} cannot compute its loss in chunks: {problem}", fix) from error
    finally:
        hook.remove()
        vars(backbone).pop("forward", None)
    if len(returned) != 1 or logits is not returned[0] or logits.shape[:2] != tokens.shape:
        problem = "its forward changes the logits after the output projection"
        raise ConfigError(f"{name} cannot compute its loss in chunks: {problem}", fix)


class _Hidden(dict[str, Any]):
    """Stands in for the output of any backbone: the hidden states come first, and every other field is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self.get("last_hidden_state") if key == 0 else None
