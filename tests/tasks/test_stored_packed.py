"""A folder that bitsandbytes has packed already: its bytes are taken as they are, or it is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint.formats.convert import convert
from shardkit.checkpoint.formats.detect import open_source
from shardkit.checkpoint.stored_packed import StoredLayers, packed_names
from shardkit.config.load import load_config
from shardkit.config.schema import QuantizeConfig
from shardkit.errors import CheckpointError, ConfigError
from shardkit.tasks.load import load_task
from tests.ranks import run_ranks
from tests.tasks import quantized

DOUBLE = {"bits": 4, "double": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 16-bit model, and what transformers saves after packing it: `plain`, `double`, and `skipped`."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = tmp_path_factory.mktemp("stored")
    quantized.write_model(folder)
    for name, options in {
        "plain": {}, "double": {"bnb_4bit_use_double_quant": True},
        "skipped": {"llm_int8_skip_modules": ["lm_head", "down_proj"], "bnb_4bit_quant_storage": torch.bfloat16},
    }.items():  # fmt: skip
        packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", quantization_config=packing, dtype=torch.float32, device_map={"": "cpu"}
        )
        model.save_pretrained(folder / name)
    return folder


def stored_layers(folder: Path, double: bool = False, **shapes: tuple[int, ...]) -> StoredLayers:
    from bitsandbytes.functional import get_4bit_type

    source = open_source(folder, weights_only=True)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    every = {
        f"model.layers.{index // 7}.{names[index % 7]}.weight": shape for index, shape in enumerate(quantized.PACKED)
    }
    code = get_4bit_type("nf4", device="cpu")
    return StoredLayers(source, {**every, **shapes}, QuantizeConfig(double=double), code)


@pytest.mark.parametrize("double", [False, True])
def test_any_range_of_a_layers_bytes_is_that_of_the_folder(double: bool, root: Path) -> None:
    from safetensors.torch import load_file

    folder = root / ("double" if double else "plain")
    saved, layers = load_file(folder / "model.safetensors"), stored_layers(folder, double)
    name = "model.layers.1.mlp.down_proj.weight"
    state = json.loads(bytes(saved[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    whole = {"packed": saved[name].flatten(), "absmax": saved[f"{name}.absmax"].view(torch.uint8).flatten()}
    if double:
        mean = torch.tensor([state["nested_offset"]])
        numbers = torch.cat([saved[f"{name}.nested_absmax"], mean, saved[f"{name}.nested_quant_map"]])
        whole["nested"] = numbers.view(torch.uint8)
    for part, n_bytes in whole.items():
        for start, stop in ((0, n_bytes.numel()), (1, 2), (7, n_bytes.numel() - 3), (n_bytes.numel() - 1, None)):
            out = torch.empty(n_bytes[start:stop].numel(), dtype=torch.uint8)
            layers.read_into(name, part, start, out)
            assert torch.equal(out, n_bytes[start:stop]), (part, start)
    source = open_source(folder, weights_only=True)
    assert len(packed_names(source)) == 14 * (6 if double else 4)


def text(value: str) -> torch.Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


STATE = ".quant_state.bitsandbytes__nf4"
OTHER_BLOCKS = '{"quant_type": "nf4", "blocksize": 128, "shape": [64, 64]}'


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda t, n: t.update({n + STATE: text('{"quant_type": "nf4"')}), "not as bitsandbytes saves it"),
        (lambda t, n: t.update({n + STATE: text("[" * 4000)}), "not as bitsandbytes saves it"),
        (lambda t, n: t.update({n + STATE: text(" " * 5000)}), "not as bitsandbytes saves it"),
        (lambda t, n: t.update({n + STATE: text(OTHER_BLOCKS)}), "was packed with blocksize=128, not 64"),
        (lambda t, n: t.update({n + ".absmax": t[n + ".absmax"][:-1].clone()}), "absmax in .* not as bitsandbytes"),
        (lambda t, n: t.update({n: t[n][:-1].clone()}), "not as bitsandbytes saves it"),
        (lambda t, n: t[n + ".quant_map"].mul_(2), "has other numbers than those of nf4"),
        (lambda t, n: t.pop(n + ".quant_map"), "quant_map in .* not as bitsandbytes"),
    ],
)
def test_a_damaged_folder_is_named(change: Any, cause: str, root: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(root / "plain", tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=cause) as caught:
        stored_layers(folder)
    assert caught.value.fix and "\n" not in caught.value.cause + caught.value.fix


def test_a_folder_that_packed_other_layers_is_refused_by_a_layers_name(root: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight unpacked") as caught:
        stored_layers(root / "skipped")
    assert "model.quantize.skip=[down_proj]" in caught.value.fix
    with pytest.raises(CheckpointError, match="down_proj"):
        stored_layers(root / "plain", **{"model.layers.1.mlp.down_proj.weight": (64, 64)})


@pytest.mark.parametrize(
    ("quantize", "stored", "cause", "fix"),
    [
        (None, {"bnb_4bit_quant_type": "nf4"}, "has packed in 4 bits (nf4), and model.quantize is not set",
         "adapter.type=lora 'model.quantize={bits: 4, type: nf4, double: false}'"),
        ({"bits": 4}, {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "(nf4, double), and",
         "{bits: 4, type: nf4, double: true}"),
        ({"bits": 4}, {"bnb_4bit_quant_type": "fp4"}, "says otherwise", "type: fp4"),
    ],
)  # fmt: skip
def test_settings_that_differ_from_the_folders_are_refused_with_the_folders(
    quantize: Any, stored: dict[str, Any], cause: str, fix: str, tmp_path: Path
) -> None:
    about = {"quant_method": "bitsandbytes", "load_in_4bit": True, **stored}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": about}))
    keys = {"task.name": "hf_causal_lm", "model.hf_config": str(tmp_path), "adapter.type": "lora"}
    with pytest.raises(ConfigError) as caught:
        load_task(load_config(None, {**keys, "model.quantize": quantize}).config)
    assert cause in caught.value.cause and fix in caught.value.fix


def cases_over(root: Path, strategy: str) -> dict[str, dict[str, Any]]:
    return {
        f"{strategy} {name}": {
            "model.quantize": quantize, "model.init_from": f"{root}/{name}", "model.hf_config": f"{root}/{name}",
        }
        for name, quantize in (("plain", {"bits": 4}), ("double", DOUBLE))
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_over_stored_bytes_is_the_run_that_packs_them_under_every_kind_of_engine(root: Path) -> None:
    packed_here: dict[str, Any] = {"single plain": {}, "single double": {"model.quantize": DOUBLE}}
    (here,) = run_ranks(1, "tests.tasks.quantized:under", root=str(root), cases=packed_here)
    (stored,) = run_ranks(1, "tests.tasks.quantized:under", root=str(root), cases=cases_over(root, "single"))
    for name, run in stored.items():
        assert run["curve"] == here[name]["curve"] and run["seen"] == here[name]["seen"], name
        assert run["digests"][0]["packed"] == here[name]["digests"][0]["packed"]
        assert run["digests"][0]["digest"] != here[name]["digests"][0]["digest"], "the source is another one"
    cases = cases_over(root, "fsdp") | cases_over(root, "ddp") | cases_over(root, "zero3")
    both = run_ranks(2, "tests.tasks.quantized:under", root=str(root), cases=cases)
    for name, run in both[0].items():
        expected = stored[f"single {name.partition(' ')[2]}"]
        assert run["digests"] == 2 * [expected["digests"][0]] and run["seen"] == expected["seen"], name
        assert torch.allclose(torch.tensor(run["curve"]), torch.tensor(expected["curve"]), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_an_adapter_over_packed_bytes_is_exported_and_not_merged(root: Path, tmp_path: Path) -> None:
    keys = cases_over(root, "single")["single plain"]
    run = tmp_path / "run"
    settings = {**keys, "run.dir": str(run), "checkpoint.at_end": True}
    run_ranks(1, "tests.tasks.quantized:under", root=str(root), cases={"single": settings})
    convert(run, "peft", tmp_path / "peft")
    assert (tmp_path / "peft" / "adapter_model.safetensors").is_file()
    with pytest.raises(CheckpointError, match="never added to packed weights") as caught:
        convert(run, "safetensors", tmp_path / "merged", merge=True)
    assert re.search("--to peft", caught.value.fix)
