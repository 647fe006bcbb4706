"""Tensor parallelism: the ranks of a group share each layer's columns or rows, and compute the same samples (Megatron:
Shoeybi et al. 2019, section 3).

A model's plan names the layers and how each is cut, in the words of transformers' plans. Linear layers compute their
parts on plain tensors, and torch's public styles cut all other layers; what lies between (norms, residuals) is whole
on every rank, which computes the same values, or each has a part of every sequence there (sequence parallelism:
Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..config.capability import divisors, one_of, sharing_rows
from ..config.schema import ParallelConfig
from ..errors import ConfigError
from .compat import copy_grad_hooks, sum_over, used_in_parts
from .context import BATCH_NORMS
from .experts import experts_of, local_parameters

VOCABULARY = "vocabulary_parallel"
"""A head with this attribute computes its loss from a share of the vocabulary's rows; torch's hooks stay off it."""
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A norm over the last dimension, for some of the heads: whichever other dimension is called sharded, its weight's
    # gradient is a sum over the ranks.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=1, use_local_output=True),
}
_DIMENSIONS = {"colwise": 0, "rowwise": 1}
"""The dimension in which a linear layer's weight is cut, by the words of those that need no style of torch's."""
_UNCUT = "uncut"
"""`check_plan`'s word for a layer that every rank has whole, with the whole gradient."""
_STACKED = re.compile(r"colwise_stacked_(\d+)")
_OF_ADAPTER = re.compile(r"\.lora_[AB]\.[^.]+$")


def split_layers(model: nn.Module, mesh: DeviceMesh, parallel: ParallelConfig) -> None:
    """Leave this rank its part of each layer that the model's plan names; tied parameters stay tied."""
    words = check_plan(model, parallel)
    before = dict(model.named_parameters(remove_duplicate=False))
    styles, parts = {}, []
    for name, word in words.items():
        module = model.get_submodule(name)
        if stacked := _STACKED.fullmatch(word):
            _split_stacked(module, mesh, int(stacked[1]))
        elif hasattr(module, VOCABULARY):
            _cut(module, mesh, 0)
        elif word in _DIMENSIONS and type(module).forward is nn.Linear.forward and not parallel.tp_sequence:
            _compute_part(module, mesh, _DIMENSIONS[word])
            parts.append(name)
        elif word != _UNCUT:
            styles[name] = _STYLES[word]()
    packed = [name for name in styles if _is_packed(model.get_submodule(name))]
    if parallel.tp_sequence:
        styles |= _split_residuals(model, mesh, words)
    else:
        _share_inputs(model, mesh, [name for name in (*parts, *packed) if words[name] == "colwise"])
    for name in packed:
        _split_packed(model.get_submodule(name), mesh, styles.pop(name))
    parallelize_module(model, mesh, styles, src_data_rank=None)  # every rank has, or will draw, the same values
    for name, word in words.items():
        if word == "embedding_rowwise":
            # The sum over ranks is a tensor that waits when it is read; as the input of a compiled block it would lose
            # its gradient.
            model.get_submodule(name).register_forward_hook(lambda module, inputs, output: output.clone())
        elif word.startswith("rowwise"):
            model.get_submodule(name).register_forward_hook(_awaited)
    tied: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        old = before[name]
        if id(old) in tied:
            _retie(model, name, param, *tied[id(old)])
            continue
        tied[id(old)] = name, param
        if param is not old:
            param.requires_grad_(old.requires_grad)
            copy_grad_hooks(old, param)


def _retie(model: nn.Module, name: str, param: nn.Parameter, tied_name: str, tied: nn.Parameter) -> None:
    """Put the parameter that it was tied to in the place of `name`: cutting the two layers has made them two."""
    if getattr(param, "placements", None) != getattr(tied, "placements", None):
        raise ConfigError(
            f"{tied_name} and {name} are tied, but the model's plan (tp_plan) cuts them differently",
            "cut both by rows (embedding_rowwise and colwise_gather_output), or neither",
        )
    prefix, _, key = name.rpartition(".")
    setattr(model.get_submodule(prefix), key, tied)


def _awaited(module: nn.Module, inputs: Any, output: Any) -> None:
    """Wait for a sum over ranks, which does so when it is read: a recomputation that ends before (at the factors of a
    LoRA beside it) would never read it, and torch keeps what nobody has waited for, step after step."""
    if not torch.compiler.is_compiling() and hasattr(output, "trigger_wait"):  # compiled code waits by itself
        output.trigger_wait()


def _share_inputs(model: nn.Module, mesh: DeviceMesh, names: Iterable[str]) -> None:
    """Let layers of one module that read the same tensor (query, key and value) reduce its gradient's sum, and not each
    its part."""
    # Each of an adapter's factors reads another tensor.
    parents = {name: name if _OF_ADAPTER.search(name) else _module_of(name) for name in names}
    for prefix, group in itertools.groupby(sorted(parents, key=parents.__getitem__), parents.__getitem__):
        latest: list[Any] = [None, None]  # a tensor that some of them have read, and what they share

        def share(module: nn.Module, inputs: tuple[Any, ...], latest: list[Any] = latest) -> tuple[Any, ...]:
            if latest[0] is not inputs[0]:
                latest[:] = inputs[0], used_in_parts(inputs[0], mesh.get_group())
            return (latest[1],)

        def forget(module: nn.Module, inputs: Any, output: Any, latest: list[Any] = latest) -> None:
            latest[:] = None, None

        for name in group:
            model.get_submodule(name).register_forward_pre_hook(share)
        # Also where a recomputation ends early, by an error: the tensor would live until the next step.
        model.get_submodule(prefix).register_forward_hook(forget, always_call=True)


def _split_residuals(model: nn.Module, mesh: DeviceMesh, words: Mapping[str, str]) -> dict[str, ParallelStyle]:
    """Let each rank have a part of every sequence in the blocks, but for the modules whose layers are cut. Returns the
    styles of the layers that see such parts.

    A module's input is gathered for all of its layers, and its output scattered as it is summed: attention reads the
    length of its input, and the model that of its embeddings. So sequences are split at the first block.
    """
    blocks = _blocks_of(model, words)
    shape: list[int] = []  # the present forward's residuals', with whole sequences; recomputations come before the next

    def split(x: torch.Tensor) -> torch.Tensor:
        shape[:] = x.shape
        replicated = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return replicated.redistribute(placements=[Shard(1)]).to_local()

    def gather(x: torch.Tensor) -> DTensor:
        _, length, width = shape
        strides = (length * width, width, 1)
        # The shape: parts are not equal where ranks do not divide the length.
        part = DTensor.from_local(x, mesh, [Shard(1)], run_check=False, shape=torch.Size(shape), stride=strides)
        return part.redistribute(placements=[Replicate()])

    def before(change: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}

    top, bottom = next(iter(blocks)), next(reversed(blocks))
    model.get_submodule(top).register_forward_pre_hook(partial(before, split), with_kwargs=True)
    # Not the view that to_local returns: a model's addition in place would drop FSDP2's hook for backward.
    model.get_submodule(bottom).register_forward_hook(lambda module, inputs, output: gather(output).to_local().clone())
    for name in itertools.chain.from_iterable(blocks.values()):
        model.get_submodule(name).register_forward_pre_hook(partial(before, gather), with_kwargs=True)
    row_layers = [name for name, word in words.items() if word.startswith("rowwise")]
    inputs = {name: Replicate() if words[name] == "rowwise_split_input" else Shard(-1) for name in row_layers}
    rows = {name: RowwiseParallel(input_layouts=layout, output_layouts=Shard(1)) for name, layout in inputs.items()}
    for name in (name for name, word in words.items() if word == _UNCUT):
        if ".lora_A." in name:  # before layers that are cut by columns
            model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: (inputs[0].to_local(),))
        else:
            _sum_gradients(model.get_submodule(name), mesh)
    return rows | {name: _STYLES["replicated_with_grad_allreduce"]() for name in _norms_of(model, blocks)}


def _sum_gradients(layer: Any, mesh: DeviceMesh) -> None:
    """Let a linear layer compute a part of every sequence, and its gradient be the sum over the parts. torch's style
    for norms would gather its input: a product lays the positions of all samples in one dimension."""
    replicated = distribute_tensor(layer.weight.detach(), mesh, [Replicate()], src_data_rank=None)
    layer.weight = nn.Parameter(replicated, requires_grad=layer.weight.requires_grad)
    layer.forward = lambda x: F.linear(x, layer.weight.to_local(grad_placements=[Partial()]))


def _cut(module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    for name, param in list(module.named_parameters(recurse=False)):
        placement = Shard(dim) if dim < param.ndim else Replicate()  # the bias beside columns is added to their sum
        local = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(local, requires_grad=param.requires_grad))


def _compute_part(module: Any, mesh: DeviceMesh, dim: int) -> None:
    """Let a rank compute its rows (`dim` 0) or columns of a linear layer. Its parameters alone are DTensors, as engines
    and checkpoints want them: torch's styles make DTensors of inputs and outputs too, and dispatch each operator on
    them by Python, which took a sixth of a step at width 256 on CPUs."""
    _cut(module, mesh, dim)

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight.to_local(), None if module.bias is None else module.bias.to_local()
        if dim == 0:
            return F.linear(x, weight, bias)
        total = sum_over(F.linear(x, weight), mesh.get_group())
        return total if bias is None else total + bias

    module.forward = forward


def _split_stacked(module: nn.Module, mesh: DeviceMesh, n: int) -> None:
    """Let a rank compute its heads of `n` layers that are stacked in one (query, key and value).

    The rows are cut where they lie, so that a shard is one range of the parameter, and gathered for each call: a range
    has the rows of other heads. The gradient goes back to the ranges as a sum, in which each head has one part.
    """
    _cut(module, mesh, 0)
    rank, size = mesh.get_local_rank(), mesh.size()

    def share(param: Any) -> torch.Tensor | None:
        if param is None:
            return None
        rows: torch.Tensor = param.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return rows.view(n, size, -1, *rows.shape[1:])[:, rank].flatten(0, 1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        replicated = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        weight = share(module.weight)
        assert weight is not None
        return F.linear(replicated.to_local(grad_placements=[Partial()]), weight, share(module.bias))

    module.forward = forward


def _is_packed(module: nn.Module) -> bool:
    """Whether a layer's weight is in 4 bits (`models.quantized.QuantizedLinear`)."""
    return hasattr(module, "take_part")


def _split_packed(module: Any, mesh: DeviceMesh, style: Any) -> None:
    """Do as `style`, ColwiseParallel or RowwiseParallel, with bytes: torch's own takes them for weights that are
    trained, and multiplies by them."""
    by_rows = isinstance(style, ColwiseParallel)
    for name, param in list(module.named_parameters(recurse=False)):
        if name not in module.per_layer and (by_rows or name != "bias"):
            local = distribute_tensor(param.detach(), mesh, [Shard(0 if by_rows else 1)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(local, requires_grad=param.requires_grad))
    module.take_part(0 if by_rows else 1, mesh.get_local_rank(), mesh.size())
    reads, makes = (Replicate(), Shard(-1)) if by_rows else (Shard(-1), Partial())

    def forward(x: torch.Tensor) -> torch.Tensor:
        local = x
        if isinstance(x, DTensor) or not by_rows:  # else `_share_inputs` sums the input's gradients
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, style.input_layouts, run_check=False)
            local = x.redistribute(placements=[reads]).to_local(grad_placements=[Partial()] if by_rows else None)
        with local_parameters(module):
            made = module.product(local, module.bias if by_rows else None)
        out: torch.Tensor = (
            DTensor.from_local(made, mesh, [makes], run_check=False)
            .redistribute(placements=style.output_layouts)
            .to_local()
        )
        return out if by_rows or module.bias is None else out + module.bias.to(out.dtype)

    module.forward = forward


def vocabulary_part(weight: Any) -> tuple[int, Any]:
    """(the first id of a head's rows on this rank, the group that has all of them)."""
    mesh = weight.device_mesh
    return mesh.get_local_rank() * -(-weight.shape[0] // mesh.size()), mesh.get_group()


def check_plan(model: nn.Module, parallel: ParallelConfig) -> dict[str, str]:
    """The words of the model's plan by the names of its layers; refuses what would not train as one process does."""
    kind, size = type(model).__name__, parallel.tp
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not any(word.startswith("rowwise") for word in plan.values()):
        raise ConfigError(
            f"parallel.tp={size}: {kind} says of no block how its layers are cut (its tp_plan has no rowwise layer)",
            "remove parallel.tp, or give the model a tp_plan (docs/wide.md)",
        )
    experts = experts_of(model) if parallel.ep > 1 else {}  # ranks hold different ones, which are not cut then
    inside = tuple(f"{name}." for name in experts)
    names = [name for name, _ in model.named_modules() if not f"{name}.".startswith(inside)]
    words: dict[str, str] = {}
    for pattern, word in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matching = [name for name in names if expression.fullmatch(name)]
        if experts and not matching:
            continue  # it cuts experts, or the dense MLPs that a model of this family may have
        if word not in _STYLES and not _STACKED.fullmatch(word):
            raise ConfigError(
                f"parallel.tp={size}: {kind} cuts {pattern} as {word}, which shardkit cannot do",
                f"remove parallel.tp; a plan may say {', '.join(_STYLES)} or colwise_stacked_N",
            )
        if not matching:
            raise ConfigError(
                f"parallel.tp={size}: the plan of {kind} cuts {pattern}, and the model has no such layer",
                "correct the name in tp_plan; * stands for one part of a name",
            )
        words |= dict.fromkeys(matching, word)
    for name, word in words.items():
        _check_layer(model, name, word, size)
    parts = {part: of_part for name, word in words.items() for part, of_part in _parts(model, name, word)}
    _check_siblings(model, words, parts, size)
    for name, module in model.named_modules():
        _check_module(name or kind, module, size)
    if parallel.tp_sequence:
        _norms_of(model, _blocks_of(model, words))
    return parts


def _parts(model: nn.Module, name: str, word: str) -> Iterator[tuple[str, str]]:
    """The layers of a layer with LoRA, by peft's names, and their words: the factor on the side of the cut is cut like
    the layer, and the other one lies between what ranks have whole."""
    module: Any = model.get_submodule(name)
    if not hasattr(module, "base_layer"):
        yield name, word
        return
    yield f"{name}.base_layer", word
    cut, uncut = ("lora_A", "lora_B") if word.startswith("rowwise") else ("lora_B", "lora_A")
    for adapter in module.lora_A:
        yield f"{name}.{cut}.{adapter}", word
        yield f"{name}.{uncut}.{adapter}", _UNCUT


def _module_of(name: str) -> str:
    """The module that calls a layer, or the layer with LoRA of which it is a part."""
    return _OF_ADAPTER.sub("", name).removesuffix(".base_layer").rpartition(".")[0]


def _blocks_of(model: nn.Module, words: Mapping[str, str]) -> dict[str, list[str]]:
    """The blocks in the model's order, each with its modules whose layers are cut: attention, an MLP."""
    cut = dict.fromkeys(_module_of(name) for name, word in words.items() if word.startswith("rowwise"))
    blocks = {name: [part for part in cut if part.rpartition(".")[0] == name] for name, _ in model.named_modules()}
    return {name: parts for name, parts in blocks.items() if parts}


def _norms_of(model: nn.Module, blocks: Mapping[str, list[str]]) -> list[str]:
    """The layers of blocks that see a part of every sequence; refuses those that may need whole ones."""
    norms = []
    for block, parts in blocks.items():
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            is_in_part = any(f"{name}.".startswith(f"{part}.") for part in parts)
            is_norm = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
            is_list = name == block and isinstance(module, (nn.ModuleList, nn.ModuleDict))
            if is_in_part or not (is_list or any(True for _ in module.parameters(recurse=False))):
                continue
            if not is_norm:
                raise ConfigError(
                    f"parallel.tp_sequence=true: between the modules whose layers are cut lies {name or 'the model'} "
                    f"({type(module).__name__}), and only norms may see parts of sequences",
                    "remove parallel.tp_sequence; it needs blocks of norms, attention and MLPs",
                )
            norms.append(name)
    return norms


def _check_layer(model: nn.Module, name: str, word: str, size: int) -> None:
    """Refuse a layer that cannot be cut in `size` equal parts."""
    module: Any = model.get_submodule(name)
    module = getattr(module, "base_layer", module)
    if word == "replicated_with_grad_allreduce":
        return
    expected = nn.Embedding if word == "embedding_rowwise" else nn.Linear
    if not isinstance(module, expected):
        raise ConfigError(
            f"parallel.tp={size}: {name} is a {type(module).__name__}, and only {expected.__name__} is cut as {word}",
            "remove parallel.tp, or leave it out of the model's tp_plan",
        )
    shape: Any = (module.out_features, module.in_features) if isinstance(module, nn.Linear) else module.weight.shape
    rows, columns = shape  # not those of bytes
    if word == "embedding_rowwise" or hasattr(module, VOCABULARY):
        if size not in sharing_rows(rows):
            raise ConfigError(
                f"parallel.tp={size}: a vocabulary of {rows} leaves a rank without any row of {name}",
                one_of("parallel.tp", sharing_rows(rows)),
            )
        return
    stacked = _STACKED.fullmatch(word)
    n = columns if word.startswith("rowwise") else rows // int(stacked[1]) if stacked else rows
    parent: Any = model.get_submodule(name.rpartition(".")[0])
    width = getattr(parent, "head_dim", None)
    unit = "columns" if word.startswith("rowwise") else "rows"
    if isinstance(width, int) and word != "colwise_gather_output":
        n, unit = n // width, "heads"
    if n % size:
        raise ConfigError(
            f"parallel.tp={size} does not divide the {n} {unit} of {name}", one_of("parallel.tp", divisors(n))
        )
    block: Any = getattr(module, "block_size", 1)  # of a layer in 4 bits
    if word.startswith("rowwise") and columns // size % block:
        raise ConfigError(
            f"parallel.tp={size}: {name} is in 4 bits, and a rank would have {columns // size} of its {columns} "
            f"columns, no multiple of block_size={block}",
            f"leave it as it is: model.quantize={{bits: 4, skip: [{name.rpartition('.')[2]}]}}, or lower parallel.tp",
        )


def _check_siblings(model: nn.Module, words: Mapping[str, str], parts: Mapping[str, str], size: int) -> None:
    """Refuse a parameter beside cut layers of which the plan says nothing: it may see some of the heads, and its
    gradient would be a part of the sum."""
    split = {name.rpartition(".")[0] for name, word in words.items() if word == "colwise" or _STACKED.fullmatch(word)}
    for parent in split:
        for name, _ in model.get_submodule(parent).named_parameters(parent):
            if name.rpartition(".")[0] not in parts:
                raise ConfigError(
                    f"parallel.tp={size}: {name} lies beside layers that are cut, and the model's tp_plan says nothing "
                    "of it",
                    "remove parallel.tp, or name it in tp_plan (replicated_with_grad_allreduce for a norm of heads)",
                )


def _check_module(name: str, module: nn.Module, size: int) -> None:
    rates = {key: vars(module).get(key) for key in ("p", "dropout", "attention_dropout")}
    rate = next((rate for rate in rates.values() if isinstance(rate, float) and rate > 0), None)
    if rate is not None:
        raise ConfigError(
            f"parallel.tp={size}: {name} drops {rate:g} of its values, and ranks would drop the same ones of different "
            "heads",
            "set the dropout to 0, or remove parallel.tp",
        )
    if isinstance(module, BATCH_NORMS):
        raise ConfigError(f"parallel.tp={size}: {name} is a batch norm", "remove parallel.tp, or use another norm")
