"""The automatic plan: what it may change, that it finds the best, how it explains itself, and what it writes."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.cli.__main__ import main
from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.errors import ConfigError, ShardkitError
from shardkit.plan.model.cost import SPEED_ERROR, TimeEstimate
from shardkit.plan.model.estimate import MemoryEstimate, PeakEstimate, PhaseEstimate
from shardkit.plan.search import search as searching
from shardkit.plan.search.search import (
    Search,
    SearchResult,
    combinations,
    micro_batches,
    pareto,
    ranks_to_a_sample,
)
from shardkit.plan.search.show import reasons, show_found
from shardkit.plan.target import Target, choose_target

GIB = 2**30


def load(more: Any = ()) -> RunConfig:
    return load_config(
        None, ["model.preset=debug", "train.micro_batch_size=4", "train.grad_accum_steps=2", *more]
    ).config


def target(gpus: int = 8, per_node: int = 8, gpu: str = "h100") -> Target:
    return choose_target(load(), gpus, per_node, gpu)


class TestAxes:
    def names(self, **changes: Any) -> set[str]:
        return {one.engine for one in combinations(load(), target(**changes), ())}

    def test_one_gpu_has_offload_and_no_sharding(self) -> None:
        names = self.names(gpus=1)
        assert "single" in names and "zero2, optimizer on the CPU" in names
        assert not names & {"ddp", "fsdp", "hsdp", "zero1"}

    def test_shard_groups_stay_inside_machines_or_join_some(self) -> None:
        assert not [name for name in self.names(gpus=8) if name.startswith("hsdp")]
        groups = {name for name in self.names(gpus=32) if name.startswith("hsdp")}
        assert groups == {"hsdp (8 to a shard group)", "hsdp (16 to a shard group)"}

    def test_bf16_is_offered_where_the_card_has_it(self) -> None:
        assert {one.precision for one in combinations(load(), target(), ())} == {"fp32", "bf16"}
        assert {one.precision for one in combinations(load(), target(gpu="v100"), ())} == {"fp32"}

    def test_what_was_given_stays(self) -> None:
        config = load(["parallel.strategy=fsdp", "activation.policy=full"])
        found = combinations(config, target(), {"parallel.strategy", "activation.policy"})
        assert {(one.engine, one.policy) for one in found} == {
            ("fsdp", "full"), ("fsdp, parameters on the CPU", "full")
        }  # fmt: skip
        assert not any("strategy" in item or "policy" in item for one in found for item in one.settings)

    def test_another_engine_does_not_inherit_keys_of_the_first(self) -> None:
        config = load(["parallel.strategy=fsdp", "parallel.prefetch=3", "parallel.reshard_after_forward=false"])
        for one in combinations(config, target(), ()):
            resolved = load([*("parallel.strategy=fsdp", "parallel.prefetch=3"), *one.settings]).parallel
            assert resolved.prefetch == (3 if resolved.strategy == "fsdp" else 1)

    def sizes(self, *given: str, fixed: str = "", **changes: Any) -> list[tuple[int, ...]]:
        found = combinations(load(given), target(**changes), fixed.split())
        assert all(one.sizes == (1, 1, 1) for one in found if one.engine == "single")
        return sorted({one.sizes[:1] for one in found})  # of `parallel.cp`

    def test_ranks_share_samples_where_nodes_heads_and_sequences_can_be_dealt_out(self) -> None:
        heads = load().model.n_heads
        assert self.sizes() == [(n,) for n in (1, 2, 4, 8) if heads % n == 0]
        assert self.sizes(gpus=1) == self.sizes(fixed="parallel.cp") == self.sizes("train.seq_len=127") == [(1,)]
        wide = ["model.n_heads=16", "model.d_model=64"]
        assert self.sizes(*wide, gpus=16) == [(1,), (2,), (4,), (8,)]
        assert self.sizes(*wide, "parallel.cp_across_nodes=true", gpus=16)[-1] == (16,)
        one_sample = ["train.micro_batch_size=1", "train.grad_accum_steps=1", "parallel.cp=8", *wide]
        assert self.sizes(*one_sample, fixed="parallel.tp") == [(8,)], "a step of one sample"
        given = {"parallel.cp", "parallel.tp", "train.micro_batch_size"}
        assert {one.sizes for one in combinations(load(["parallel.cp=2"]), target(), given)} == {(2, 1, 1)}
        changed = {
            one.settings for one in combinations(load(["parallel.cp=2"]), target(), ()) if one.sizes == (4, 1, 1)
        }
        assert all("parallel.cp=4" in settings for settings in changed)
        split = load(["parallel.tp=2", "parallel.tp_sequence=true"])
        for one in combinations(split, target(), ()):
            assert ("parallel.tp_sequence=false" in one.settings) is (one.sizes[1] == 1), "of whom shares layers"
        with pytest.raises(ConfigError, match=r"parallel\.cp=3 ranks share their samples"):
            combinations(load(["parallel.cp=3"]), target(), ())

    def test_ranks_of_a_node_share_layers_where_an_engine_can(self) -> None:
        tried = combinations(load(), target(gpus=16, per_node=8), {"parallel.cp"})
        by_engine = {engine: {one.sizes[1] for one in tried if one.engine == engine} for engine in ("fsdp", "zero3")}
        assert by_engine == {"fsdp": {1, 2, 4, 8}, "zero3": {1}}

    def test_ranks_of_a_node_share_experts_of_a_model_that_has_some_and_keep_their_samples(self) -> None:
        model = "{model_type: mixtral, num_local_experts: 4, num_hidden_layers: 2, hidden_size: 64}"
        experts = load_config(None, ["task.name=hf_causal_lm", f"model.hf={model}"]).config
        tried = combinations(experts, target(gpus=16, per_node=8), {"parallel.cp", "parallel.tp"})
        by_engine = {engine: {one.sizes for one in tried if one.engine == engine} for engine in ("fsdp", "ddp")}
        assert by_engine == {"fsdp": {(1, 1, 1), (1, 1, 2), (1, 1, 4)}, "ddp": {(1, 1, 1)}}
        assert {ranks_to_a_sample(one.sizes) for one in tried} == {1}
        assert {"fsdp", "fsdp, ep 2"} <= {one.layout for one in tried}

    def test_a_step_keeps_its_samples(self) -> None:
        assert micro_batches(load(), target(), ()) == (8, [1, 2, 4, 8])
        even = load(["train.global_batch_size=48", "train.grad_accum_steps=null", "train.micro_batch_size=6"])
        assert micro_batches(even, target(), ()) == (6, [1, 2, 3, 6])
        assert micro_batches(load(), target(), {"train.micro_batch_size"}) == (8, [4])
        assert micro_batches(load(), target(), {"train.grad_accum_steps"}) == (8, [4])
        uneven = load(["train.global_batch_size=49", "train.grad_accum_steps=null", "train.micro_batch_size=7"])
        with pytest.raises(ConfigError, match=r"train\.global_batch_size"):
            micro_batches(uneven, target(), ())


def run(args: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    return ended.value.code


class FakePlanner:
    """Memory and time as functions of what is set: the search is to find the best of them, not to know them."""

    costs: dict[str, tuple[float, float, float, float]] = {}
    refused = 0  # the size of `parallel.cp` that the model cannot have

    def __init__(self, target: Target) -> None:
        self.target = target

    def __enter__(self) -> FakePlanner:
        return self

    def __exit__(self, *_: object) -> None: ...

    def predict(self, config: RunConfig, *, timed: bool, rough: bool = False) -> MemoryEstimate:
        state, per_sample, per_pass, seconds = self.costs[config.parallel.strategy + config.activation.policy]
        cp, size = config.parallel.cp, config.train.micro_batch_size
        if cp == self.refused:
            raise ConfigError(f"parallel.cp={cp} is refused", "")
        per_sample, seconds = per_sample / cp, seconds / cp
        batch = config.train.global_batch_size
        passes = batch // (self.target.world_size // cp) // size
        needed = round(max(state, state / 2 + per_sample * size) * GIB)  # the peak is in the step, or in backward
        exchanges = passes * size * 1e-3 * (cp - 1)
        time = passes * (per_pass + seconds * size)
        peak = PeakEstimate(needed, needed, needed, "backward", "")
        phases = {
            "update": PhaseEstimate(round(state * GIB), 0, 0),
            "backward": PhaseEstimate(round((state / 2 + per_sample * size) * GIB), 0, 0),
        }
        return MemoryEstimate(
            "h100", self.target.world_size, 0, 1, 1, "cuda", phases, peak, needed, 0, {}, device_memory=80 * GIB,
            time=TimeEstimate(
                time + exchanges, {"compute": time, "links": 0.0, "exchanges": exchanges}, 1.0, batch * 10.0, False,
                cp * GIB,
            ),
        )  # fmt: skip


class StuckPlanner(FakePlanner):
    """Never answers the second question; `stop` ends the wait, as killing its process does."""

    asked, is_stuck = itertools.count(), threading.Event()

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.stopped = threading.Event()

    def predict(self, config: RunConfig, *, timed: bool, rough: bool = False) -> MemoryEstimate:
        if next(self.asked) > 0:
            self.is_stuck.set()
            assert self.stopped.wait(60), "nobody stopped it"
            raise ShardkitError("the planning process was ended", "")
        return super().predict(config, timed=timed, rough=rough)

    def stop(self) -> None:
        self.stopped.set()


KEYS = [
    s + p for s in ("ddp", "fsdp", "zero1", "zero2", "zero3") for p in ("none", "selective_op", "selective", "full")
]

FIXED = {"parallel.cp", "parallel.tp", "precision.mode", "parallel.offload_optimizer", "parallel.offload_param"}


def cut_short(monkeypatch: pytest.MonkeyPatch, told: Callable[[str], None], budget: float | None) -> SearchResult:
    """A search whose first trace is answered, and no other."""
    monkeypatch.setattr(searching.os, "cpu_count", lambda: 1)
    StuckPlanner.costs = dict.fromkeys(KEYS, (1.0, 0.1, 0.0, 0.01))
    StuckPlanner.asked, StuckPlanner.is_stuck = itertools.count(), threading.Event()
    monkeypatch.setattr(searching, "Planner", StuckPlanner)
    fours = lambda more=(): load(["train.global_batch_size=64", "train.grad_accum_steps=null", *more])  # noqa: E731
    with Search(fours, target(), {*FIXED, "train.micro_batch_size"}, None, told, budget) as search:
        return search.run()


def test_ctrl_c_ends_the_traces_that_are_under_way_and_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def interrupted(line: str) -> None:
        said.append(line)
        raise KeyboardInterrupt

    found = cut_short(monkeypatch, interrupted, None)
    assert (found.stopped, len(found.left_out), found.best.combination.engine) == ("interrupted", 19, "ddp")
    assert "best so far: ddp; checkpointing none; fp32; micro-batch 4 × 2: " in said[0]
    shown = show_found("x", found, target())
    assert "interrupted: 19 combinations were not planned" in shown
    assert "not tried at all: fsdp; zero1; zero2; zero3" in shown
    assert "not tried: ddp with checkpointing selective_op (fp32), selective (fp32), full (fp32)" in shown
    assert "traced roughly only" in shown


def test_when_its_time_is_over_a_search_answers_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = [0.0]

    def told(line: str) -> None:
        said.append(line)
        assert StuckPlanner.is_stuck.wait(60)
        now[0] = 119.9

    monkeypatch.setattr(searching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = cut_short(monkeypatch, told, 120.0)
    assert (found.stopped, len(found.left_out), found.best.combination.engine) == ("out of time after 120 s", 19, "ddp")
    assert " s for the rest; the search ends within 120 s" in said[0]


COST = st.tuples(st.floats(1, 120), st.floats(0.1, 30), st.floats(0, 0.1), st.floats(0.01, 0.1))


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(KEYS, COST)), st.sampled_from([None, 0.2]))
def test_nothing_that_fits_is_faster_than_what_is_chosen(
    costs: dict[str, tuple[float, float, float, float]], margin: float | None
) -> None:
    FakePlanner.costs = costs
    where = target()
    room = where.device_memory / 1.03 if margin is None else where.device_memory * (1 - margin)

    def exact(key: str, size: int) -> tuple[int, float]:
        state, per_sample, per_pass, seconds = costs[key]
        needed = round(max(state, state / 2 + per_sample * size) * GIB)
        return needed, 8 * 8 * 10 / (8 // size * (per_pass + seconds * size))

    every = [exact(key, size) for key in KEYS for size in (1, 2, 4, 8)]
    able = [speed for needed, speed in every if needed <= room]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "Planner", FakePlanner)
        with Search(load, where, FIXED, margin, lambda said: None) as search:
            if not able:
                with pytest.raises(ConfigError, match="no setting fits"):
                    search.run()
                return
            found = search.run()
    assert found.best.estimate is not None and found.best.needed <= room
    assert found.best.estimate.verdict == "fits"
    assert found.best.tokens_per_s == pytest.approx(max(able))
    assert all(setting.estimate is not None for setting in found.front)
    assert list(found.front) == list(pareto(found.fitting))
    assert "best" in show_found("x", found, where)


def test_it_says_why_not_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePlanner.costs = dict.fromkeys(KEYS, (500.0, 1.0, 0.0, 1.0)) | {
        "ddpnone": (100.0, 1.0, 0.0, 0.01),  # fastest, too large
        "fsdpnone": (20.0, 20.0, 0.01, 0.02),  # fits with 2 samples
        "fsdpfull": (20.0, 2.0, 0.01, 0.03),
    }
    monkeypatch.setattr(searching, "Planner", FakePlanner)
    with Search(load, target(), FIXED, 0.05, lambda said: None) as search:
        found = search.run()
    assert (found.best.combination.engine, found.best.combination.policy, found.best.micro_batch) == ("fsdp", "none", 2)
    why = "\n".join(reasons(found))
    assert "ddp: does not fit: 100.00 GiB, 133% of what may be used, at the least" in why
    assert "checkpointing full: 20% slower" in why
    assert "micro-batch 4: does not fit: 90.00 GiB" in why
    assert "micro-batch 1: 17% slower" in why


def test_ranks_share_samples_only_where_others_hardly_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "Planner", FakePlanner)
    monkeypatch.setattr(FakePlanner, "refused", 8)
    too_large = dict.fromkeys(KEYS, (500.0, 1.0, 0.0, 1.0))
    wide = lambda more=(): load(["model.n_heads=8", *more])  # noqa: E731
    for per_sample, best, words in (
        (100.0, 2, ["cp 1: does not fit: 110.00 GiB", "cp 8: parallel.cp=8 is refused"]),
        (
            20.0,
            1,
            [
                "cp 2: 9% slower: layers wait for other ranks; a rank sends 2.00 GiB a step in place of 1.00 GiB",
                "cp 4: 38% slower: layers wait for",
            ],
        ),
    ):
        FakePlanner.costs = too_large | {"fsdpnone": (20.0, per_sample, 0.0, 0.02)}
        with Search(wide, target(), FIXED - {"parallel.cp"}, 0.05, lambda said: None) as search:
            found = search.run()
        chosen = wide(found.best.settings)
        assert (chosen.parallel.strategy, chosen.parallel.cp, found.best.combination.sizes) == (
            "fsdp",
            best,
            (best, 1, 1),
        )
        samples = found.best.passes * found.best.micro_batch * 8 // best
        assert chosen.train.global_batch_size == samples == found.samples == 64
        why = "\n".join(reasons(found))
        assert all(word in why for word in words), why
        assert ("best       fsdp, cp 2; checkpointing none" in show_found("x", found, target())) == (best == 2)


@pytest.mark.slow
def test_a_single_rank_on_the_cpu_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["model.n_layers=2", "model.d_model=32", "run.device=cpu", "precision.mode=fp32", "train.seq_len=64"]
    args = ["plan", "-", "--auto", *fixed, "train.micro_batch_size=4", "--out", str(tmp_path)]
    args += ["activation.policy=none"]
    assert run([*args, "--memory-cap", "1GiB"]) == 0
    said = capsys.readouterr().out
    assert "best       single; checkpointing none; fp32; micro-batch 4" in said
    chosen = load_config(tmp_path / "config.yaml").config
    assert (chosen.train.micro_batch_size, chosen.activation.policy, chosen.model.d_model) == (4, "none", 32)
    assert json.loads((tmp_path / "auto.json").read_text())["best"]["needed"] > 0
    assert "tokens/s" in (tmp_path / "auto.html").read_text()
    assert all(
        SPEED_ERROR in text for text in (said, *((tmp_path / name).read_text() for name in ("auto.json", "auto.html")))
    )
    unused = tmp_path / "unused"
    args_of_none = ["parallel.strategy=fsdp", "--memory-cap", "1GiB", "--out", str(unused)]
    assert run(["plan", "-", "--auto", *fixed, *args_of_none]) == 2
    assert "no combination for world size 1 has all of" in capsys.readouterr().err
    assert not unused.exists()
    (tmp_path / "file").write_text("")
    assert run(["plan", "-", "--auto", *fixed, "--memory-cap", "1GiB", "--out", str(tmp_path / "file")]) == 2
    assert "file cannot be written" in capsys.readouterr().err
    assert run([*args, "--memory-cap", "100KiB"]) == 4
    assert "no setting fits: the least, single with activation.policy=" in capsys.readouterr().err
    assert run(["plan", "-", "--auto", *fixed]) == 2
    assert "pass --gpu or --gpu-memory; for CPUs --memory-cap" in capsys.readouterr().err


@pytest.mark.slow
def test_the_best_are_run_and_the_fastest_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "-", "--auto", "--gpus", "2", "run.device=cpu", "precision.mode=fp32", "--memory-cap", "1GiB"]
    args += ["parallel.strategy=ddp", "model.preset=debug", "--verify", "2", "--out", str(tmp_path)]
    assert run(args) == 0
    said = capsys.readouterr().out
    assert "measured" in said
    ran = json.loads((tmp_path / "auto.json").read_text())["verified"]
    assert [one["outcome"] for one in ran] == ["ok", "ok"]
    assert ran[0]["measured"] >= ran[1]["measured"]
    assert ran[0]["peak"] == pytest.approx(ran[0]["needed"], rel=0.03)
