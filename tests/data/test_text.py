"""Text, conversations and prompts as a tokenizer's tokens, from every format."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.config.schema import RunConfig
from shardkit.data.loader import MixOrder
from shardkit.data.rows import Json, RowFormat
from shardkit.data.text_data import TextData
from shardkit.data.tokenize import open_source
from shardkit.data.tokenizer import load_tokenizer, tokenizer_path
from shardkit.data.windows import IGNORE_INDEX
from shardkit.errors import ConfigError, DataError

from .chats import MARKED, PLAIN, conversation, write_lines, write_tokenizer

pytest.importorskip("transformers")


def config(tmp_path: Path, path: Path | None, *, seq_len: int = 64, vocab_size: int = 512, **data: Any) -> RunConfig:
    if not (tmp_path / "tok").exists():
        write_tokenizer(tmp_path / "tok")
    keys = {
        "tokenizer": str(tmp_path / "tok"),
        "path": path and str(path),
        "cache_dir": str(tmp_path / "cache"),
        **data,
    }
    return RunConfig.model_validate(
        {"model": {"vocab_size": vocab_size}, "train": {"seq_len": seq_len}, "data": {"tokenize_workers": 2, **keys}}
    )


def opened(tmp_path: Path, path: Path | None, **keys: Any) -> TextData:
    data = TextData(config(tmp_path, path, **keys), 512, "model.vocab_size")
    assert data.sources is not None and data.corpus is None
    return data


def everything(data: TextData) -> list[tuple[list[int], list[bool]]]:
    """Tokens and targets of all documents, in the order of the file."""
    from shardkit.data.store import Documents

    whole = Documents(data.sources.train)
    return [
        (sample["tokens"].tolist(), sample["is_target"].tolist())
        for sample in map(whole.__getitem__, range(len(whole)))
    ]


TRAILER = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
"""Some templates end a conversation, whoever speaks last, with a token."""


@pytest.mark.parametrize("trailer", ["", TRAILER])
def test_assistant_masks_are_those_of_transformers(trailer: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", PLAIN + trailer)
    rows = [conversation(i, turns=1 + i % 3) for i in range(40)]
    path = write_lines(tmp_path / "chat.jsonl", ({"messages": row} for row in rows))
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "marked", MARKED + trailer))
    expected = []
    for row in rows:
        found = tokenizer.apply_chat_template(row, return_dict=True, return_assistant_tokens_mask=True)
        expected.append((found["input_ids"], [bool(m) for m in found["assistant_masks"]]))
    computed = everything(opened(tmp_path, path))
    marked = everything(opened(tmp_path, path, tokenizer=str(tmp_path / "marked")))
    assert computed == expected
    assert marked == expected
    last = everything(opened(tmp_path, path, loss_on="completion"))
    for (tokens, mask), (_, every) in zip(last, expected, strict=True):
        starts = [i for i in range(1, len(every)) if every[i] and not every[i - 1]]
        assert mask == [one and i >= starts[-1] for i, one in enumerate(every)], tokens


def test_every_format_and_convention_gives_the_same_documents(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    rows = [conversation(i) for i in range(30)]
    roles = {"user": "human", "assistant": "gpt", "system": "system"}
    theirs = [[{"from": roles[m["role"]], "value": m["content"]} for m in row] for row in rows]
    write_lines(tmp_path / "a.jsonl", ({"messages": row} for row in rows))
    write_lines(tmp_path / "b.jsonl", ({"id": i, "conversations": row} for i, row in enumerate(theirs)))
    write_lines(tmp_path / "c.jsonl", ({"prompt": row[:-1], "completion": row[-1:]} for row in rows))
    table = pa.table({"n": list(range(30)), "dialog": rows})
    parquet.write_table(table, tmp_path / "d.parquet", row_group_size=7)
    feather.write_feather(table, tmp_path / "e.arrow", chunksize=4)
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (saved / "state.json").write_text("{}")
    with (
        pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table, max_chunksize=10)
    reference = everything(opened(tmp_path, tmp_path / "a.jsonl"))
    assert len(reference) == 30
    named = {"columns": {"messages": "dialog"}}
    for name, keys in [("b.jsonl", {}), ("c.jsonl", {}), ("d.parquet", named), ("e.arrow", named), ("saved", named)]:
        assert everything(opened(tmp_path, tmp_path / name, **keys)) == reference, name


def test_a_prompt_may_count_and_no_end_be_added(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "sums.jsonl", [{"prompt": "3 plus 3 is", "completion": " 6"}] * 9)
    tokens, mask = everything(opened(tmp_path, path, loss_on="all", add_eos=False))[3]
    assert all(mask[1:])
    assert load_tokenizer(tmp_path / "tok").decode(tokens) == "3 plus 3 is 6"


def test_windows_of_text_hold_each_token_once(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for module in ("decoder", "encoder", "scanner", "tool"):
        (folder / f"{module}.py").write_bytes((Path(json.__file__).parent / f"{module}.py").read_bytes())
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 9)
    data = opened(tmp_path, folder)
    tokenizer = load_tokenizer(tmp_path / "tok")
    documents = data.documents("train")
    stream = [token for i in range(len(documents)) for token in documents[i]["tokens"].tolist()]
    assert stream.count(tokenizer.eos_token_id) == len(documents) > 0
    windows = pickle.loads(pickle.dumps(data.dataset("train")))
    targets = np.concatenate([windows[i]["targets"].numpy() for i in range(len(windows))])
    assert targets[targets != IGNORE_INDEX].tolist() == stream[1:]
    assert [windows[i]["tokens"][0].item() for i in range(len(windows))] == stream[::64][: len(windows)]
    assert "import re" in tokenizer.decode(stream)
    assert 3 < data.describe()["unigram_cross_entropy"] < 6.3


def test_workers_give_the_tokens_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are cut into pieces, and a document that spans several, are the same whoever encodes them."""
    from shardkit.data import tokenize

    folder = tmp_path / "text"
    folder.mkdir()
    for module in ("decoder", "encoder"):
        (folder / f"{module}.py").write_bytes((Path(json.__file__).parent / f"{module}.py").read_bytes())
    one = opened(tmp_path, folder)
    monkeypatch.setattr(RowFormat, "piece_bytes", 3000)
    monkeypatch.setattr(tokenize, "_SMALL", 0)
    environ, variables = os.environ, dict(os.environ)
    several = opened(tmp_path, folder, cache_dir=str(tmp_path / "other"))
    assert os.environ is environ and dict(environ) == variables, "modules hold os.environ, which datasets replaces"
    lengths = [
        data.documents("train").lengths.tolist() + data.documents("val").lengths.tolist() for data in (one, several)
    ]
    assert len(lengths[1]) == 2
    tokenizer = load_tokenizer(tmp_path / "tok")
    texts = [[tokenizer.decode(tokens) for tokens, _ in everything(data)] for data in (one, several)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("case", ["hostile", "killed", "preferences"])
def test_an_error_of_a_worker_is_two_lines(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.data import tokenize

    pytest.importorskip("datasets")
    monkeypatch.setattr(tokenize, "_SMALL", 0)
    monkeypatch.setattr(Json, "encoded_bytes", (100, 100))
    path, _ = write_case(tmp_path, case)
    if case == "killed":
        monkeypatch.setattr(tokenize, "encode_piece", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if case == "preferences":
        rows = [{"prompt": "a", "completion": "b", **({"label": False} if i == 70 else {})} for i in range(90)]
        write_lines(tmp_path / "good.jsonl", rows)
    causes = {"hostile": "SecurityError", "killed": "a process that tokenised", "preferences": "good.jsonl:71: pref"}
    with pytest.raises(DataError, match=causes[case]) as caught:
        opened(tmp_path, path)
    assert "\n" not in caught.value.cause + caught.value.fix
    assert not [entry for entry in (tmp_path / "cache").glob("*") if entry.is_dir()], "nothing is half-written"


@pytest.mark.parametrize("how", ["truncate", "split", "drop"])
def test_long_conversations_are_counted(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i, turns=1 + i % 4)} for i in range(60)))
    whole = everything(opened(tmp_path, path))
    data = opened(tmp_path, path, seq_len=40, long_samples=how, val_path=str(path))
    samples = data.dataset("train")
    n_long = sum(len(tokens) > 41 for tokens, _ in whole)
    assert f"{n_long} {dict(truncate='truncated', split='split', drop='dropped')[how]}" in caplog.text
    targets = [sum(samples[i]["targets"] != IGNORE_INDEX).item() for i in range(len(samples))]
    assert all(targets), "a sample without a target is left out"
    assert max(len(samples[i]["tokens"]) for i in range(len(samples))) <= 40
    everyone = sum(sum(mask) for _, mask in whole)
    fitting = sum(sum(mask) for tokens, mask in whole if len(tokens) <= 41)
    assert {
        "truncate": fitting < sum(targets) < everyone,
        "split": sum(targets) == everyone,
        "drop": sum(targets) == fitting,
    }[how]
    batch = data.collate([samples[0], samples[1]])
    assert batch["tokens"].shape == batch["targets"].shape == (2, 40)


def test_a_mix_takes_each_source_as_often_as_its_weight_says(tmp_path: Path) -> None:
    order = MixOrder([10, 40, 7], [1.0, 0.5, 2.0], seed=3, shuffle=True)
    assert order.n == 10 + 20 + 14
    taken = np.zeros(57, dtype=int)
    for epoch in range(4):
        found = order.indices(epoch, 0, order.n)
        assert found.tolist() == [int(order.indices(epoch, i, i + 1)[0]) for i in range(order.n)]
        counts = np.bincount(found, minlength=57)
        assert (counts[:10] == 1).all() and counts[10:50].max() == 1 and (counts[50:] == 2).all()
        taken += counts
    assert (taken == [4] * 10 + [2] * 40 + [8] * 7).all(), "over the epochs, the samples of a source are equally often"
    assert order.indices(0, 0, 44).tolist() != order.indices(1, 0, 44).tolist()
    one = write_lines(tmp_path / "one.jsonl", ({"messages": conversation(i)} for i in range(50)))
    two = write_lines(tmp_path / "two.jsonl", ({"text": f"a plain text {i}"} for i in range(30)))
    sources = [{"path": str(one), "weight": 0.5}, {"path": str(two), "name": "plain"}]
    data = opened(tmp_path, None, sources=sources, val_path=str(two))
    mixed = data.dataset("train")
    assert data.documents("train").sources == ("one.jsonl", "plain")
    assert mixed.order(0, True).n == 25 + 30
    assert len(mixed) == 80 and len(mixed[79]["tokens"]) > 1
    assert len(data.dataset("val")) == 30


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "json": ('{"messages": [', "not JSON"),
    "number": ('{"messages": [{"role": "user", "content": 1e999}]}', "column messages holds the number inf"),
    "empty": ({"messages": []}, "column messages is an empty conversation"),
    "role": ({"messages": [{"role": "tool", "content": "x"}, *conversation(1)]},
             "the chat template rejects it: unknown role tool"),
    "reply": ({"messages": conversation(3)[:-1]}, "no turn of the assistant"),
    "object": ("[1, 2]", "not a JSON object but list"),
    "half": ('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}',
             "half of a surrogate pair"),
}  # fmt: skip
"""The fifth row of bad.jsonl, and why it is refused."""
UNUSABLE = "chat template cannot be used: "
TEMPLATES: dict[str, tuple[str | None, str, str]] = {
    "no_template": (None, "no chat template", "data.chat_template"),
    "syntax": ("{% for %}", f"{UNUSABLE}TemplateSyntaxError", "data.chat_template"),
    "hostile": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", f"{UNUSABLE}SecurityError",
                "data.chat_template"),
    "endless": ("{% for a in range(10**9) %}x{% endfor %}", f"{UNUSABLE}OverflowError", "data.chat_template"),
    "division": ("{{ 1 / 0 }}", r"good.jsonl:1: the chat template rejects it: division by zero \(9 of 9 rows",
                 "or the chat template"),
    "long": ("{{ raise_exception('x ' * 10**6) }}", "good.jsonl:1: the chat template rejects it: x x",
             "or the chat template"),
}  # fmt: skip
"""A template, and how conversations are refused with it."""
FILES: dict[str, tuple[str, str]] = {
    "utf8": (r"good.jsonl:7: invalid UTF-8 at byte \d+ of the line", "save the file as UTF-8, or leave them"),
    "latin1": ("good.jsonl has no line with a JSON object, the first is invalid UTF-8 at byte", "save it as UTF-8"),
    "utf16": ("good.jsonl is UTF-16 text, not UTF-8", "iconv -f utf-16"),
    "array": ("one JSON array", "jq"),
    "columns": ("data.columns.text=boddy: .* no such column", "did you mean body"),
    "parquet": ("cut.parquet is damaged or cut short", "again"),
    "arrow": ("cut.arrow is damaged or cut short", "again"),
    "auto_map": (r"code of its own \(auto_map", "tokenizer.json"),
    "damaged": ("tokenizer in .* cannot be read", "data.tokenizer"),
    "panics": ("tokenizer in .* cannot be read", "data.tokenizer"),
}
"""Files that `write_case` writes, and how they are refused."""
REFUSED = {case: (f"bad.jsonl:5: {cause}", "max_bad_rows") for case, (_, cause) in BAD_ROWS.items()}
REFUSED |= {case: refusal for case, (_, *refusal) in TEMPLATES.items()} | FILES


def write_case(tmp_path: Path, case: str) -> tuple[Path | None, dict[str, Any]]:
    """A data set or a tokenizer that is refused, and the settings beside it."""
    good = [{"messages": conversation(i)} for i in range(9)]
    if case in BAD_ROWS:
        return write_lines(tmp_path / "bad.jsonl", [*good[:4], BAD_ROWS[case][0], *good[4:]]), {}
    path = write_lines(tmp_path / "good.jsonl", good)
    if case == "utf8":
        path.write_bytes(path.read_bytes().replace(b"ask 6", b"ask \xff"))
    if case == "latin1":
        path.write_bytes(path.read_bytes().replace(b"a", b"\xe4"))
    if case == "utf16":
        path.write_bytes(path.read_text().encode("utf-16"))
    if case == "array":
        path = tmp_path / "all.jsonl"
        path.write_text(json.dumps(good))
    if case == "columns":
        path = write_lines(tmp_path / "x.jsonl", [{"body": "a text", "id": 1}])
    if case == "parquet":
        path = tmp_path / "cut.parquet"
        path.write_bytes(b"PAR1" + b"\0" * 99)
    if case == "arrow":
        ipc = pytest.importorskip("pyarrow.ipc")
        table = pytest.importorskip("pyarrow").Table.from_pylist(good * 9)
        path = tmp_path / "cut.arrow"
        with ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=9)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if case in TEMPLATES:
        write_tokenizer(tmp_path / "tok", TEMPLATES[case][0])
    if case == "auto_map":
        write_tokenizer(tmp_path / "tok", auto_map={"AutoTokenizer": ["code.Evil", None]})
        (tmp_path / "tok" / "code.py").write_text("raise SystemExit('it ran')")
    if case in ("damaged", "panics"):
        rules = write_tokenizer(tmp_path / "tok") / "tokenizer.json"
        nested = {"Regex": "(" * 20_000 + "a" + ")" * 20_000}
        split = {"type": "Split", "pattern": nested, "behavior": "Isolated", "invert": False}
        panics = json.dumps({**json.loads(rules.read_text()), "pre_tokenizer": split})
        rules.write_text('{"model": ' if case == "damaged" else panics)
    return path, {"columns": {"text": "boddy"}} if case == "columns" else {}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_two_lines_and_nothing_is_half_written(case: str, tmp_path: Path) -> None:
    cause, fix = REFUSED[case]
    path, keys = write_case(tmp_path, case)
    with pytest.raises((DataError, ConfigError), match=cause) as caught:
        opened(tmp_path, path, **keys)
    assert fix in caught.value.fix
    assert "\n" not in caught.value.cause + caught.value.fix and len(caught.value.cause) < 800
    cache = tmp_path / "cache"
    assert [p for p in cache.glob("*") if p.is_dir() and not (p / "meta.json").is_file()] == []


def test_the_mark_that_editors_on_windows_write_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path, _ = write_case(tmp_path, "mark")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(everything(opened(tmp_path, path))) == 9


def test_a_template_beside_plain_text_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.jinja").write_text(PLAIN)
    opened(
        tmp_path,
        write_lines(tmp_path / "t.jsonl", [{"text": "some text"}] * 9),
        chat_template=str(tmp_path / "t.jinja"),
    )
    assert re.search(r"chat_template=.*t.jinja does not apply to .*t.jsonl: it has plain text", caplog.text)


def test_bad_rows_are_left_out_up_to_a_share(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[Any] = [{"messages": conversation(i)} for i in range(97)]
    path = write_lines(tmp_path / "chat.jsonl", [*rows[:50], "{", "", {"messages": 3}, *rows[50:], {"messages": []}])
    with pytest.raises(DataError, match=r"chat.jsonl:51: not JSON.*\(3 of 100 rows are bad\); .* allows 2"):
        opened(tmp_path, path, max_bad_rows=0.02)
    assert len(everything(opened(tmp_path, path, max_bad_rows=0.03))) == 97
    odd = write_lines(tmp_path / "odd.jsonl", [*rows[:40], "{"])
    with pytest.raises(DataError) as caught:
        opened(tmp_path, odd)
    (share,) = re.findall(r"max_bad_rows=([\d.]+) or more", caught.value.fix)
    assert share == "0.025" and len(everything(opened(tmp_path, odd, max_bad_rows=float(share)))) == 40
    assert "3 of 100 rows are left out, the first: " in caplog.text


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [{"text": "some text"}] * 9)
    with pytest.raises(ConfigError, match=r"has 512 ids, but model.vocab_size=500") as caught:
        TextData(config(tmp_path, path), 500, "model.vocab_size").dataset("train")
    assert "model.vocab_size=512" in caught.value.fix
    assert TextData(config(tmp_path, path, seq_len=2), 640, "model.vocab_size").n_ids == 512, "padded"


def test_keys_of_a_tokenizer_are_refused_without_one_with_the_values_that_yaml_has(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some text " * 99)
    for key, value, words in (("add_eos", False, "data.add_eos=false"), ("max_bad_rows", 0.5, "data.max_bad_rows=0.5")):
        keys = config(tmp_path, tmp_path / "t.txt", tokenizer=None, tokenize_workers=None, **{key: value})
        with pytest.raises(ConfigError, match=f"^{words} would be ignored: the data are read without a tokenizer"):
            TextData(keys, 512, "model.vocab_size").dataset("train")


def test_a_tokenizer_with_other_special_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    """The file's ids count, as do the generation settings beside it and `model.hf`."""
    path = write_lines(tmp_path / "t.jsonl", [{"text": "some text"}] * 99)
    folder = write_tokenizer(tmp_path / "model")

    def opening(config_keys: dict[str, Any], generation: dict[str, Any] | None = None, **hf: Any) -> None:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config_keys}))
        (folder / "generation_config.json").write_text(json.dumps(generation or {}))
        keys = config(tmp_path, path, tokenizer=str(folder)).model_dump()
        keys |= {"task": {"name": "hf_causal_lm"}, "model": {"init_from": str(folder), "hf": hf}}
        TextData(RunConfig.model_validate(keys), 512, "model.hf.vocab_size").dataset("train")

    with pytest.raises(ConfigError, match=r"eos_token_id of the tok.* is 0, but the model.s is 2 or 5") as caught:
        opening({"eos_token_id": [2, 5], "bos_token_id": 1})
    assert "model.hf.eos_token_id=0" in caught.value.fix and "\n" not in caught.value.cause
    opening({"eos_token_id": [2, 0], "bos_token_id": 1})
    opening({"eos_token_id": 2}, {"eos_token_id": [2, 0]})
    opening({"eos_token_id": 2}, eos_token_id=0)
    opening({"eos_token_id": None})
    opening({})
    with pytest.raises(ConfigError, match=r"is 0, but the model's is 3"):
        opening({"eos_token_id": 0}, eos_token_id=3)
    write_tokenizer(folder, bos_token="<|im_start|>")
    with pytest.raises(ConfigError, match=r"bos_token_id of the tokenizer in .* is 1, but the model's is 0"):
        opening({"bos_token_id": 0, "eos_token_id": 0})
    opening({"bos_token_id": 1, "eos_token_id": 0})


def test_the_model_folders_tokenizer_is_used(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    keys: dict[str, Any] = {"task": {"name": "hf_causal_lm"}}
    for model in ({"hf_config": str(folder)}, {"hf_config": str(folder / "config.json")}, {"init_from": str(folder)}):
        assert tokenizer_path(RunConfig.model_validate({**keys, "model": model})) == folder
    assert tokenizer_path(RunConfig.model_validate(keys)) is None
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        tokenizer_path(RunConfig.model_validate({"data": {"tokenizer": str(tmp_path / "nowhere")}}))


def test_the_cache_knows_tokenizer_template_data_and_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i)} for i in range(9)))
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tok"))

    def entry(**keys: Any) -> str:
        return open_source(config(tmp_path, path, **keys).data, tokenizer, str(path))[0].directory

    first = entry()
    assert entry(max_bad_rows=0.5, long_samples="drop") == first
    (tmp_path / "other.jinja").write_text(PLAIN.replace("unknown role", "no such role"))
    others = {entry(loss_on="all"), entry(chat_template=str(tmp_path / "other.jinja"), max_bad_rows=0.9)}
    write_lines(path, ({"messages": conversation(i + 1)} for i in range(9)))
    others.add(entry())
    monkeypatch.setattr(Json, "encoded_bytes", (100, 100))  # the data digest is of the pieces
    others.add(entry())
    assert len(others | {first}) == 5
