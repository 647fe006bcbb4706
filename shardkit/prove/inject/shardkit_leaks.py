"""Forwards of one micro-batch in which one document's tokens change: do they move what a model computes for another?

The change is made in the output of the token embedding, so that no target changes with it. What is compared is the
last output with a place for each token: the logits, or the hidden states below a loss that hides them.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

MOST_SOURCES = 8
"""Documents that are changed, one in each forward; all others are looked at."""
DOCUMENT_IDS = re.compile(r"(seq|sequence|doc|document)s?_?(idx|ids?)")
LENGTHS = re.compile(r"cu_?seq")


def probe(
    module: Any, args: Any, kwargs: Any, separator: int | None, rank: int,
    meet: Callable[[dict[str, Any]], dict[int, Any]],
) -> dict[str, Any]:  # fmt: skip
    """How far each document moves the others, as a record; `reason` in it if this micro-batch cannot tell.

    `separator`: the token between documents, if the user names it. `meet` gives this rank's word to all ranks and
    returns theirs: their forwards are collective, so that all make equally many.
    """
    generator = torch.random.get_rng_state()

    def forward(change: Callable[[int, Any], Any] | None, shape: Any) -> tuple[list[Any], Any]:
        torch.random.set_rng_state(generator)
        with _watched(change, shape) as seen:
            module(*args, **kwargs)
        return seen["embedded"], seen["output"]

    embedded, _ = forward(None, None)
    number = next((n for n, ids in enumerate(embedded) if not _counts_up(ids)), 0 if embedded else None)
    record: dict[str, Any] = {"documents": [], "how": "", "changes": [], "rows": None}
    shape = None
    if number is None:
        record["reason"] = "no embedding of tokens was seen"
    else:
        ids = embedded[number]
        record["rows"] = hashlib.sha256(str(ids.tolist()).encode()).hexdigest()[:12]
        shape = tuple(ids.shape) if ids.dim() == 2 else (1, ids.numel())
        named = {**named_arguments(module, args, kwargs), **{
            f"embedded {n}": numbers for n, numbers in enumerate(embedded) if n != number
        }}  # fmt: skip
        numbers, record["how"], begun = tell_apart(ids.reshape(shape), named, separator, known_separators(module))
        record["documents"] = _listed(numbers, begun)
        if not record["how"]:
            record["reason"] = "no row of tokens shows several documents"
    counts = {row: sum(document["row"] == row for document in record["documents"]) for row in range((shape or [0])[0])}
    n_documents = max(counts.values(), default=0)
    ranks = meet({"n_documents": n_documents, "reason": record.get("reason"), "rows": record["rows"]})
    # Ranks with equal rows, as under tensor parallelism, change them together.
    holders = {word["rows"]: holder for holder, word in sorted(ranks.items(), reverse=True)}
    sources = [(holder, index) for holder in holders.values() for index in range(ranks[holder]["n_documents"])]
    sources.sort()
    if len(sources) < 2 or all(word["reason"] for word in ranks.values()):
        return {**record, "reason": record.get("reason") or "no row of tokens shows several documents"}
    if len(sources) > MOST_SOURCES:
        sources = [sources[n * (len(sources) - 1) // (MOST_SOURCES - 1)] for n in range(MOST_SOURCES)]
    _, clean = forward(None, shape)

    def moved(is_changed: Any) -> Any:
        """How far each token's output moves when these tokens change; None if no output has a place for each."""

        def change(n: int, output: Any) -> Any:
            if n != number:
                return output
            std = _full(output).float().std().cpu()
            noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)) * std
            noise = (noise * is_changed.reshape(*output.shape[:-1], 1)).to(output.device, output.dtype)
            if _is_dtensor(output):
                noise = type(output).from_local(noise, output.device_mesh, output.placements, run_check=False)
            return output + noise

        _, output = forward(change, shape)
        if clean is None or output is None:
            return None
        distance = (output.float() - clean.float()).nan_to_num().norm(dim=-1)
        return (distance / clean.float().nan_to_num().norm(dim=-1).clamp_min(1e-30)).cpu()

    nothing = torch.zeros(shape or (1, 1), dtype=torch.bool)
    first_row = nothing.clone()
    first_row[0] = True
    repeated, by_row = moved(nothing), moved(first_row)
    for source_rank, index in sources:
        is_changed = nothing.clone()
        for document in record["documents"] if holders[record["rows"]] == source_rank else []:
            if document["number"] == index:
                is_changed[document["row"], document["start"] : document["stop"]] = True
        change = moved(is_changed)
        documents = [] if change is None else record["documents"]
        farthest = [float(change[d["row"], d["start"] : d["stop"]].max()) for d in documents]
        record["changes"].append([source_rank, index, farthest])
    if repeated is None:
        return {**record, "reason": "no module's output has a place for each token"}
    record["noise"] = float(repeated.max())
    record["other_rows"] = float(by_row[1:].max()) if len(by_row) > 1 else 0.0
    record["eps"] = torch.finfo(clean.dtype).eps
    return record


@contextlib.contextmanager
def _watched(change: Callable[[int, Any], Any] | None, shape: Any) -> Iterator[dict[str, Any]]:
    """One forward: what its embeddings got, `change` applied to what they gave, and the last output of that shape."""
    seen: dict[str, Any] = {"embedded": [], "output": None}
    functional = torch.nn.functional
    embed = functional.embedding

    def embedded(input: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = embed(input, *args, **kwargs)
        if input.dim() not in (1, 2):
            return output
        if _is_dtensor(output):  # parts of a sum, to each of which a change would be added
            output = output.redistribute(placements=[_replicate()] * output.device_mesh.ndim)
        seen["embedded"].append(_full(input).detach().to("cpu", copy=True))
        return output if change is None else change(len(seen["embedded"]) - 1, output)

    def after(_module: Any, _args: Any, output: Any) -> None:
        tensor = next((t for t in _tensors(output) if _has_tokens(t, shape)), None)
        if tensor is not None:
            seen["output"] = tensor.detach()

    functional.embedding = embedded
    hook = torch.nn.modules.module.register_module_forward_hook(after) if shape is not None else None
    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6; a compiled module shows no embedding
    try:
        with torch.no_grad(), stance("force_eager") if stance is not None else contextlib.nullcontext():
            yield seen
            if seen["output"] is not None:  # once, as the parts of a DTensor take a collective
                seen["output"] = _by_token(_full(seen["output"]), shape)
    finally:
        functional.embedding = embed
        if hook is not None:
            hook.remove()


def _tensors(output: Any) -> Iterator[Any]:
    if isinstance(output, torch.Tensor):
        yield output
    members = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    for member in members:
        yield from _tensors(member)


def _has_tokens(tensor: Any, shape: tuple[int, int]) -> bool:
    """Whether it has a place for each token: rows × tokens, tokens × rows, or all tokens of all rows."""
    rows, tokens = shape
    sizes = tuple(tensor.shape)
    is_flat = len(sizes) == 2 and sizes[0] == rows * tokens
    return tensor.is_floating_point() and (is_flat or (len(sizes) > 2 and sizes[:2] in (shape, (tokens, rows))))


def _by_token(tensor: Any, shape: tuple[int, int]) -> Any:
    """Such a tensor as rows × tokens × numbers."""
    if tensor.dim() > 2 and tuple(tensor.shape[:2]) != shape:
        tensor = tensor.transpose(0, 1)
    return tensor.reshape(*shape, -1)


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if _is_dtensor(tensor) else tensor


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def named_arguments(module: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Name → argument, also of those given by position: by the signature inside of wrappers that take any."""
    while any(isinstance(getattr(module, name, None), torch.nn.Module) for name in ("module", "_orig_mod")):
        module = getattr(module, "_orig_mod", None) or module.module
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        bound = {f"argument {index}": argument for index, argument in enumerate(args)}
    named: dict[str, Any] = {}
    for name, argument in {**bound, **kwargs}.items():
        if isinstance(argument, Mapping):
            named.update({str(key): member for key, member in argument.items()})
        elif isinstance(argument, list | tuple):
            named.update({f"{name} {index}": member for index, member in enumerate(argument)})
        else:
            named[name] = argument
    return {name: _full(tensor).detach().cpu() for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}


def known_separators(module: Any) -> list[int]:
    """The ids of BOS and EOS in the configuration of a model of Hugging Face's kind."""
    for inner in module.modules():
        config = getattr(inner, "config", None)
        ids = [getattr(config, name, None) for name in ("eos_token_id", "bos_token_id")]
        flat = [token for entry in ids for token in (entry if isinstance(entry, list) else [entry])]
        if any(isinstance(token, int) for token in flat):
            return [token for token in flat if isinstance(token, int)]
    return []


def tell_apart(
    ids: Any, named: Mapping[str, Any], separator: int | None, separators: Iterable[int]
) -> tuple[Any, str, Any]:
    """Each token's document (-1: none), how they are told apart ("" if no row has several), and where some begin."""
    shape = tuple(ids.shape)
    padding = named.get("attention_mask")
    is_padding = padding == 0 if padding is not None and tuple(padding.shape) == shape else torch.zeros_like(ids) > 0
    ways: list[tuple[str, Any, Any]] = []
    if separator is not None:
        ways.append((f"token {separator}", *_between(ids, [separator])))
    else:
        ways += [way for name, tensor in named.items() if (way := _by_argument(name, tensor, shape)) is not None]
        ways += [("EOS", *_between(ids, list(separators)))] if separators else []
    for how, documents, begins in ways:
        documents = documents.masked_fill(is_padding, -1)
        if len(rows := [document["row"] for document in _listed(documents, begins)]) > len(set(rows)):
            return documents, how, begins
    return torch.full(shape, -1), "", torch.zeros(shape, dtype=torch.bool)


def _between(ids: Any, separators: list[int]) -> tuple[Any, Any]:
    """Documents between separators, which belong to none."""
    is_separator = torch.isin(ids, torch.tensor(separators))
    documents = is_separator.cumsum(1)
    begins = torch.zeros_like(is_separator)
    begins[:, 1:] = is_separator[:, :-1]
    return documents.masked_fill(is_separator, -1), begins


def _by_argument(name: str, tensor: Any, shape: tuple[int, int]) -> tuple[str, Any, Any] | None:
    """The documents that an argument of the model tells apart."""
    rows, tokens = shape
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    changes = torch.ones(shape, dtype=torch.bool)
    if is_whole and LENGTHS.search(name) and tensor.numel() > 1 and int(tensor.reshape(-1)[-1]) <= rows * tokens:
        ends = tensor.reshape(-1)[1:].contiguous().long()
        documents = torch.searchsorted(ends, torch.arange(rows * tokens), right=True).reshape(shape)
        documents = documents.masked_fill(documents == len(ends), -1)
    elif is_whole and tensor.numel() == rows * tokens and DOCUMENT_IDS.fullmatch(name):
        documents = tensor.reshape(shape)
    elif is_whole and name == "attention_mask" and tuple(tensor.shape) == shape and int(tensor.max()) > 1:
        documents = tensor.masked_fill(tensor == 0, -1)
    elif tensor.shape[-2:] == (tokens, tokens) and tuple(tensor.shape) != shape and 1 < tensor.dim() < 5:
        return _by_square(name, tensor, shape)
    elif is_whole and tensor.numel() in (tokens, rows * tokens) and int(tensor.max()) > 1 and _counts_up(tensor):
        positions = tensor.reshape(-1, tokens).expand(shape)
        changes[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        # A part of a row under context parallelism may go on with a document of which another rank has the beginning.
        return f"{name} that restart", changes.cumsum(1), changes & (positions == positions.min())
    else:
        return None
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    changes[:, 0] = False
    return name, changes.cumsum(1).masked_fill(documents < 0, -1), changes


def _by_square(name: str, tensor: Any, shape: tuple[int, int]) -> tuple[str, Any, Any] | None:
    """The documents of a mask of tokens by tokens: one begins where a token does not see the one before it."""
    square = tensor.reshape(-1, *tensor.shape[-2:])
    if len(square) % shape[0] and len(square) != 1:
        return None
    square = square[:: max(len(square) // shape[0], 1)].expand(shape[0], -1, -1)
    is_seen = square if tensor.dtype == torch.bool else square >= 0 if bool((square < 0).any()) else square > 0
    seen_itself = is_seen.diagonal(dim1=1, dim2=2)
    if not bool(seen_itself.any()):  # a mask of what is hidden
        is_seen = ~is_seen
    begins = torch.zeros(shape, dtype=torch.bool)
    begins[:, 1:] = ~is_seen.diagonal(-1, 1, 2)
    return name, begins.cumsum(1), begins


def _counts_up(ids: Any) -> bool:
    """Whether numbers are positions: each one more than the last, or a new start; or the same for all tokens."""
    flat = ids.reshape(-1) if ids.dim() < 2 else ids
    ahead, behind = flat[..., 1:], flat[..., :-1]
    return bool(((ahead == behind + 1) | (ahead == flat.min())).all())


def _listed(documents: Any, begun: Any) -> list[dict[str, Any]]:
    """The documents of a micro-batch in order, those of one token left out: they may be padding."""
    listed = []
    for row, line in enumerate(documents.tolist()):
        number, start = 0, 0
        while start < len(line):
            stop = start
            while stop < len(line) and line[stop] == line[start]:
                stop += 1
            if line[start] >= 0 and stop - start > 1:
                listed.append({
                    "row": row, "number": number, "start": start, "stop": stop, "begun": bool(begun[row, start]),
                    "is_last": stop == len(line),
                })  # fmt: skip
                number += 1
            start = stop
    return listed
