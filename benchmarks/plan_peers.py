"""Other tools' predictions of the same cases: DeepSpeed's estimators, accelerate estimate-memory, torch's trackers.

`python -m benchmarks.plan_peers` calls each tool's own functions for those cases of `plan_accuracy` that it covers, and
compares with the measurements there. Nothing is trained here.

- DeepSpeed's `estimate_zero2/3_model_states_mem_needs`: parameters, gradients and optimizer states under mixed
  precision. Its offload figures assume separate GPU and host memory.
- `accelerate estimate-memory`, its "Training using Adam": one process.
- `FSDPMemTracker`, `MemTracker` of torch.distributed._tools: the peak of a step on fake tensors; wrapped modules of
  FSDP2, or one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any

from tests.ranks import run_ranks

from .common import earlier, publish
from .options import ONLY, chosen, options
from .plan_accuracy import Unheard, cases

Case = tuple[str, int, list[str]]
NAME = "plan_peers"
CLOSE = 0.03


def of_case(name: str, world_size: int, overrides: list[str]) -> dict[str, Any]:
    """Each covering tool's answer for a case, in bytes of one rank; or the reason why it failed."""
    import torch

    from shardkit.config.load import load_config
    from shardkit.tasks.load import load_task

    config = load_config(None, overrides).config
    model = load_task(config).build_model()
    n_params = sum(param.numel() for param in model.parameters())
    answers: dict[str, Any] = {"n_params": n_params}
    _, strategy, precision, _, optimizer = name.split(" ")
    engine = strategy.partition("@")[0]
    if engine in ("zero2", "zero3") and "offload" not in strategy and precision == "bf16":
        answers["deepspeed"] = _deepspeed(model, engine, world_size)
    if engine == "single" and optimizer == "adamw":
        answers["accelerate"] = _accelerate(model, precision)
    if engine in ("single", "fsdp", "hsdp"):
        tracker = "memtracker" if engine == "single" else "fsdpmemtracker"
        try:
            answers[tracker] = _tracked(config, world_size)
        except (RuntimeError, NotImplementedError, AssertionError, TypeError, AttributeError, KeyError) as error:
            torch.distributed.destroy_process_group()
            answers[tracker] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return answers


def _deepspeed(model: Any, engine: str, world_size: int) -> int:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs, model_to_params
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    total, largest_layer = model_to_params(model)
    if engine == "zero2":
        return int(estimate_zero2_model_states_mem_needs(total, world_size, cpu_offload=False)[1])
    needs = estimate_zero3_model_states_mem_needs(total, largest_layer, world_size, cpu_offload=False)
    return int(needs[1])


def _accelerate(model: Any, precision: str) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(model)
    stages = estimate_training_usage(total, {"fp32": "float32", "bf16": "bfloat16"}[precision])
    return int(max(stages.values()))  # the figure that the command prints


def _tracked(config: Any, world_size: int) -> int:
    import torch

    from shardkit.plan.simulate.fake_weights import FakeWeights
    from shardkit.plan.simulate.fake_world import fake_world
    from shardkit.plan.simulate.step import on_fake, sample_batch, take_step, wrapped
    from shardkit.tasks.load import load_task

    device = torch.device("cpu")
    task = load_task(config)
    batch = sample_batch(task, config)
    weights = FakeWeights(config.train.seed, getattr(task, "init_parameter", None))
    with fake_world(device, world_size, 8) as world:
        n_targets = float(task.n_targets(batch))
        fakes = on_fake(batch)
        with wrapped(config, world, task, weights) as strategy, _Tracked(strategy, fakes) as tracked:
            for _ in range(2):
                take_step(config, world, task, fakes, n_targets, strategy, Unheard())
                tracked.stepped()
    return tracked.peak


class _Tracked:
    """torch's tracker around the steps, as in its documentation."""

    def __init__(self, strategy: Any, batch: Any) -> None:
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
        from torch.distributed._tools.mem_tracker import MemTracker
        from torch.distributed.fsdp import FSDPModule

        self.peak, inputs = 0, tuple(batch.values())
        self._tracker: Any
        if isinstance(strategy.model, FSDPModule):
            self._tracker = FSDPMemTracker(strategy.model, strategy.optimizer)
            self._tracker.track_inputs(inputs)
        else:
            self._tracker = MemTracker()
            self._tracker.track_external(strategy.model, strategy.optimizer, *inputs)

    def __enter__(self) -> _Tracked:
        self._tracker.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._tracker.__exit__(*raised)

    def stepped(self) -> None:
        snapshot = self._tracker.get_tracker_snapshot("peak")
        self.peak = max(sum(refs["Total"] for refs in snapshot.values()), self.peak)
        self._tracker.reset_mod_stats()


def with_gradients(name: str, row: Mapping[str, Any], n_params: int, key: str) -> int:
    """Bytes of all model states: `row[key]` (the states between two steps) plus the gradients that a step adds.

    Gradients are fp32, whole or sharded; DDP's buckets persist and are counted already. DeepSpeed has a bf16 partition
    and its fp32 copy.
    """
    engine, _, rest = name.split(" ")[1].partition("@")
    world_size = int(rest.partition("+")[0])
    per_param = {
        "single": 4.0, "ddp": 0.0, "fsdp": 4 / world_size, "hsdp": 4 / 2, "zero1": 2 + 4 / world_size,
        "zero2": 6 / world_size, "zero3": 6 / world_size,
    }  # fmt: skip
    return int(row[key] + per_param[engine] * n_params)


def errors(rows: Mapping[str, Mapping[str, Any]], answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By tool and reference: the tool's errors, and the planner's in the same cases; of tools with an answer.

    Args:
        rows: the measured cases of `plan_accuracy`.
    """

    def of(tool: str, ours: Callable[[str], float], truth: Callable[[str], float]) -> dict[str, Any]:
        of_tool = {name: answer[tool] for name, answer in answers.items() if tool in answer and name in rows}
        answered = {name: n_bytes for name, n_bytes in of_tool.items() if not isinstance(n_bytes, str)}
        if not answered:
            return {}
        return {
            "asked": len(of_tool),
            "failed": {name: why for name, why in of_tool.items() if isinstance(why, str)},
            "theirs": _spread(n_bytes / truth(name) - 1 for name, n_bytes in answered.items()),
            "ours": _spread(ours(name) / truth(name) - 1 for name in answered),
        }

    def states(key: str) -> Callable[[str], float]:
        return lambda name: with_gradients(name, rows[name], answers[name]["n_params"], key)

    def column(key: str) -> Callable[[str], float]:
        return lambda name: float(rows[name][key])

    compared = {}
    for tool in ("deepspeed", "accelerate"):
        compared[f"{tool}: model states"] = of(tool, states("resident_predicted"), states("resident_measured"))
    for tool in ("deepspeed", "accelerate", "fsdpmemtracker", "memtracker"):
        compared[f"{tool}: peak"] = of(tool, column("predicted"), column("measured"))
    return {comparison: spreads for comparison, spreads in compared.items() if spreads}


def _spread(values: Iterator[float] | Any) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "cases": len(ordered),
        "median_error": median(map(abs, ordered)),
        "lowest": ordered[0],
        "highest": ordered[-1],
        "within_3_percent": sum(abs(error) <= CLOSE for error in ordered) / len(ordered),
    }


def in_world(world_size: int, names: Sequence[str]) -> dict[str, Any]:
    """The answers for those of these cases that are of one world size: a process can be a rank of only one world."""
    from shardkit.plan.model.predict import prepare
    from shardkit.plan.target import Target

    prepare(Target(world_size, None, 8), "cpu")
    answers = {}
    for name in names:
        case = cases()[name]
        if case[0] == world_size:
            answers[name] = of_case(name, *case)
            print(f"{name:52s} {answers[name]}", flush=True)
    return answers


def main() -> None:
    names = chosen(cases(), options(__doc__, only=ONLY).only)
    answers: dict[str, Any] = earlier(NAME).get("said", {})
    for world in sorted({cases()[name][0] for name in names}):
        target = "benchmarks.plan_peers:in_world"
        answers |= run_ranks(1, target, timeout=1800, init_group=False, world_size=world, names=names)[0]
    publish(NAME, {
        "close": CLOSE, "accelerate": version("accelerate"),
        "errors": errors(earlier("plan_accuracy")["cases"], answers),
        "said": {name: answers[name] for name in cases() if name in answers},
    })  # fmt: skip


if __name__ == "__main__":
    main()
