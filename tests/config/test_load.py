from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardkit.config import capability, removed
from shardkit.config.errors import HERE, OTHER_NAMES, json_schema, suggest
from shardkit.config.load import LoadedConfig, load_config, resolve_batch
from shardkit.config.presets import MODEL_PRESETS
from shardkit.config.schema import RunConfig, section_fields
from shardkit.errors import ConfigError, parse_bytes
from shardkit.tasks.load import load_task
from tests import generated

REPO = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPO / "configs").glob("*.yaml"))
SECTIONS: dict[str, Any] = {name: info.annotation for name, info in RunConfig.model_fields.items()}
KEYS = [f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields]

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_config(text: str | bytes) -> Path:
        path = tmp_path / "c.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_config


def refused(path: Path | str | None = None, overrides: Any = ()) -> ConfigError:
    """The error; cause and fix are one line each, unless several things are wrong."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    error = caught.value
    assert error.cause
    assert error.fix
    assert "\n" not in error.fix and ("\n" not in error.cause or "settings are not valid" in error.cause)
    return error


@pytest.mark.parametrize("text", [None, "", "# only a comment\n", "---\n", "train:\n", "\ufeff"])
def test_nothing_given_is_all_defaults(write: Write, text: str | None) -> None:
    loaded = load_config(None if text is None else write(text))
    assert loaded.config == RunConfig()
    assert set(loaded.sources) == set(KEYS) and set(loaded.sources.values()) == {"default"}


def test_later_layers_win_and_sources_say_so(write: Write) -> None:
    path = write("train: {max_steps: 7, seq_len: 64}\noptim: {lr: 1e-4}\n")
    loaded = load_config(path, ["train.max_steps=8", "run.dir=out"])
    assert (loaded.config.train.max_steps, loaded.config.train.seq_len) == (8, 64)
    assert loaded.config.optim.lr == 1e-4
    assert loaded.sources["train.max_steps"] == "command line"
    assert loaded.sources["train.seq_len"] == str(path)
    assert loaded.sources["train.seed"] == "default"


@pytest.mark.parametrize(
    ("override", "dotted", "value"),
    [
        ("train.max_norm=null", "train.max_norm", None),
        ("optim.lr=1e-4", "optim.lr", 1e-4),
        ("train.max_steps=1e3", "train.max_steps", 1000),
        ("parallel.no_sync=off", "parallel.no_sync", False),
        ("optim.betas=[0.8, 0.9]", "optim.betas", (0.8, 0.9)),
        ("run.dir=2024", "run.dir", "2024"),
        ("run.dir=1e3", "run.dir", "1e3"),
        ("run.dir=a=b: c", "run.dir", "a=b: c"),
        ('run.dir="a b"', "run.dir", "a b"),
        ("data.path=*.txt", "data.path", "*.txt"),
        ("data.path=[ab]*/x", "data.path", "[ab]*/x"),
        ("data.path=null", "data.path", None),
    ],
)
def test_values_on_the_command_line(override: str, dotted: str, value: object) -> None:
    section, key = dotted.split(".")
    assert getattr(getattr(load_config(None, [override]).config, section), key) == value


def test_deep_overrides_merge_into_raw_keys(write: Write) -> None:
    path = write("parallel: {ds_config: {zero_optimization: {overlap_comm: true, stage3_max_live_parameters: 1_000}}}")
    loaded = load_config(
        path,
        [
            "parallel.ds_config.zero_optimization.overlap_comm=false",
            "parallel.ds_config.aio.x=1e-4",
            "task.factory=a:B",
            "task.args.n=3",
        ],
    )
    raw = loaded.config.parallel.ds_config
    assert raw == {"zero_optimization": {"overlap_comm": False, "stage3_max_live_parameters": 1000}, "aio": {"x": 1e-4}}
    assert isinstance(raw["aio"]["x"], float)
    assert loaded.config.task.args == {"n": 3}
    assert loaded.sources["parallel.ds_config.zero_optimization.overlap_comm"] == "command line"
    assert loaded.sources["parallel.ds_config.zero_optimization.stage3_max_live_parameters"] == str(path)


def test_anchors_and_merge_keys_work(write: Write) -> None:
    loaded = load_config(
        write("parallel: {ds_config: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}}}"), ["parallel.ds_config.b.x=9"]
    )
    assert loaded.config.parallel.ds_config == {"a": {"x": 1, "y": 2}, "b": {"x": 9, "y": 3}}


def test_yaml_1_1_surprises_are_text(write: Write) -> None:
    loaded = load_config(write("task: {factory: 'a:B', args: {d: 2024-01-01, t: 12:30:00, o: 010, h: 0x10}}"))
    assert loaded.config.task.args == {"d": "2024-01-01", "t": "12:30:00", "o": "010", "h": "0x10"}


def test_a_preset_gives_the_sizes_that_are_not_set(write: Write) -> None:
    loaded = load_config(write("model: {preset: 124m, n_layers: 2}"))
    assert (loaded.config.model.d_model, loaded.config.model.n_layers) == (768, 2)
    assert loaded.sources["model.d_model"] == "preset 124m"
    assert loaded.sources["model.n_layers"].endswith("c.yaml")
    assert loaded.sources["model.dropout"] == "default"


def test_a_preset_on_the_command_line_replaces_the_files_sizes(write: Write) -> None:
    resolved = write(load_config(None, ["model.preset=124m"]).render())
    loaded = load_config(resolved, ["model.preset=355m", "model.n_layers=3"])
    assert loaded.config.model.d_model == MODEL_PRESETS["355m"]["d_model"]
    assert loaded.config.model.n_layers == 3
    assert loaded.sources["model.d_model"] == "preset 355m"
    assert loaded.sources["model.n_layers"] == "command line"


def same(first: LoadedConfig, second: LoadedConfig) -> bool:
    return first.config.model_dump() == second.config.model_dump()


def test_rendered_config_shows_sources_and_loads_to_the_same(write: Write) -> None:
    loaded = load_config(write("optim: {lr: 1e-5}\nrun: {dir: 'a # b'}"), ["train.max_norm=null", "model.preset=7b"])
    text = loaded.render()
    lines = {line.split(":")[0].strip(): line for line in text.splitlines() if "  # " in line}
    assert lines["lr"].endswith("c.yaml")
    assert lines["max_norm"].endswith("# command line")
    assert lines["d_model"].endswith("# preset 7b")
    assert lines["seed"].endswith("# default")
    assert same(load_config(write(text)), loaded)
    assert yaml.safe_load(text)["run"]["dir"] == "a # b"  # other readers agree


def text(**size: int) -> st.SearchStrategy[str]:
    return st.text(**size).map(lambda found: found.replace("\0", "0"))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | text(max_size=12)
    | st.sampled_from(["1e-4", "null", "yes", "0x1", "010", "a: b", "- a", "x # y", "2024-01-01", "~", "<<", "\x85"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(args=st.dictionaries(text(max_size=6), plain, max_size=4), folder=text(min_size=1, max_size=20))
@example(args={".0": ".5e3"}, folder=".0")  # numbers, without quotes
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_config_survives_print_config(tmp_path: Path, args: dict[str, Any], folder: str) -> None:
    loaded = load_config(overrides={"task.factory": "a:B", "task.args": args, "run.dir": folder})
    path = tmp_path / "resolved.yaml"
    path.write_text(loaded.render(), encoding="utf-8")
    assert same(load_config(path), loaded)


def test_file_errors(tmp_path: Path, write: Write) -> None:
    assert "does not exist" in refused(tmp_path / "missing.yaml").cause
    assert "is a directory" in refused(tmp_path).cause
    assert "not UTF-8" in refused(write(b"\xff\xfe\x00t")).cause
    assert "cannot be read" in refused(tmp_path / "a\0b").cause
    assert "cannot be read" in refused(write("train: {}") / "below_a_file").cause


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("train:\n  a: [1\n", ":3:1", "not YAML"),
        ("train:\n\tmax_steps: 1\n", ":2:1", "not YAML"),
        ("a: 1\n---\nb: 2\n", ":2:1", "not YAML"),
        ("- 1\n", "", "a list, not a mapping"),
        ("just text\n", "", "not a mapping"),
        ("train: 3\n", ":1", "train=3"),
        ("train:\n  seed: 1\n  max_steps: 2\n  seed: 3\n", ":4", "'seed' is already set on line 2"),
        ("train: {}\ntrain: {}\n", ":2", "'train' is already set on line 1"),
        ("parallel: {ds_config: {a: 1, a: 2}}\n", ":1", "'a' is already set"),
        ("1: 2\n", ":1", "a key must be text"),
        ("? [a]\n: 2\n", ":1", "a key must be text"),
        ("task: {args: {x: !!python/object:os.system ls}}\n", ":1", "tag"),
        ("task: {args: {x: !!binary aGk=}}\n", ":1", "bytes"),
        ("train: {seed: !!int x}\n", ":1", "does not fit its tag"),
        ("task: {args: &a {x: *a}}\n", "", "nested too deeply"),
        ('run: {dir: "\\ud800"}\n', ":1", "surrogate"),
        ("train: {seed: 99999999999999999999999}\n", ":1", "bits"),
        ("run: {dir: *x}\n", ":1:12", "undefined alias"),
        ("a\0b", "", "not YAML"),
    ],
)
def test_yaml_errors_name_the_place(write: Write, text: str, where: str, cause: str) -> None:
    path = write(text)
    error = refused(path)
    assert f"{path}{where}" in error.cause
    assert cause in error.cause


def test_what_is_nested_too_deeply_is_refused(write: Write) -> None:
    assert "nested too deeply" in refused(write("task: {args: {x: " + "[" * 2000 + "]" * 2000 + "}}")).cause
    nested: dict[str, Any] = {}
    nested["x"] = nested
    assert "nested too deeply" in refused(overrides={"task.args": nested}).cause


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("train.max_step=1", "train.max_steps"),
        ("train.lr=1", "optim.lr"),
        ("trian.max_steps=1", "train.max_steps"),
        ("optimizer.lr=1", "optim.lr"),
        ("train.learning_rate=1", "optim.lr"),
        ("train.batch_size=1", "train.micro_batch_size"),
        ("training.gradient_clipping=1", "train.max_norm"),
        ("parallel.reshard_after_foward=1", "parallel.reshard_after_forward"),
        ("checkpoint.every=1", "checkpoint.every_steps"),
        ("lr=1", "optim.lr"),
        ("zero_stage=2", "parallel.strategy"),
    ],
)
def test_unknown_keys_get_a_suggestion(write: Write, override: str, meant: str) -> None:
    assert refused(None, [override]).fix == f"did you mean {meant}?"
    dotted, value = override.split("=")
    section, _, key = dotted.partition(".")
    error = refused(write(f"# line 1\n{section}: {f'{{{key}: {value}}}' if key else value}\n"))
    assert error.fix == f"did you mean {meant}?"
    assert "c.yaml:2" in error.cause


def test_a_removed_key_names_what_to_use_instead(write: Write) -> None:
    for error in (refused(write("train:\n  eval_batches: 8\n")), refused(None, ["train.eval_batches=8"])):
        assert error.cause.startswith("train.eval_batches was removed (")
        assert error.fix == removed.KEYS["train.eval_batches"].instead


def test_a_stored_config_loads_with_a_removed_key_that_asked_for_nothing(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(removed.KEYS, "train.former", removed.Removed("use x", harmless=(None, 0)))
    assert load_config(write("train: {former: 0, seed: 3}"), ["train.former=null"]).config.train.seed == 3
    assert refused(write("train: {former: 1, seed: 3}")).fix == "use x"
    assert refused(None, ["train.former=1"]).fix == "use x"


def test_no_row_of_the_removed_is_still_there() -> None:
    assert not set(removed.KEYS) & set(KEYS)
    assert all("\n" not in words for words in [*removed.VALUES.values(), *removed.COMMANDS.values()])


def test_unknown_keys_without_a_near_one_list_what_there_is() -> None:
    assert "max_steps" in refused(None, ["train.qqqqq=1"]).fix
    assert "parallel" in refused(None, ["qqqqq.zzzzz=1"]).fix


def test_everything_that_is_wrong_with_a_file_is_said_at_once(write: Write) -> None:
    wrong = "train: {max_steps: 0, seed: x, max_stps: 3}\noptim: {lr: -1, betas: true}\nmodl: {a: 1}\n"
    error = refused(write(wrong + "compile: 3\ndata: {workers: yes}\n"))
    told = error.cause.splitlines()
    assert told[0] == "8 settings are not valid" and len(told) == 9, told
    causes = ["train.max_steps=0", "train.seed='x'", "unknown key train.max_stps", "optim.lr=-1", "optim.betas=true"]
    for cause in [*causes, "unknown key modl.a", "compile=3", "data.workers=true"]:
        assert any(line.startswith(f"  {cause}") for line in told), (cause, told)
    assert "did you mean train.max_steps?" in error.cause


def test_a_nul_character_is_refused_in_every_text(write: Write) -> None:
    for text in ('run: {dir: "a\\0b"}', 'data: {path: "a\\0b"}', 'task: {factory: "m:F", args: {x: ["\\0"]}}'):
        assert "NUL character" in refused(write(text)).cause
    assert "NUL character" in refused(None, ["run.dir=a\0b"]).cause


@pytest.mark.parametrize(
    ("preset", "task", "right"),
    [("gpt2", "causal_lm", "hf_causal_lm"), ("vit-b", "hf_causal_lm", "image_classification"),
     ("124m", "hf_causal_lm", "causal_lm"), ("bert-base", "super_resolution", "hf_masked_lm")],
)  # fmt: skip
def test_a_preset_of_another_task_names_its_task(preset: str, task: str, right: str) -> None:
    loaded = load_config(None, [f"model.preset={preset}", f"task.name={task}"])

    def use() -> None:
        capability.check(loaded.config, device="cpu", world_size=1, local_world_size=1)
        load_task(loaded.config)

    with pytest.raises(ConfigError) as caught:
        use()
    assert f"task.name={right}" in caught.value.fix


@pytest.mark.parametrize(
    "override", ["", "=", "train", "train=1", "train.=1", ".x=1", "train..x=1", "a b", "max_steps 3"]
)
def test_malformed_overrides_say_the_form(override: str) -> None:
    error = refused(None, [override])
    assert "section.key=value" in error.cause
    assert "optim.lr=1e-3" in error.fix


def test_overrides_below_a_value_or_beside_one(write: Write) -> None:
    assert "optim.lr is a value" in refused(None, ["optim.lr.x=1"]).cause
    path = write("parallel: {ds_config: {a: 1}}")
    assert "parallel.ds_config.a is 1" in refused(path, ["parallel.ds_config.a.b=1"]).cause
    assert "optim.lr='[1'" in refused(None, ["optim.lr=[1"]).cause


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("train.max_steps=0", "0"),
        ("train.max_steps=2.5", "2.5"),
        ("train.max_steps=yes", "true"),
        ("train.grad_accum_steps=-1", "-1"),
        ("train.seed=4294967296", "4294967296"),
        ("optim.lr=fast", "'fast'"),
        ("optim.lr=null", "null"),
        ("optim.lr=.inf", "inf"),
        ("optim.lr=.nan", "nan"),
        ("optim.lr=1e309", "inf"),
        ("optim.betas=[0.9]", "[0.9]"),
        ("data.shuffle=3", "3"),
        ("task.factory=nocolon", "'nocolon'"),
        ("parallel.ds_config=3", "3"),
        ("run.dir=null", "null"),
        ("precision.mode=int8", "'int8'"),
        ("parallel.strategy=pipeline", "'pipeline'"),
        ("activation.every_k=0", "0"),
        ("activation.budget=1.5", "1.5"),
        ("activation.offload_min_bytes=-1", "-1"),
        ("activation.offload_min_bytes=lots", "'lots'"),
        ("model.quantize=bits:4", "'bits:4'"),
        ("model.quantize={bits:8}", "{'bits:8': None}"),
        ("data.columns={messages:dialog}", "{'messages:dialog': None}"),
    ],
)
def test_wrong_values_say_what_was_set_and_where(write: Write, override: str, shown: str) -> None:
    dotted, value = override.split("=")
    assert refused(None, [override]).cause.startswith(f"{dotted}={shown} (command line): ")
    section, key = dotted.split(".")
    path = write(f"{section}:\n  # comment\n  {key}: {value}\n")
    assert refused(path).cause.startswith(f"{dotted}={shown} ({path}:3): ")


def test_fixes_for_common_slips(write: Write) -> None:
    assert refused(None, ["parallel.strategy=fdsp"]).fix == "did you mean parallel.strategy=fsdp?"
    assert refused(None, ["run.device=gpu"]).fix == "did you mean run.device=cuda?"
    assert refused(None, ["model.quantize={bitz: 4}"]).fix == "did you mean model.quantize.bits?"
    assert refused(write("run: {dir: 2024}")).fix == 'quote it: "2024"'
    assert "'model.hf={key: value}'" in refused(None, ["model.hf=hidden_size"]).fix
    assert "'model.quantize={key: value}'" in refused(None, ["model.quantize={bits:4}"]).fix


COMPILED = "compile.enabled=true"


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        ("model.n_heads=3", "model.n_heads", "model.d_model="),
        ("train.seq_len=999", "model.max_seq_len", "max_seq_len=999"),
        ("task.args={a:1}", "task.args", "task.factory"),
        ("optim.momentum=0.9", "optim.momentum", "optim.name=sgd"),
        ("optim.name=sgd optim.eps=1e-3", "optim.eps", "optim.eps"),
        ("optim.betas=[0.9,1]", "optim.betas", "0.9"),
        ("parallel.offload_param=nvme", "parallel.nvme_path", "nvme_path"),
        ("parallel.nvme_path=/x", "parallel.nvme_path", "remove"),
        ("train.global_batch_size=12", "train.global_batch_size", "8 or 16"),
        ("activation.policy=budget", "compile.enabled", "compile.enabled=true"),
        (f"activation.offload=cpu {COMPILED} compile.mode=reduce-overhead", "compile.mode", "compile.mode=default"),
        (f"activation.offload=cpu {COMPILED} compile.mode=max-autotune", "compile.mode", "no-cudagraphs"),
        (f"activation.policy=selective_op {COMPILED} parallel.strategy=zero3", "strategy", "policy=selective"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_to_set(overrides: str, key: str, fix: str) -> None:
    """Values that contradict each other; a fix can be pasted into a shell."""
    error = refused(None, overrides.split())
    assert key in error.cause and "(command line)" in error.cause
    assert fix in error.fix


@pytest.mark.parametrize(
    ("overrides", "world", "steps"),
    [
        ([], 4, 1),
        (["train.grad_accum_steps=3"], 4, 3),
        (["train.global_batch_size=64"], 4, 2),
        (["train.global_batch_size=64", "train.grad_accum_steps=2"], 4, 2),
        (["train.global_batch_size=64"], 1, 8),
    ],
)
def test_accumulation_is_derived(overrides: list[str], world: int, steps: int) -> None:
    assert resolve_batch(load_config(None, overrides).config, world) == steps


@pytest.mark.parametrize(
    ("overrides", "world", "cause"),
    [
        (["train.global_batch_size=64"], 3, "8 × 3 = 24"),
        (["train.global_batch_size=16"], 4, "8 × 4 = 32"),
        (["train.global_batch_size=64", "train.grad_accum_steps=4"], 4, "train.grad_accum_steps=4"),
    ],
)
def test_batches_that_cannot_be_met_say_which_would(overrides: list[str], world: int, cause: str) -> None:
    config = load_config(None, overrides).config
    with pytest.raises(ConfigError) as caught:
        resolve_batch(config, world)
    assert cause in caught.value.cause
    for advice in caught.value.fix.split(", or "):  # each piece of advice works on its own
        dotted, value = advice.removeprefix("set ").removeprefix("remove ").partition("=")[::2]
        change = {dotted: value.split(" or ")[0] or None}
        given = dict(item.split("=") for item in overrides)
        fixed = load_config(overrides={**given, **change}).config
        assert resolve_batch(fixed, world) >= 1


keys = st.sampled_from(KEYS) | st.text(max_size=10)


def loads_or_refuses(path: Path | None, overrides: Any = ()) -> None:
    refusal = None
    try:
        load_config(path, overrides).render().encode()
    except ConfigError as error:
        refusal = error
    if refusal is not None:
        lines = refusal.cause.split("\n")
        assert refusal.fix and "\n" not in refusal.fix and all(line and len(line) < 900 for line in lines)
        assert len(lines) == 1 or lines[0] == f"{len(lines) - 1} settings are not valid"
        str(refusal).encode()


fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.lists(st.builds("{}={}".format, keys, st.text(max_size=15) | plain.map(json.dumps)) | st.text(), max_size=4))
@example(["optim.lr=" + "[" * 5000])
@example(["run.dir=\ud800"])
@example(["\ud800.x=1"])
@example(['train.seed="\\U00110000"'])
@fuzz
def test_random_overrides(overrides: list[str]) -> None:
    loads_or_refuses(None, overrides)


tree = st.dictionaries(
    st.sampled_from(list(SECTIONS)) | st.text(max_size=5),
    st.dictionaries(st.sampled_from([key.split(".")[1] for key in KEYS]) | st.text(max_size=5), plain, max_size=4)
    | plain,
    max_size=4,
)


@given(st.binary(max_size=40) | tree.map(yaml.safe_dump) | st.text() | st.text("{}[]:,-?&*!|>'\"%#\n\t ab1<~.0"))
@example("a: !!int\n")
@example("!!set {a}")
@example("a: &a {<<: *a}")
@example('"\\U00110000"')
@example("%YAML 3.0\n---\n")
@fuzz
def test_random_files(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    loads_or_refuses(path)


def test_every_section_and_field_has_a_description() -> None:
    schema = json_schema()
    assert all(schema["properties"][section].get("description") for section in SECTIONS)
    fields = {name: model.model_fields for name, model in SECTIONS.items()}
    missing = [f"{name}.{key}" for name, keys in fields.items() for key, info in keys.items() if not info.description]
    assert not missing


def test_the_checked_in_schema_is_current() -> None:
    assert json.loads(generated.SCHEMA.read_text()) == json_schema(), "run: python -m tests.generated"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_name_their_schema_and_directory(path: Path) -> None:
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    loaded = load_config(path)
    assert loaded.config.run.dir == f"runs/{path.stem}"
    assert str(path) in loaded.sources.values()


def test_loading_imports_no_torch() -> None:
    code = (
        "import sys, shardkit.config.load, shardkit.config.capability as c; "
        "c.markdown_table(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


def test_a_setting_in_the_place_of_the_file_is_told_from_one() -> None:
    assert "- for the defaults" in refused("model.preset=debug").fix


def test_a_missing_file_is_not_answered_with_hidden_ones(tmp_path: Path) -> None:
    (tmp_path / ".pre-commit-config.yaml").touch()
    missing = tmp_path / "none.yaml"
    assert "pre-commit" not in refused(missing).fix
    (tmp_path / "mine.yaml").touch()
    assert "mine.yaml" in refused(missing).fix and "pre-commit" not in refused(missing).fix


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("2GiB", 2 * 2**30), ("1.5 MiB", 3 * 2**19), ("1KiB", 1024), (" 0.25TiB ", 2**38)]
)
def test_sizes_are_powers_of_two(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "2", "2GB", "2gib", "-1GiB", "0GiB", "1e3MiB", "GiB", "2GiB!"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)
    with pytest.raises(ConfigError, match="is not a size") as refused:
        load_config(overrides={"memory.cap": text})
    assert "memory.cap=2GiB" in refused.value.fix


def test_a_name_is_declared_once_for_a_key_that_exists() -> None:
    assert len(HERE) == sum(len(names.split()) for names in OTHER_NAMES.values())
    fields = {f"{section}.{key}" for section, keys in section_fields().items() for key in keys}
    assert {".".join(key.split(".")[:2]) for key in OTHER_NAMES} <= fields
    assert list(OTHER_NAMES) == sorted(OTHER_NAMES)


@pytest.mark.parametrize("name", HERE)
def test_another_tools_name_suggests_the_key_here(name: str) -> None:
    key = ".".join(HERE[name].split(".")[:2])
    assert suggest(tuple(name.split("."))[:2]) == key or name.count(".") > 1
    assert "." in name or suggest(("adapter" if key.startswith("adapter.") else "optimizer", name)) == key
