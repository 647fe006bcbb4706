"""Rows that differ from the first one, unusual tokenizers and templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.data.tokenizer import load_tokenizer
from shardkit.errors import ConfigError, DataError
from tests.commands import python_m

from .chats import KINDS, PLAIN, conversation, write_lines, write_tokenizer
from .test_text import everything, opened

pytest.importorskip("transformers")

SPLITS = [
    ("def f(x):\n    retu", "rn x"), ("the answer is:", " self.random"), ("the answer is: ", "self.random"), ("a", "b"),
    ("", "return x"), ("x = ", "  y\n"), ("class A:\n", "    def __init__(self):\n        pass"), ("caf", "é ☃ self"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_continues_its_prompt(kind: str, tmp_path: Path) -> None:
    """Both have the tokens of their text as a whole; those with a character of the completion count."""
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in SPLITS]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tok", kind=kind))
    samples = everything(opened(tmp_path, path))
    for (prompt, completion), (tokens, mask) in zip(SPLITS, samples, strict=True):
        encoding = tokenizer(prompt + completion, add_special_tokens=False, return_offsets_mapping=True)
        assert tokens == [*encoding.input_ids, tokenizer.eos_token_id], prompt
        inside = [stop > len(prompt) for _, stop in encoding.offset_mapping]
        assert mask == [False, *inside[1:], True], prompt  # nothing predicts a document's first token
        starts = [start for (start, _), learned in zip(encoding.offset_mapping, mask[:-1], strict=True) if learned]
        assert not prompt or not (prompt + completion)[len(prompt) : starts[0]].strip(), "none of it is left out"


TOOLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    + PLAIN.replace("['system', 'user', 'assistant']", "['user', 'assistant', 'tool', 'system']")
).replace(
    "{{ message.content ~ '<|im_end|>' }}",
    "{{ (message.content or '') ~ ((message.tool_calls | tojson) if message.tool_calls else '') ~ '<|im_end|>' }}",
)


def write_rows(folder: Path, rows: list[dict[str, Any]], kind: str, name: str = "rows") -> Path:
    """The rows as JSON lines, parquet, or arrow as `datasets` writes it."""
    path = folder / f"{name}.{kind}"
    if kind == "jsonl":
        return write_lines(path, rows)
    pa = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = pa.table({column: [row.get(column) for row in rows] for column in columns})
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=3)
    else:
        with ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=3)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_nulls_in_objects_are_as_if_they_were_not_there(kind: str, tmp_path: Path) -> None:
    def row(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        return {
            "messages": [
                {"role": "user", "content": "ask"},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "content": "sun"},
                {"role": "assistant", "content": "sun"},
            ]
        }

    rows = [
        row({"city": "Rome"}),
        row({"city": "Rome", "zone": None}),
        row({"city": "Oslo", "zone": "UTC", "deep": {"list": [{"a": 1}, {"b": None}, {"a": 2, "b": "x"}]}}),
    ]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tok", TOOLING))
    samples = everything(opened(tmp_path, write_rows(tmp_path, rows, kind)))
    texts = [tokenizer.decode(tokens) for tokens, _ in samples]
    assert texts[0] == texts[1] and "null" not in "".join(texts)
    assert '"arguments": {"city": "Rome"}' in texts[0]
    assert '{"list": [{"a": 1}, {}, {"a": 2, "b": "x"}]}' in texts[2]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_are_those_of_all_rows(kind: str, streaming: bool, tmp_path: Path) -> None:
    """Tools that the first row, or the first file, lacks; for conversations and for prompts."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "text"}}}]
    chats: list[dict[str, Any]] = [{"messages": conversation(2 * i)} for i in range(4)]
    prompts: list[dict[str, Any]] = [
        {"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in chats
    ]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tok", TOOLING))
    for name, rows in (("chats", chats), ("prompts", prompts)):
        rows = [*rows[:3], {**rows[3], "tools": tools}]
        expected = ["weather" in str(row) for row in rows]
        whole = write_rows(tmp_path, rows, kind, name)
        folder = tmp_path / name
        write_rows(folder, rows[:2], kind, "a")
        write_rows(folder, rows[2:], kind, "b")
        for path in (whole, folder):
            if streaming:
                data = opened(tmp_path, path, streaming=True, val_path=str(whole), seq_len=200).dataset("train")
                samples = [(data[i]["tokens"].tolist(), None) for i in range(len(data))]
            else:
                samples = [(tokens, None) for tokens, _ in everything(opened(tmp_path, path))]
            assert ["weather" in tokenizer.decode(tokens) for tokens, _ in samples] == expected, path


def test_a_set_is_what_any_of_its_rows_is(tmp_path: Path) -> None:
    """A first row of plain text makes no plain text of conversations, in no format."""
    rows = [{"text": "a text"}, *({"messages": conversation(i)} for i in range(3))]
    write_tokenizer(tmp_path / "tok")
    for kind in ("jsonl", "parquet", "arrow"):
        path = write_rows(tmp_path, rows, kind)
        with pytest.raises(DataError, match=r"rows.\w+:1: column messages is missing"):
            opened(tmp_path, path)
        assert len(everything(opened(tmp_path, path, max_bad_rows=0.25))) == 3
    nested = write_lines(tmp_path / "nested.jsonl", [{"text": "a", "x": {"messages": 1}}, {"text": '"prompt": 1'}] * 3)
    assert len(everything(opened(tmp_path, nested))) == 6
    named = write_lines(tmp_path / "named.jsonl", ['{"a": 1}', '{"r\\u00f6le": "b", "a": 2}'])
    assert len(everything(opened(tmp_path, named, columns={"text": "röle"}, max_bad_rows=0.5))) == 1


def test_tools_beside_a_prompt_of_text_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "tools": tools} for tools in (None, [], [{"name": "weather"}])]
    with pytest.raises(DataError, match=r"rows.jsonl:3: column tools holds tools, but the prompt is text"):
        opened(tmp_path, write_lines(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_numbers_that_are_not_finite_are_named(kind: str, tmp_path: Path) -> None:
    rows = [
        {"messages": conversation(2 * i), "score": float("nan"), "tools": [{"name": "a", "most": 1.5}]}
        for i in range(4)
    ]
    write_tokenizer(tmp_path / "tok", TOOLING)
    assert len(everything(opened(tmp_path, write_rows(tmp_path, rows, kind)))) == 4, "in a column that is not read"
    rows[2]["tools"] = [{"name": "a", "most": float("inf")}]
    with pytest.raises(DataError, match=r"rows.\w+:3: column tools holds the number inf"):
        opened(tmp_path, write_rows(tmp_path, rows, kind))


def test_maps_of_arrow_are_objects(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"messages": conversation(2 * i), "tools": [{"name": "weather", "args": {"city": "Rome"} if i else {}}]}
        for i in range(3)
    ]
    tool = pa.struct([("name", pa.string()), ("args", pa.map_(pa.string(), pa.string()))])
    tools = pa.array([[{**t, "args": list(t["args"].items())} for t in row["tools"]] for row in rows], pa.list_(tool))
    parquet.write_table(
        pa.table({"messages": [row["messages"] for row in rows], "tools": tools}), tmp_path / "map.parquet"
    )
    write_tokenizer(tmp_path / "tok", TOOLING)
    expected = everything(opened(tmp_path, write_lines(tmp_path / "rows.jsonl", rows)))
    assert everything(opened(tmp_path, tmp_path / "map.parquet")) == expected


DATED = (
    "{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<|im_start|>today ' ~ today ~ strftime_now(' %-d/%-m/%y 100%%') }}" + PLAIN
)
"""As Llama 3's, which writes the date into the system's turn."""


@pytest.mark.slow
def test_a_template_that_writes_the_date_takes_it_from_the_config(tmp_path: Path) -> None:
    rows = [{"messages": conversation(i, turns=2)} for i in range(5)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tok", DATED))
    with pytest.raises(ConfigError, match=r"writes the date of the day \(strftime_now\)") as caught:
        opened(tmp_path, path)
    assert re.search(r"data.chat_date=\d{4}-\d\d-\d\d$", caught.value.fix)
    days = {day: opened(tmp_path, path, chat_date=day) for day in ("2024-07-06", "2025-12-25")}
    texts = {day: tokenizer.decode(everything(data)[0][0]) for day, data in days.items()}
    assert texts["2024-07-06"].startswith("<|im_start|>today 06 Jul 2024 6/7/24 100%<|im_start|>")
    assert texts["2025-12-25"].startswith("<|im_start|>today 25 Dec 2025 25/12/25 100%<|im_start|>")
    digests = [data.digests()["data"] for data in days.values()]
    streams = [
        opened(tmp_path, path, chat_date=day, streaming=True, val_path=str(path)).stream.digests()["data"]
        for day in days
    ]
    assert len({*digests, *streams}) == 4, "the date is part of the data that a checkpoint was trained with"
    command = [
        "shardkit.data.tokenize", str(path), str(tmp_path / "out"), str(tmp_path / "tok"),
        "data.chat_date=2024-07-06",
    ]  # fmt: skip
    assert python_m(*command, env={"TZ": "Pacific/Kiritimati"}).returncode == 0
    made = opened(tmp_path, tmp_path / "out")
    assert made.digests()["data"] == digests[0]
    write_tokenizer(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"data.chat_date=2024-07-06 would be ignored"):
        opened(tmp_path, path, chat_date="2024-07-06", tokenizer=str(tmp_path / "plain"))


THINKING = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' }}"
    "{% if message.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>' ~ (message.reasoning or '') ~ '</think>' }}{% endif %}"
    "{{ message.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen 3's: the reasoning of turns before the last question is left out."""


def test_a_template_that_changes_earlier_turns_trains_each_as_it_was_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def turns(n: int, again: bool = False) -> list[dict[str, str]]:
        messages = []
        for turn in range(n):
            messages.append({"role": "user", "content": f"ask {turn}"})
            messages += [
                {"role": "assistant", "content": f"say {turn}{part}", "reasoning": f"why {turn}{part}"}
                for part in range(1 + again)
            ]
        return messages

    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tok", THINKING))
    rows = [
        {"messages": messages}
        for messages in (turns(1), turns(3), turns(2, again=True), [*turns(2), {"role": "user", "content": "end"}])
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    samples = everything(opened(tmp_path, path))
    learned: list[list[str]] = []
    for tokens, mask in samples:
        starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        stops = [i for i in range(1, len(mask) + 1) if mask[i - 1] and (i == len(mask) or not mask[i])]
        learned.append([tokenizer.decode(tokens[a:b]) for a, b in zip(starts, stops, strict=True)])

    def reply(turn: int, part: int = 0) -> str:
        return f"<think>why {turn}{part}</think>say {turn}{part}<|im_end|>"

    assert learned == [
        [reply(0)], [reply(0)], [reply(1)], [reply(2)], [reply(0), reply(0, 1)], [reply(1), reply(1, 1)], [reply(0)],
        [reply(1)],
    ]  # fmt: skip
    for number, n_messages in (
        (1, 1),
        (2, 3),
        (3, 5),
    ):  # the prompt of each sample is what the model would have been given
        prompt = tokenizer.apply_chat_template(
            rows[1]["messages"][:n_messages], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(samples[number][0]).startswith(prompt)
    assert "3 of 4 conversations are trained as several samples (8 samples together)" in caplog.text
    assert [len(everything(opened(tmp_path, path, loss_on=how))) for how in ("completion", "all")] == [4, 4]
    split = opened(tmp_path, path, val_fraction=0.4)
    sides = [{tokenizer.decode(sample["tokens"].tolist())[:20] for sample in map(data.__getitem__, range(len(data)))}
             for data in (split.documents("train"), split.documents("val"))]  # fmt: skip
    places = np.fromfile(Path(split.sources.train[0].directory) / "places.bin", dtype="<u8")
    assert len(set(places.tolist())) == 4 and all(sides), "all samples of a conversation fall to one side"
    streamed = opened(tmp_path, path, streaming=True, val_path=str(path)).dataset("train")
    assert (streamed[0]["targets"] >= 0).any()
    with pytest.raises(
        DataError, match=r"row 2 from byte 0 on: the chat template changes earlier turns .* it makes 3 samples"
    ):
        streamed[1]
