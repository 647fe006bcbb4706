"""A base in 4 bits: the bits of peft with bitsandbytes, the same under every engine; checkpoints, exports, refusals."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.checkpoint.formats.convert import convert
from shardkit.checkpoint.frozen_base import CHECKSUM, FrozenBase
from shardkit.config import capability
from shardkit.config.load import load_config
from shardkit.config.schema import QuantizeConfig
from shardkit.errors import CheckpointError, ConfigError
from shardkit.models.quantized import BaseQuantizer, QuantizedLinear
from shardkit.tasks.load import load_task
from tests.commands import python_m
from tests.ranks import run_ranks
from tests.tasks import adapters, quantized
from tests.tasks.quantized import PARTITIONED


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    quantized.write_model(folder)
    return folder


def load_checked(keys: dict[str, Any]) -> Any:
    config = load_config(None, keys).config
    capability.check(config, device="cpu", world_size=1, local_world_size=1)
    return load_task(config)


QLORA: dict[str, Any] = {"task.name": "hf_causal_lm", "adapter.type": "lora", "model.quantize": {"bits": 4}}
ON_NVME = {"parallel.strategy": "zero3", "parallel.offload_param": "nvme", "parallel.nvme_path": "/scratch"}


def refused(keys: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_checked(keys)
    assert caught.value.fix and "\n" not in caught.value.cause + caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("keys", "cause", "fix"),
    [
        ({"adapter.type": "none"}, "nothing could train", "adapter.type=lora"),
        ({"compile.enabled": True}, "compile.enabled=true", "compile.enabled=false"),
        (ON_NVME, "model.quantize with parallel.offload_param=nvme", "parallel.offload_param=cpu"),
        ({"model.quantize": {"bits": 8}}, "model.quantize.bits=8 is not supported", "bits: 4"),
        ({"model.quantize": {"type": "int8"}}, "model.quantize.type=int8 is not supported", "remove type"),
        ({"model.quantize": {"bits": 3}}, "bits", "the default is"),
        ({"model.quantize": {"blocksize": 64}}, "blocksize", "model.quantize.block_size"),
        ({"model.quantize": 4}, "model.quantize=4", "'model.quantize={key: value}'"),
    ],
)
def test_settings_outside_of_it_are_refused_by_name(keys: dict[str, Any], cause: str, fix: str, tmp_path: Path) -> None:
    error = refused({**QLORA, "model.hf.model_type": "llama", **keys})
    assert cause in error.cause and fix in error.fix


def test_a_missing_bitsandbytes_is_named_before_ranks_join(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = capability.importlib.util.find_spec
    monkeypatch.setattr(
        capability.importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name)
    )
    error = refused({**QLORA, "model.hf.model_type": "llama"})
    assert "needs bitsandbytes" in error.cause and "shardkit[quantize]" in error.fix


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_a_folder_that_is_quantised_already_is_refused_by_its_method(method: str, tmp_path: Path) -> None:
    about = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    error = refused({**QLORA, "model.hf_config": str(tmp_path)})
    assert f"is of a quantised model ({method})" in error.cause and "16-bit model" in error.fix


@pytest.mark.parametrize(
    ("quantize", "model", "cause", "fix"),
    [
        ({"skip": ["q_prj"]}, {}, "model.quantize.skip: q_prj matches no module", "did you mean q_proj"),
        ({"block_size": 128}, {}, "q_proj has 64 input features, no multiple of block_size=128", "block_size: 64"),
        ({}, {"intermediate_size": 96}, "down_proj has 96 input features", "skip: [down_proj]"),
        ({"skip": ["layers"]}, {}, "packs no layer", "shorten model.quantize.skip"),
        ({}, {"model_type": "gpt2", "n_layer": 1}, "GPT2LMHeadModel has no linear layers", "remove model.quantize"),
    ],
)
def test_unpackable_layers_are_named(quantize: dict[str, Any], model: dict[str, Any], cause: str, fix: str) -> None:
    hf = model if "model_type" in model else {"model_type": "llama", **quantized.MODEL, **model}
    error = refused({**QLORA, "model.quantize": {"bits": 4, **quantize}, "model.hf": hf})
    assert cause in error.cause and fix in error.fix


DOUBLE: dict[str, Any] = {"model.quantize": {"bits": 4, "double": True}}
FP4_DOUBLE: dict[str, Any] = {"model.quantize": {"bits": 4, "type": "fp4", "double": True}}


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, Any]:
    cases = {"single": {}, "single fp4": {"model.quantize": {"type": "fp4", "skip": ["k_proj", "layers.1.mlp"]}},
             "single drawn": {"model.init_from": None}, "single double": DOUBLE,
             "single fp4-double": FP4_DOUBLE}  # fmt: skip
    (found,) = run_ranks(1, "tests.tasks.quantized:under", root=str(root), cases=cases)
    return found


def close(curve: list[Any], expected: list[Any], tolerance: float = 1e-5) -> bool:
    return torch.allclose(torch.tensor(curve), torch.tensor(expected), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("single", {}),
        ("single double", {"double": True}),
        pytest.param("single fp4-double", {"kind": "fp4", "double": True}, marks=pytest.mark.slow),
    ],
)
def test_one_process_gives_the_bits_of_peft_with_bitsandbytes(
    name: str, options: dict[str, Any], root: Path, alone: dict[str, Any]
) -> None:
    """Without `prepare_model_for_kbit_training`, which would only cast the unpacked weights."""
    (expected,) = run_ranks(1, "tests.tasks.quantized:bnb_alone", root=str(root), **options)
    assert expected[0][0] - expected[-1][0] > 0.05, "the loss must fall, or equality says nothing"
    assert alone[name]["curve"] == expected


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("kind", "block_size"), [("nf4", 64), ("nf4", 512), ("fp4", 64), ("fp4", 256)])
def test_a_layer_holds_the_bits_of_bitsandbytes(kind: Any, block_size: Any, double: bool) -> None:
    """Packed bytes, the scales' bytes, and the weight that both stand for."""
    from bitsandbytes import functional

    weight = torch.randn(24, 1024, generator=torch.Generator().manual_seed(3), dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(weight, blocksize=block_size, quant_type=kind, compress_statistics=double)
    quantizer = object.__new__(BaseQuantizer)
    quantizer.settings = QuantizeConfig(type=kind, block_size=block_size, double=double)
    layer = QuantizedLinear(nn.Linear(1024, 24, bias=False, device="meta"), quantizer.settings).to_empty(device="cpu")
    packed_here, scales = quantizer.pack(weight.view(-1))
    for name, part in {"packed": packed_here, **quantizer.state(scales)}.items():
        layer.get_parameter(name).data.view(-1).copy_(part)
    assert torch.equal(layer.packed.flatten(), packed.flatten())
    assert torch.equal(layer.absmax.view(state.absmax.dtype).flatten(), state.absmax)
    parts = [layer.get_parameter(name) for name in ("packed", "absmax", *["nested"] * double)]
    for dtype in (torch.float32, torch.bfloat16):
        state.dtype = dtype
        assert torch.equal(layer.unpacked(dtype, *parts), functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("dim", "rank"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_part_of_a_layer_unpacks_to_that_part_of_its_weight(dim: int, rank: int, double: bool) -> None:
    """Blocks of 256 scales begin inside of its rows."""
    pytest.importorskip("bitsandbytes")  # registers its operators
    quantizer = object.__new__(BaseQuantizer)
    quantizer.settings = QuantizeConfig(double=double)
    layer = QuantizedLinear(nn.Linear(1280, 42, bias=False, device="meta"), quantizer.settings).to_empty(device="cpu")
    packed, scales = quantizer.pack(torch.randn(42 * 1280, generator=torch.Generator().manual_seed(3)))
    parts = {"packed": packed, **quantizer.state(scales)}
    parts = {name: part.view(layer.get_parameter(name).shape) for name, part in parts.items()}
    whole = layer.unpacked(torch.float32, *parts.values())
    layer.take_part(dim, rank, 2)
    of_rank = (part if name == "nested" else part.chunk(2, dim)[rank].contiguous() for name, part in parts.items())
    assert torch.equal(layer.unpacked(torch.float32, *of_rank), whole.chunk(2, dim)[rank])


@pytest.mark.slow
def test_every_engine_equals_one_process_over_the_same_bytes(root: Path, alone: dict[str, Any]) -> None:
    """The digests of source and packed bytes too, before and after training; fsdp computes with the unsharded bytes."""
    skipped = {"model.quantize": {"type": "fp4", "skip": ["k_proj", "layers.1.mlp"]}}
    drawn = {"model.init_from": None}
    cases = {"ddp": {}, "fsdp": {}, "zero1": {}, "zero2": {}, "zero3": {}, "fsdp fp4": skipped, "fsdp drawn": drawn,
             "ddp drawn": drawn, "zero3 drawn": drawn, "fsdp double": DOUBLE, "ddp double": DOUBLE,
             "zero2 double": DOUBLE, "zero3 double": {**PARTITIONED, **DOUBLE},
             "zero3 fp4": {**PARTITIONED, **skipped}}  # fmt: skip
    both = run_ranks(2, "tests.tasks.quantized:under", root=str(root), cases=cases)
    for name, run in both[0].items():
        expected = alone[f"single {name.partition(' ')[2]}".strip()]
        assert close(run["curve"], expected["curve"]), (name, run["curve"], expected["curve"])
        assert both[1][name]["curve"] == run["curve"]
        assert run["digests"] == 2 * [expected["digests"][0]], name
        assert run["seen"] == both[1][name]["seen"] == expected["seen"], name
    digests = {name: alone[name]["digests"][0] for name in alone}
    assert len({entry["packed"] for entry in digests.values()}) == len(digests)
    drawn_digest = digests.pop("single drawn")["digest"]
    assert {entry["digest"] for entry in digests.values()} == {digests["single"]["digest"]} != {drawn_digest}


MIXTRAL = {key: size for key, size in quantized.MODEL.items() if key != "attention_bias"} | {
    "model_type": "mixtral", "num_local_experts": 4,
}  # fmt: skip


@pytest.mark.slow
def test_policies_recompute_the_same_bits_and_3d_experts_keep_their_type(root: Path, alone: dict[str, Any]) -> None:
    policies = ("full", "selective", "selective_op", "every_k")
    cases: dict[str, Any] = {f"single {policy}": {"activation.policy": policy} for policy in policies}
    cases["single offload"] = {"activation.offload": "cpu", "activation.offload_min_bytes": 1}
    experts = {"model.hf_config": None, "model.init_from": None, "model.hf": MIXTRAL}
    cases["single experts"] = {**experts, "adapter.targets": ["q_proj"], "precision.mode": "bf16"}
    (found,) = run_ranks(1, "tests.tasks.quantized:under", root=str(root), cases=cases)
    experts_run = found.pop("single experts")
    for name, run in found.items():
        assert run["curve"] == alone["single"]["curve"], name
    in_16_bits = 2 * (2 * 4 * 3 * 64 * 128 + 2 * 256 * 64 + 2 * 4 * 64 + 5 * 64)
    packed = 2 * (2 * 64 * 64 + 2 * 64 * 32)
    assert experts_run["state"]["params"] == in_16_bits + 4 * 2 * 4 * 128
    assert experts_run["state"]["quantized"] == packed // 2 + packed // 16


@pytest.mark.slow
def test_engines_on_one_rank_and_on_four(root: Path, alone: dict[str, Any]) -> None:
    cases = {name: {} for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")}
    (ones,) = run_ranks(1, "tests.tasks.quantized:under", root=str(root), cases=cases)
    groups = {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}
    fours = run_ranks(4, "tests.tasks.quantized:under", root=str(root), cases={
        "hsdp": groups, "fsdp": {"parallel.offload_param": "cpu"},
        "hsdp double": {**groups, **DOUBLE}, "fsdp double": {"parallel.offload_param": "cpu", **DOUBLE},
        "zero3": {**PARTITIONED, "parallel.offload_param": "cpu", "parallel.offload_optimizer": "cpu"},
        "zero3 double": {**PARTITIONED, **DOUBLE, "parallel.hpz": 2},
    })[0]  # fmt: skip
    for name, run in [*ones.items(), *fours.items()]:
        expected = alone[f"single {name.partition(' ')[2]}".strip()]
        assert close(run["curve"], expected["curve"]), name
        assert run["digests"] == 2 * [expected["digests"][0]], name


@pytest.mark.slow
def test_ranks_that_share_layers_pack_their_rows_and_columns_on_the_grid_of_blocks(root: Path) -> None:
    wide = {"model.init_from": None, "model.hf": {"head_dim": 32}, "adapter.targets": "all-linear"}
    kinds = {
        "read": {"model.quantize": {"bits": 4, "skip": ["o_proj"]}}, "drawn": wide, "double": {**wide, **FP4_DOUBLE},
    }  # fmt: skip
    alone = {f"single {name}": keys for name, keys in kinds.items()}
    (right,) = run_ranks(1, "tests.tasks.quantized:under", root=str(root), cases=alone)
    tp = {"parallel.tp": 2, "train.micro_batch_size": quantized.BATCH // 2}
    cases = {f"fsdp {name}": {**keys, **tp} for name, keys in kinds.items()}
    for name, run in run_ranks(4, "tests.tasks.quantized:under", root=str(root), cases=cases)[0].items():
        expected = right[f"single {name.partition(' ')[2]}"]
        assert close(run["curve"], expected["curve"]), (name, run["curve"], expected["curve"])
        assert run["digests"] == 2 * [expected["digests"][0]] and run["seen"] == expected["seen"], name


@pytest.mark.dist
def test_columns_off_the_grid_of_blocks_are_refused_by_their_layer(root: Path) -> None:
    cases = {"fsdp": {"parallel.tp": 2, "run.resume": False}}
    found = run_ranks(2, "tests.tasks.quantized:resumed", root=str(root), source=str(root), cases=cases)
    for cause, fix in (rank["fsdp"] for rank in found):
        assert "o_proj is in 4 bits, and a rank would have 32 of its 64 columns" in cause and "skip: [o_proj]" in fix


@pytest.mark.slow
def test_three_ranks_cut_rows_scales_and_pairs_of_4_bits_anywhere(root: Path) -> None:
    sizes, accumulated = {"train.micro_batch_size": 2}, {"train.micro_batch_size": 1, "train.grad_accum_steps": 2}
    kinds = {"plain": {}, "double": FP4_DOUBLE, "drawn": {"model.init_from": None, "adapter.targets": "all-linear"}}
    alone = {f"single {name}": {**keys, "train.micro_batch_size": 6} for name, keys in kinds.items()}
    (right,) = run_ranks(1, "tests.tasks.quantized:under", root=str(root), cases=alone)
    cases = {
        "fsdp plain": sizes, "fsdp double": {**kinds["double"], **accumulated},
        "zero3 plain": {**PARTITIONED, **sizes, "activation.policy": "full"},
        "zero3 double": {**PARTITIONED, **kinds["double"], **sizes, "parallel.offload_param": "cpu"},
        "zero3 drawn": {**PARTITIONED, **kinds["drawn"], **accumulated},
    }  # fmt: skip
    for name, run in run_ranks(3, "tests.tasks.quantized:under", root=str(root), cases=cases)[0].items():
        expected = right[f"single {name.partition(' ')[2]}"]
        assert close(run["curve"], expected["curve"]), (name, run["curve"], expected["curve"])
        assert run["digests"] == 2 * [expected["digests"][0]] and run["seen"] == expected["seen"], name


@pytest.mark.slow
def test_under_bf16_the_base_is_sharded_and_its_bytes_stay_bytes(root: Path) -> None:
    """Mixed precision casts no byte; a rank holds half of the packed bytes, the scales and the bf16 rest."""
    bf16 = {"precision.mode": "bf16"}
    zero3 = {**bf16, **PARTITIONED}
    cases = {"ddp": bf16, "fsdp": bf16, "fsdp full": {**bf16, "activation.policy": "full"},
             "ddp double": {**bf16, **DOUBLE}, "fsdp double": {**bf16, **DOUBLE},
             "zero3": zero3, "zero3 full": {**zero3, "activation.policy": "full"}}  # fmt: skip
    found = run_ranks(2, "tests.tasks.quantized:under", root=str(root), cases=cases)[0]
    for name in ("fsdp", "fsdp full", "zero3", "zero3 full"):
        assert close(found[name]["curve"], found["ddp"]["curve"], 2e-2), (name, found)
        assert found[name]["seen"] == found["ddp"]["seen"]
        assert found[name]["digests"] == found["ddp"]["digests"]
    adapter = 2 * (4 * (64 + 64) + 4 * (64 + 32) + 4 * (128 + 64))
    packed = quantized.N_PACKED // 2 + quantized.N_PACKED // 64 * 4
    state = {name: run["state"] for name, run in found.items()}
    for name in ("ddp", "ddp double"):
        assert state[name]["params"] == 2 * quantized.N_UNPACKED + 4 * adapter
    for name in ("fsdp", "fsdp double"):
        assert state[name]["params"] == quantized.N_UNPACKED + 2 * adapter
    assert state["zero3"]["params"] == quantized.N_UNPACKED + adapter
    assert [state[name]["quantized"] for name in ("ddp", "fsdp", "zero3")] == [packed, packed // 2, packed // 2]
    rows = [-(-out * columns // 64 // 256) + 257 for out, columns in quantized.PACKED]
    double = quantized.N_PACKED // 2 + quantized.N_PACKED // 64
    assert state["ddp double"]["quantized"] == double + 4 * sum(rows)
    assert state["fsdp double"]["quantized"] == double // 2 + 4 * sum((n + 1) // 2 for n in rows)
    assert close(found["fsdp double"]["curve"], found["ddp double"]["curve"], 2e-2)


def test_the_same_weights_packed_to_other_bytes_are_refused() -> None:
    """As another release of bitsandbytes, or a GPU, may round them."""
    model = nn.ParameterDict({"lora_A": torch.ones(2)})
    for name, frozen in (("embed", torch.ones(2)), ("packed", torch.zeros(2, dtype=torch.uint8))):
        model[name] = nn.Parameter(frozen, requires_grad=False)
    base = FrozenBase(model, {"type": "lora"}, str, None)
    identity = {"digest": "the weights'", "checksum": CHECKSUM, "dtype": "float32", "source": None, "packed": "here"}
    base.about["base"] = identity
    base.check({"type": "lora", "base": identity})
    with pytest.raises(CheckpointError, match=r"packed to other bytes .*: digest here here, there there\n"):
        base.check({"type": "lora", "base": {**identity, "packed": "there"}})


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_elsewhere(root: Path) -> None:
    want = run_ranks(2, "tests.tasks.quantized:stopped", root=str(root), strategy="fsdp")[0]
    saved = root / "stopped" / "checkpoints" / "step_00000001"
    manifest = json.loads((saved / "manifest.json").read_text())["manifest"]
    names = [name for name in manifest["tensors"] if not name.startswith("rng.")]
    assert names and all(".lora_" in name for name in names)
    assert manifest["run"]["extra"]["adapter"]["quantize"]["block_size"] == 64
    cases = {"single": {}, "single plain": {"model.quantize": None}, "single fp4": {"model.quantize": {"type": "fp4"}}}
    found = run_ranks(1, "tests.tasks.quantized:resumed", root=str(root), source=str(saved), cases=cases)[0]
    assert close(found["single"], want[1:])
    assert "model.quantize=null" in found["single plain"][0]
    assert re.search(r"set model.quantize='\{bits: 4, .*skip: \[\], type: nf4\}'", found["single plain"][1])
    assert "type: fp4" in found["single fp4"][0]
    both = {"zero2": {}, "zero3": {}}
    zero = run_ranks(2, "tests.tasks.quantized:resumed", root=str(root), source=str(saved), cases=both)[0]
    assert close(zero["zero2"], want[1:]) and close(zero["zero3"], want[1:])
    assert close(run_ranks(2, "tests.tasks.quantized:stopped", root=str(root), strategy="zero3")[0], want)
    found = run_ranks(1, "tests.tasks.quantized:resumed", root=str(root), source=str(saved), cases={"single": {}})[0]
    assert close(found["single"], want[1:])


def test_merging_adds_the_adapter_to_the_16_bit_weights(root: Path, tmp_path: Path) -> None:
    """With the packed layers' error added again, the merged folder computes the logits of the run."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(16).view(1, 16)
    run = root / "merged-run"
    want = run_ranks(1, "tests.tasks.quantized:logits", root=str(root), run=str(run), tokens=tokens)[0]
    notes = convert(run, "safetensors", tmp_path / "merged", merge=True).notes
    assert any(note.startswith("the adapter is added to the weights that the run had packed") for note in notes)
    source = load_file(root / "model" / "model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert source.keys() == merged.keys()
    changed = {name for name in source if not torch.equal(source[name], merged[name])}
    assert changed == {name for name in source if re.search(r"(q_proj|v_proj|down_proj)\.weight", name)}
    convert(run, "peft", tmp_path / "peft")
    described = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert sorted(described["target_modules"]) == ["down_proj", "q_proj", "v_proj"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        error = (model(tokens).logits.view(-1, 256) - want).abs().mean() / want.abs().mean()
        assert 0.01 < error < 0.2
        for name in source:
            if re.search(r"layers.*proj\.weight", name):
                model.get_parameter(name).data += quantized.packing_error(source[name])
        assert (model(tokens).logits.view(-1, 256) - want).abs().max() < 1e-5


@pytest.mark.slow
def test_a_base_that_does_not_fit_is_offered_4_bits_while_it_is_loaded(root: Path, tmp_path: Path) -> None:
    sizes = {**quantized.MODEL, "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024}
    done = python_m(
        "shardkit.train", "task.name=hf_causal_lm", f"model.hf={json.dumps(sizes)}", "adapter.type=lora",
        "parallel.strategy=single", "train.seq_len=16", "train.micro_batch_size=1", "train.eval_samples=0",
        "memory.cap=14MiB", "run.device=cpu", f"run.dir={tmp_path}/run", f"data.path={root}/text.txt",
        f"data.cache_dir={tmp_path}/cache", code=3,
    )  # fmt: skip
    assert re.search(r"while wrapping the model.*\n  fix: set model\.quantize\.bits=4", done.stderr), done.stderr
    advice = json.loads((tmp_path / "run" / "oom" / "rank0.json").read_text())["advice"]
    (change,) = (change for change in advice if change["change"] == "model.quantize.bits=4")
    assert "unpacks a layer" in change["cost"]


@pytest.mark.slow
def test_the_five_commands_of_the_page_make_one_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapters.write_chat(tmp_path, {"model_type": "llama", **quantized.MODEL})
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    block = page.partition("to one folder that transformers loads:")[2].partition("```bash\n")[2].partition("```")[0]
    install, export, *commands = block.splitlines()
    assert install.startswith("pip install") and len(commands) == 3
    job = export.removeprefix('export JOB="').removesuffix('"')
    job += f" data.cache_dir={tmp_path}/cache data.tokenize_workers=1 train.max_steps=2"
    local = {"$JOB": job, "/models/Llama-3.1-8B": tmp_path / "chat", "/data/": f"{tmp_path}/",
             "seq_len=2048": "seq_len=64", "runs/qlora": tmp_path / "run", "served": tmp_path / "served"}  # fmt: skip
    for command in commands:
        for text, there in local.items():
            command = command.replace(text, str(there))
        program, *words = command.split()
        if program == "torchrun":
            here = [f"run.dir={tmp_path}/run", "run.device=cpu"]
            done = python_m("shardkit.train", *words[words.index("--config") :], *here, ranks=2)
            packed = r"^quantised: 14 layers, .* in nf4 \(.*, scales .*\); in \w+: .*lm_head"
            assert re.search(packed, done.stdout, re.MULTILINE), done.stdout
        else:
            done = python_m("shardkit.cli", *words)
        assert done.returncode == 0, (command, done.stderr)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    ids = AutoTokenizer.from_pretrained(tmp_path / "served")("ask 3", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()


SHARES = {
    "llama": (94, 97), "mistral": (94, 97), "phi3": (94, 97), "olmo2": (94, 97), "gpt_neox": (94, 97),
    "qwen2": (90, 91), "qwen3": (90, 91), "gemma": (90, 91), "opt": (68, 68), "mixtral": (3, 3), "qwen3_moe": (1, 1),
}  # fmt: skip


def share(model_type: str) -> float:
    """Percent of the values that are packed, at transformers' sizes: a line through one and two layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    counts = []
    for layers in (1, 2):
        config: Any = AutoConfig.for_model(model_type)
        depth, config.num_hidden_layers = config.num_hidden_layers, layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        packed = sum(math.prod(shape) for shape in BaseQuantizer(model, QuantizeConfig()).shapes.values())
        counts.append((packed, sum(param.numel() for param in model.parameters())))
    packed, values = (one + (two - one) * (depth - 1) for one, two in zip(*counts, strict=True))
    return 100 * packed / values


@pytest.mark.slow
def test_the_shares_of_families_are_true() -> None:
    for model_type, (least, most) in SHARES.items():
        assert least <= round(share(model_type)) <= most, model_type
    for model_type in ("gpt2", "falcon"):
        with pytest.raises(ConfigError, match="has no linear layers"):
            share(model_type)
