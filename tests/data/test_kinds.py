"""The files, marks, roles and columns that people have: each kind trains what it says, or is refused by its cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.data.rows import find, splits_by_name
from shardkit.data.store import Documents
from shardkit.data.tokenizer import load_tokenizer
from shardkit.errors import DataError

from .chats import MARKED, PLAIN, conversation, write_lines, write_tokenizer
from .test_rows import THINKING, TOOLING
from .test_text import everything, opened

pytest.importorskip("transformers")

ANY_ROLE = PLAIN.replace(
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}",
    "",
)
"""ChatML as most have it: any role is written as it is."""
VISION = ANY_ROLE.replace(
    "{{ message.content ~ '<|im_end|>' }}",
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{{ '<|im_end|>' }}",
)
"""As of a vision model: contents are lists of parts."""
TWO = [("user", "ask one"), ("assistant", "bad"), ("user", "ask two"), ("assistant", "good")]


def turns(*marked: dict[str, Any], sharegpt: bool = False) -> list[dict[str, Any]]:
    """`TWO`, with further members for each turn."""
    role, content = ("from", "value") if sharegpt else ("role", "content")
    names = {"user": "human", "assistant": "gpt"} if sharegpt else {}
    further = [*marked, *({} for _ in range(4))]
    return [{role: names.get(who, who), content: text, **more} for (who, text), more in zip(TWO, further, strict=False)]


def predicted(tmp_path: Path, path: Path, template: str = PLAIN, **keys: Any) -> list[tuple[str, list[str]]]:
    """Of each document its text, and the parts of it that are predicted."""
    folder = write_tokenizer(tmp_path / f"tok{abs(hash(template))}", template)
    tokenizer = load_tokenizer(folder)
    documents = []
    for tokens, mask in everything(opened(tmp_path, path, tokenizer=str(folder), **keys)):
        parts: list[list[int]] = []
        for i, (token, counts) in enumerate(zip(tokens, mask, strict=True)):
            if counts and (i == 0 or not mask[i - 1]):
                parts.append([])
            if counts:
                parts[-1].append(token)
        documents.append((tokenizer.decode(tokens), [tokenizer.decode(part) for part in parts]))
    return documents


def of_row(tmp_path: Path, row: Any, template: str = PLAIN, **keys: Any) -> tuple[str, list[str]]:
    path = write_lines(tmp_path / "rows.jsonl", [row, row])
    first, second = predicted(tmp_path, path, template, **keys)
    assert first == second
    return first


def refusal(tmp_path: Path, rows: list[Any], template: str = PLAIN, **keys: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        predicted(tmp_path, write_lines(tmp_path / "rows.jsonl", rows), template, **keys)
    assert "\n" not in caught.value.cause + caught.value.fix
    return caught.value


def hub(root: Path, *names: str) -> Path:
    """A folder as hubs store it, whose conversations have the number of their file."""
    root.mkdir()
    for beside in ("README.md", "LICENSE", ".gitattributes", "load.py", "dataset_infos.json"):
        (root / beside).write_text("{}" if beside.endswith("json") else "a text of words\n" * 9)
    for number, name in enumerate(names):
        rows = [{"messages": conversation(2 * number)} for _ in range(3)]
        path = root / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".parquet"):
            pa = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(pa.Table.from_pylist(rows), path)
        elif name.endswith(".json"):
            path.write_text(json.dumps(rows, indent=1))
        else:
            write_lines(path, rows)
    return root


@pytest.mark.parametrize(
    ("names", "trained", "validated"),
    [
        (["train.jsonl"], [0], None),
        (["a.json", "b.json"], [0, 1], None),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"], [0, 1], None),
        (["train.jsonl", "validation.jsonl", "test.jsonl"], [0], [1]),
        (["data/dev-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"], [1], [0]),
        (["training/a.jsonl", "valid/a.jsonl", "eval/test.jsonl"], [0], [1]),
        (["my_train.jsonl", "Test.jsonl"], [0], None),
        (["chat.jsonl", "more.jsonl"], [0, 1], None),
    ],
)
def test_a_folder_of_a_hub_is_its_records_by_split(
    names: list[str],
    trained: list[int],
    validated: list[int] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = opened(tmp_path, hub(tmp_path / "set", *names))
    tokenizer = load_tokenizer(tmp_path / "tok")

    def numbers(stores: Any) -> list[int]:
        documents = Documents(stores)
        texts = [tokenizer.decode(documents[i]["tokens"].tolist()) for i in range(len(documents))]
        return sorted({int(text.partition("ask ")[2].split()[0]) // 2 for text in texts})

    assert numbers(data.sources.train) == trained
    assert (numbers(data.sources.val) if data.sources.val else None) == validated
    line = capsys.readouterr().out.splitlines()[0]
    assert "conversations from column messages" in line and "README.md" in line and "LICENSE" in line
    assert all(name in line for name in names)


def test_without_evaluation_and_with_data_of_its_own_the_validation_split_is_left_alone(tmp_path: Path) -> None:
    folder = hub(tmp_path / "set", "train.jsonl", "validation.jsonl")
    other = write_lines(tmp_path / "other.jsonl", [{"messages": conversation(9)}] * 5)
    for keys, n_val in (({"val_path": str(other)}, 5), ({}, 3)):
        data = opened(tmp_path, folder, **keys)
        assert (len(data.documents("train")), len(data.documents("val"))) == (3, n_val)
    streamed = opened(tmp_path, folder, streaming=True)
    assert len(streamed.dataset("train")) == 3 and len(streamed.dataset("val")) == 3


@pytest.mark.parametrize(
    ("names", "validated"),
    [
        (["train.jsonl", "dev.jsonl"], 1),
        (["test.jsonl"], 0),
        (["chat.jsonl"], 0),
        (["train.jsonl", "test.jsonl"], None),
    ],
)
def test_a_folder_as_validation_data_is_its_validation_split(
    names: list[str], validated: int | None, tmp_path: Path
) -> None:
    folder = hub(tmp_path / "set", *names)
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": turns()}] * 3)
    if validated is None:
        with pytest.raises(DataError, match=r"has the splits train, test, and none of them is for validation"):
            opened(tmp_path, path, val_path=str(folder))
        return
    documents = opened(tmp_path, path, val_path=str(folder)).documents("val")
    text = load_tokenizer(tmp_path / "tok").decode(documents[0]["tokens"].tolist())
    assert len(documents) == 3 and f"ask {2 * validated} " in text


def test_a_column_that_the_first_row_lacks_is_read(tmp_path: Path) -> None:
    late = [{"messages": turns()}, {"messages": turns(), "rule": "be brief"}]
    texts = predicted(tmp_path, write_lines(tmp_path / "late.jsonl", late), columns={"system": "rule"})
    assert "be brief" in texts[1][0] and "be brief" not in texts[0][0]


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        (["a.jsonl", "b.parquet"], r"mixes jsonl and parquet files \(a.jsonl, b.parquet\)"),
        (["a.jsonl", "notes.txt"], r"mixes records \(a.jsonl\) and text \(notes.txt\)"),
        (["test.jsonl"], r"has no training split \(test: test.jsonl\)"),
        (["chat.jsonl", "test.jsonl"], r"no training split \(test: test.jsonl; of no split: .*chat.jsonl"),
        (["data/train_sft-00000-of-00001.parquet"], "has no training split .train_sft: "),
        (["train_test.jsonl"], "train_test.jsonl is of the splits train and test"),
        (["train.jsonl.gz"], r"is compressed \(train.jsonl.gz\)"),
        (["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"], r"lacks train-00001-of-00003.jsonl"),
        (["data/train-00001-of-00002.parquet", "dev.parquet"], r"lacks data/train-00000-of-00002.parquet"),
        (["part-00001-of-00003.jsonl", "part-00003-of-00003.jsonl"], r"lacks part-00002-of-00003.jsonl"),
    ],
)
def test_a_folder_of_two_minds_is_refused_with_its_files(names: list[str], cause: str, tmp_path: Path) -> None:
    folder = hub(tmp_path / "set", *names)
    with pytest.raises(DataError, match=cause):
        opened(tmp_path, folder)
    if names == ["a.jsonl", "b.parquet"]:
        assert len(everything(opened(tmp_path, folder / "a.jsonl"))) == 3
        assert len(everything(opened(tmp_path, folder / "*.jsonl"))) == 3


def test_pictures_and_settings_beside_records_are_no_data_but_a_shard_is_a_shard(tmp_path: Path) -> None:
    folder = hub(tmp_path / "set", "a.json", "b.json")
    (folder / "logo.svg").write_text("<svg/>\n")
    (folder / "photo.png").write_bytes(b"\x89PNG")
    (folder / "metrics.json").write_text('{\n "loss": 1.5\n}')
    assert len(everything(opened(tmp_path, folder))) == 6
    (folder / "b.json").write_text(json.dumps({"version": 1, "data": [{"messages": turns()}]}))
    with pytest.raises(DataError, match=r"b.json"):
        opened(tmp_path, folder)
    (folder / "b.json").write_text(json.dumps({"messages": turns(), "id": 1}, indent=1))
    with pytest.raises(DataError, match=r"b.json is one JSON object"):
        opened(tmp_path, folder)
    shards = hub(tmp_path / "shards", "data/train-00000-of-00002.json", "data/train-00001-of-00002.json")
    (shards / "data/train-00000-of-00002.json").write_text('{\n "a": {}\n}')
    with pytest.raises(DataError, match=r"train-00000-of-00002.json is one JSON object"):
        opened(tmp_path, shards)


@pytest.mark.parametrize("content", ['[{"text": "a"}, {"te', '[{"text": "a"},]', '[{"text": "a"}]\n[{"text": "b"}]'])
def test_a_damaged_array_of_json_is_refused_by_its_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(DataError, match=r"rows\.json is damaged or cut short"):
        opened(tmp_path, tmp_path / "rows.json")


def test_a_card_names_the_files_of_each_split(tmp_path: Path) -> None:
    folder = hub(tmp_path / "set", "one.jsonl", "two.jsonl", "train.jsonl")
    files = "\n".join(f"  - split: {split}\n    path: {path}" for split, path in (("train", "one*"), ("val", "two*")))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}\n---\n# A set\n")
    found = find(str(folder))
    assert {split: [file.name for file in files] for split, files in found.splits.items()} == {
        "train": ["one.jsonl"], "validation": ["two.jsonl"],
    }  # fmt: skip
    assert "train.jsonl" in found.left_out
    sets = "\n".join(f"- config_name: {name}\n  data_files: {name}.jsonl" for name in ("one", "two"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{sets}\n---\n")
    with pytest.raises(DataError, match=r"several data sets \(one, two\)"):
        find(str(folder))


def test_names_mean_the_splits_that_datasets_takes_them_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_files = pytest.importorskip("datasets.data_files")
    monkeypatch.chdir(tmp_path)
    for number, names in enumerate([
        ["train.jsonl", "valid-1.jsonl", "x.jsonl"], ["a/b.jsonl", "dev/c.jsonl"],
        ["my train.jsonl", "evaluation.jsonl"],
        ["trainer.jsonl", "latest.jsonl"], ["data/train-00000-of-00001.jsonl", "test.jsonl"],
        ["1val2/a.jsonl", "train_a.jsonl"],
        ["testing_data/train.jsonl", "training.data/x.jsonl"], ["x-test-y.jsonl", "contest.jsonl"],
    ]):  # fmt: skip
        root = tmp_path / f"s{number}"
        for name in names:
            write_lines(root / name, [{"text": "a"}])
        patterns = data_files.get_data_patterns(str(root))
        resolved = data_files.DataFilesDict.from_patterns(patterns, base_path=str(root))
        expected = {str(s): {str(Path(f).relative_to(root)) for f in files} for s, files in resolved.items()}
        ours = splits_by_name(names) or {"train": set(names)}
        assert ours == expected, names


def test_csv_and_arrays_of_json_are_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("007", "NA"), ("a, b", 'say "x"'), ("two\nlines", " 4")]
    lines = write_lines(tmp_path / "r.jsonl", [{"prompt": p, "completion": c, "id": "x"} for p, c in rows])
    (tmp_path / "r.json").write_text(json.dumps([{"prompt": p, "completion": c} for p, c in rows], indent=2))
    quoted = ['"' + p + '","' + c.replace('"', '""') + '",x' for p, c in rows]
    (tmp_path / "r.csv").write_text("\ufeffprompt,completion,id\r\n" + "\r\n".join(quoted))
    (tmp_path / "r.tsv").write_text(
        "prompt\tcompletion\n" + "\n".join(f"{q[:-2]}".replace('","', '"\t"') for q in quoted)
    )
    expected = predicted(tmp_path, lines)
    for name in ("r.json", "r.csv", "r.tsv"):
        assert predicted(tmp_path, tmp_path / name) == expected, name
        streamed = opened(tmp_path, tmp_path / name, streaming=True, val_path=str(lines)).dataset("train")
        assert len(streamed) == 3
    assert "prompts with completions from columns prompt, completion; ignored columns: id" in capsys.readouterr().out
    (tmp_path / "bad.csv").write_text("prompt,completion\na,b\na,b,c\n")
    with pytest.raises(DataError, match=r"bad.csv:2: 3 fields, and the header has 2"):
        opened(tmp_path, tmp_path / "bad.csv")
    (tmp_path / "bad.json").write_text('[{"text": "a"}, 3]')
    with pytest.raises(DataError, match=r"bad.json:2: not a JSON object but int"):
        opened(tmp_path, tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ([{"features": [], "rows": [{"row": {"instruction": "a"}}]}], ".[].rows[].row"),
        ({"rows": [{"row_idx": 0, "row": {"text": "a"}}]}, ".rows[].row"),
        ({"version": 2, "data": [{"text": "a"}]}, ".data[]"),
        ({"text": "a"}, "."),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_an_export_says_where_its_rows_lie(content: Any, path: str, indent: int | None, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text(json.dumps(content, indent=indent))
    if path == "." and indent is None:
        assert len(everything(opened(tmp_path, tmp_path / "export.json"))) == 1  # a row on its one line
        return
    with pytest.raises(DataError) as caught:
        opened(tmp_path, tmp_path / "export.json")
    assert f"jq -c '{path}'" in caught.value.fix


def test_a_name_of_the_hub_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = hub(tmp_path / "set", "train.jsonl", "test.jsonl")
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **keys: asked.append((name, keys)) or folder)
    assert len(everything(opened(tmp_path, Path("org/chats@v1")))) == 3
    assert asked[0][0] == "org/chats" and asked[0][1]["revision"] == "v1" and asked[0][1]["repo_type"] == "dataset"


OFF = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"trainable": False}, {"loss": False},
       {"loss_mask": 0}]  # fmt: skip


@pytest.mark.parametrize("mark", OFF, ids=str)
@pytest.mark.parametrize("template", [PLAIN, MARKED, THINKING], ids=["plain", "marked", "thinking"])
@pytest.mark.parametrize("sharegpt", [False, True])
def test_a_marked_turn_is_in_the_text_and_not_predicted(
    mark: dict[str, Any], template: str, sharegpt: bool, tmp_path: Path
) -> None:
    column = "conversations" if sharegpt else "messages"
    text, parts = of_row(tmp_path, {column: turns({}, mark, sharegpt=sharegpt)}, template)
    plain, both = of_row(tmp_path, {column: turns(sharegpt=sharegpt)}, template) if template != THINKING else (text, [])
    assert text == plain and "bad" in text
    assert [part.removeprefix("<think></think>") for part in parts] == ["good<|im_end|>"]
    on = {name: type(value)(1) for name, value in mark.items()}
    if both:
        assert of_row(tmp_path, {column: turns({}, on, sharegpt=sharegpt)}, template) == (plain, both)
        name = next(iter(mark))
        assert of_row(tmp_path, {column: turns({}, mark, sharegpt=sharegpt)}, template, ignore=[name]) == (plain, both)


def test_marks_on_a_completion_are_obeyed(tmp_path: Path) -> None:
    row = {"prompt": turns()[:1], "completion": turns({}, {"weight": 0})[1:]}
    assert of_row(tmp_path, row)[1] == ["good<|im_end|>"]


@pytest.mark.parametrize(
    ("marked", "keys", "cause"),
    [
        ([{}, {"weight": 0.5}], {}, "message 2 has weight=0.5"),
        ([{}, {"train": "no"}], {}, "message 2 has train=no"),
        ([{}, {"weight": 0, "train": True}], {}, "weight=False and train=True"),
        ([{"train": True}], {}, "message 1 is marked to be predicted"),
        ([{}, {"weight": 0}, {}, {"weight": 0}], {}, "each turn of the assistant"),
        ([{}, {}, {}, {"weight": 0}], {"loss_on": "completion"}, "marked not to be predicted"),
        ([{}, {"weight": 0}], {"loss_on": "all"}, "data.loss_on=all predicts everything"),
        ([{}, {"train_detail": [{"begin_offset": 0}]}], {}, "marks parts of its text"),
        ([{}, {"liked": False}, {}, {"liked": True}], {}, "turns have the member liked"),
        ([{}, {"keep": 0}], {}, "turns have the member keep"),
        ([{"learn": "false"}, {"learn": "true"}], {}, "turns have the member learn"),
        ([{"learn": None}, {"learn": False}], {}, "turns have the member learn"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_mark_that_cannot_be_obeyed_is_refused(
    marked: list[dict[str, Any]], keys: dict[str, Any], cause: str, streaming: bool, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": turns(*marked)}] * 3)
    good = write_lines(tmp_path / "good.jsonl", [{"messages": turns()}] * 3)
    streamed = {"streaming": True, "val_path": str(good)} if streaming else {}
    with pytest.raises(DataError) as caught:
        opened(tmp_path, path, **streamed, **keys).dataset("train")[0]
    assert cause in caught.value.cause
    if "member" in cause:
        assert f"data.ignore=[{cause.rpartition(' ')[2]}]" in caught.value.fix


def test_a_late_mark_in_a_stream_is_refused(tmp_path: Path) -> None:
    rows = [*({"messages": conversation(2)} for _ in range(150)), {"messages": turns({}, {"liked": False})}]
    good = write_lines(tmp_path / "good.jsonl", rows[:3])
    path = write_lines(tmp_path / "rows.jsonl", rows)
    data = opened(tmp_path, path, streaming=True, val_path=str(good)).dataset("train")
    assert len(data[149]["tokens"])
    with pytest.raises(DataError, match=r"row 151 .* have the member liked"):
        data[150]


def test_other_members_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    further = [{"id": 1, "time": "9:00"}, {"id": 2, "liked": False, "note": "x"}]
    text, _ = of_row(tmp_path, {"messages": turns(*further)}, ignore=["liked"])
    assert text == of_row(tmp_path, {"messages": turns()})[0]
    assert capsys.readouterr().out.count("ignored members of turns: id, note, time") == 1


CALL = {"name": "add", "arguments": {"a": 3}}


def tool_row(role: str, result: str, **more: Any) -> dict[str, Any]:
    messages = [("human", "3 + 4?"), (role, json.dumps(CALL)), (result, "7"), ("gpt", "it is 7")]
    return {"conversations": [{"from": who, "value": text} for who, text in messages], **more}


@pytest.mark.parametrize("role", ["function_call", "tool_call"])
@pytest.mark.parametrize("result", ["observation", "tool", "function"])
def test_sharegpts_calls_are_the_models_turns(role: str, result: str, tmp_path: Path) -> None:
    row = tool_row(role, result, tools=json.dumps([{"name": "add"}]), system="be a calculator")
    text, parts = of_row(tmp_path, row, ANY_ROLE)
    assert text.startswith("<|im_start|>system\nbe a calculator<|im_end|>\n<|im_start|>user\n3 + 4?")
    assert "<|im_start|>tool\n7<|im_end|>" in text
    assert parts == [f"{json.dumps(CALL)}<|im_end|>", "it is 7<|im_end|>"]
    text, parts = of_row(tmp_path, row, TOOLING)
    assert text.startswith('[{"name": "add"}]<|im_start|>system\nbe a calculator')
    call = {"type": "function", "function": CALL}
    assert parts == [f"{json.dumps([call])}<|im_end|>", "it is 7<|im_end|>"]


def test_system_and_tools_reach_the_template_beside_a_prompt(tmp_path: Path) -> None:
    chat = {"prompt": turns()[:1], "completion": turns()[1:2]}
    text, parts = of_row(tmp_path, {**chat, "system": "be brief", "tools": [{"name": "add"}]}, TOOLING)
    assert text.startswith('[{"name": "add"}]<|im_start|>system\nbe brief<|im_end|>') and parts == ["bad<|im_end|>"]
    named = of_row(
        tmp_path,
        {**chat, "rule": "be brief"},
        columns={"prompt": "prompt", "completion": "completion", "system": "rule"},
    )
    assert named[0].startswith("<|im_start|>system\nbe brief")


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("kind", ["messages", "prompt", "completion"])
def test_a_role_that_the_template_does_not_know_is_refused_wherever_it_stands(
    place: int, kind: str, tmp_path: Path
) -> None:
    messages = turns()
    messages.insert(place, {"role": "critic", "content": "hm"})
    row = {"messages": messages}
    if kind != "messages":
        row = {"prompt": turns()[:1], "completion": turns()[1:2]}
        row[kind] = [{"role": "critic", "content": "hm"}, *row[kind]]
    error = refusal(tmp_path, [row], ANY_ROLE)
    assert "rows.jsonl:1: message" in error.cause and "the role critic" in error.cause


UNSPOKEN = ANY_ROLE.replace("for message in messages", "for message in messages if message.role != 'system'")
CHANGED = ANY_ROLE.replace("message.content", "(message.content | trim | upper)")
ASKED = {"role": "user", "content": "ask"}
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
OLDER = {"role": "assistant", "content": "", "function_call": CALL}  # OpenAI's before tools
BRIEF = {"role": "system", "content": "be brief"}
CHAT, PAIR = {"messages": turns()}, {"prompt": "a", "completion": "b"}
REFUSED: dict[str, tuple[list[Any], str, dict[str, str], str, str]] = {
    "input of a chat": ([{**CHAT, "rule": "x"}], PLAIN, {"input": "rule"}, "would be ignored", ""),
    "system of a text": ([{"text": "a", "rule": "x"}], PLAIN, {"system": "rule"}, "would be ignored", ""),
    "system of a pair": ([{**PAIR, "system": "x"}], PLAIN, {}, "column system holds text, but the prompt is text", ""),
    "two systems": ([{"messages": [BRIEF, *turns()], "system": "x"}], PLAIN, {}, "two different system texts", ""),
    "system_prompt": ([{**CHAT, "system_prompt": "x"}], PLAIN, {}, "", "{messages: messages, system: system_prompt}"),
    "role left out": ([{"messages": [BRIEF, *turns()]}], UNSPOKEN, {}, "leaves out message 1, whose role is sys", ""),
    "no turn": ([{"messages": [ASKED]}], CHANGED, {}, "no turn", ""),
    "call left out": ([{"messages": [ASKED, CALLED]}], PLAIN, {}, "tool calls, which the chat template does not", ""),
    "older call": ([{"messages": [ASKED, OLDER]}], ANY_ROLE, {}, "rows.jsonl:1: message 2 has a function_call", ""),
    "older call, tools": ([{"messages": [ASKED, OLDER]}], TOOLING, {}, "message 2 has a function_call", ""),
    "preferences": ([{"prompt": "q", "chosen": "2", "rejected": "3"}] * 3, PLAIN, {}, "columns chosen, rejected", ""),
    "preferred chats": ([{"chosen": turns(), "rejected": turns()}] * 3, PLAIN, {}, "columns chosen, rejected", ""),
    "weight of a row": ([{**CHAT, "weight": 0.5}], PLAIN, {}, "", "data.ignore=[weight]"),
    "mask of a row": ([{**CHAT, "loss_mask": [0, 1, 0, 1]}], PLAIN, {}, "", "data.ignore=[loss_mask]"),
    "mark of a row": ([{**CHAT, "train": False}], PLAIN, {}, "", "data.ignore=[train]"),
    "text and chats": ([{"text": "a"}, CHAT], PLAIN, {}, "is missing", "data.sources"),
    "pairs and text": ([PAIR, {"text": "a"}], PLAIN, {}, "is missing", "data.sources"),
}
"""Case → rows, template, `data.columns`, cause, fix."""


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_would_train_something_else_are_refused(case: str, tmp_path: Path) -> None:
    rows, template, columns, cause, fix = REFUSED[case]
    error = refusal(tmp_path, rows, template, **({"columns": columns} if columns else {}))
    assert cause in error.cause and fix in error.fix and "text: NAME" not in error.fix


@pytest.mark.parametrize(
    ("row", "ignore"),
    [
        ({"prompt": "q", "completion": "3", "label": False}, ["label"]),
        ({"prompt": "q", "completion": "3", "label": 1}, ["label"]),
        ({"messages": turns(), "label": True}, ["label"]),
        ({"messages": turns(), "kto_tag": True}, ["kto_tag"]),
        ({"prompt": "q", "completion": "2", "chosen": "2", "rejected": "3"}, ["chosen", "rejected"]),
        (
            {"messages": turns(), "chosen": {"role": "assistant", "content": "2"}, "rejected": {}},
            ["chosen", "rejected"],
        ),
        ({"prompt": "q", "completion": "2", "score_rejected": 0.5}, ["score_rejected"]),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_preferences_are_refused_in_these_words(
    row: dict[str, Any], ignore: list[str], first: bool, tmp_path: Path
) -> None:
    plain = {name: value for name, value in row.items() if name not in ignore}
    rows = [row, plain] if first else [plain, plain, row]
    error = refusal(tmp_path, rows, max_bad_rows=0.9)
    assert "preferences" in error.cause and "does not train" in error.cause
    assert f"data.ignore=[{ignore[0]}" in error.fix
    assert "completion: chosen" not in error.fix
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert len(predicted(tmp_path, path, ignore=ignore)) == len(rows)


def test_a_label_of_a_text_and_other_columns_are_ignored_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": "a text", "label": 1, "score": 0.5}, {"text": "a text", "late": True}]
    predicted(tmp_path, write_lines(tmp_path / "t.jsonl", rows))
    predicted(
        tmp_path, write_lines(tmp_path / "m.jsonl", [{"messages": turns(), "score": 1, "id": "x", "label": "maths"}])
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("text from column text; ignored columns: label, late, score")
    assert lines[1].endswith("conversations from column messages; ignored columns: id, label, score")


@pytest.mark.parametrize("column", ["weight,0", "weight,0.5", "train,false", "loss_mask,1"])
def test_marks_of_rows_in_csv_are_refused_although_they_are_text(column: str, tmp_path: Path) -> None:
    name, value = column.split(",")
    (tmp_path / "rows.csv").write_text(f"prompt,completion,{name}\na,b,{value}\n")
    with pytest.raises(DataError, match=f"rows.csv:1: column {name} marks"):
        opened(tmp_path, tmp_path / "rows.csv")


def test_a_system_prompt_beside_messages_is_named(tmp_path: Path) -> None:
    row = {"messages": turns(), "system_prompt": "be brief"}
    text, _ = of_row(tmp_path, row, columns={"messages": "messages", "system": "system_prompt"})
    assert text.startswith("<|im_start|>system\nbe brief")


def test_an_input_joins_its_prompt_or_is_refused(tmp_path: Path) -> None:
    rows = [
        {"instruction": "add", "input": "1 and 2", "output": "3"},
        {"instruction": "say x", "input": "", "output": "x"},
    ]
    columns = {"prompt": "instruction", "completion": "output"}
    for error in (refusal(tmp_path, rows), refusal(tmp_path, rows, columns=columns)):
        assert "data.columns={prompt: instruction, input: input, completion: output}" in error.fix
    assert "rows.jsonl:1: column input holds a part of the prompt" in error.cause
    path = write_lines(tmp_path / "rows.jsonl", rows)
    joined = predicted(tmp_path, path, columns={**columns, "input": "input"})
    assert joined == [("add\n\n1 and 23<|endoftext|>", ["3<|endoftext|>"]), ("say xx<|endoftext|>", ["x<|endoftext|>"])]
    empty = write_lines(tmp_path / "empty.jsonl", rows[1:] * 2)
    assert predicted(tmp_path, empty, columns=columns) == joined[1:] * 2


def parts_of(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_parts_of_text_are_joined_as_the_template_reads_them(tmp_path: Path) -> None:
    plain = {"messages": turns()}
    listed = {"messages": [{**message, "content": parts_of(message["content"])} for message in turns()]}
    split = {"messages": [{**m, "content": parts_of(m["content"][:2], m["content"][2:])} for m in turns()]}
    for template in (PLAIN, MARKED, VISION):
        expected = of_row(tmp_path, listed, template)
        assert "ask one" in expected[0] and expected[1] == ["bad<|im_end|>", "good<|im_end|>"]
        assert of_row(tmp_path, plain, template) == of_row(tmp_path, split, template) == expected, template


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, "text", {"text": "a"}])
def test_a_part_of_another_type_is_refused_by_row_and_type(part: Any, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": [*parts_of("see"), part]}, *turns()[1:]]}
    for template in (PLAIN, VISION):
        error = refusal(tmp_path, [{"messages": turns()}, row], template)
        assert "rows.jsonl:2: message 1 has a part of type" in error.cause and "template" not in error.fix


@pytest.mark.parametrize("template", [PLAIN, MARKED, ANY_ROLE])
def test_a_conversation_that_begins_with_the_assistant_trains(template: str, tmp_path: Path) -> None:
    text, parts = of_row(tmp_path, {"messages": turns()[1:]}, template)
    assert text.startswith("<|im_start|>assistant\nbad<|im_end|>")
    assert parts == ["bad<|im_end|>", "good<|im_end|>"]
    assert of_row(tmp_path, {"messages": turns()[1:2]}, template)[1] == ["bad<|im_end|>"]
