"""Wrong commands of a first hour: each ends with a line of cause, a line of fix and exit code 2, and writes nothing."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import torch

from shardkit.cli.__main__ import main
from tests.commands import environment, train_here
from tests.data.chats import conversation, write_lines, write_tokenizer
from tests.docs.test_integrations import REPO

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 3,
}  # fmt: skip


def write_model(folder: Path, template: bool = True, tokenizer: bool = True) -> None:
    """A Llama folder of which no wrong command reads the weights."""
    folder.mkdir(parents=True)
    if tokenizer:
        write_tokenizer(folder, **({} if template else {"template": None}))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    header = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a first hour: models, data, recipes, and some files that are none of these."""
    folder = tmp_path_factory.mktemp("hour")
    write_model(folder / "models" / "base")
    write_model(folder / "models" / "no_tokenizer", tokenizer=False)
    write_model(folder / "models" / "no_template", template=False)
    write_lines(folder / "data" / "chats.jsonl", ({"messages": conversation(n)} for n in range(60)))
    write_lines(folder / "data" / "dialog.jsonl", ({"dialog": conversation(n)} for n in range(60)))
    recipe = (REPO / "examples" / "first_hour.yaml").read_text(encoding="utf-8")
    recipe = recipe.replace("models/tiny-llama", "models/base").replace("data/conversations", "data/chats")
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "latin1.json").write_bytes('{"zero_optimization": {"stage": 3}, "x": "caf\xe9"}'.encode("latin-1"))
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (folder / "args.yaml").write_text("per_device_train_batch_size: 1\noutput_dir: out\n")
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "tiny.txt").write_text("too short")
    return folder


TRAIN = "train --config recipe.yaml"
LAUNCH = "launch recipe.yaml --nproc-per-node"
BYTES = "train run.device=cpu model.d_model=32 model.n_heads=2"
SUBMIT = "submit - --dry-run --nodes 2 --ranks-per-node 4 --gpus-per-node 4"
PODS = "submit --to kubernetes --container a"
GATE = "submit --dry-run --gpus-per-node 2"
MANY = 4096
NVME = "parallel.offload_param=nvme parallel.nvme_path=/tmp"
CLIPPED = "parallel.strategy=zero2 parallel.ds_config.gradient_clipping=7"
WRONG = [
    ("plan", "no config is named", "name a YAML file"),
    ("plan recipe.yml", "config file recipe.yml does not exist", "recipe.yaml"),
    ("plan recipe.yaml data.path=", "has no value", "or remove it"),
    ("launch train.py --nproc-per-node 2", "not a config: a script", "shardkit launch --nproc-per-node 2 -- train.py"),
    ("plan recipe.yaml max_steps=10", "'max_steps=10' is not of the form section.key=value", "train.max_steps"),
    ("plan recipe.yaml parallel.strategy=deepspeed", "parallel.strategy=", "parallel.strategy=zero3?"),
    ("plan recipe.yaml optim.name=paged_adamw_8bit", "keep their moments in CUDA's managed memory", "adamw_bnb_8bit"),
    ("plan recipe.yaml other.yaml", "override 'other.yaml' is not of the form", "name one config"),
    ("plan recipe.yaml --gpu h1000", "--gpu 'h1000' is not in the table of GPUs", "did you mean h100?"),
    ("plan recipe.yaml --gpu", "Option '--gpu' requires an argument", "shardkit plan --help"),
    ("plan recipe.yaml --budget 10", "--verify, --margin, --budget and --out belong to --auto", "add --auto"),
    ("plan recipe.yaml --auto --out found", "there is no memory to fit into", "--gpu"),
    ("plan recipe.yaml --model models/base", "--model models/base belongs to", "add model.hf_config=models/base"),
    ("plan --from recipe.yaml --memory-cap 2GiB", "recipe.yaml is no file of Accelerate or", "needs no --from"),
    ("plan ''", "an empty value names nothing", "a variable of the shell"),
    ("plan recipe.yaml run.resume=latest", "run.resume=latest is no way to resume", "set run.resume=true"),
    ("plan models/base/config.json", "models/base/config.json is a file of", "--model models/base/config.json"),
    ("plan recipe.yaml --gpus two", "--gpus 'two' should be a whole number", "shardkit plan --help"),
    ("plan --from latin1.json --model models/base", "latin1.json is not UTF-8 text (byte 45)", "save it as UTF-8"),
    ("plan --from data --model models/base", "data is a directory", "name the file in it"),
    ("plan --from ds.json --model nope", "--model nope cannot be read", "config.json"),
    ("plan --from args.yaml", "args.yaml is a file of transformers' Trainer", "shardkit rehearse"),
    ("plan --from ds.json --auto --gpu l4", "--auto searches from a config", "into a config"),
    ("max-model recipe.yaml --find params", "--find params", "--find model or --find batch"),
    ("max-model recipe.yaml --find length", "--find length", "shardkit plan --longest"),
    ("plan recipe.yaml --longest --auto --gpu l4", "--longest and --auto are two searches", "pass one of them"),
    ("plan recipe.yaml --confirm", "--confirm belongs to --longest", "add --longest"),
    ("plan --from ds.json --longest", "--longest searches from a config", "into a config"),
    ("plan - task.name=image_classification --longest --gpu l4", "--longest is for causal", "causal_lm"),
    ("launch", "neither a config nor a script was given", "shardkit launch CONFIG"),
    ("launch recipe.yaml", "one rank per GPU, but run.device=cpu", "pass --nproc-per-node N"),
    ("launch recipe.yaml --nproc_per_node 2", "No such option: --nproc_per_node", "did you mean --nproc-per-node?"),
    ("launch --nproc-per-node 2 -- my_train.py", "my_train.py does not exist", "name a file that exists"),
    (f"{LAUNCH} two", "--nproc-per-node 'two' is not a number of ranks", "a number from 1"),
    (f"{LAUNCH} 3", "train.global_batch_size=4 is not a multiple of micro_batch_size × data ranks", "=3 or 6"),
    (f"{LAUNCH} 2 parallel.strategy=single", "parallel.strategy=single", "ddp"),
    (f"{LAUNCH} 2 --nnodes 2", "--nnodes 2 without --rdzv-endpoint", "pass --rdzv-endpoint HOST:PORT"),
    ("train --config", "argument --config: expected one argument", "write --config FILE"),
    ("train --nproc 2", "unrecognized arguments: --nproc", "--help lists the options"),
    ("train --config recipe.yml", "config file recipe.yml does not exist", "recipe.yaml"),
    (f"{TRAIN} optim.name=adam8bit", "optim.name=", "did you mean optim.name=adamw8bit?"),
    (f"{TRAIN} model.d_model=64", "model.d_model=64 would be ignored", "remove model.d_model"),
    (f"{TRAIN} data.path=data/chatz.jsonl", "data path data/chatz.jsonl does not exist", "set data.path to a file"),
    (f"{TRAIN} data.path=data/dialog.jsonl", "dialog", "data.columns"),
    (f"{TRAIN} data.path=models/base", "data path models/base is a model folder", "model.init_from"),
    (f"{TRAIN} model.init_from=models/no_template", "the tokenizer has no chat template", "data.chat_template"),
    (f"{TRAIN} model.init_from=models/no_tokenizer", "tokenizer", "data.tokenizer"),
    (f"{TRAIN} model.init_from=./models/nope", "model.init_from=./models/nope does not exist", "name a folder"),
    (f"{TRAIN} model.init_from=data", "model.init_from=data: data holds no checkpoint", "name a run directory"),
    (f"{TRAIN} model.init_from=null model.hf_config=models/base run.resume=runs/none", "runs/none does not", "a run"),
    (f"{LAUNCH} 2 run.dir=recipe.yaml", "run.dir=recipe.yaml is a file", "set run.dir to a directory"),
    ("report runs/none", "runs/none is not a directory", "pass the run.dir of a run"),
    ("convert", "Missing argument 'SOURCE'", "SOURCE --to safetensors|torch|shardkit|peft --out DIR;"),
    ("doctor --device gpu", "--device 'gpu' is not a device", "auto, cpu or cuda"),
    ("submit recipe.yaml --gpus-per-node -2", "--gpus-per-node -2 is negative", "0 or more"),
    ("submit recipe.yaml --array a-b", "--array 'a-b' is not a list of indices", "0-3"),
    ("submit recipe.yaml --sbatch nice=5", "--sbatch 'nice=5' is not an option", "--sbatch=--nice=5"),
    ("submit recipe.yaml --style mpirun", "--style 'mpirun' is not a way to start ranks", "torchrun or srun"),
    ("submit recipe.yaml --time -5", "--time '-5' is negative", "H:MM:SS"),
    ("submit recipe.yaml --to nomad", "--to 'nomad' is not a kind of cluster", "slurm, kubernetes"),
    ("submit", "neither a config nor a script was given", "shardkit submit CONFIG"),
    ("launch -- recipe.yaml", "`-- recipe.yaml` is not a Python script", "stands without `--`"),
    ("launch --", "nothing follows `--`", "-- train.py"),
    ("launch --nproc-per-node 2 -- python train.py", "`-- python`: the ranks are started", "-- train.py"),
    ("launch --nproc-per-node 2 -- -m nope", "there is no module nope in", "correct the name"),
    ("launch ds.json --nproc-per-node 2", "ds.json is a file of DeepSpeed", "--from ds.json"),
    (f"{LAUNCH} 0", "--nproc-per-node '0' is not a number of ranks", "a number from 1"),
    (f"{LAUNCH} 2 --nnodes 2 --rdzv-endpoint host", "--rdzv-endpoint 'host' is not HOST:PORT", "node0:29500"),
    (f"{SUBMIT} --sbatch=--gpus-per-task=1", "contradicts --gpus-per-node 4", "pass --gpus-per-node alone"),
    (f"{LAUNCH} 2 --max-restarts -1", "--max-restarts -1 is negative", "0 or more"),
    (f"{LAUNCH} 2 run.resume=true", "run.resume=true, but run.dir=runs/first_hour does not exist", "run.resume=auto"),
    (f"{LAUNCH} 2 run.dir=models/base", "run.dir=models/base is a model folder", "a new or an empty directory"),
    (f"{LAUNCH} 2 -- train.py", "both a config (recipe.yaml) and a script (train.py) were given", "remove one"),
    (f"{LAUNCH} 2 --run-dir x", "--run-dir applies to a script behind `--`", "remove it"),
    ("report data data data", "unexpected extra argument", "shardkit report --help"),
    ("train --config ''", "the name of the config file is empty", "name a YAML file"),
    ("convert models/base --merge --to safetensors --out served", "models/base holds no adapter", "adapter.type=lora"),
    ("checkpoint ls runs/none", "runs/none is not a directory", "name the run.dir of a run"),
    ("checkpoint verify models/base", "models/base holds no checkpoint", "name the run.dir of a run"),
    ("tokenize nothing corpus --tokenizer models/base", "data path nothing does not", "name as SRC a file of text"),
    ("tokenize data/chats.jsonl corpus --tokenizer models/base train.seq_len=3", "train.seq_len=3", "pass keys of"),
    ("init recipe.yaml", "cannot write recipe.yaml/configs", "pass a directory you can write"),
    ("plann", "No such command 'plann'", "did you mean plan"),
    ("plan - --gpu-memory eighty", "--gpu-memory 'eighty'", "80GB"),
    ("plan - --gpus 12", "--gpus 12", "8 or 16"),
    (f"plan - --auto --gpu h100 --gpus {MANY} --gpus-per-node {MANY} --verify 2", "this machine has", "--verify"),
    ("tokenize data/chats.jsonl corpus --tokenizer nope", "the tokenizer nope does not", "pass --tokenizer with a "),
    ("launch -m package.module", "-m is not a config", "shardkit launch -- -m package.module"),
    ("launch -- -m", "-m is not followed by a module's name", "shardkit launch"),
    ("launch -- -c pass", "a script or -m MODULE must follow", "shardkit launch"),
    ("launch -- accelerate launch train.py", "the ranks are started by shardkit", "shardkit launch"),
    ("launch -- train.sh", "`-- train.sh` is not a Python script", "name the .py file"),
    ("launch --on-preempt usr9 -- train.py", "--on-preempt 'usr9'", "term, usr1, usr2, file"),
    ("launch --heartbeat-timeout 9 -- train.py", "--heartbeat-timeout says how long", "--heartbeat auto"),
    ("launch --on-preempt term recipe.yaml", "--on-preempt applies to a script", "remove it"),
    (f"{LAUNCH} 2 --nnodes 1:2 --rdzv-endpoint head:1", "a lost node would end the job", "pass --max-restarts"),
    ("submit --to kubernetes --partition gpu -- -m there", "--partition applies to Slurm", "remove it"),
    ("submit --volume data:/data -- -m json.tool", "--volume applies to Kubernetes", "pass --to"),
    ("submit --to jobset -- -m there", "--to jobset is written --to kubernetes now", "--to kubernetes: it prints"),
    (f"{PODS} --mem lots -- -m there", "--mem 'lots' is not a size", "64GiB"),
    (f"{SUBMIT} parallel.strategy=hsdp parallel.dp_replicate=3 parallel.dp_shard=5", "= 15, but there", "2 × 4, 4 × 2"),
    (f"{SUBMIT} parallel.strategy=single", "8 ranks does not work with", "parallel.strategy=ddp"),
    (f"{SUBMIT} train.global_batch_size=7 train.micro_batch_size=1", "size=7 is less than", "global_batch_size=8"),
    (f"{SUBMIT} --gpus-per-node 0 run.device=cuda", "the job asks for no GPU", "run.device=cpu"),
    (f"{SUBMIT} --gpus-per-node 2", "4 ranks on each node, but 2 GPU(s)", "2 ranks per node"),
    (f"{GATE} --gpu l4 -- train.py", "--gpu plans a config, and this is a script", "add --rehearse"),
    ("launch --gpu h100 -- train.py", "--gpu names the cards of --rehearse", "add it"),
    ("launch --rehearse --nproc-per-node 2 -- train.py", "this machine has no GPU", "submit"),
    ("submit --rehearse --gpu h100 --force -- train.py", "--force submits", "remove one"),
    ("rehearse", "no command stands behind `--`", "-- torchrun --nproc-per-node 8 train.py"),
    ("rehearse -- /bin/ls", "/bin/ls is not a Python program", "name the Python program itself"),
    ("rehearse -- no-such-program", "there is no program no-such-program", "its environment is active"),
    ("rehearse -- python3 -I train.py", "lets Python ignore its environment", "leave -I out"),
    ("rehearse --ranks 8 -- torchrun train.py", "torchrun starts ranks by itself", "that each rank runs"),
    ("rehearse --ranks 8 --live 8 -- train.py", "of 8 ranks, 0 to 7", "--live 0"),
    ("rehearse --live 0 -- python train.py", "--live names ranks of --ranks", "--ranks 128 --live 0,64"),
    ("rehearse --compute --ranks 8 --steps 2 -- train.py", "--ranks and --steps: with --compute", "leave out"),
    ("rehearse --poison -- python train.py", "show in what is computed", "give --compute"),
    ("rehearse --until friday -- python train.py", "--until friday", "--until save"),
    ("prove", "no command stands behind `--`", "-- torchrun --nproc-per-node 2 train.py"),
    ("prove -- /bin/ls", "/bin/ls is not a Python program", "name the Python program itself"),
    ("prove -- python3 train.py", "python3 names no number of processes", "--against 'python train.py"),
    ("prove --expect faster -- torchrun train.py", "--expect faster", "--expect same"),
    ("prove --until friday -- torchrun train.py", "--until friday", "--until save"),
    ("prove --gpu a100 -- torchrun train.py", "none are asked for", "--gpus 2"),
    ("prove --gpus 2 --gpu a1000 -- torchrun --nproc-per-node 2 train.py", "--gpu 'a1000' is not in", "it has: "),
    ("prove --until save --allow-writes -- torchrun train.py", "the sandbox keeps", "leave out --allow-writes"),
    (f"{BYTES} model.d_model=30 model.n_heads=4", "model.n_heads=4 does not divide", "model.d_model=32"),
    (f"{BYTES} data.path=tiny.txt", "tiny.txt has 9 tokens, fewer than the 257 that train.seq_len=256", "more data"),
    (f"{BYTES} parallel.strategy=ddp parallel.offload_optimizer=cpu", "with", "zero1, zero2, zero3"),
    (f"{BYTES} parallel.strategy=fsdp {NVME}", "offload_param=nvme does not work with parallel.strategy=fsdp", "zero3"),
    (f"{BYTES} parallel.strategy=zero2 precision.mode=fp16", "fp16 needs a GPU", "remove precision.mode"),
    (f"{BYTES} {CLIPPED}", "ds_config.gradient_clipping=7 contradicts train.max_norm", "set train.max_norm"),
    (f"{BYTES} run.device=cuda", "run.device=cuda, but torch ", "set run.device=cpu"),
    (f"{BYTES} profile.start=9 train.max_steps=5", "profile.start=9 is after the last step,", "at most 5"),
    (f"{BYTES} profile.steps=3", "profile.steps is set, but profile.start is not", "set profile.start to a step"),
]


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder in it, with its size and time of change."""
    found = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*")}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found.items()}


@pytest.mark.parametrize(("command", "cause", "fix"), WRONG, ids=[command for command, _, _ in WRONG])
def test_a_wrong_command_takes_two_lines_and_writes_nothing(
    command: str, cause: str, fix: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if any(words in command for words in ("tokenize ", "init_from", "data.")):
        pytest.importorskip("transformers")
    if ("run.device=cuda" in command or "launch --rehearse" in command) and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = files(folder)
    program, *words = shlex.split(command)
    code: object
    if program == "train":
        code = train_here(words)
    else:
        with pytest.raises(SystemExit) as ended:
            main([program, *words])
        code = ended.value.code
    out, err = capfd.readouterr()
    assert code == 2 and err.count("\n") == 2, err
    assert not out or (program == "train" and not ("run.dir" in command and "reading the data" in out)), out
    first, second = err.splitlines()
    assert first.startswith("error: ") and cause in first, err
    assert second.startswith("  fix: ") and fix in second, err
    assert files(folder) == before
