"""Stands in for the ranks of a program's world that are no processes; `SHARDKIT_REHEARSAL_LIVE` names those that are.

The emulated NCCL answers for them on GPUs, once it has been told here which ranks of a group are live. Collectives of
host tensors, which gloo would carry, are answered here: live ranks exchange their parts through the store, and each
pretended rank has the part of the live rank before it. A pretended rank has no numbers that a program could decide by:
asking it for them ends the program.
"""

from __future__ import annotations

import bisect
import copy
import datetime
import functools
import hashlib
import inspect
import itertools
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

ID_BYTES = 128
"""Of an NCCL communicator's id."""


class PretendedRankError(RuntimeError):
    """A live rank asked a pretended one for what nobody can invent."""


class Meeting(PrefixStore):
    """Keys of the store through which live ranks exchange their parts."""


class Team:
    """A group with pretended ranks, seen from a live one; ranks are those of the group.

    `ranks`: global ranks of the group. `group`: the group; None while it is made.
    """

    live_ranks: tuple[int, ...] = ()
    """Of the world."""
    with_messages: set[tuple[int, ...]] = set()
    """Global ranks of each group in which this rank sent to a pretended rank, or waited for one."""
    _sequence: dict[str, int] = {}

    def __init__(self, ranks: Sequence[int], group: Any = None) -> None:
        self.ranks, self.group = list(ranks), group
        self.live = [index for index, rank in enumerate(self.ranks) if rank in self.live_ranks]

    @classmethod
    def of(cls, group: Any) -> Team | None:
        """The team of a group; None for one without pretended ranks, or of which this rank is no member."""
        if not dist.is_initialized():
            return None
        group = c10d._get_default_group() if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            return None
        try:
            team = cls(dist.get_process_group_ranks(group), group)
        except KeyError:  # a group that torch did not make
            return None
        return team if team.pretends else None

    @property
    def pretends(self) -> bool:
        return len(self.live) < len(self.ranks)

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether gloo would carry a tensor."""
        return tensor.device.type == "cpu" and any(device.type == "cpu" for device in self.group._device_types)

    def stand_in(self, rank: int) -> int:
        """The live rank whose part a rank has."""
        return self.live[max(bisect.bisect_right(self.live, rank) - 1, 0)]

    def exchange(self, part: Any) -> list[Any]:
        """The parts of all ranks; every live rank of the group must call it."""
        parts = {self.rank: part}
        if len(self.live) > 1:
            name = self.group.group_name
            number = self._sequence[name] = self._sequence.get(name, 0) + 1
            store = Meeting(f"shardkit/{name}/{number}", c10d._get_default_store())
            store.set(str(self.rank), pickle.dumps(part))  # type: ignore[arg-type]
            for rank in self.live:
                parts[rank] = pickle.loads(store.get(str(rank)))
            self._outlast_readers(store)
        return [parts[self.stand_in(rank)] for rank in range(len(self.ranks))]

    def _outlast_readers(self, store: Meeting) -> None:
        """Let the rank that serves the store go on, and perhaps end, only when all members have read the parts."""
        if dist.get_rank() == self.live_ranks[0]:
            store.wait([f"read by {rank}" for rank in self.live if rank != self.rank])
        else:
            store.set(f"read by {self.rank}", "")

    def peer(self, arguments: Mapping[str, Any], role: str, default: int | None = None) -> int | None:
        """The rank in the group that a call names by `src` or `dst`, or by `group_src` or `group_dst`."""
        if (rank := arguments.get(f"group_{role}")) is not None:
            return int(rank)
        rank = arguments.get(role)
        rank = default if rank is None else rank
        return self.ranks.index(rank) if rank in self.ranks else None

    def refuse_invention(self, call: str, peer: int, tensor: torch.Tensor) -> None:
        """Refuse to invent what a program decides by; bytes (`uint8`) are random states or another tensor's."""
        if tensor.dtype == torch.uint8 or tensor.is_floating_point() or tensor.is_complex():
            return
        live = ",".join(map(str, sorted({*self.live_ranks, self.ranks[peer]})))
        kind = str(tensor.dtype).rpartition(".")[2]
        raise PretendedRankError(
            f"rank {dist.get_rank()} asks rank {self.ranks[peer]}, which is pretended, for {tensor.numel()} numbers of "
            f"type {kind} ({_public_name(call)}): nobody can invent them; let it live: --live {live}"
        )


class FinishedWork:
    """A finished operation. It holds its tensor until it is gone, as the operation would."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.tensor = tensor

    def wait(self, timeout: Any = None) -> bool:
        self.tensor = None
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([self.tensor])
        return future


def attach(live: Sequence[int]) -> None:
    """Answer for all ranks of the world but these."""
    Team.live_ranks = tuple(live)
    for name, answer in ANSWERS.items():
        if hasattr(c10d, name):
            _replace(name, _answered(name, getattr(c10d, name), answer))
    _replace("_new_process_group_helper", _forming(c10d._new_process_group_helper))
    _replace("split_group", _splitting(c10d.split_group))
    _replace("TCPStore", _LiveStore)
    if dist.is_gloo_available():
        c10d.ProcessGroupGloo = _LiveGloo  # type: ignore[misc]
    _watch_stores(live)
    _open_symmetric_memory()


def _replace(name: str, replacement: Any) -> None:
    """Put a replacement wherever torch's distributed modules have imported a function."""
    original = getattr(dist, name, None) or getattr(c10d, name)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch.distributed") and getattr(module, name, None) is original:
            setattr(module, name, replacement)


class _LiveStore(TCPStore):
    """A store that waits for no pretended rank; the first live rank serves it."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        serves = is_master or os.environ.get("RANK") == str(Team.live_ranks[0])
        super().__init__(host_name, port, None, serves, *args, **kwargs)


class _LiveGloo(dist.ProcessGroupGloo):
    """gloo's backend; for a group with pretended ranks it connects to nobody, as this module answers."""

    forming: Team | None = None

    def __init__(self, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        if self.forming is not None and self.forming.pretends:
            store, rank, size = HashStore(), 0, 1
        super().__init__(store, rank, size, *args, **kwargs)


_serial = itertools.count()


def _options(options: Any, team: Team) -> Any:
    """NCCL's options with a network name that tells the emulated NCCL which ranks of the group are live."""
    options = copy.deepcopy(options) if options is not None else dist.ProcessGroupNCCL.Options()
    live = ",".join(map(str, team.live))
    options.config.net_name = f"shardkit-live:{len(team.ranks)}:{live};{next(_serial)}"
    if team.pretends and hasattr(options, "use_pg_for_symm_mem_rendezvous"):
        options.use_pg_for_symm_mem_rendezvous = True  # `_open_symmetric_memory` says why
    return options


def _forming(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's maker of groups, which learns of the pretended ranks."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        call = arguments.arguments
        team = Team(call["global_ranks_in_group"] or range(call["group_size"]))
        backends = c10d.BackendConfig(dist.Backend(call["backend"])).get_device_backend_map()
        is_member = not call["global_ranks_in_group"] or dist.get_rank() in call["global_ranks_in_group"]
        if is_member and "nccl" in backends.values():
            is_new = call["backend_options"] is None
            call["backend_options"] = _options(call["backend_options"], team)
            if is_new:
                call["backend_options"]._timeout = call["timeout"]
            if team.pretends and 0 not in team.live:
                for device in (device for device, backend in backends.items() if backend == "nccl"):
                    _name_communicators(call["store"], f"{call['group_name']}/", f"{device}/")
        _LiveGloo.forming = team
        try:
            return original(*arguments.args, **arguments.kwargs)
        finally:
            _LiveGloo.forming = None

    return make


def _name_communicators(store: Any, *prefixes: str) -> None:
    """Put ids into the store that the group's first rank, which is pretended, would have made."""
    for prefix in prefixes:
        store = PrefixStore(prefix, store)
    for number in range(8):
        seed = f"{os.environ['SHARDKIT_REHEARSAL']} {os.environ['MASTER_PORT']} {prefixes} {number}"
        store.set(str(number), hashlib.sha256(seed.encode()).hexdigest()[:32].ljust(ID_BYTES, "\0"))


def _splitting(original: Callable[..., Any]) -> Callable[..., Any]:
    """`split_group`, whose parts are named as groups are."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def split(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        call = arguments.arguments
        parent = call["parent_pg"] or c10d._get_default_group()
        ranks = dist.get_process_group_ranks(parent)
        part = next((sorted(part) for part in call["split_ranks"] or () if parent.rank() in part), None)
        if part is not None:
            options = call["pg_options"] or parent._get_backend(torch.device("cuda")).options
            call["pg_options"] = _options(options, Team([ranks[index] for index in part]))
        return original(*arguments.args, **arguments.kwargs)

    return split


def _answered(name: str, original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's that `answer` answers, or leaves to torch by NotImplemented, where ranks are pretended."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        team = Team.of(arguments.arguments.get("group"))
        if team is None:
            return original(*args, **kwargs)
        answered = answer(team, arguments.arguments, functools.partial(original, *args, **kwargs))
        if answered is NotImplemented:
            return original(*args, **kwargs)
        return FinishedWork() if answered is None and arguments.arguments.get("async_op") else answered

    return call


def _public_name(name: str) -> str:
    """The function of torch's that the program called, which may have called `name`."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == c10d.__file__ and not frame.f_code.co_name.startswith("_"):
            name = frame.f_code.co_name if frame.f_code.co_name != "wrapper" else name
    return name


_PAIRS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add, dist.ReduceOp.AVG: torch.add, dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or, dist.ReduceOp.BXOR: torch.bitwise_xor,
}  # fmt: skip


def _reduced(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    pair = next(function for name, function in _PAIRS.items() if name == op)
    total = functools.reduce(pair, parts)
    return total / len(parts) if op == dist.ReduceOp.AVG else total


def _all_reduce(team: Team, call: dict[str, Any], _: Any) -> Any:
    if not team.is_on_host(call["tensor"]):
        return NotImplemented
    call["tensor"].copy_(_reduced(team.exchange(call["tensor"]), call["op"]))
    return None


def _reduce(team: Team, call: dict[str, Any], _: Any) -> Any:
    if not team.is_on_host(call["tensor"]):
        return NotImplemented
    parts = team.exchange(call["tensor"])
    if team.peer(call, "dst") == team.rank:
        call["tensor"].copy_(_reduced(parts, call["op"]))
    return None


def _from_root(team: Team, call: dict[str, Any], _: Any) -> Any:
    """Answers `broadcast` and `scatter`."""
    scatters, on_host = "scatter_list" in call, team.is_on_host(call["tensor"])
    root = team.peer(call, "src", team.ranks[0])
    if root is None or (root in team.live and not on_host):
        return NotImplemented
    if root not in team.live:
        team.refuse_invention("scatter" if scatters else "broadcast", root, call["tensor"])
        return None if on_host else NotImplemented
    content = call["scatter_list"] if scatters else call["tensor"]
    sent = team.exchange(content if root == team.rank else None)[root]
    if scatters or root != team.rank:
        call["tensor"].copy_(sent[team.rank] if scatters else sent)
    return None


def _all_gather(team: Team, call: dict[str, Any], _: Any) -> Any:
    if not team.is_on_host(call["tensor"]):
        return NotImplemented
    for tensor, part in zip(call["tensor_list"], team.exchange(call["tensor"]), strict=True):
        tensor.copy_(part)
    return None


def _all_gather_into_tensor(team: Team, call: dict[str, Any], _: Any) -> Any:
    if not team.is_on_host(call["input_tensor"]):
        return NotImplemented
    parts = torch.cat([part.flatten() for part in team.exchange(call["input_tensor"])])
    call["output_tensor"].copy_(parts.view_as(call["output_tensor"]))
    return None


def _gather(team: Team, call: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    on_host = team.is_on_host(call["tensor"])
    parts = team.exchange(call["tensor"]) if on_host else []
    work = None if on_host else proceed()
    tensors = call["gather_list"] or []
    for rank, tensor in enumerate(tensors):
        if on_host:
            tensor.copy_(parts[rank])
        elif rank not in team.live:
            tensor.copy_(tensors[team.stand_in(rank)])
    return work


def _barrier(team: Team, call: dict[str, Any], _: Any) -> Any:
    if c10d._get_object_coll_device(team.group) != "cpu":
        return NotImplemented
    team.exchange(None)
    return None


def _send(team: Team, call: dict[str, Any], _: Any) -> Any:
    peer = team.peer(call, "dst")
    if peer is None or peer in team.live:
        return NotImplemented
    Team.with_messages.add(tuple(team.ranks))
    return NotImplemented if _batch_depth else FinishedWork(call["tensor"])


def _receive(team: Team, call: dict[str, Any], _: Any) -> Any:
    peer = team.peer(call, "src")
    if peer is None or peer in team.live:
        return NotImplemented
    team.refuse_invention("recv", peer, call["tensor"])
    Team.with_messages.add(tuple(team.ranks))
    return NotImplemented if _batch_depth else FinishedWork(call["tensor"])


_batch_depth: list[None] = []
"""Not empty while a batch of messages is made: NCCL's group takes them all, and drops those of pretended ranks."""


def _batch(team: Team, call: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    _batch_depth.append(None)
    try:
        return proceed()
    finally:
        _batch_depth.pop()


def _no_answer(name: str, argument: str) -> Callable[..., Any]:
    def refuse(team: Team, call: dict[str, Any], _: Any) -> Any:
        tensor = call.get(argument)
        tensor = tensor[0] if isinstance(tensor, list) and tensor else tensor
        if not isinstance(tensor, torch.Tensor) or not team.is_on_host(tensor):
            return NotImplemented
        pretended = next(rank for index, rank in enumerate(team.ranks) if index not in team.live)
        raise PretendedRankError(
            f"rank {dist.get_rank()} calls {name} on host tensors, for which rank {pretended}, which is pretended, has "
            "no answer; let every rank of its group live"
        )

    return refuse


ANSWERS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce, "reduce": _reduce, "broadcast": _from_root, "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor, "gather": _gather, "scatter": _from_root, "barrier": _barrier,
    "monitored_barrier": _barrier, "isend": _send, "irecv": _receive, "batch_isend_irecv": _batch,
    "reduce_scatter": _no_answer("reduce_scatter", "output"),
    "reduce_scatter_tensor": _no_answer("reduce_scatter_tensor", "output"),
    "all_to_all": _no_answer("all_to_all", "output_tensor_list"),
    "all_to_all_single": _no_answer("all_to_all_single", "output"),
}  # fmt: skip


PATIENCE_S = 5.0
"""How long all live ranks must have waited: another thread may write."""
LOOKS = 2
"""How often each of them must have looked meanwhile, the first time perhaps before all waited: a rank that gets no
processor may have its key and not know it."""
POLL_S = 0.05
_WAITING, _LOOKED = "shardkit/waiting/", "shardkit/looked/"


def _watch_stores(live: Sequence[int]) -> None:
    """End a wait for a key of a store that only a pretended rank would write.

    A rank that waits says so in the store, and counts how often it has looked. Once all live ranks wait, each for a key
    that is not there, nobody is left to write one.
    """
    store: Any = Store
    if len(live) < int(os.environ.get("WORLD_SIZE", "1")):
        store.get = _looking(store.get, live)
        store.wait = _looking(store.wait, live)
        store.multi_get = _looking(store.multi_get, live)


def _looking(original: Callable[..., Any], live: Sequence[int]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(store: Any, keys: Any, *timeout: datetime.timedelta) -> Any:
        names = [keys] if isinstance(keys, str) else list(keys)
        root = store
        while isinstance(root, PrefixStore):
            root = root.underlying_store
        # `dist.TCPStore` is `_LiveStore` by now.
        if isinstance(root, torch._C._distributed_c10d.TCPStore) and not store.check(names):
            _await(store, root, names, timeout[0] if timeout else store.timeout, live)
        return original(store, keys, *timeout)

    return read


def _await(store: Any, root: Any, keys: Sequence[str], timeout: datetime.timedelta, live: Sequence[int]) -> None:
    """Wait for keys until they are there, or the store's time is over, which its own read then says."""
    began, own_rank = time.monotonic(), os.environ["RANK"]
    all_wait_since: float | None = None
    looks_then: list[int] = []
    root.set(_WAITING + own_rank, "")
    try:
        while not store.check(list(keys)) and time.monotonic() - began < timeout.total_seconds():
            root.add(_LOOKED + own_rank, 1)
            if not root.check([f"{_WAITING}{rank}" for rank in live]):
                all_wait_since = None
            elif all_wait_since is None:
                all_wait_since, looks_then = time.monotonic(), _looks(root, live)
            is_over = all_wait_since is not None and time.monotonic() - all_wait_since > PATIENCE_S
            if is_over and not isinstance(store, Meeting):
                looks = zip(_looks(root, live), looks_then, strict=True)
                if all(now - then >= LOOKS for now, then in looks):
                    raise PretendedRankError(_words(next(key for key in keys if not store.check([key])), live))
            time.sleep(POLL_S)
    finally:
        root.delete_key(_WAITING + own_rank)


def _looks(root: Any, live: Sequence[int]) -> list[int]:
    """How often each live rank has looked for its keys in vain so far."""
    return [root.add(f"{_LOOKED}{rank}", 0) for rank in live]


def _words(key: str, live: Sequence[int]) -> str:
    """What is missing; a key that ends in the number of a pretended rank is likely that rank's."""
    cause = f"rank {os.environ['RANK']} waits for the key {key!r} of the store, which no live rank writes"
    number = re.search(r"(\d+)\D*$", key)
    writer = int(number[1]) if number else -1
    if writer in live or not 0 <= writer < int(os.environ["WORLD_SIZE"]):
        return f"{cause}: a pretended rank would; let the one that does live (--live)"
    named = ",".join(map(str, sorted({*live, writer})))
    return f"{cause}: by its name rank {writer}, which is pretended, would; let it live: --live {named}"


MOST_MEETINGS = 256
"""In which a workspace is made for a group, or one that is larger: torch numbers them for each process."""
_OPEN: set[str] = set()


def _open_symmetric_memory() -> None:
    """Let ranks of a group with pretended ranks make symmetric memory, in which asynchronous tensor parallelism works.

    Ranks tell each other where their memory lies, in a collective, which the emulated NCCL answers for pretended ones;
    then they wait for each other in the store, where no pretended rank would come.
    """
    memory = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    if memory is not None:
        memory.empty_strided_p2p = _opening(memory.empty_strided_p2p)
        memory.rendezvous = _opening(memory.rendezvous)


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        for name in (*args, *kwargs.values()):
            if isinstance(name, str) and name not in _OPEN:
                _open(name)
        return original(*args, **kwargs)

    return make


def _open(name: str) -> None:
    """Let no wait for a group's pretended ranks begin."""
    distributed: Any = c10d  # torch's names for groups have a type of their own
    group = distributed._resolve_process_group(name)
    team = Team.of(group)
    _OPEN.add(name)
    if team is None:
        return
    backend = group._get_backend(torch.device("cuda"))
    if not hasattr(backend.options, "use_pg_for_symm_mem_rendezvous"):
        pretended = next(rank for index, rank in enumerate(team.ranks) if index not in team.live)
        raise PretendedRankError(
            f"rank {team.ranks[team.rank]} makes symmetric memory with rank {pretended}, which is pretended: torch "
            f"{torch.__version__} looks for that rank's memory; let every rank of its group live, or take torch 2.13"
        )
    store = c10d._get_process_group_store(group)
    for number in range(MOST_MEETINGS):
        store.set(f"CUDASymmetricMemory/{number}/last_member", "")
