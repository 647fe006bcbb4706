"""A published folder is enough to train, under every engine; the exported folder is enough for every loader."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardkit.checkpoint.formats import start
from shardkit.checkpoint.formats.convert import convert
from shardkit.checkpoint.formats.folder import copy_tokenizer, write_configs
from shardkit.checkpoint.formats.targets import model_facts
from shardkit.config.load import load_config
from shardkit.errors import CheckpointError
from shardkit.run.job import start as start_job
from shardkit.tasks.load import build_model, load_task
from tests.checkpoint.formats import hub, loaders
from tests.ranks import run_ranks
from tests.strategies.cases import on_cpus

ZERO3 = on_cpus("zero3")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"parallel.strategy": "fsdp"}),
    ("mixtral", {"parallel.strategy": "ddp"}),
    ("gpt2-base", ZERO3),
    ("mixtral", {"parallel.strategy": "zero2"}),
    ("llama", {"parallel.strategy": "hsdp", "parallel.dp_replicate": 2}),
    ("qwen3", {"parallel.strategy": "ddp"}),
]
ADAPTED = ("qwen3", {"parallel.strategy": "ddp", "adapter.type": "lora"})


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    return tensors


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders, and a run of each of CASES and of ADAPTED that began with its folder and learnt nothing (lr 0)."""
    root = tmp_path_factory.mktemp("folders")
    hub.write_tokens(root)
    for kind in ("llama", "mixtral", "gpt2-base", "qwen3"):
        hub.make_folder(root / kind, kind)
    cases = [(str(root / kind), extra) for kind, extra in [*CASES, ADAPTED]]
    ranks = run_ranks(2, "tests.checkpoint.formats.hub:train_all", cases=cases, root=str(root))
    (root / "read.json").write_text(json.dumps(ranks[0]))
    return root


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{k}-{e['parallel.strategy']}" for k, e in CASES])
def test_a_folder_goes_through_a_run_unchanged(index: int, begun: Path, tmp_path: Path) -> None:
    """Config, names and values come from the folder alone; all ranks together request its bytes once."""
    kind = CASES[index][0]
    _, n_bytes = json.loads((begun / "read.json").read_text())[index]
    tensors = tensors_of(begun / kind)
    assert n_bytes <= 1.05 * sum(tensor.nbytes for tensor in tensors.values())
    converted = convert(begun / f"run-{index}", "safetensors", tmp_path / "out", max_shard_size="30KB")
    written = tensors_of(tmp_path / "out")
    prefix = "transformer." if kind == "gpt2-base" else ""
    assert set(written) == {prefix + name for name in tensors}
    for name, tensor in tensors.items():
        assert torch.equal(written[prefix + name], tensor.float()), name
    assert any("--dtype bf16" in note for note in converted.notes) == (kind == "llama")


def test_the_exported_folder_is_all_that_loaders_ask_for(begun: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    converted = convert(begun / "run-0", "safetensors", out, max_shard_size="20KB", dtype="bf16")
    assert converted.notes == []
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info.values()) and model.dtype == torch.bfloat16
    assert model.generation_config.temperature == 0.5, "the settings of the folder that the run began with"
    base = AutoModelForCausalLM.from_pretrained(begun / "llama", dtype="auto")
    tokens = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, base(tokens).logits)
    exported, original = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(begun / "llama")
    turn = [{"role": "user", "content": "def main():"}]
    assert exported.apply_chat_template(turn, tokenize=False) == original.apply_chat_template(turn, tokenize=False)
    assert exported("import os").input_ids == original("import os").input_ids

    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert "chat_template.jinja" in names and "LICENSE" in names
    card = (out / "README.md").read_text()
    header, body = card.removeprefix("---\n").split("---\n", 1)
    assert dict(line.split(": ") for line in header.splitlines())["base_model"] == '"llama"'
    for fact in ("tokens.bin", "1 of 1", "validation loss", "fsdp on 2 ranks", "shardkit"):
        assert fact in body, fact
    assert str(begun) not in card, "a card is published: no path of this machine"


EXPORTS = {"llama": 0, "qwen3": len(CASES) - 1, "adapter": len(CASES)}


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("run", list(EXPORTS))
def test_vllm_and_llama_cpp_find_what_they_open(run: str, size: str, begun: Path, tmp_path: Path) -> None:
    out, kind = tmp_path / "out", "llama" if run == "llama" else "qwen3"
    convert(begun / f"run-{EXPORTS[run]}", "safetensors", out, max_shard_size=size, merge=run == "adapter")
    assert (out / loaders.INDEX).exists() == (size == "20KB")
    for name, opened in loaders.LOADERS.items():
        facts = opened(out)
        assert facts["architecture"] == {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind], name
        assert facts["tensors"] == set(tensors_of(begun / kind)), name
    assert facts["template"] == hub.TEMPLATE and facts["special"] == {"bos": 0, "eos": 1}


def test_the_runs_chat_template_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    hub.make_folder(tmp_path / "base", "llama")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    settings = tmp_path / "base" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": "{{ 'old' }}"}))
    template = tmp_path / "own.jinja"
    template.write_text(hub.TEMPLATE)
    keys = {"task.name": "hf_causal_lm", "model.init_from": str(tmp_path / "base"), "data.chat_template": str(template)}
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "base", out, ignore=shutil.ignore_patterns("tokenizer*"))
    assert copy_tokenizer(load_config(None, keys).config, out) == ""
    assert AutoTokenizer.from_pretrained(out).chat_template == hub.TEMPLATE
    assert loaders.for_llama_cpp(out)["template"] == hub.TEMPLATE


def test_special_tokens_that_the_run_changed_are_exported(tmp_path: Path) -> None:
    """In the config and in the generation settings, which say where a text ends; those keep their other keys."""
    from transformers import AutoConfig, GenerationConfig

    model = hub.make_folder(tmp_path / "base", "llama")
    keys = {"task.name": "hf_causal_lm", "model.init_from": str(tmp_path / "base"), "model.hf": {"eos_token_id": 7}}
    model.config.eos_token_id = 7
    out = tmp_path / "out"
    out.mkdir()
    write_configs(model, load_config(None, keys).config, out, torch.float32)
    settings = GenerationConfig.from_pretrained(out)
    assert settings.eos_token_id == 7 and settings.bos_token_id == 0 and settings.temperature == 0.5
    assert AutoConfig.from_pretrained(out).eos_token_id == 7


def test_links_out_of_a_strangers_folder_are_not_published(tmp_path: Path) -> None:
    secret = tmp_path / "environ"
    secret.write_text("HF_TOKEN=hf_secret")
    for name in ("LICENSE", "special_tokens_map.json", "additional_chat_templates/tool.jinja"):
        model, out = tmp_path / f"model-{Path(name).name}", tmp_path / f"out-{Path(name).name}"
        hub.make_folder(model, "llama")
        out.mkdir()
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(secret)
        with pytest.raises(CheckpointError, match=r"is a link to .*environ, outside of the model's folder"):
            copy_tokenizer(load_config(None, {"task.name": "hf_causal_lm", "model.init_from": str(model)}).config, out)
        assert not any(b"hf_secret" in file.read_bytes() for file in out.rglob("*") if file.is_file())


@pytest.mark.parametrize("key", ["data.chat_template", "data.tokenizer"])
def test_a_file_that_a_strangers_config_names_is_not_published(key: str, tmp_path: Path) -> None:
    """The config that lies around a step may name any file of the user's; only a run that is named may publish it."""
    secret = tmp_path / "token"
    secret.write_text("hf_secret")
    hub.make_folder(tmp_path / "model", "llama")
    keys = {"task.name": "hf_causal_lm", "model.init_from": str(tmp_path / "model"), key: str(secret)}
    for is_named in (False, True):
        out = tmp_path / f"out-{is_named}"
        out.mkdir()
        note = copy_tokenizer(load_config(None, keys).config, out, is_named)
        assert (f"names {secret}, a file that is copied only if the run is named" in note) is not is_named
        assert any(b"hf_secret" in file.read_bytes() for file in out.iterdir() if file.is_file()) is is_named


def test_the_path_of_a_step_does_not_name_its_run(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("model: {preset: debug}\n")
    named = [model_facts(path, step).is_named for path in (tmp_path, step.parent, step)]
    assert named == [True, False, False]


def test_files_of_the_hubs_cache_are_links_to_its_blobs(tmp_path: Path) -> None:
    hub.make_folder(tmp_path / "plain", "llama")
    snapshot, blobs, out = tmp_path / "models--a--b/snapshots/main", tmp_path / "models--a--b/blobs", tmp_path / "out"
    for folder in (snapshot, blobs, out):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "plain").glob("*.json"))):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "LICENSE").write_text("mine")
    config = load_config(None, {"task.name": "hf_causal_lm", "model.init_from": str(snapshot)}).config
    assert copy_tokenizer(config, out) == ""
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "plain" / "tokenizer.json").read_bytes()
    assert (out / "LICENSE").read_text() == "mine"


def refused(root: str, folders: list[str]) -> str:
    """What a load says where each rank is a node of its own, whose folder under the path is its own."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with start_job(None, hub.settings(folders[0], root)) as job:
        task = load_task(job.config)
        job.wrap(partial(build_model, job.config, task), block_classes=task.block_classes, drawn=False)
        try:
            with start.opening(folders[rank], job.model) as open_source:
                start.load_weights(job.strategy, job.world, job.world.control_group, open_source)
        except CheckpointError as error:
            return error.cause
    return ""


@pytest.mark.slow
def test_nodes_with_other_weights_under_one_path_are_refused(tmp_path: Path) -> None:
    """Each node would read its own, and the ranks would train a mixture."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    hub.make_folder(ours, "llama")
    shutil.copytree(ours, theirs)
    weights = next(theirs.glob("*.safetensors"))
    tensors = load_file(weights)
    next(iter(tensors.values())).add_(1)
    save_file(tensors, weights, {"format": "pt"})
    call = "tests.checkpoint.formats.test_folder:refused"
    assert run_ranks(2, call, root=str(tmp_path), folders=[str(ours), str(ours)]) == ["", ""]
    for rank, said in enumerate(run_ranks(2, call, root=str(tmp_path), folders=[str(ours), str(theirs)])):
        assert said == f"{(ours, theirs)[rank]} of node 1 holds another model than that of node 0"


@pytest.mark.slow
def test_weights_that_a_folder_lacks_are_named_and_counted(tmp_path: Path) -> None:
    hub.make_folder(tmp_path / "model", "qwen3")
    weights = tmp_path / "model" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(weights).items() if "norm" not in name}
    save_file(kept, weights, {"format": "pt"})
    call = "tests.checkpoint.formats.test_folder:refused"
    (said,) = run_ranks(1, call, root=str(tmp_path), folders=[str(tmp_path / "model")])
    assert re.search(r"has no \S*norm\.weight, .* and \d+ more", said), said
