"""Programs of other projects on a card too small for them: what their users see today, and with the one line.

TRL's `scripts/sft.py`, which docs/integrations.md shows, is read from its wheel; the one line is put into a copy. The
wheels of Lightning, Accelerate, DeepSpeed and torch have no examples. Lightning's
`examples/pytorch/basics/transformer.py`, also on that page, trains the model in `lightning.pytorch.demos`; that model
is in the wheel, and this file trains it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkit.report.read import read_run
from tests.commands import environment
from tests.emulated_cuda import REPO, needs_emulation
from tests.integrations.test_others import PACKAGES

pytestmark = [pytest.mark.gpu, pytest.mark.release, pytest.mark.timeout(900), needs_emulation]
OF_TRL = ["trl==1.16.0", "datasets", "dill", "multiprocess", "xxhash", "pandas", "aiohttp", "python-dateutil"]
WORDS = 500
SAMPLES = 160

TRANSFORMER = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.transformer import LightningTransformer
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningTransformer):
    def prepare_data(self):
        pass  # nothing is downloaded


tokens = torch.randint(0, 33278, (40, 36))
trainer = Trainer(max_steps=2, logger=False, enable_checkpointing=False, accelerator="cuda", devices=1)
trainer.fit(Net(), DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=20))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[str]], str]:
    """PYTHONPATH of a process that has a library, which is installed beside the environment if need be."""
    own = os.environ.get("PYTHONPATH", str(REPO))

    def path(library: str, packages: list[str]) -> str:
        if importlib.util.find_spec(library) is not None:
            return own
        folder = str(tmp_path_factory.mktemp(library))
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *packages]
        subprocess.run(install, check=True)
        return os.pathsep.join([folder, own])

    return path


def run(code: str, folder: Path, path: str, memory: str, args: list[str], env: dict[str, str]) -> str:
    """The last lines of a program that runs out of memory, from the error's own on."""
    script = folder / "program.py"
    script.write_text(code)
    card = {"EMUCUDA_MEMORY": memory, "EMUCUDA_DEVICES": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run(
        [sys.executable, str(script), *args], cwd=folder, env=environment(card), capture_output=True, text=True,
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    lines = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr).splitlines()
    (folder / "stderr").write_text(done.stderr)
    first = max(index for index, line in enumerate(lines) if "OutOfMemoryError: CUDA out of memory" in line)
    return "\n".join(line for line in lines[first:] if line.strip() and "%|" not in line)


def test_trls_sft_says_what_the_page_shows(installed: Callable[[str, list[str]], str], tmp_path: Path) -> None:
    path = installed("trl", OF_TRL)
    found = importlib.util.find_spec("trl")
    at = Path(path.split(os.pathsep)[0]) / "trl" if found is None else Path(str(found.origin)).parent
    code = (at / "scripts" / "sft.py").read_text()
    watch = f"with watch(trainer, run_dir={str(tmp_path / 'run')!r}):"
    line = f"from shardkit.integrations.transformers import watch\n    {watch}"
    watched, places = re.subn(r"^    (trainer\.train\(.*\))$", rf"    {line}\n        \1", code, flags=re.MULTILINE)
    assert places == 1
    args = _model_and_data(tmp_path)
    env = {"HF_HOME": str(tmp_path / "cache"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "EMUCUDA_COMPUTE": "0"}
    today = run(code, tmp_path, path, "2300M", args, env)
    assert "Tried to allocate" in today and "shardkit" not in today
    cause, fix = run(watched, tmp_path, path, "2300M", args, env).splitlines()[-2:]
    assert re.match(r"shardkit: rank 0 ran out of memory in (forward|backward) of step 1\b", cause)
    found = re.search(r"per_device_train_batch_size: 80, gradient_accumulation_steps: 2 \(planned: (.+?)\)", fix)
    assert found is not None and found[1].endswith(" of 2.25 GiB, fits"), fix
    seen = read_run(tmp_path / "run")
    assert seen.setting("train.micro_batch_size") == SAMPLES


def _model_and_data(folder: Path) -> list[str]:
    import tokenizers
    import transformers

    words = [f"w{index}" for index in range(WORDS)]
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder / "model")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    text = json.dumps({"text": " ".join(words)})
    (folder / "data" / "train.jsonl").write_text("\n".join([text] * (2 * SAMPLES)))
    return [
        "--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "data"), "--max_length", "512",
        "--output_dir", str(folder / "out"), "--max_steps", "2", "--report_to", "none", "--save_strategy", "no",
        "--per_device_train_batch_size", str(SAMPLES), "--gradient_checkpointing", "false", "--bf16", "true",
    ]  # fmt: skip


def test_lightnings_transformer_says_what_the_page_shows(
    installed: Callable[[str, list[str]], str], tmp_path: Path
) -> None:
    path = installed("lightning", PACKAGES)
    callback = f"callbacks=[ShardkitCallback({str(tmp_path / 'run')!r})], "
    watched = "from shardkit.integrations.lightning import ShardkitCallback\n" + TRANSFORMER.replace(
        "Trainer(max_steps", f"Trainer({callback}max_steps"
    )
    today = run(TRANSFORMER, tmp_path, path, "112M", [], {})
    assert "Tried to allocate" in today and "shardkit" not in today
    cause, fix = run(watched, tmp_path, path, "112M", [], {}).splitlines()[-2:]
    assert re.match(r"shardkit: rank 0 ran out of memory in \w+ of step \d", cause)
    assert fix.startswith("  fix: set torch.utils.checkpoint around each block (saves ")
    assert "batch_size=10 in the DataLoader, Trainer(accumulate_grad_batches=2) (saves " in fix
