"""The ranks of a rehearsal that are processes: parsed, started, and answered for by pretended ones on host tensors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.errors import LaunchError
from shardkit.rehearse.build import INJECT
from shardkit.rehearse.ranks import MOST_DISCOVERED, RehearsedWorld, command_of_rank, parse_ranks
from shardkit.rehearse.rehearsal import START_LIVE


def test_a_live_rank_has_the_variables_of_its_place_in_the_world() -> None:
    ranks = parse_ranks(128, None, "64,0")
    assert ranks == RehearsedWorld(128, 8, (0, 64), fixed=True)
    assert ranks.variables()[1] == {
        "RANK": "64", "WORLD_SIZE": "128", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "8",
        "NODE_RANK": "8", "EMUCUDA_MACHINE": "8",
    }  # fmt: skip


def test_ranks_are_discovered_unless_the_user_named_them() -> None:
    ranks = parse_ranks(4, None, None)
    assert (ranks.per_node, ranks.live) == (4, (0,))
    assert ranks.may_grow(2) and ranks.with_live(2).live == (0, 2)
    assert not ranks.may_grow(None) and not ranks.may_grow(0) and not parse_ranks(4, None, "0").may_grow(2)
    assert not RehearsedWorld(64, 8, tuple(range(MOST_DISCOVERED))).may_grow(9)


@pytest.mark.parametrize(
    ("world_size", "per_node", "live", "cause"),
    [
        (12, None, None, "12 ranks do not fill machines of 8 GPUs"),
        (16, 8, "0,16", "of 16 ranks, 0 to 15"),
        (16, 8, "zero", "--live zero is no list of ranks"),
        (16, 8, "-1", "of 16 ranks, 0 to 15"),
        (128, 8, ",".join(map(str, range(65))), "at most 64 can be live"),
    ],
)
def test_ranks_that_cannot_be_are_refused(world_size: int, per_node: int | None, live: str | None, cause: str) -> None:
    with pytest.raises(LaunchError, match=cause):
        parse_ranks(world_size, per_node, live)


def test_a_launcher_is_refused_and_a_script_is_run_by_python() -> None:
    assert command_of_rank(["train.py", "--lr", "1"]) == ["python", "train.py", "--lr", "1"]
    assert command_of_rank(["python", "-m", "train"]) == ["python", "-m", "train"]
    for command in (["/x/bin/torchrun", "train.py"], ["python", "-m", "torch.distributed.run", "train.py"]):
        with pytest.raises(LaunchError, match="starts ranks by itself"):
            command_of_rank(command)


@pytest.mark.parametrize(("code", "expected"), [("pass", 0), ("sys.exit(int(os.environ['RANK']))", 3)])
def test_the_first_rank_that_fails_ends_the_start(code: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "ranks.json").write_text(json.dumps(RehearsedWorld(8, 8, (0, 3)).variables()))
    program = [sys.executable, "-c", f"import os, sys; assert int(os.environ['MASTER_PORT']); {code}"]
    done = subprocess.run([sys.executable, str(START_LIVE), str(tmp_path / "ranks.json"), *program])
    assert done.returncode == expected


TALK = """
import os, time, torch, torch.distributed as dist
import shardkit_pretended
live = [int(rank) for rank in os.environ["SHARDKIT_REHEARSAL_LIVE"].split(",")]
shardkit_pretended.attach(live)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert world == 4
names = [None] * world
dist.all_gather_object(names, f"rank {rank}")
assert names == ["rank 0", "rank 0", "rank 2", "rank 2"], names
total = torch.tensor([rank])
dist.all_reduce(total)
assert total.item() == 4, total
largest = torch.tensor([rank])
dist.all_reduce(largest, dist.ReduceOp.MAX)
assert largest.item() == 2
gathered = [None] * world if rank == 0 else None
dist.gather_object(rank, gathered, dst=0)
assert gathered in (None, [0, 0, 2, 2])
objects = ["from 2"] if rank == 2 else [None]
dist.broadcast_object_list(objects, src=2)
assert objects == ["from 2"]
pieces = [torch.full((2,), float(index)) for index in range(world)] if rank == 0 else None
piece = torch.zeros(2)
dist.scatter(piece, pieces, src=0)
assert piece.tolist() == [rank, rank]
into = torch.zeros(world)
dist.all_gather_into_tensor(into, torch.tensor([float(rank)]))
assert into.tolist() == [0, 0, 2, 2]
dist.barrier()
dist.monitored_barrier()
work = dist.all_reduce(torch.ones(1), async_op=True)
assert work.wait() and work.is_completed()
pair = dist.new_group([2, 3])
if rank == 2:
    dist.send(torch.ones(1), 3)
    there = torch.ones(1)
    dist.all_reduce(there, group=pair)
    assert there.item() == 2 and dist.get_world_size(pair) == 2
    try:
        dist.broadcast_object_list([None], src=3, group=pair)
    except shardkit_pretended.PretendedRankError as error:
        print(error)
    try:
        dist.all_to_all_single(torch.ones(2), torch.ones(2), group=pair)
    except shardkit_pretended.PretendedRankError as error:
        print(error)
    read = shardkit_pretended.Meeting.get  # late, while rank 0, which serves the store, has nothing more to do
    shardkit_pretended.Meeting.get = lambda *args: time.sleep(1) or read(*args)
dist.barrier()
"""


def live_ranks(program: str, live: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each live rank of four, over gloo."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the rank that asks for the port gets it, too
        held.bind(("127.0.0.1", 0))
        env = {
            **os.environ, "PYTHONPATH": str(INJECT), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(held.getsockname()[1]), "WORLD_SIZE": "4", "SHARDKIT_REHEARSAL_LIVE": live,
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        env.pop("SHARDKIT_REHEARSAL", None)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program], env={**env, "RANK": rank}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in live.split(",")
        ]  # fmt: skip
        return [(rank.returncode, *output) for rank in ranks for output in [rank.communicate(timeout=120)]]


@pytest.mark.slow
def test_pretended_ranks_answer_on_host_tensors_with_the_part_of_the_live_rank_before_them() -> None:
    ended = live_ranks(TALK, "0,2")
    assert [code for code, *_ in ended] == [0, 0], ended
    refusals = ended[1][1].splitlines()
    asks = "rank 2 asks rank 3, which is pretended, for 1 numbers of type int64 (broadcast_object_list)"
    assert refusals[0] == f"{asks}: nobody can invent them; let it live: --live 0,2,3"
    assert refusals[1].startswith("rank 2 calls all_to_all_single on host tensors, for which rank 3")


READS = """
import os, torch.distributed as dist
import shardkit_pretended
live = [int(rank) for rank in os.environ["SHARDKIT_REHEARSAL_LIVE"].split(",")]
shardkit_pretended.attach(live)
dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
if rank == 0:
    store.set("from 0", "there")
assert store.get("from 0") == b"there"
store.wait(["from 0"])
try:
    store.get("ready/3") if rank == 0 else dist.all_gather_object([None] * 4, rank)
except shardkit_pretended.PretendedRankError as error:
    print(error)
    store.set("ready/3", "told")
    assert store.get("ready/3") == b"told"
    dist.all_gather_object([None] * 4, rank)
"""


@pytest.mark.slow
@pytest.mark.parametrize("live", ["0", "0,2"])
def test_a_key_that_only_a_pretended_rank_would_write_is_named_at_once(live: str) -> None:
    ended = live_ranks(READS, live)
    assert {code for code, *_ in ended} == {0}, ended
    assert ended[0][1].startswith("rank 0 waits for the key 'ready/3' of the store, which no live rank writes")
    assert f"rank 3, which is pretended, would; let it live: --live {live},3" in ended[0][1]
    assert not any(out for _, out, _ in ended[1:])
