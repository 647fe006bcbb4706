"""What a user gets from planning: figures that add up, verdicts, refusals, and the same answer from a shallow trace."""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import wide_plans
from benchmarks.common import earlier
from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.errors import ConfigError, ShardkitError, gib
from shardkit.hardware.cards import GPUS, find_gpu
from shardkit.plan.client import Planner, plan
from shardkit.plan.model.estimate import MemoryEstimate
from shardkit.plan.model.predict import predict
from shardkit.plan.show import show
from shardkit.plan.target import Target, choose_target
from tests.commands import python_m
from tests.ranks import REPO

GIB = 2**30
slow = pytest.mark.slow


def config(*overrides: str) -> RunConfig:
    return load_config(None, ["model.preset=debug", *overrides]).config


@pytest.fixture(scope="module")
def two_h100() -> Iterator[Planner]:
    with Planner(choose_target(config(), 2, gpu="h100")) as planner:
        yield planner


STRATEGIES = {
    "ddp": [],
    "fsdp": [],
    "zero2": ["parallel.offload_optimizer=cpu"],
    "zero3": ["parallel.offload_optimizer=cpu", "parallel.offload_param=cpu"],
}


@pytest.mark.slow
def test_a_run_measured_in_epochs_is_planned_without_reading_its_data(two_h100: Planner, tmp_path: Path) -> None:
    """No step needs more memory than another, so their number, which depends on the data, does not matter."""
    missing = f"data.path={tmp_path / 'tokens.bin'}"
    in_epochs = two_h100.predict(config("train.epochs=3", missing))
    in_steps = two_h100.predict(config("train.max_steps=7"))
    assert in_epochs.to_json() == in_steps.to_json()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_categories_sum_to_the_peak_and_state_is_what_the_formulas_say(strategy: str, two_h100: Planner) -> None:
    estimate = two_h100.predict(config(f"parallel.strategy={strategy}", "precision.mode=bf16", *STRATEGIES[strategy]))
    assert estimate.method == "cuda"
    assert sum(c.device for c in estimate.categories.values()) == estimate.peak.allocated
    assert sum(c.host for c in estimate.categories.values()) == estimate.host_peak
    assert estimate.peak.allocated <= estimate.peak.required <= estimate.peak.reserved
    assert max(phase.allocated for phase in estimate.phases.values()) == estimate.peak.allocated
    assert "evaluate" in estimate.phases
    assert estimate.categories["workspace"].device >= 2 * 32 * 2**20  # cuBLAS, in forward's and in backward's thread
    n = estimate.n_params
    optimizer = estimate.categories["optimizer"]
    moments = {"ddp": 8 * n, "fsdp": 4 * n, "zero2": 4 * n, "zero3": 4 * n}[strategy]
    held = optimizer.device if strategy in ("ddp", "fsdp") else optimizer.host
    assert held == pytest.approx(moments, rel=0.03)  # the allocator rounds each tensor up to 512 bytes
    if strategy.startswith("zero"):
        assert optimizer.device == 0
        assert estimate.host_peak > 8 * n / 2


def test_checkpointing_of_blocks_with_buffers_is_planned(two_h100: Planner) -> None:
    """A run compares a block's buffers by their values; what is planned has none."""
    sizes = [
        "task.name=super_resolution",
        "model.preset=swin2sr-debug",
        "data.crop_size=64",
        "train.micro_batch_size=2",
    ]
    plain, full = (
        two_h100.predict(load_config(None, [*sizes, "parallel.strategy=ddp", f"activation.policy={policy}"]).config)
        for policy in ("none", "full")
    )
    assert full.categories["activations"].device < 0.8 * plain.categories["activations"].device


def test_activations_on_the_host_are_planned_there(two_h100: Planner) -> None:
    sizes = ["parallel.strategy=ddp", "activation.policy=full", "train.micro_batch_size=1", "train.seq_len=4096"]
    growth, on_host = {}, {}
    for offload in ("none", "cpu"):
        few, many = (
            two_h100.predict(
                config(*sizes, f"activation.offload={offload}", "model.max_seq_len=4096", f"model.n_layers={n}")
            )
            for n in (4, 8)
        )
        growth[offload], on_host[offload] = many.peak.allocated - few.peak.allocated, many.host_peak - few.host_peak
    inputs = 4 * 4096 * 128 * 4  # of four further blocks
    assert growth["none"] - growth["cpu"] == inputs
    assert (on_host["none"], on_host["cpu"]) == (0, inputs)


def test_a_plan_of_experts_says_how_many_rows_the_busiest_rank_may_get(two_h100: Planner) -> None:
    model = {
        "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    sizes = {
        "task.name": "hf_causal_lm", "model.hf": model, "train.micro_batch_size": 1, "train.seq_len": 4096,
        "parallel.strategy": "fsdp", "parallel.ep": 2,
    }  # fmt: skip
    rows, peaks = (1.0, 1.5, 2.0, 3.0), []
    for imbalance in rows:
        estimate = two_h100.predict(load_config(None, {**sizes, "parallel.ep_imbalance": imbalance}).config)
        peaks.append(estimate.categories["activations"].device)
        shown = show("experts", estimate, two_h100.target)
        assert f"fits: {{}}, if the busiest rank's experts get at most {imbalance:g} times the average rows" in re.sub(
            r"fits: .*?\)", "fits: {}", shown
        )
    steps = [more - less for less, more in itertools.pairwise(peaks)]
    # Half the average more is a row for each of 4096 tokens, which keeps its values, gate, up and their product.
    assert steps[0] >= 4096 * (256 + 3 * 512) * 4
    # No rank of two gets more than twice the average.
    assert steps[1] == pytest.approx(steps[0], rel=0.01) and steps[2] == 0
    crowded = replace(estimate, device_memory=1)
    assert crowded.condition.startswith(", where the busiest rank's experts get 3 times")
    together = two_h100.predict(load_config(None, {**sizes, "parallel.ep": 1, "parallel.ep_imbalance": 3}).config)
    assert any("parallel.ep_imbalance changes nothing" in note for note in together.notes)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("strategy", "key_heads"), [("fsdp", 4), ("fsdp", 2), ("fsdp", 1), ("ddp", 4), ("zero3", 4)])
def test_activations_shrink_by_the_ranks_that_share_a_sequence(strategy: str, key_heads: int) -> None:
    """Of the length, not of constants: a card's kernels and cuBLAS take 200 MB, whatever a rank's part is."""
    model = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": key_heads, "max_position_embeddings": 2**20,
    }  # fmt: skip
    sizes = {
        "task.name": "hf_causal_lm", "model.hf": model, "model.mlp_chunks": 16, "train.micro_batch_size": 1,
        "train.seq_len": 2**20, "train.eval_samples": 0, "parallel.strategy": strategy, "activation.policy": "full",
        "activation.offload": "cpu", "precision.mode": "bf16",  # in fp32 shared key heads have no fused kernel
    }  # fmt: skip
    activations = {}
    with Planner(choose_target(config(), 4, gpu="h100")) as planner:
        for cp in (1, 2, 4):
            planned = planner.predict(load_config(None, {**sizes, "parallel.cp": cp}).config)
            parts = planned.categories
            activations[cp] = sum(
                parts[key].device for key in ("activations", "communication", "workspace") if key in parts
            )
            # Keys and values of 64 numbers a head, in two bytes, of all positions instead of a share.
            repeated = 2 * 2**20 * 64 * 2 * (cp - key_heads) // cp
            notes = [note for note in planned.notes if "repeated key heads" in note]
            assert [gib(repeated) in note for note in notes] == [True] * (cp > key_heads), planned.notes
    assert 1 / 2 - 0.05 <= activations[2] / activations[1] <= 1 / 2 + 0.05
    assert 1 / 4 - 0.05 <= activations[4] / activations[1] <= 1 / 4 + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_the_rank_that_takes_the_most_is_planned(strategy: str) -> None:
    """The last rank keeps its gradients from the first bucket on, while most activations are still there."""
    deep = ("model.n_layers=6", "model.d_model=256", "train.micro_batch_size=16", "activation.policy=full")
    one_bucket = config(f"parallel.strategy={strategy}", *deep)
    with Planner(choose_target(one_bucket, 4, gpu="h100")) as planner:
        assert planner.predict(one_bucket).rank == 0, "it reduces its bucket after backward"
        buckets = config(f"parallel.strategy={strategy}", *deep, "parallel.bucket_mb=0.1")
        first, most = planner.predict(buckets, rough=True), planner.predict(buckets)
    assert (first.rank, most.rank) == (0, 3)
    assert most.needed > first.needed and most.peak.phase == "backward"
    assert "figures are of rank 3, which takes the most" in show("", most, planner.target)


@pytest.mark.slow  # 52 layers, whole
def test_a_deep_model_is_the_same_from_two_shallow_traces() -> None:
    deep = config("parallel.strategy=fsdp", "model.n_layers=52", "activation.policy=full", "precision.mode=bf16")
    target = choose_target(deep, 4, gpu="h100")
    with Planner(target) as planner:
        shallow, whole = planner.predict(deep), planner.predict(deep, all_layers=True)
    assert shallow.extrapolated_from == (4, 5)
    assert whole.extrapolated_from == ()
    assert shallow.peak.allocated == pytest.approx(whole.peak.allocated, rel=0.001)
    assert shallow.peak.reserved == pytest.approx(whole.peak.reserved, rel=0.05)
    assert (shallow.peak.phase, shallow.peak.module) == (whole.peak.phase, whole.peak.module)
    assert shallow.n_params == whole.n_params
    for name, phase in whole.phases.items():
        assert shallow.phases[name].allocated == pytest.approx(phase.allocated, rel=0.001)


@pytest.mark.slow
def test_the_reserved_memory_of_a_70b_is_that_of_its_rehearsal() -> None:
    name = "Llama 70B, tp 8 × fsdp 32"
    (rehearsed,) = (row["rehearsed"] for row in earlier("wide_plans")["rows"] if row["case"] == name)
    assert wide_plans.planned(name)["reserved"] == pytest.approx(rehearsed["peak_reserved"], rel=0.05)


def test_a_first_look_at_a_model_whose_first_layers_are_dense_counts_its_experts() -> None:
    """Two or three of its layers hold none, and would say that it fits."""
    model = {
        "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_hidden_layers": 12, "first_k_dense_replace": 3, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    }  # fmt: skip
    settings = {
        "task.name": "hf_causal_lm", "model.hf": model, "train.seq_len": 32, "train.eval_samples": 0,
        "parallel.strategy": "fsdp", "run.device": "cpu",
    }  # fmt: skip
    deep = load_config(None, settings).config
    with Planner(choose_target(deep, 2)) as planner:
        assert planner.predict(deep, rough=True).n_params == planner.predict(deep).n_params


@pytest.mark.slow
def test_a_misfit_exits_4_and_names_changes_that_fit_with_their_saving() -> None:
    settings = ["model.preset=debug", "parallel.strategy=single", "train.micro_batch_size=64"]
    words = ["plan", "-", *settings, "--gpu-memory", "1080MiB", "--gpus", "1", "--json"]
    said = json.loads(python_m("shardkit.cli", *words, code=4).stdout)
    assert said["verdict"] == "does not fit"
    fitting = [change for change in said["changes"] if change["verdict"] == "fits"]
    assert fitting
    assert all(change["saving"] > 0 and change["needs"] < 1080 * 2**20 for change in fitting)
    estimate = MemoryEstimate.from_json({k: v for k, v in said.items() if k != "changes"})
    assert estimate.needed - fitting[0]["saving"] == fitting[0]["needs"]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"gpus": -1}, "--gpus -1"),
        ({"gpus": 4, "gpus_per_node": 0}, "--gpus-per-node 0"),
        ({"gpus": 9, "gpus_per_node": 4}, "--gpus 9 is not a whole number of machines"),
        ({"gpu_memory": "0GB"}, "--gpu-memory '0GB'"),
        ({"gpu_memory": "nan"}, "--gpu-memory 'nan'"),
        ({"gpu_memory": "80 parsecs"}, "--gpu-memory '80 parsecs'"),
        ({"host_memory": ""}, "--host-memory ''"),
        ({"memory_cap": "much"}, "--memory-cap 'much'"),
    ],
)
def test_the_option_that_is_wrong_is_named(options: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(cause)):
        choose_target(config(), **options)


def test_a_card_may_be_called_what_its_driver_calls_it() -> None:
    for name, card in GPUS.items():
        assert find_gpu(name) is find_gpu(name.upper()) is find_gpu(card.device_name) is card
    names = {
        "RTX 4090": "rtx4090", " H100 ": "h100", "NVIDIA A100": "a100", "A100-80GB": "a100", "h100_pcie": "h100-pcie",
    }  # fmt: skip
    assert {said: find_gpu(said).name for said in names} == names
    with pytest.raises(ConfigError, match="--gpu 'rtx' is more than one card") as found:
        find_gpu("rtx")
    assert "did you mean rtx4090 or rtx3090 or a6000?" in found.value.fix
    for odd in ("", "-", "h100 nvl"):
        with pytest.raises(ConfigError, match=f"--gpu '{odd}' is not in the table"):
            find_gpu(odd)


def test_a_cap_stands_for_a_smaller_card_and_for_what_tensors_may_take_on_cpus() -> None:
    card = choose_target(config(), 2, gpu="h100", memory_cap="24GiB")
    assert card.gpu is not None and (card.gpu.name, card.device_memory) == ("h100", 24 * GIB)
    assert choose_target(config(), 2, memory_cap="24GiB").device_memory == 24 * GIB
    cpu = choose_target(config("run.device=cpu"), 2, memory_cap="1GiB")
    assert cpu.gpu is None and cpu.device_memory == GIB
    shared = choose_target(config("run.device=cpu"), 4, 2, host_memory="3GiB", memory_cap="2GiB")
    assert (shared.device_memory, shared.host_memory) == (3 * GIB // 2, None), "the host is the device"


def test_a_card_that_cannot_multiply_fp8_is_refused() -> None:
    fp8 = config("precision.mode=fp8", "parallel.strategy=single")
    with pytest.raises(ConfigError, match=r"precision.mode=fp8 on a100: .* 8\.9 or newer"):
        predict(fp8, choose_target(fp8, gpu="a100"), "cuda")


def test_a_world_that_the_mesh_does_not_fill_is_refused() -> None:
    mesh = config("parallel.strategy=hsdp", "parallel.dp_shard=3", "parallel.dp_replicate=2")
    with pytest.raises(ConfigError, match="= 6, but there are 8 ranks"):
        predict(mesh, choose_target(mesh, 8), "cuda")


USERS_TASK = """
import torch
from torch import nn

class Last(nn.LSTM):
    def forward(self, x):
        return super().forward(x[None])[0][0]

class Model(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.inner, self.branch = nn.Linear(32, 32), branch
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        if branch == "frozen":
            self.layers[:2].requires_grad_(False)
        if branch.startswith("wide"):
            self.table = nn.Embedding(40000, 100)
        if branch == "mixed":
            self.layers.append(nn.Conv1d(32, 32, 1, bias=False))
        if branch == "norm":
            self.layers.append(nn.BatchNorm1d(32))
        if branch == "recurrent":
            self.layers.append(Last(32, 32, batch_first=True))
        if branch.startswith("rates"):
            given = torch.linspace(0, 0.2, 3)
            rates = given.tolist() if branch.endswith("tolist") else [rate.item() for rate in given]
            self.layers.extend(nn.Sequential(nn.Linear(32, 32), nn.Dropout(rate)) for rate in rates if rate > 0)
        if branch == "own weight":
            self.scale = self.layers[0].weight.std().item()
        if branch == "nowhere":
            self.scale = torch.ones(3).sum().item() + torch.ones(1, device="nowhere")

    def forward(self, x):
        y = self.inner(x)
        for layer in self.layers:
            y = layer(y if self.branch != "mixed" else y[..., None].float() if layer is self.layers[-1] else y)
        if self.branch == "value" and y.sum() > 0:
            y = -y
        if self.branch == "shape":
            y = y[y > 0]
        if self.branch == "op":
            y = torch.ops.users.twice(y)
        if self.branch == "custom":
            y = torch.ops.users.thrice(y)
        if self.branch == "array":
            y = y + y.detach().cpu().numpy().sum()
        return y

torch.library.define("users::twice", "(Tensor x) -> Tensor")

@torch.library.impl("users::twice", "CPU")
def twice(x):
    return x * 2

@torch.library.custom_op("users::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3

class Task:
    block_classes = (nn.Linear,)

    def __init__(self, config, branch="", plan_loss=False):
        self.branch = branch
        if plan_loss:
            self.plan_loss = lambda model, batch: model.inner(batch).sum()
        if branch.endswith(" drawn"):
            self.branch = branch.removesuffix(" drawn")
            self.init_parameter = lambda fqn, full, generator: full.normal_(generator=generator)

    def build_model(self):
        model = Model(self.branch)
        if self.branch == "number":
            model.number = nn.Parameter(torch.tensor(0.5))
            model.register_forward_hook(lambda model, _, y: y * model.number)
        if self.branch == "experts":
            model.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            model.register_forward_hook(lambda model, _, y: y + model.experts[1](y))
        return model

    def dataset(self, split):
        rows = [] if self.branch == "no data" else [torch.ones(32)] * 8
        return iter(rows) if self.branch == "no length" else rows

    def n_targets(self, batch):
        return len(batch)

    def loss(self, model, batch):
        return model(batch).sum()
"""


Ask = Callable[..., MemoryEstimate]
"""Plans the user's task, given its branch and overrides."""


@contextmanager
def asking(target: Target, folder: Path, *always: str) -> Iterator[Ask]:
    (folder / "users_task.py").write_text(USERS_TASK)

    def ask(branch: str, *overrides: str) -> MemoryEstimate:
        task = ["task.factory=users_task:Task", f"task.args={{branch: {branch}}}"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            return planner.predict(load_config(None, [*task, *always, *overrides]).config)

    with Planner(target) as planner:
        yield ask


@pytest.fixture(scope="module")
def for_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """On 2 H100."""
    with asking(choose_target(config(), 2, gpu="h100"), tmp_path_factory.mktemp("users")) as ask:
        yield ask


@pytest.fixture(scope="module")
def on_a_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """On one rank."""
    alone = ["run.device=cpu", "parallel.strategy=single"]
    with asking(choose_target(config(*alone)), tmp_path_factory.mktemp("on_a_cpu"), *alone) as ask:
        yield ask


@pytest.mark.parametrize(
    ("branch", "cause", "fix"),
    [
        ("value", r"needs the value of a tensor at .*users_task.py:37 \(if self.branch", "plan_loss"),
        pytest.param("shape", r"needs the values of a tensor at .*users_task.py:40 ", "plan_loss", marks=slow),
        ("op", r"users.twice.* at .*users_task.py:42 .*no fake kernel", "register_fake"),
        pytest.param("custom", r"users::thrice at .*users_task.py:44 .*no fake kernel", "register_fake", marks=slow),
        pytest.param("array", r"numpy\(\) is not supported .* at .*users_task.py:46 ", "plan_loss", marks=slow),
        ("no data", r"task users_task:Task has no training data", "plan_batch"),
        ("no length", r"dataset\('train'\) of task users_task:Task is a list_iterator without len\(\)", ""),
    ],
)
def test_what_cannot_be_traced_is_named_with_the_users_line(branch: str, cause: str, fix: str, for_users: Ask) -> None:
    with pytest.raises(ShardkitError, match=cause) as found:
        for_users(branch)
    assert fix in found.value.fix


def test_fp32_tensors_in_a_product_are_refused_as_the_run_refuses_them(for_users: Ask) -> None:
    settings = ("parallel.strategy=zero2", "precision.mode=bf16")
    with pytest.raises(ConfigError, match=r"mixes fp32 tensors into precision.mode=bf16 .*convolution") as found:
        for_users("mixed", *settings)
    assert "precision.autocast=true" in found.value.fix
    assert for_users("mixed", *settings, "precision.autocast=true").peak.allocated > 0


@pytest.mark.parametrize("branch", ["plain", "frozen"])
def test_a_model_that_was_not_built_on_meta_is_sharded_on_the_gpu(branch: str, for_users: Ask) -> None:
    whole, sharded = (for_users(branch, f"parallel.strategy={one}").categories["params"] for one in ("ddp", "fsdp"))
    assert (whole.host, sharded.host) == (0, 0)
    assert whole.device == 4 * (32 * 32 * 4 + 512)
    assert sharded.device == 4 * (32 * 32 * 2 + 512), "half of a bias still takes a block of the allocator"
    for strategy in ("fsdp", "hsdp"):
        offloaded = for_users(branch, f"parallel.strategy={strategy}", "parallel.offload_param=cpu")
        assert offloaded.host_peak > 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_a_parameter_that_is_one_number_is_planned(strategy: str, for_users: Ask) -> None:
    plain, number = (for_users(branch, f"parallel.strategy={strategy}") for branch in ("plain", "number"))
    assert number.n_params == plain.n_params + 1


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_experts_that_ranks_agree_on_are_planned_on_several_ranks(strategy: str, for_users: Ask) -> None:
    experts = for_users("experts", f"parallel.strategy={strategy}")
    assert experts.n_params == for_users("plain", f"parallel.strategy={strategy}").n_params + 4 * 32 * 33
    on_host = ["parallel.offload_optimizer=cpu", "train.grad_accum_steps=2"]
    for branch in ("plain", "experts"):
        assert for_users(branch, f"parallel.strategy={strategy}", *on_host).categories["optimizer"].host > 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
@pytest.mark.parametrize("branch", ["rates by item", "rates by tolist", "rates by tolist drawn"])
def test_a_constructor_that_reads_values_is_given_the_true_ones(branch: str, strategy: str, for_users: Ask) -> None:
    """As models read their rates of dropout: a layer is made only where the rate is not 0."""
    assert for_users(f"'{branch}'", f"parallel.strategy={strategy}").n_params == (4 + 2) * 32 * 33


@pytest.mark.parametrize(("branch", "mib"), [("plain", 0.1), ("wide drawn", 1.1)])
def test_a_start_takes_the_host_memory_of_a_chunk(branch: str, mib: float, for_users: Ask) -> None:
    for strategy in ("fsdp", "ddp"):
        found = for_users(f"'{branch}'", f"parallel.strategy={strategy}")
        assert found.phases["wrap"].host < mib * 2**20, strategy


def test_a_constructor_that_reads_its_own_weights_is_built_really(for_users: Ask) -> None:
    assert for_users("own weight", "parallel.strategy=ddp").n_params == 4 * 32 * 33


def test_a_constructor_that_reads_values_and_cannot_be_built_here_is_refused(for_users: Ask) -> None:
    with pytest.raises(ConfigError, match=r"constructor needs .*users_task.py:\d+ \(self.scale.*\n  fix: .*numbers"):
        for_users("nowhere", "parallel.strategy=ddp")


@pytest.mark.slow
def test_weights_that_are_on_the_cpu_already_count_once(on_a_cpu: Ask) -> None:
    estimate = on_a_cpu("plain")
    assert estimate.phases["wrap"].allocated < 1.2 * 4 * estimate.n_params


@pytest.mark.parametrize("precision", [pytest.param(mode, marks=pytest.mark.slow) for mode in ("fp32", "bf16")])
def test_a_mixture_of_experts_is_planned_in_every_precision(precision: str) -> None:
    """Torch's kernel for grouped products of fake tensors knows bf16 alone."""
    sizes = {
        "model_type": "mixtral", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    mine = load_config(
        None,
        ["task.name=hf_causal_lm", f"model.hf={json.dumps(sizes)}", "run.device=cpu", "parallel.strategy=single",
         "train.seq_len=32", "train.micro_batch_size=2", f"precision.mode={precision}"],
    ).config  # fmt: skip
    estimate = plan(mine, choose_target(mine))
    experts = 2 * 4 * 3 * 64 * 128
    assert estimate.n_params > experts and estimate.n_blocks == 2


def test_recurrent_layers_are_less_certain(on_a_cpu: Ask) -> None:
    estimate = on_a_cpu("recurrent")
    assert estimate.uncertainty >= 0.67, "40 % too low is two thirds more than was planned"
    assert any("recurrent" in note for note in estimate.notes)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_statistics_of_all_ranks_are_planned(strategy: str, for_users: Ask) -> None:
    apart, together = (
        for_users("norm", f"parallel.strategy={strategy}", f"model.sync_batchnorm={sync}") for sync in ("false", "true")
    )
    assert apart.categories["buffers"] == together.categories["buffers"]
    assert together.peak.phase == apart.peak.phase


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_states_in_bf16_on_the_cpu_are_half_as_large(strategy: str, two_h100: Planner) -> None:
    offloaded = [f"parallel.strategy={strategy}", "parallel.offload_optimizer=cpu"]
    fp32, bf16 = (
        two_h100.predict(config(*offloaded, f"precision.mode={mode}")).categories["optimizer"].host
        for mode in ("bf16", "pure_bf16")
    )
    assert bf16 == pytest.approx(fp32 / 2, rel=0.01)


@pytest.mark.slow
def test_plan_loss_goes_round_what_cannot_be_traced(on_a_cpu: Ask) -> None:
    assert on_a_cpu("value, plan_loss: true").n_params == 4 * 32 * 33


@pytest.mark.slow
def test_a_shim_that_crashes_its_process_leaves_cpu_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'shardkit.plan.worker' in sys.orig_argv and sys.orig_argv[-1] == 'cuda': os.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPO}")
    estimate = plan(config("parallel.strategy=single"), choose_target(config(), 1, gpu="h100"))
    assert estimate.method == "cpu"
    assert estimate.uncertainty > 0.1
    assert any("CPU tensors" in note for note in estimate.notes)
    assert estimate.peak.allocated > 0


def test_a_planning_process_that_is_killed_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'shardkit.plan.worker' in sys.orig_argv: os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPO}")
    with pytest.raises(ShardkitError, match="the planning process was ended by SIGKILL") as found:
        plan(config("parallel.strategy=single"), choose_target(config(), 1, gpu="h100"))
    assert "memory" in found.value.fix


@pytest.mark.slow
def test_a_plan_asks_no_hub_for_a_tokenizer_that_is_missing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is missing looks like a hub's name: asking for it would tell the hub, and send the user's token."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(0)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        masked = config("task.name=hf_masked_lm", "model.preset=bert-base", "data.tokenizer=models/tokenizer")
        with pytest.raises(ConfigError, match=r"data\.tokenizer=models/tokenizer is not a folder here"):
            plan(masked, choose_target(masked, 1, gpu="h100"))
        with pytest.raises(BlockingIOError):
            hub.accept()


def test_planning_a_run_on_cpus_needs_no_card() -> None:
    cpu = config("run.device=cpu", "parallel.strategy=single")
    target = choose_target(cpu, 1)
    estimate = plan(cpu, target)
    assert estimate.device == "cpu" and estimate.verdict is None and estimate.overhead == 0
    assert "verdict" not in show("mine", estimate, target)
    assert "verdict    does not fit: " in show("mine", estimate.limited(2**20, None), target)
    assert "note: no card" not in show("mine", estimate, target)
    unnamed = choose_target(config(), 2, memory_cap="2GiB")
    assert "note: no card was named, so the plan is for l4; pass --gpu NAME" in show("mine", estimate, unnamed)
