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

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ..errors import ConfigError
from .balance import balance_of
from .packed_attention import BatchDocuments, DocumentLayout, check_seen


def chunked_cross_entropy(
    hidden: torch.Tensor,  # [..., d], floating point
    weight: torch.Tensor,  # [vocab, d], or a DTensor of which each rank has some rows
    targets: torch.Tensor,  # [...] integer class per position
    chunk_size: int,  # tokens whose [chunk_size, vocab] fp32 logits exist at once, > 0
    ignore_index: int = -100,  # targets that do not count
    bias: torch.Tensor | None = None,  # [vocab]
) -> torch.Tensor:
    """Sum of cross-entropies of `hidden @ weight.T + bias` against `targets`, `chunk_size` tokens at a time.

    Call it inside the forward of the module that owns `weight`, so that an engine's gather hooks have run. Returns a
    0-d fp32 tensor (fp64 for fp64 input), differentiable once with respect to `hidden`, `weight` and `bias`.

    On the CPU, logits are computed for the positions that count alone; finding them would make a GPU's host wait.

    Where ranks share the rows, each computes the logits of its own, and they exchange three numbers a position: the
    largest logit, the sum of the exponentials, and the target's logit.

    Memory beyond inputs: one fp32 [chunk_size, vocab], its copy in the compute type if that is narrower, and, if
    gradients are wanted, those of hidden and of weight (in fp32, so that chunks add up without rounding).
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be positive")
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} differ in leading sizes")
    part = _Part()
    if hasattr(weight, "to_local"):
        from ..parallel.tensor import vocabulary_part  # DTensor's class takes 0.4 s to import

        part = _Part(*vocabulary_part(weight))
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()  # type: ignore[attr-defined]
    grad = torch.is_grad_enabled()
    wants = grad and hidden.requires_grad, grad and weight.requires_grad
    arguments = hidden, weight, targets, chunk_size, ignore_index, *wants, bias, part
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


class _Part(NamedTuple):
    """The rows of the head that this rank has."""

    first_id: int = 0
    group: dist.ProcessGroup | None = None  # the ranks that have the others; None: this one has all

    def reduce_(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, op, self.group)
        return tensor


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
        part: _Part,
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
                loss += _losses_then_gradient_(logits, flat_targets[rows], ignore_index, part).sum()
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
            if grad_hidden is not None:
                part.reduce_(grad_hidden)
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
        return grad_hidden, grad_weight, None, None, None, None, None, grad_bias, None


def _losses_then_gradient_(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, part: _Part) -> torch.Tensor:
    """Per-row loss [n]; on return `logits` [n, vocab] holds d(sum of losses)/d(logits), written in place. loss = log Σ
    exp(z) - z_target and its gradient softmax(z) - onehot(target), both shifted by the row's maximum."""
    counted = targets != ignore_index
    columns = targets.where(counted, 0).unsqueeze(1).long()
    logits.sub_(part.reduce_(logits.amax(dim=1, keepdim=True), dist.ReduceOp.MAX))
    weights = counted.to(logits.dtype).unsqueeze(1)
    if part.group is None:
        target_logits = logits.gather(1, columns)
        sums = logits.exp_().sum(dim=1, keepdim=True)
    else:
        columns = columns - part.first_id
        is_inside = (columns >= 0) & (columns < logits.shape[1])
        columns = columns.where(is_inside, 0)
        target_logits = logits.gather(1, columns).where(is_inside, 0)
        sums, target_logits = part.reduce_(torch.stack([logits.exp_().sum(dim=1, keepdim=True), target_logits]))
    losses = (sums.log() - target_logits).squeeze(1)
    logits.mul_(weights / sums)
    logits.scatter_add_(1, columns, -weights if part.group is None else -weights.where(is_inside, 0))
    return losses.where(counted, 0)


def attach_loss(model: nn.Module, loss_chunk_size: int) -> nn.Module:
    """Make `model(tokens, targets, positions=None, documents=None)` return the sum of cross-entropies (fp32), in place.

    The model's own forward runs, with a `forward` of the output projection that knows the targets. A call of the
    backbone alone would bypass the engine's hooks, and miss what the model's forward does to embeddings. `forward` is
    replaced on the two modules, so that parameters keep their names.

    `loss_chunk_size`: positions whose [chunk, vocab] logits exist at once; 0 = all, from the model's own forward.

    While the model trains, the loss has its routers' load-balancing loss in it, if its config asks for one.
    """
    balance = balance_of(model)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    model_forward, own_forward = model.forward, head.forward
    requests: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []

    def project(hidden: torch.Tensor) -> torch.Tensor:
        is_cut = hasattr(getattr(head, "weight", None), "full_tensor")
        logits: torch.Tensor = all_logits(hidden, head.weight, head.bias) if is_cut else own_forward(hidden)
        return logits

    def losses(hidden: torch.Tensor) -> torch.Tensor:
        if not requests:
            return project(hidden)
        targets, positions = requests[-1]
        if positions is not None:
            hidden = hidden.flatten(0, -2).index_select(0, positions)
        if targets is None:
            return project(hidden)
        if loss_chunk_size:
            return chunked_cross_entropy(hidden, head.weight, targets, loss_chunk_size, bias=head.bias)
        return summed_loss(project(hidden), targets)

    def forward(
        tokens: torch.Tensor,  # [batch, seq]
        targets: torch.Tensor | None = None,  # [batch, seq], or [n] with `positions`; -100 is not counted; None: logits
        positions: torch.Tensor | None = None,  # [n] indices into the flattened batch × seq to predict at; None = all
        documents: DocumentLayout | None = None,  # those of a packed batch
        real: torch.Tensor | None = None,  # [batch, seq] whether a position is no padding; None: none is
    ) -> torch.Tensor:
        result: torch.Tensor
        if positions is None and (targets is None or not loss_chunk_size):
            outputs = _run(model, model_forward, tokens, documents)  # freed after the loss, as in transformers
            result = outputs.logits if targets is None else summed_loss(outputs.logits, targets)
        else:
            requests.append((targets, positions))
            try:
                outputs = _run(model, model_forward, tokens, documents)
                result = outputs.logits
            finally:
                requests.pop()
        if balance is None or targets is None or not model.training:
            return result
        is_target = targets != -100 if real is None else (targets != -100) & real
        return result + balance.loss(outputs.router_logits, is_target.sum(), real)

    head.forward, head.vocabulary_parallel = losses, True
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


def all_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of a head; of a head of which each rank has some rows, with all of them gathered."""
    if hasattr(weight, "full_tensor"):
        weight, bias = weight.full_tensor(), None if bias is None else bias.full_tensor()  # type: ignore[attr-defined]
    return F.linear(hidden, weight, bias)


def check_loss_fits(model: nn.Module, fix: str) -> None:
    """Refuse a model that changes its logits after the output projection, where chunks of the loss are computed. Runs
    the model's own forward once, on meta and without the backbone, and checks its result."""
    name = type(model).__name__
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        problem = f"its output projection is {type(head).__name__}, not a linear layer"
        raise ConfigError(f"{name} cannot compute its loss in chunks: {problem}", fix)
    returned: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: returned.append(output))
    try:
        logits = run_head(model, getattr(model.config, "hidden_size", head.in_features)).logits
    except Exception as error:
        problem = f"its forward cannot be followed ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        raise ConfigError(f"{name} cannot compute its loss in chunks: {problem}", fix) from error
    finally:
        hook.remove()
    if len(returned) != 1 or logits is not returned[0] or logits.shape[:2] != (1, 2):
        problem = "its forward changes the logits after the output projection"
        raise ConfigError(f"{name} cannot compute its loss in chunks: {problem}", fix)


def run_head(model: Any, width: int, **fields: Any) -> Any:
    """Run a model's own forward of two tokens on meta, with a stand-in for its backbone that returns `fields`."""
    hidden = _Hidden(last_hidden_state=torch.empty(1, 2, width, device="meta"), **fields)
    backbone = model.base_model
    backbone.forward = lambda *args, **kwargs: hidden
    try:
        with torch.no_grad():
            return model(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"))
    finally:
        del backbone.forward


class _Hidden(dict[str, Any]):
    """Stands in for the output of any backbone: the hidden states come first, and every other field is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self.get("last_hidden_state") if key == 0 else None
