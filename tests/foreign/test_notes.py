"""Notes under a plan: what silently changes the mathematics, and misspelt keys; files without a fault have none."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.errors import ConfigError
from shardkit.foreign import tools
from shardkit.foreign.notes import Note
from shardkit.foreign.show import mapping
from shardkit.foreign.translate import read_job

from .samples import BY_FILE, DDP, DUMMIES, FSDP1, FSDP2, TRAINER, ZERO2, ZERO3, write

BROKEN = Path(__file__).parent / "broken"


def notes(names: list[str]) -> tuple[Note, ...]:
    return read_job(names).notes


def has_words(lines: list[str], words: list[str]) -> bool:
    return any(all(word in line for word in words) for line in lines)


def named(names: list[str]) -> list[str]:
    """Lines of a plan that say a fault: notes, refusals, and rows of keys that their tool does not read."""
    try:
        job = read_job(names)
    except ConfigError as error:
        return [f"{error.cause} {error.fix}"]
    rows = [line for line in mapping(job) if "unknown" in line or "ignored there" in line or "a section" in line]
    return [*rows, *(f"{fault.cause} {fault.fix}" for fault in (*job.notes, *job.problems))]


@pytest.mark.parametrize(("folder", "count"), [("", 22), ("later", 9)])
def test_broken_configs_from_public_threads_are_named(
    folder: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = []
    paths = sorted((BROKEN / folder).glob("*.yaml"))
    for path in paths:
        (tmp_path / path.stem).mkdir()
        monkeypatch.chdir(tmp_path / path.stem)
        case = yaml.safe_load(path.read_text())
        assert case["thread"].startswith("https://github.com/")
        for name, text in case["files"].items():
            Path(name).write_text(text)
        if not has_words(named(list(case["files"])), case["names"]):
            missed.append(path.stem)
    assert (len(paths), missed) == (count, [])


@pytest.mark.parametrize(
    "files",
    [
        {"ds__json": ZERO3, "args__yaml": TRAINER},
        {"accelerate__yaml": FSDP2},
        {"accelerate__yaml": FSDP1},
        {"accelerate__yaml": ZERO2, "args__yaml": TRAINER + "gradient_accumulation_steps: 4\n"},
        {"accelerate__yaml": DDP, "args__yaml": TRAINER},
        {"accelerate__yaml": BY_FILE, "ds__json": DUMMIES},
        {"args__yaml": TRAINER + "fsdp: true\nfsdp_config: {activation_checkpointing: true}\n"},
    ],
)  # fmt: skip
def test_files_without_a_fault_have_no_note(files: dict[str, Any], tmp_path: Path) -> None:
    assert notes(write(tmp_path, **files)) == ()


FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"accelerate__yaml": FSDP2.replace("offload_params", "ofload_params")},
     ["accelerate.yaml:9: ", "ignores", "did you mean fsdp_config.fsdp_offload_params"]),
    ({"accelerate__yaml": "distributed_type: NO\nnum_proceses: 1\n"},
     ["accelerate.yaml:2: ", "refuses", "num_processes"]),
    ({"ds__json": {**ZERO3, "gradient_cliping": 1.0}, "args__yaml": TRAINER}, ["unknown to DeepSpeed", "_clipping"]),
    ({"ds__json": json.dumps({**ZERO3, "zero_optimization": {"stage": 3, "overlap_com": True}}, indent=1),
      "args__yaml": TRAINER}, ["ds.json:12: ", "refuses", "did you mean zero_optimization.overlap_comm?"]),
    ({"args__yaml": TRAINER + "no_cuda: true\n"}, ["args.yaml:6: ", "refuses", "use_cpu"]),
    ({"args__yaml": TRAINER + "gradient_checkpointing: 'false'\n"}, ["args.yaml:6: ", "counts as true"]),
    ({"args__yaml": TRAINER + "fsdp_version: 2\n"}, ["fsdp_config.version"]),
    ({"args__yaml": TRAINER, "ds__json": {**ZERO3, "scheduler": {"type": "WarmupLR", "params": {}}}},
     ["ds.json:1: scheduler.type=WarmupLR wins over lr_scheduler_type=cosine", "remove the scheduler at ds.json:1"]),
    ({"args__yaml": TRAINER, "ds__json": {**ZERO3, "scheduler": {
        "type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 20}}}},
     ["warmup_num_steps=20 is more than total_num_steps=10"]),
    ({"args__yaml": TRAINER.replace("bf16", "fp16"), "config__json": {"model_type": "llama", "dtype": "bfloat16"}},
     ["args.yaml:2: fp16 with llama", "use bf16"]),
    ({"args__yaml": TRAINER + "enable_jit_checkpoint: true\n", "ds__json": ZERO3},
     ["args.yaml:6: enable_jit_checkpoint=true", "one update more"]),
]  # fmt: skip


@pytest.mark.parametrize(("files", "words"), FAULTS)
def test_a_fault_is_a_note_with_the_line_of_the_users_file(
    files: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **files)
    lines = [f"{note.cause} {note.fix}" for note in notes([name.replace("__", ".") for name in files])]
    assert has_words(lines, words), lines


def test_a_note_needs_the_pair_that_goes_wrong(tmp_path: Path) -> None:
    model = {"model_type": "llama", "dtype": "bfloat16"}
    assert notes(write(tmp_path, args__yaml=TRAINER, config__json=model)) == ()
    assert notes(write(tmp_path, args__yaml=TRAINER + "enable_jit_checkpoint: true\n")) == ()
    job = read_job(write(tmp_path, args__yaml=TRAINER + "dataset_name: a\nmy_own: 1\n"))
    assert job.notes == (), "arguments of the script itself are no misspelt keys"
    assert "unless the script has such an argument" in "\n".join(mapping(job))


def test_a_number_that_yaml_takes_for_text_is_written_so_that_it_does_not(tmp_path: Path) -> None:
    (note,) = notes(write(tmp_path, args__yaml="learning_rate: 5e-5\n"))
    assert yaml.safe_load(note.fix.removeprefix("write ")) == {"learning_rate": 5e-5}


@pytest.mark.parametrize(
    ("content", "cause", "fix"),
    [
        ('{"zero_optimization": {"stage": 2', "ds.json:1: not JSON", "ends early"),
        ('{"zero_optimization": {"stage": 2},}', "ds.json:1: not JSON", "trailing"),
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', "set twice", ""),
        ("distributed_type: [NO\n", "not YAML", ""),
        ("- 1\n", "a list", ""),
        ("", "empty", ""),
        ("train: {max_steps: 3}\n", "of shardkit itself", "without --from"),
        ("apiVersion: v1\nkind: Pod\n", "no config of Accelerate", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_one_cause_and_one_fix(
    content: str, cause: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_job(write(tmp_path, ds__json=content))
    assert cause in caught.value.cause
    assert fix in caught.value.fix
    assert "\n" not in caught.value.cause + caught.value.fix


def test_two_files_of_one_tool_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both files of DeepSpeed"):
        read_job(write(tmp_path, a__json=ZERO3, b__json=ZERO3))


def test_a_binary_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    for name in ("x.json", "gone.json", "."):
        with pytest.raises(ConfigError) as caught:
            read_job([str(tmp_path / name)])
        assert caught.value.fix


STRANGE = [True, "x", [1], -1, {"a": 1}]
BASES = {
    "accelerate": [{"distributed_type": kind} for kind in ("FSDP", "DEEPSPEED")],
    "deepspeed": [{"zero_optimization": {"stage": 3}}],
    "trainer": [{"output_dir": "out", "fsdp": True}],
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", BASES)
def test_no_value_of_any_key_is_a_traceback(tool: str, tmp_path: Path) -> None:
    """Nobody checks the types of these files before: every key gets values of every kind."""
    model = tmp_path / "config.json"
    model.write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    for key in tools.KEYS[tool]:
        for base in BASES[tool]:
            for value in STRANGE:
                tree = json.loads(json.dumps(base))
                *sections, name = key.replace(".*", ".other").split(".")
                inner = tree
                for section in sections:
                    inner[section] = inner[section] if isinstance(inner.get(section), dict) else {}
                    inner = inner[section]
                inner[name] = value
                names = write(tmp_path, file__json=tree)
                with contextlib.suppress(ConfigError):
                    read_job(names, str(model), 2).load(["train.seq_len=8", "train.micro_batch_size=1"])
