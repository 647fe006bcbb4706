"""Expert parallelism: the ranks of a group hold different experts of each layer, and send each other the rows that
those compute (GShard: Lepikhin et al. 2021, section 3).

Ranks have samples of their own, as under FSDP. Around a layer's experts an all-to-all brings each row to the rank that
holds its expert, and another one brings the results back; no row is dropped, so counts are ragged. A rank's shard of an
expert has gradients of the rows of its whole group: hence a factor of its own (`shard_experts`).
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ..config.capability import divisors, one_of
from ..errors import ConfigError
from .compat import copy_grad_hooks, exchange_rows, has_values, shard
from .mesh import dimensions

_Rows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A layer's experts: (hidden [rows, width], experts [rows, k], weights [rows, k]) → [rows, width]."""


class ExpertParallel:
    """The groups that hold a layer's experts together, and how many rows this rank's experts got."""

    def __init__(self, mesh: DeviceMesh, imbalance: float, same_rows: DeviceMesh | None = None) -> None:
        """`mesh`: all ranks; those along its last dimension hold different experts. `imbalance`:
        `parallel.ep_imbalance`, where no router computes. `same_rows`: the ranks that share layers, and therefore have
        the same rows."""
        *outer, inner = range(mesh.ndim)
        self.mesh, self.size, self.imbalance, self.same_rows = mesh, mesh.size(inner), imbalance, same_rows
        self.computes = os.environ.get("EMUCUDA_COMPUTE") != "0"
        """Whether this rank's device computes: a rehearsal's launches kernels that do nothing."""
        self.among_groups = dimensions(mesh, *outer)
        """The ranks that hold the same experts, over which FSDP2 shards them."""
        self.in_group = dimensions(mesh, inner)
        self.rank: int = self.in_group.get_local_rank()
        self._received, self._peak = 0, 0.0

    def note_received(self, n_rows: int, even: int) -> None:
        """Count the rows that this rank's experts got in one call; `even`: if all experts got as many."""
        self._received += n_rows
        self._peak = max(self._peak, n_rows / max(1, even))

    def assumed(self, n_rows: int, k: int) -> tuple[list[int], list[int]]:
        """Rows to send to each rank of the group, and to receive from each, where nobody computes a router (`plan`,
        `rehearse`): the group's first rank gets `imbalance` times the average, the others share the rest. `n_rows`: of
        the layer, which ranks with the same ones divide; `k`: experts of each."""
        if (rehearsal := sys.modules.get("shardkit_rehearsal")) is not None:
            rehearsal.assume_rows(self.imbalance)
        n_sharing = 1 if self.same_rows is None else self.same_rows.size()
        part = -(-n_rows // n_sharing)  # as DTensor divides them: the last ranks may get fewer
        by_sender = []
        for sender in dist.get_process_group_ranks(self.in_group.get_group()):
            n_pairs = k * min(part, max(0, n_rows - sender % n_sharing * part))
            busiest = min(n_pairs, math.ceil(self.imbalance * n_pairs / self.size))
            share, remainder = divmod(n_pairs - busiest, self.size - 1)
            by_sender.append([busiest, *(share + (rank < remainder) for rank in range(self.size - 1))])
        return by_sender[self.rank], [sent[self.rank] for sent in by_sender]

    def take_received(self) -> tuple[float, float]:
        """(rows that this rank's experts got, the most in one call over an even share) since this was called last."""
        taken = float(self._received), self._peak
        self._received, self._peak = 0, 0.0
        return taken


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose parameters have a row for each of a layer's experts, by name.

    Such a module has an attribute `num_experts`, by which its forward counts, and is called with rows, the experts of
    each row and their weights: transformers' own, and a user's (docs/wide.md). Weights that are adapted or packed are
    modules in it (`weights_of`).
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(n_experts := getattr(module, "num_experts", None), int)
        # ZeRO-3 may have taken a parameter apart.
        for shapes in [[tuple(getattr(p, "ds_shape", p.shape)) for p in module.parameters(recurse=False)]]
        if (weights_of(module) or any(len(shape) == 3 for shape in shapes))
        and all(shape[:1] == (n_experts,) for shape in shapes)
    }


def weights_of(experts: nn.Module) -> list[Any]:
    """The modules that stand for weights of a layer's experts (`models.quantized.ExpertWeight`)."""
    return [child for child in experts.children() if hasattr(child, "take_share")]


def _holders(experts: nn.Module) -> list[nn.Module]:
    """The modules that hold parameters of a layer's experts."""
    return [experts, *(module for weight in weights_of(experts) for module in weight.modules())]


def check_experts(model: nn.Module, size: int) -> dict[str, nn.Module]:
    """The model's modules of experts, if their numbers can be divided among `size` ranks; else a ConfigError."""
    modules = experts_of(model)
    if not modules:
        raise ConfigError(
            f"parallel.ep={size}: no module of {type(model).__name__} holds experts in parameters with a row for each",
            "remove parallel.ep, or add the hook of docs/wide.md to its experts",
        )
    for name, module in modules.items():
        try:
            inspect.signature(module.forward).bind(None, None, None)
        except TypeError:
            raise ConfigError(
                f"parallel.ep={size}: {name}, a {type(module).__name__}, is not called with rows, the experts of each "
                "row and their weights",
                "remove parallel.ep, or write it with the hook of docs/wide.md",
            ) from None
        n_experts = int(module.num_experts)  # type: ignore[arg-type]
        if n_experts % size:
            raise ConfigError(
                f"parallel.ep={size} does not divide the {n_experts} experts of {name}",
                one_of("parallel.ep", divisors(n_experts)),
            )
    return modules


def split_experts(model: nn.Module, parallel: ExpertParallel) -> None:
    """Leave each rank its share of every layer's experts, and let the layers exchange rows."""
    for module in check_experts(model, parallel.size).values():
        for holder in _holders(module):
            for name, param in list(holder.named_parameters(recurse=False)):
                # Rows of all experts, one expert after another, or numbers that all of them need.
                placement = Replicate() if name in getattr(holder, "per_layer", ()) else Shard(0)
                local = distribute_tensor(param.detach(), parallel.in_group, [placement], src_data_rank=None)
                replaced = nn.Parameter(local, requires_grad=param.requires_grad)
                copy_grad_hooks(param, replaced)
                setattr(holder, name, replaced)
        for weight in weights_of(module):
            weight.take_share(parallel.rank, parallel.size)
        module.num_experts = module.num_experts // parallel.size  # type: ignore[operator, assignment]
        module.forward = partial(_exchanged, module, parallel, module.forward)


def shard_experts(
    model: nn.Module, parallel: ExpertParallel, n_losses: int, policy: dict[str, Any], compiled: bool = False
) -> None:
    """Make each layer's experts a unit of FSDP2 over the ranks that hold the same ones. `n_losses`: ranks, or groups
    that share layers, with a loss of their own."""
    for module in [*experts_of_shares(model)]:
        if compiled:  # the rows that ranks exchange differ in every call, and code would be compiled for each number
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        shard(module, **{**policy, "mesh": parallel.among_groups})
        assert isinstance(module, FSDPModule)
        # A rank's gradient is a sum over its group's rows, so FSDP2's own factor, the number of groups, would leave it
        # `ep` times too large: losses and norms look right, and AdamW hides it.
        module.set_gradient_divide_factor(float(n_losses))
        # gloo cannot multiply while it sums. Where one group holds all experts, nothing is summed, and torch would
        # divide twice.
        module.set_force_sum_reduction_for_comms(parallel.among_groups.size(-1) > 1)


def experts_of_shares(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that `split_experts` has changed."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "func", None) is _exchanged:
            yield module


def _exchanged(
    module: nn.Module,
    parallel: ExpertParallel,
    compute: _Rows,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Stand in for a layer's experts: send rows to their experts' ranks, compute this rank's, send the results back."""
    shape, same_rows = hidden.shape, parallel.same_rows
    if same_rows is not None:  # each sends its part, or experts would compute all rows so many times
        hidden, index, weights = (
            DTensor.from_local(rows, same_rows, [Replicate()], run_check=False)
            .redistribute(placements=[Shard(0)])
            .to_local()
            for rows in (hidden, index, weights)
        )
    n_local, k = int(module.num_experts), index.shape[-1]  # type: ignore[arg-type]
    group = parallel.in_group.get_group()
    experts = index.reshape(-1)
    order = torch.argsort(experts, stable=True)
    counts = experts.new_zeros(n_local * parallel.size)
    counts.scatter_add_(0, experts, experts.new_ones(1).expand_as(experts))  # bincount has no shape without values
    arriving = torch.empty_like(counts)  # by sender, then by this rank's experts
    dist.all_to_all_single(arriving, counts, group=group)
    if parallel.computes and has_values(index):
        by_peer = torch.stack([counts, arriving]).view(2, parallel.size, n_local)
        sent, received = by_peer.sum(2).tolist()
    else:
        sent, received = parallel.assumed(shape[0], k)
        arriving = arriving.new_tensor([n // n_local + (at < n % n_local) for n in received for at in range(n_local)])
    if torch.is_grad_enabled():
        parallel.note_received(sum(received), len(experts))
    rows = exchange_rows(hidden[order // k], sent, received, group)
    local_index = torch.arange(n_local, device=rows.device).repeat(parallel.size)
    local_index = local_index.repeat_interleave(arriving, output_size=len(rows))
    with local_parameters(module):
        if len(rows):
            computed = compute(rows, local_index[:, None], rows.new_ones(len(rows), 1))
        else:
            # A rank without rows would give its experts no gradient, and the others would wait for it in the reduction:
            # it computes a row of zeros, and drops it.
            row = rows.sum(0, keepdim=True)
            computed = compute(row, local_index.new_zeros(1, 1), row.new_ones(1, 1))[:0]
    returned = exchange_rows(computed, received, sent, group)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    out: torch.Tensor = (returned[back].view(len(hidden), k, shape[-1]) * weights[..., None]).sum(1).to(hidden.dtype)
    if same_rows is not None:
        parts = DTensor.from_local(out, same_rows, [Shard(0)], run_check=False, shape=shape, stride=(shape[-1], 1))
        # Not the view that to_local returns: a model's addition in place would drop FSDP2's hook for backward.
        out = parts.redistribute(placements=[Replicate()]).to_local().clone()
    return out


@contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, the module reads this rank's part of its parameters as plain tensors: its forward knows no DTensor."""
    shown = [
        (vars(holder), name, param.to_local())
        for holder in _holders(module)
        for name, param in holder.named_parameters(recurse=False)
        if isinstance(param, DTensor)
    ]
    for attributes, name, local in shown:
        attributes[name] = local  # attributes of the object itself come before registered parameters
    try:
        yield
    finally:
        for attributes, name, _ in shown:
            del attributes[name]
