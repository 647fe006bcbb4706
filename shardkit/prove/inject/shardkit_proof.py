"""Records what a training program computes, for `shardkit prove`; torch loads it by a `torch.backends` entry point.

`SHARDKIT_PROOF` names the folder of the records, `SHARDKIT_PROOF_PLAN` a JSON file with the steps to record. In the
parallel run a step is only observed. In the run of one process each step begins with weights of the parallel run, its
loader is fed the rows that the ranks drew, and its optimizer steps with the parallel run's gradients. No collective is
added where a rank's own piece of a tensor suffices.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import shardkit_leaks as leaks  # type: ignore[import-not-found]
import shardkit_pieces as pieces  # type: ignore[import-not-found]
import shardkit_zero as zero  # type: ignore[import-not-found]
import torch

WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)(?=\.)")
WITHOUT_PADDING = ("labels", "shift_labels")
NO_ROWS = ("attention_mask", "position_ids", "positions", "num_items_in_batch", "cache_position")
PATIENCE_S = 60.0
"""How long a rank that has its steps waits for the others, which may still need its sockets."""


@functools.cache
def canonical(name: str) -> str:
    """A parameter's name without the wrappers of DDP, FSDP, compile and checkpointing."""
    return WRAPPERS.sub("", "." + name).lstrip(".")


class ProofRecorder:
    def __init__(self, folder: str, plan: dict[str, Any]) -> None:
        self.folder, self.steps = folder, plan["steps"]
        self.source: str | None = plan.get("parallel")
        self.is_replay = bool(plan.get("replay"))  # one process runs the same command
        self.feed = {int(number): draws for number, draws in plan.get("rows", {}).items()}
        # Batches of the parallel run for a loader without row numbers, or for the calls of the outermost module
        self.fed_batches = {int(number): sources for number, sources in plan.get("batches", {}).items()}
        self.fed_calls: list[Any] = plan.get("calls", [])
        self.awaits_save = plan.get("until") == "save"
        self.n_further = 0  # steps after those of the plan
        self.n_further_before_save: int = plan.get("further", 0)  # in the parallel run
        self.sampled_above: int = plan.get("sampled_above", pieces.SAMPLED_ABOVE)
        self.grids: dict[str, Any] = {}  # name → the sampled indices of a large parameter
        self.leak: dict[str, Any] = plan.get("leak", {})  # look for documents that see each other
        self.n_calls = 0
        self.compute: str = plan.get("compute", "")  # a type of 16 bits in which modules compute, whatever the weights'
        self.batches: dict[str, list[Any]] = {}  # loader, or `calls` → packed batches
        self.batch_writer: Any = None
        self.outputs: list[Any] = []  # graph nodes of the losses that the outermost module returned
        self.pid, self.index = os.getpid(), 0
        self.roots: list[Any] = []
        self.is_inside = False
        self.notes: set[str] = set()
        self.writer: Any = None
        self.record: dict[str, Any] = {}
        self.clip_depth = 0
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.own_rates: list[tuple[dict[str, Any], Any]] = []  # group and its learning rate, while it has another
        self.stepped: set[int] = set()  # ids of the optimizers that have stepped in this step
        self.trained: set[int] = set()  # ids of the parameters that they hold
        self.draws: dict[int, list[Any]] = {}  # loader → what its sampler drew
        self.loaders: dict[int, int] = {}  # id of a loader → its number
        self.iterators: dict[int, Any] = {}  # loader → its newest iterator
        self.yielded: dict[int, int] = {}  # loader → batches that the program got
        self.after_backward: dict[str, Any] = {}  # pieces of the gradients
        self.hooked: dict[str, Any] = {}  # pieces of a backward, where an engine takes gradients out of `.grad`
        self.has_hooks: set[int] = set()
        self.sources: dict[str, dict[int, dict[str, Any]]] = {}
        self.named_sources: dict[tuple[str, str], dict[str, dict[int, Any]]] = {}
        self._begin_record()

    def _begin_record(self) -> None:
        self.record = {"raw": {}, "used": {}, "backwards": [], "rows": [], "losses": [], "norms": [], "strangers": 0}
        self.record["rates"] = []  # the learning rates of each group of each optimizer, in the order of their steps
        self.stepped, self.trained = set(), set()

    def is_active(self) -> bool:
        return os.getpid() == self.pid and self.index < len(self.steps)

    @property
    def step(self) -> dict[str, Any]:
        return self.steps[self.index] if self.index < len(self.steps) else {}

    # ---- tensors

    def named(self) -> dict[str, Any]:
        """Canonical name → parameter, each once; the largest module names it."""
        parameters: dict[str, Any] = {}
        seen: set[int] = set()
        for number, root in enumerate(sorted(self.roots, key=lambda root: -sum(1 for _ in root.parameters()))):
            for name, parameter in root.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    name = canonical(name)
                    parameters[name if name not in parameters else f"module {number}.{name}"] = parameter
        return parameters

    def engine(self) -> Any:
        """DeepSpeed's engine, if a root is one."""
        return next((root for root in self.roots if zero.is_engine(root)), None)

    @contextlib.contextmanager
    def gathered(self, with_gradients: bool, is_written: bool = False) -> Iterator[None]:
        """Inside, the parameters of FSDP1 are full, or fragments that `flat_parts` knows.

        `is_written`: what is put into them lasts.
        """
        fsdp1: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
        with contextlib.ExitStack() as stack:
            for root in self.roots:
                if fsdp1 and any(map(_is_gathered, root.modules())):
                    # A rank without a gradient sends zeros of the default type, whatever the type of the others'.
                    default = torch.get_default_dtype()
                    torch.set_default_dtype(next(root.parameters()).dtype)
                    try:
                        stack.enter_context(
                            fsdp1.FullyShardedDataParallel.summon_full_params(
                                root, with_grads=with_gradients, writeback=is_written
                            )
                        )
                    finally:
                        torch.set_default_dtype(default)
            yield

    def flat_parts(self) -> dict[int, tuple[int, int, tuple[int, ...]]]:
        """Id of a parameter of FSDP1 → where the fragment in its place begins, its length and the full shape."""
        parts = {}
        roots = [root for root in self.roots if not any(map(_is_gathered, root.modules()))]
        for module in (module for root in roots for module in root.modules()):
            if _is_fsdp1(module) and module._handle is not None:
                flat = module._handle.flat_param
                for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
                    start, length = info.intra_param_start_idx or 0, info.numel_in_shard or 0
                    parts[id(parameter)] = start, length, tuple(shape)
                for parameter, info in zip(flat._shared_params, flat._shared_param_infos, strict=True):
                    parts[id(parameter)] = parts[id(getattr(info.prim_module, info.prim_param_name))]
        return parts

    def grid(self, name: str, shape: tuple[int, ...]) -> Any:
        """The indices that are recorded of a large parameter; None: all. One process records those of the ranks."""
        if name not in self.grids:
            n_numbers = self.sampled_above // 8
            if self.source is not None:
                ranks = self._source("start", "weights").get(name, {})
                self.grids[name] = pieces.grid_like(name, shape, ranks, n_numbers)
            else:
                is_large = math.prod(shape) > self.sampled_above
                self.grids[name] = pieces.grid(name, shape, n_numbers) if is_large else None
        return self.grids[name]

    def add(self, name: str, tensor: Any, keeps_all: bool = False, equal: Any = None) -> dict[str, Any]:
        """Write a parameter's weight or gradient."""
        return self.writer.add(tensor, self.grid(name, tuple(tensor.shape)), keeps_all, equal)  # type: ignore[no-any-return]

    def weights(self, frozen: bool, is_final: bool = False) -> dict[str, Any]:
        """`is_final`: no step of one process begins with these weights, so that a sample suffices."""
        written, engine = {}, self.engine()
        with torch.no_grad(), self.gathered(False):
            copied, parts = self._copied(), self.flat_parts()
            for name, parameter in self.named().items():
                if not (frozen or parameter.requires_grad):
                    continue
                keeps_all = self.source is None and not is_final and id(parameter) not in copied
                tensor = zero.weight(parameter) if engine is not None else _fragment(parameter, parameter, parts)
                written[name] = {**self.add(name, tensor, keeps_all), "trains": parameter.requires_grad}
        return written

    def gradients(self, only: set[int] | None = None) -> Iterator[tuple[str, Any]]:
        """Name and gradient (or None) of each trainable parameter, among those with an id in `only`."""
        engine = self.engine()
        with torch.no_grad(), self.gathered(True):
            parts = self.flat_parts()
            for name, parameter in self.named().items():
                if not parameter.requires_grad or (only is not None and id(parameter) not in only):
                    continue
                if engine is not None:
                    yield name, zero.gradient(parameter)
                else:  # a rank without a part of a parameter has no gradient, and none is missing
                    gradient = parameter.grad if id(parameter) not in parts or parameter.numel() else parameter
                    yield name, gradient if gradient is None else _fragment(parameter, gradient, parts)

    def open(self, name: str) -> None:
        rank, _ = _ranks()
        self.writer = pieces.PieceWriter(os.path.join(self.folder, f"{name}.rank{rank}.bin"))

    def _source(self, name: str, field: str) -> dict[str, dict[int, Any]]:
        """The parallel run's pieces of an event, by name."""
        assert self.source is not None, "the parallel run has no source"
        if name not in self.sources:
            self.sources[name] = pieces.read(self.source, name)
        if (name, field) not in self.named_sources:
            self.named_sources[name, field] = pieces.by_name(self.sources[name], field)
        return self.named_sources[name, field]

    def _load(self, before: int | None = None) -> None:
        """Give the parameters the parallel run's weights after so many steps, or those before this step.

        Each is moved by an ulp where this step wants it. Steps beyond the recorded ones have left only the newest.
        """
        assert self.source is not None, "the parallel run has no source"
        before = int(self.step["weights"]) if before is None else before
        moved = bool(self.step.get("moved"))
        stored = self._source("start", "weights")
        if before:
            stored = {**stored, **self._source(f"step{before}", "after")}
        if self.n_further:
            stored = {**stored, **self._source("further", "after")}
        engine, missing, unverified = self.engine(), [], []
        if "step1" not in self.sources:
            self.sources["step1"] = pieces.read(self.source, "step1")
        compute = next((record["compute"] for record in self.sources["step1"].values() if record.get("compute")), "")
        compute = compute or self.compute  # one process may compute in 16 bits alone: torchtitan's pipelines do not
        generator = torch.Generator().manual_seed(self.index + 1)
        with torch.no_grad(), self.gathered(False, is_written=True):
            for name, parameter in self.named().items():
                shape = zero.shape_of(parameter)
                by_rank = pieces.unsampled(stored.get(name, {}))
                tensor = pieces.assemble(self.source, by_rank, shape)[0]
                if tensor is None:
                    missing.append([name, list(shape), parameter.requires_grad])
                    continue
                if any(pieces.is_split_by_hand(piece, shape) for piece in by_rank.values()):
                    unverified += [] if _is_equal(parameter, tensor) or self.index else [name]
                if moved and tensor.is_floating_point():
                    # An ulp in fp32 is lost where autocast or FSDP casts the weight to 16 bits.
                    tensor = _moved(tensor, getattr(torch, compute) if compute else parameter.dtype, generator)
                if engine is not None:
                    zero.set_weight(parameter, tensor)
                else:
                    target = parameter.to_local() if hasattr(parameter, "device_mesh") else parameter
                    target.data.copy_(tensor)
        self.record["missing"], self.record["unverified"] = missing, unverified

    def _force_gradients(self, only: set[int] | None) -> None:
        """Let the optimizer step with the parallel run's gradients: Adam makes a whole step of the rounding of a
        gradient near zero."""
        assert self.source is not None, "the parallel run has no source"
        used = self._source(f"step{self.step['gradients']}", "used")
        with torch.no_grad():
            for name, parameter in self.named().items():
                if parameter.grad is None or name not in used or not (only is None or id(parameter) in only):
                    continue
                grid = self.grid(name, tuple(parameter.shape))
                shape = tuple(parameter.shape) if grid is None else tuple(map(len, grid))
                tensor = pieces.assemble(self.source, used[name], shape)[0]
                if tensor is None:
                    continue
                gradient = parameter.grad
                gradient = gradient.to_local() if hasattr(gradient, "device_mesh") else gradient
                if grid is None:
                    gradient.copy_(tensor)
                else:  # the sampled numbers, which alone are compared after the step
                    gradient[torch.meshgrid(*grid, indexing="ij")] = tensor.to(gradient)

    def _force_rates(self, optimizer: Any) -> None:
        """Let the optimizer of the same command step with the ranks' learning rates until it has stepped: schedules
        that count ranks, as Accelerate's do, and rates that are scaled with them make an update no defect."""
        assert self.source is not None, "the parallel run has no source"
        number = len(self.record["rates"]) - 1
        name = f"step{int(self.step['weights']) + 1}"
        if name not in self.sources:
            self.sources[name] = pieces.read(self.source, name)
        rates = self.sources[name][min(self.sources[name])]["rates"]
        if number < len(rates) and len(rates[number]) == len(optimizer.param_groups):
            for group, rate in zip(optimizer.param_groups, rates[number], strict=True):
                self.own_rates.append((group, group["lr"]))
                group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate

    # ---- a step

    def enter(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The program calls a module to train it, and no other module's call is under way; returns its arguments."""
        if self.stepped:  # of an optimizer that waited for another one, which does not step in this step
            self.end_step()
        if not self.is_active():
            return args, kwargs
        if all(module is not root for root in self.roots):
            parameters = {id(parameter) for parameter in module.parameters()}
            if not any(parameters <= {id(parameter) for parameter in root.parameters()} for root in self.roots):
                self.roots.append(module)
                self._watch_wrappers(module)
                if self.index == 0:
                    self._start()
        if self.source is None and not self.yielded:
            self._keep_batch("calls", {"args": args, "kwargs": kwargs})
        if self.n_calls < len(self.fed_calls):
            call = self._fed("calls", self.fed_calls[self.n_calls])
            args, kwargs = tuple(call["args"]), call["kwargs"]
        self.n_calls += 1
        if self.awaits_save:
            self.watch_saves()
        if self.leak:
            self._look_for_leaks(module, args, kwargs)
        self.record["rows"].append(rows_of(args, kwargs))
        return args, kwargs

    def _look_for_leaks(self, module: Any, args: Any, kwargs: Any) -> None:
        """Change documents of this micro-batch, and end if that could tell; else the next one may hold several."""
        rank, world_size = _ranks()
        name = f"call{self.n_calls}"

        def meet(word: dict[str, Any]) -> dict[int, Any]:
            """Every rank's word: through files, as no collective is added."""
            pieces.PieceWriter(os.path.join(self.folder, f"{name}.rank{rank}.bin")).close(word)
            deadline = time.monotonic() + PATIENCE_S
            while len(words := pieces.read(self.folder, name)) < world_size:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"only ranks {', '.join(map(str, words))} called a module {self.n_calls} times")
                time.sleep(0.02)
            return words  # type: ignore[no-any-return]

        record = leaks.probe(module, args, kwargs, self.leak["separator"], rank, meet)
        pieces.PieceWriter(os.path.join(self.folder, f"leak.rank{rank}.bin")).close(record)
        if record["changes"]:
            self._end()

    def _keep_batch(self, key: str, batch: Any) -> None:
        """Write a batch that no row numbers name; None takes the place of one that holds other objects than tensors."""
        if self.batch_writer is None:
            self.batch_writer = pieces.PieceWriter(os.path.join(self.folder, f"batches.rank{_ranks()[0]}.bin"))
        try:
            packed = pieces.pack(self.batch_writer, batch)
        except (TypeError, RuntimeError):
            packed = None
        self.batches.setdefault(key, []).append(packed)

    def _fed(self, key: str, sources: list[list[int]]) -> Any:
        """The parallel run's batches of a list of (rank, index), as one."""
        assert self.source is not None, "the parallel run has no source"
        if "batches" not in self.sources:
            self.sources["batches"] = pieces.read(self.source, "batches")
        return pieces.unpack(self.source, [self.sources["batches"][rank][key][index] for rank, index in sources])

    def _start(self) -> None:
        """Record the weights before the first step; again for each module that turns up in it."""
        for root in self.roots:
            for module in root.modules():
                if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p:
                    module.p = 0.0
                    self.notes.add("dropout was set to 0")
                if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training:
                    self.notes.add("batch norm")
        if self.source is not None:
            self._load()
            if self.engine() is not None:
                self._hook_gradients()
        elif self.index == 0:
            self._check_names()
            self._check_disk()
        writer = self.writer
        self.open("start")
        with self.gathered(False):
            shapes = {
                name: {
                    "shape": zero.shape_of(p) if (grid := self.grid(name, zero.shape_of(p))) is None
                    else tuple(map(len, grid)),
                    "trains": p.requires_grad,
                }
                for name, p in self.named().items()
            }  # fmt: skip
        self.writer.close({
            "weights": self.weights(frozen=True) if self.source is None else shapes,
            "world": _ranks()[1], "group": self._data_parallel_ranks(),
            "buffers": [canonical(name) for root in self.roots for name, _ in root.named_buffers()],
            "missing": self.record.pop("missing", []), "unverified": self.record.pop("unverified", []),
        })  # fmt: skip
        if writer is None:
            self.open(self.step["name"])
        else:
            self.writer = writer

    def _check_names(self) -> None:
        """End the program if FSDP1 leaves its parameters no names."""
        modules = [module for root in self.roots for module in root.modules()]
        if any(_is_fsdp1(module) and not module._use_orig_params for module in modules):
            with open(os.path.join(self.folder, "nameless"), "w"):
                os._exit(1)

    def _check_disk(self) -> None:
        """End the program before it has written anything if the pieces of all runs do not fit the disk."""
        start = step = process = 0
        with self.gathered(False):
            parts = self.flat_parts()
            for name, parameter in self.named().items():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                shape = parts[id(parameter)][2] if id(parameter) in parts else zero.shape_of(parameter)
                n_bytes, part = math.prod(shape) * parameter.element_size(), local.numel() * local.element_size()
                if zero.is_sharded(parameter):  # in fp32
                    n_bytes = math.prod(shape) * 4
                    part = n_bytes // _ranks()[1]
                grid = self.grid(name, shape)
                sampled = 1.0 if grid is None else math.prod(map(len, grid)) / math.prod(shape)
                start += part
                if parameter.requires_grad:
                    # Gradients before and after clipping, and the weights, which are kept in full.
                    step += part * (1 + 2 * sampled)
                    process += n_bytes * sampled
        # One process writes as much, and gradients of moved weights.
        needed = int(_ranks()[1] * (start + len(self.steps) * step) + 4 * len(self.steps) * process)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            with open(os.path.join(self.folder, "disk"), "w") as file:
                json.dump({"needed": needed, "free": free}, file)
            os._exit(1)

    def _copied(self) -> set[int]:
        """Ids of the parameters that a lower rank holds, too, by their wrapper."""
        group = self._data_parallel_ranks()
        if group is None or group[0] == _ranks()[0]:
            return set()
        ddp = torch.nn.parallel.DistributedDataParallel
        modules = [m for root in self.roots for m in root.modules() if isinstance(m, ddp) or _is_gathered(m)]
        return {id(parameter) for module in modules for parameter in module.parameters()}

    def _hook_gradients(self) -> None:
        """See the gradients that DeepSpeed takes out of `.grad` while the backward runs."""
        for name, parameter in self.named().items():
            if parameter.requires_grad and id(parameter) not in self.has_hooks:
                self.has_hooks.add(id(parameter))

                def note(gradient: Any, name: str = name) -> None:
                    if self.is_active() and self.step.get("shares"):
                        self.hooked.setdefault(name, []).append(self.add(name, gradient.detach().float()))

                parameter.register_hook(note)

    def _data_parallel_ranks(self) -> list[int] | None:
        """The ranks among which a wrapper averages this rank's gradients: they are to see different rows."""
        distributed: Any = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        for root in self.roots:
            for module in root.modules():
                if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                    return sorted(distributed.get_process_group_ranks(module.process_group))
                if zero.is_engine(module):
                    group = getattr(module, "data_parallel_group", None)
                    return sorted(distributed.get_process_group_ranks(group)) if group is not None else None
                if _is_fsdp1(module) and hasattr(module, "process_group"):
                    ranks = set(distributed.get_process_group_ranks(module.process_group))
                    replicas = getattr(module, "_inter_node_pg", None)
                    if replicas is not None and len(ranks) < distributed.get_world_size():
                        ranks = set(range(distributed.get_world_size()))
                    return sorted(ranks)
                state = getattr(module, "_get_fsdp_state", None)
                group = getattr(state(), "_fsdp_param_group", None) if state is not None else None
                if group is not None:
                    return sorted(group.mesh_info.mesh.mesh.flatten().tolist())
        return None

    def before_clipping(self) -> None:
        if self.is_active() and self.roots and not self.record["raw"]:
            self.record["raw"] = {
                name: gradient if gradient is None else self.add(name, gradient) for name, gradient in self.gradients()
            }

    def before_step(self, only: set[int] | None) -> None:
        """Record the gradients that an optimizer is about to use."""
        raw, used = self.record["raw"], self.record["used"]
        for name, gradient in self.gradients(only):
            piece = None if gradient is None else self.add(name, gradient, equal=raw.get(name))
            raw.setdefault(name, piece)
            used[name] = piece
        if self.step.get("gradients") and not self.record.get("engine") and self.engine() is None:
            self._force_gradients(only)

    def end_step(self) -> None:
        """All optimizers of a step have stepped."""
        record, step = self.record, self.step
        orphans = [
            name
            for name, parameter in self.named().items()
            if parameter.requires_grad and parameter.grad is not None and id(parameter) not in self.trained
        ]
        record["orphans"] = orphans if self.trained else []
        record["after"] = (
            {}
            if step.get("gradients_only")
            else self.weights(frozen=False, is_final=self.index + 1 == len(self.steps) and not self.awaits_save)
        )
        record["notes"], record["draws"] = sorted(self.notes), self.draws
        record["yielded"], record["calls"], record["compute"] = self.yielded, self.n_calls, self.compute
        if self.batch_writer is not None:
            self.batch_writer.publish(self.batches)
        if self.index + 1 == len(self.steps) and not self.awaits_save:  # the samplers are spent by that
            record["epoch"] = self._rest_of_epoch()
        self.writer.close(record)
        self._begin_record()
        self.index += 1
        if self.index >= len(self.steps):
            if not self.awaits_save or self._has_saved():
                self._end()
            elif self.source is not None:
                self._load(len(self.steps))
            return
        self.open(self.step["name"])
        if self.source is not None:
            self._load()

    def _has_saved(self) -> bool:
        """Whether a rank has saved in an earlier step than the one that ends. In the same step another rank may
        still have a part to save, and all ranks have to end after the same step."""
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self.folder, "save")) as file:
            n_steps = file.read()
            return bool(n_steps) and int(n_steps) < self.index + self.n_further
        return False

    def after_further_step(self) -> None:
        """A step after those of the plan: the weights are kept until the program saves them."""
        self.n_further += 1
        self.watch_saves()
        if self._has_saved():
            self._end()
        if self.source is not None:
            if self.n_further == self.n_further_before_save:
                self._load(len(self.steps))
            return
        self.open("further")
        self.writer.close({"after": self.weights(frozen=False)})

    def _note_save(self) -> None:
        """Tell all ranks of the first save of any after the first step, with the planned and further steps so far."""
        if self.awaits_save and self.index and os.getpid() == self.pid:
            with contextlib.suppress(FileExistsError), open(os.path.join(self.folder, "save"), "x") as file:
                file.write(str(self.index + self.n_further))

    def watch_saves(self) -> None:
        def watched(save: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not any(isinstance(argument, io.BytesIO) for argument in args):
                    self._note_save()
                return save(*args, **kwargs)

            run.of_proof = True  # type: ignore[attr-defined]
            return run

        if not hasattr(torch.save, "of_proof"):
            torch.save = watched(torch.save)
        with contextlib.suppress(ImportError):  # programs import it when they save
            import safetensors.torch as module

            if not hasattr(module.serialize_file, "of_proof"):
                module.serialize_file = watched(module.serialize_file)

    def _end(self) -> None:
        """Wait for the other ranks, which may still need this one, and end the process."""
        rank, world_size = _ranks()
        with open(os.path.join(self.folder, f"done.rank{rank}"), "w"):
            pass
        deadline = time.monotonic() + PATIENCE_S
        ends = [os.path.join(self.folder, f"done.rank{rank}") for rank in range(world_size)]
        while time.monotonic() < deadline and not all(map(os.path.exists, ends)):
            time.sleep(0.02)
        time.sleep(0.1)
        sys.stdout.flush()
        os._exit(0)

    def _rest_of_epoch(self) -> dict[int, list[Any]]:
        """The row numbers that the samplers would still draw in this epoch; no row is loaded for that."""
        remaining: dict[int, list[Any]] = {}
        for number, iterator in self.iterators.items():
            drawn = remaining[number] = []
            sampler: Any = getattr(iterator, "_sampler_iter", None)
            with contextlib.suppress(Exception):  # samplers are the program's; the numbers are only one more look
                while sum(map(len, drawn)) < 1_000_000:
                    rows = _numbers(next(sampler))
                    if rows is None:
                        break
                    drawn.append(rows)
        return remaining

    # ---- what is watched

    def watch_optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        make = torch.optim.Optimizer.__init__

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self.optimizers.add(optimizer)

        def parameters(optimizer: Any) -> set[int]:
            return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

        def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                return note(optimizer)
            calls: list[None] = []

            def with_gradients() -> Any:
                loss = closure()
                if not calls:  # L-BFGS makes several
                    note(optimizer)
                calls.append(None)
                return loss

            return args[:1], {**kwargs, "closure": with_gradients}

        def note(optimizer: Any) -> None:
            """Record the gradients; where the step makes them by a closure, as Lightning's do, after that."""
            if not (self.is_active() and self.roots) or self.engine() is not None:
                return
            if id(optimizer) in self.stepped:
                self.end_step()
                if not self.is_active():
                    return
            named = self.named()
            ids, named_ids = parameters(optimizer), {id(parameter) for parameter in named.values()}
            with_flat_ones = any(name.endswith("_flat_param") for name in named)  # FSDP1 names others when it gathers
            self.before_step(ids if ids & named_ids and not with_flat_ones else None)
            self.record["rates"].append([float(group.get("lr", 0.0)) for group in optimizer.param_groups])
            if self.source is not None and self.is_replay:
                self._force_rates(optimizer)
            unknown = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in named_ids]
            n_strangers = sum(p.grad is not None for p in unknown)
            if ids & named_ids:
                self.record["strangers"] += n_strangers
            elif n_strangers:  # copies in fp32, which the program fills and reads by itself
                self.record["engine"] = True

        def after(optimizer: Any, *_: Any) -> None:
            for group, rate in self.own_rates:
                group["lr"] = rate
            self.own_rates.clear()
            if self.engine() is not None or not self.roots or os.getpid() != self.pid:
                return
            if not self.is_active():
                self.after_further_step()
                return
            self.stepped.add(id(optimizer))
            self.trained |= parameters(optimizer)
            named_ids = {id(p) for root in self.roots for p in root.parameters() if p.requires_grad}
            if all(id(o) in self.stepped for o in list(self.optimizers) if parameters(o) & named_ids):
                self.end_step()

        torch.optim.Optimizer.__init__ = made  # type: ignore[assignment]
        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)

    def _watch_wrappers(self, root: Any) -> None:
        """Watch what DeepSpeed and FSDP1 do by methods of their own: a step, and clipping."""
        if zero.is_engine(root):
            self._watch_engine(type(root))
        fsdp1: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
        if fsdp1 is None or hasattr(fsdp1.FullyShardedDataParallel.clip_grad_norm_, "of_proof"):
            return
        clip = fsdp1.FullyShardedDataParallel.clip_grad_norm_

        def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_clipping()
            norm = clip(module, *args, **kwargs)
            self.record["norms"].append(float(norm))
            return norm

        watched.of_proof = True  # type: ignore[attr-defined]
        fsdp1.FullyShardedDataParallel.clip_grad_norm_ = watched

    def _watch_engine(self, engine_class: Any) -> None:
        """DeepSpeed's engine owns the step: its optimizers hold flat copies, and are no torch optimizers."""
        if hasattr(engine_class.step, "of_proof"):
            return
        step = engine_class.step

        def watched(engine: Any, *args: Any, **kwargs: Any) -> Any:
            is_boundary = os.getpid() == self.pid and engine.is_gradient_accumulation_boundary()
            is_recorded = is_boundary and self.is_active()
            if is_recorded:
                self.before_step(None)
            returned = step(engine, *args, **kwargs)
            if is_recorded:
                self.record["engine"] = True
                norm = engine.get_global_grad_norm()
                self.record["norms"] += [] if norm is None else [float(norm)]
                self.end_step()
            elif is_boundary:
                self.after_further_step()
            return returned

        watched.of_proof = True  # type: ignore[attr-defined]
        engine_class.step = watched

    def watch_clipping(self) -> None:
        from torch.nn.utils import clip_grad

        def watched(clip: Callable[..., Any]) -> Callable[..., Any]:
            def run(parameters: Any, *args: Any, **kwargs: Any) -> Any:
                parameters = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
                if not self.clip_depth:
                    self.before_clipping()
                self.clip_depth += 1
                try:
                    norm = clip(parameters, *args, **kwargs)
                finally:
                    self.clip_depth -= 1
                if isinstance(norm, torch.Tensor) and not self.clip_depth and self.is_active():
                    self.record["norms"].append(_number(norm))
                return norm

            return run

        for name in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
            if hasattr(torch.nn.utils, name):
                run = watched(getattr(torch.nn.utils, name))
                for module in (clip_grad, torch.nn.utils):
                    setattr(module, name, run)

    def watch_modules(self) -> None:
        call = torch.nn.Module.__call__

        def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
            is_recomputed = torch._C._current_graph_task_id() != -1
            if self.is_inside and not self.compute and not torch.compiler.is_compiling():
                output = call(module, *args, **kwargs)
                if isinstance(output, torch.Tensor) and output.dtype in (torch.bfloat16, torch.float16):
                    self.compute = str(output.dtype).removeprefix("torch.")
                return output
            if self.is_inside or is_recomputed or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            if not self.is_active() or not any(parameter.requires_grad for parameter in module.parameters()):
                return call(module, *args, **kwargs)
            self.is_inside = True
            try:
                args, kwargs = self.enter(module, args, kwargs)
                output = call(module, *args, **kwargs)
                if self.batches.get("calls"):
                    self.outputs = [tensor.grad_fn for tensor in _scalars(output)]
                return output
            finally:
                self.is_inside = False

        torch.nn.Module.__call__ = watched  # type: ignore[method-assign]

    def watch_backward(self) -> None:
        backward = torch.autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1 or not (self.is_active() and self.roots):
                return backward(tensors, *args, **kwargs)
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                self.record["losses"].append(_number(tensors))
            if self.batches.get("calls") and not _is_computed_from(tensors, self.outputs):
                self.record["loss_outside"] = True
            shares, index = self.record["backwards"], self.index
            write_share = self._share() if self.step.get("shares") else None
            shares.append(None)
            number = len(shares) - 1
            returned = backward(tensors, *args, **kwargs)
            if write_share is not None and index == self.index:  # else an optimizer stepped in the backward
                shares[number] = write_share()
            return returned

        torch.autograd.backward = watched

    def _share(self) -> Callable[[], dict[str, Any] | None]:
        """A function that writes how a backward changes the gradients."""
        if self.engine() is not None:
            self.hooked.clear()
            return lambda: {name: {"plus": added, "minus": []} for name, added in self.hooked.items()}
        is_fsdp1 = any(_is_fsdp1(module) for root in self.roots for module in root.modules())
        if is_fsdp1 and _ranks()[1] > 1:  # its gradients take collectives, which ranks may need unlike often
            return lambda: None
        # Between forward and backward FSDP1 gathers nothing, and FSDP2's root holds parameters without gradients.
        is_fsdp = is_fsdp1 or any(
            hasattr(module, "_get_fsdp_state") for root in self.roots for module in root.modules()
        )
        parameters = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        parameters += [p for root in self.roots for p in root.parameters()]
        if not is_fsdp:
            before = self.after_backward = self._written_gradients()
        elif any(
            bool((g.to_local() if hasattr(g, "to_local") else g).any()) for p in parameters if (g := p.grad) is not None
        ):
            before = self.after_backward
        else:
            before = {}

        def write() -> dict[str, Any]:
            self.after_backward = self._written_gradients()
            return {
                name: None if piece is None
                else {"plus": [piece], "minus": [] if before.get(name) is None else [before[name]]}
                for name, piece in self.after_backward.items()
            }  # fmt: skip

        return write

    def _written_gradients(self) -> dict[str, Any]:
        """Pieces of the gradients; those of the last backward where nothing has changed since."""
        return {
            name: None if gradient is None else self.add(name, gradient, equal=self.after_backward.get(name))
            for name, gradient in self.gradients()
        }

    def watch_dropout(self) -> None:
        functional = torch.nn.functional
        dropout, attend = functional.dropout, functional.scaled_dot_product_attention

        def without_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if p and training:
                self.notes.add("dropout was set to 0")
            return dropout(input, 0.0, training, inplace)

        def attend_without_dropout(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dropout_p") or (len(args) > 4 and args[4]):
                self.notes.add("dropout was set to 0")
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
            return attend(*args, **kwargs)

        functional.dropout = without_dropout
        functional.scaled_dot_product_attention = attend_without_dropout

    def watch_loaders(self) -> None:
        from torch.utils.data import dataloader

        iterator_class: Any = dataloader._BaseDataLoaderIter
        make, draw, fetch = iterator_class.__init__, iterator_class._next_index, iterator_class.__next__

        def made(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            # The number comes before the workers, which are forked with it.
            number = iterator.of_proof = self.loaders.setdefault(id(loader), len(self.loaders))
            self.iterators[number] = iterator
            make(iterator, loader, *args, **kwargs)

        def drawn(iterator: Any) -> Any:
            number = iterator.of_proof
            draws = self.draws.setdefault(number, [])
            fed = self.feed.get(number, [])
            rows = fed[len(draws)] if len(draws) < len(fed) else draw(iterator)
            draws.append(_numbers(rows))
            return rows

        def fetched(iterator: Any) -> Any:
            batch, number = fetch(iterator), iterator.of_proof
            index = self.yielded.get(number, 0)
            self.yielded[number] = index + 1
            if self.source is None and self.is_active() and (self.draws.get(number) or [None])[0] is None:
                self._keep_batch(str(number), batch)
            fed = self.fed_batches.get(number, [])
            if index >= len(fed):
                return batch
            ranks = self._fed(str(number), fed[index])
            return ranks if self.is_replay or pieces.are_alike(batch, ranks) else batch

        iterator_class.__init__, iterator_class._next_index, iterator_class.__next__ = made, drawn, fetched


def _numbers(rows: Any) -> list[Any] | None:
    """A sampler's draw as a list of row numbers; None for data that has no numbers."""
    rows = list(rows) if hasattr(rows, "__iter__") and not isinstance(rows, str | tuple) else [rows]
    rows = [int(row) if isinstance(row, torch.Tensor) or type(row).__module__ == "numpy" else row for row in rows]
    return rows if all(isinstance(row, int | str) for row in rows) else None


def _number(tensor: Any) -> float:
    tensor = tensor.detach()
    return float(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


def _ranks() -> tuple[int, int]:
    distributed: Any = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _scalars(output: Any) -> list[Any]:
    """The tensors of one number in a module's output."""
    if isinstance(output, torch.Tensor):
        return [output] if output.numel() == 1 and output.grad_fn is not None else []
    members = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [tensor for member in members for tensor in _scalars(member)]


def _is_computed_from(loss: Any, nodes: list[Any]) -> bool:
    """Whether a loss is one of these nodes of the graph, or a multiple of it."""
    node = getattr(loss, "grad_fn", None)
    for _ in range(8):
        if node is None or node in nodes:
            return node is not None
        inputs = [before for before, _ in node.next_functions if before is not None]
        node = inputs[0] if len(inputs) == 1 and re.match(r"(Mul|Div|Neg|To|Mean)", type(node).__name__) else None
    return False


def _is_fsdp1(module: Any) -> bool:
    return type(module).__name__ == "FullyShardedDataParallel"


def _is_gathered(module: Any) -> bool:
    """Whether a module of FSDP1 has to gather its parameters so that they have names and places."""
    if not _is_fsdp1(module) or module._handle is None:
        return False
    return not (module._use_orig_params and module._handle.uses_sharded_strategy)


def _fragment(parameter: Any, tensor: Any, parts: dict[int, tuple[int, int, tuple[int, ...]]]) -> Any:
    """A parameter's weight or gradient as the fragment that FSDP1 leaves in its place, or as it is."""
    start, length, shape = parts.get(id(parameter), (0, -1, ()))
    return pieces.Fragment(tensor.reshape(-1), start, shape) if tensor.numel() == length else tensor


def _is_equal(parameter: Any, tensor: Any) -> bool:
    local = parameter.detach()
    local = (local.to_local() if hasattr(local, "to_local") else local).to("cpu")
    return local.shape == tensor.shape and bool(torch.equal(local, tensor.to(local.dtype)))


def _moved(tensor: Any, dtype: Any, generator: Any) -> Any:
    """Each number moved up or down to the next that its type holds."""
    side = torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, -torch.inf, torch.inf)
    narrow = tensor.to(dtype) if dtype in (torch.bfloat16, torch.float16) else tensor
    return torch.nextafter(narrow, side.to(narrow.dtype)).to(tensor.dtype)


def rows_of(args: Any, kwargs: Any) -> list[dict[str, Any]]:
    """For each row of a forward's input: a hash without padding, one without labels, the number of targets, its sorted
    tokens by argument, and the tokens at the end of which some were taken for padding."""
    named: list[tuple[str, Any]] = []

    def collect(name: str, argument: Any) -> None:
        if isinstance(argument, torch.Tensor):
            if argument.dim() and argument.numel() and not argument.is_complex():
                named.append((name, argument.detach()))
        elif isinstance(argument, dict):
            for key, member in argument.items():
                collect(str(key), member)
        elif isinstance(argument, list | tuple):
            for member in argument:
                collect(name, member)

    for index, argument in enumerate(args):
        collect(f"argument {index}", argument)
    for name, argument in kwargs.items():
        collect(name, argument)
    named = [(name, (t.full_tensor() if hasattr(t, "full_tensor") else t).to("cpu")) for name, t in named]
    mask = dict(named).get("attention_mask")
    if mask is None:  # by position, or under another name
        mask = next((t for _, t in named if _is_mask(t, [tensor for _, tensor in named])), None)
    named = [(name, tensor) for name, tensor in named if name not in NO_ROWS and tensor is not mask]
    # Pipelines are given their tokens twice, for the first stage and for masks.
    named = [
        (name, tensor)
        for at, (name, tensor) in enumerate(named)
        if name in WITHOUT_PADDING or not any(torch.equal(tensor, earlier) for _, earlier in named[:at])
    ]
    n_rows = named[0][1].size(0) if named else 0
    rows = []
    for row in range(n_rows):
        digest, inputs, targets = hashlib.blake2b(digest_size=6), hashlib.blake2b(digest_size=6), None
        tokens: dict[bool, dict[str, list[int]]] = {True: {}, False: {}}  # of labels, and others
        cut: dict[str, int] = {}
        for name, tensor in named:
            if tensor.size(0) != n_rows:
                continue
            part = tensor[row]
            if name in WITHOUT_PADDING and part.dim():  # one number is a row's class
                targets = int((part[1:] != -100).sum()) if name == "labels" else int((part != -100).sum())
                part = part[part != -100]
            elif mask is not None and mask.dim() == 2 and tensor.shape[:2] == mask.shape:
                part = part[mask[row].bool()]
            if not part.is_floating_point() and part.dim() == 1 and part.numel():
                if mask is None:  # the run of equal tokens at the end may be padding
                    unequal = (part != part[-1]).nonzero()
                    end = int(unequal[-1]) + 2 if len(unequal) else 1
                    if end < len(part):
                        cut[name] = int(part[-1])
                    part = part[:end]
                tokens[name in WITHOUT_PADDING][name] = sorted(part.tolist())
            content = part.contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(content)
            if name not in WITHOUT_PADDING:
                inputs.update(content)
        rows.append({
            "row": digest.hexdigest(), "inputs": inputs.hexdigest(), "targets": targets,
            "tokens": tokens[False] or tokens[True], "cut": cut,
        })  # fmt: skip
    return rows


def _is_mask(tensor: Any, tensors: list[Any]) -> bool:
    if tensor.dim() != 2 or not bool(((tensor == 0) | (tensor == 1)).all()) or not bool((tensor == 1).any()):
        return False
    return any(t is not tensor and t.shape[:2] == tensor.shape for t in tensors)


def attach() -> None:
    """An entry point of `torch.backends`, called when torch has been imported."""
    if "SHARDKIT_PROOF" not in os.environ:
        return
    with open(os.environ["SHARDKIT_PROOF_PLAN"]) as file:
        recorder = ProofRecorder(os.environ["SHARDKIT_PROOF"], json.load(file))
    recorder.watch_optimizers()
    recorder.watch_clipping()
    recorder.watch_modules()
    recorder.watch_backward()
    recorder.watch_dropout()
    recorder.watch_loaders()

    def in_child() -> None:
        if not recorder.iterators and not recorder.roots:  # a rank that a launcher forks, no worker of a loader
            recorder.pid = os.getpid()

    os.register_at_fork(after_in_child=in_child)
