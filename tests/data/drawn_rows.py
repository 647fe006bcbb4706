"""Folders and rows as people have them, drawn from a seed, each with its oracle: the pieces of text that are predicted,
or the words that the refusal must have.

The oracle knows a row from before it is spelled in a format, and shares no code with the reader. Run many seeds by
`python -m tests.data.drawn_rows --seeds 0:2000`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from shardkit.config.schema import RunConfig
from shardkit.data.store import Documents
from shardkit.data.text_data import TextData
from shardkit.errors import ConfigError, DataError

from .chats import MARKED, PLAIN, SPECIAL
from .test_kinds import ANY_ROLE, VISION
from .test_rows import TOOLING

TEMPLATES = {"strict": PLAIN, "marked": MARKED, "any": ANY_ROLE, "tools": TOOLING, "vision": VISION}
KNOWN = {"any": {"tool"}, "tools": {"tool"}, "vision": {"tool"}}
"""Roles that a template writes, further than system, user and assistant."""
EOS = SPECIAL[0]
MARK_NAMES = ["weight", "train", "training", "trainable", "loss", "loss_mask"]
ODD = ["", " ", "é☃", "\u2028", "\x85", "\t", '"q"', "\\n", "a\nb", "👩‍🚀", "\ufeff", "007", "NA", "null", "{}", "\x1c"]
BESIDE = {
    "README.md": b"# A set\n\nof rows\n", "LICENSE": b"all rights\n", ".gitattributes": b"*.parquet filter=lfs\n",
    "load.py": b"import os\n", "dataset_infos.json": b'{\n "default": {"features": {}}\n}', ".DS_Store": b"\0\1",
    "images/a.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "logo.svg": b"<svg xmlns='x'/>\n", "LICENSE.txt": b"all rights\n",
    ".cache/huggingface/download/train.jsonl.metadata": b"abc\n",
}  # fmt: skip

Document = tuple[tuple[str, bool], ...]
"""Pieces of text, each with whether it is predicted."""


def pieces(*parts: tuple[str, bool]) -> Document:
    joined = groupby((part for part in parts if part[0]), key=lambda part: part[1])
    return tuple(("".join(text for text, _ in group), predicted) for predicted, group in joined)


@dataclass
class Turn:
    role: str
    """system, user, assistant, tool, or call: a tool call of the assistant, whose text is the call's JSON."""
    text: str
    off: bool = False
    further: dict[str, Any] = field(default_factory=dict)
    spelled: str | None = None
    content: Any = None


def written(turns: list[Turn], template: str, tools: Any = None, last: bool = False) -> Document:
    """The conversation as each of `TEMPLATES` writes it."""
    parts = [(json.dumps(tools, ensure_ascii=False), False)] if tools and template == "tools" else []
    final = max((n for n, turn in enumerate(turns) if turn.role in ("assistant", "call")), default=-1)
    for number, turn in enumerate(turns):
        body = turn.text
        if turn.role == "call" and template == "tools":
            body = json.dumps([{"type": "function", "function": json.loads(turn.text)}], ensure_ascii=False)
        role = "assistant" if turn.role == "call" else turn.role
        parts.append((f"<|im_start|>{role}\n", False))
        parts.append((f"{body}<|im_end|>", role == "assistant" and not turn.off and (not last or number == final)))
        parts.append(("\n", False))
    return pieces(*parts)


class Draw:
    """A folder, the keys to read it with, and what must come of it."""

    def __init__(self, seed: int, root: Path) -> None:
        self.rng, self.root = random.Random(seed), root
        rng = self.rng
        self.keys: dict[str, Any] = {}
        self.names: list[str] = []
        """Words of a refusal; without any, a refusal is wrong unless `may_refuse`."""
        self.may_refuse = False
        self.ignored: list[str] = []
        """Columns and members that the line at the start must name."""
        self.template = rng.choice(list(TEMPLATES))
        self.kind = rng.choice(
            ["messages", "sharegpt", "messages", "sharegpt", "prompt", "chat prompt", "alpaca", "text"]
        )
        self.format = rng.choice(["jsonl", "jsonl", "jsonl", "json", "json", "parquet"])
        if self.kind in ("prompt", "alpaca", "text") and rng.random() < 0.3:
            self.format = rng.choice(["csv", "tsv"])
        self.last = self.kind in ("messages", "sharegpt") and rng.random() < 0.1
        if self.last:
            self.keys["loss_on"] = "completion"
        if self.kind == "alpaca":
            self.keys["columns"] = {"prompt": "instruction", "input": "input", "completion": "output"}
        self.n = 0
        self.rows: list[tuple[dict[str, Any], list[Document]]] = [self.row() for _ in range(rng.randint(2, 5))]
        self.what = "plain"
        self.raw: dict[int, bytes] = {}
        self.cut = False
        if rng.random() < 0.75:
            drawn = rng.choice([self.marks, self.members, self.role, self.columns, self.parts, self.bad, self.systems,
                                self.encoding, self.other_columns, self.marks, self.bad, self.wholes])  # fmt: skip
            self.what = drawn.__name__
            drawn()
        self.path = self.lay_out()

    # Rows.

    def word(self) -> str:
        self.n += 1
        return f"w{self.n} {self.rng.choice(ODD)}{self.rng.choice(ODD)}x"

    def turns(self) -> list[Turn]:
        rng = self.rng
        turns = [Turn("system", self.word())] if rng.random() < 0.3 else []
        begins = 0.15 if not turns else 0
        for number in range(rng.randint(1, 3)):
            if number or rng.random() >= begins:
                turns.append(Turn("user", self.word()))
            if (self.kind == "sharegpt" or (self.kind, self.template) == ("messages", "tools")) and (
                self.template in KNOWN and rng.random() < 0.3
            ):
                turns.append(Turn("call", json.dumps({"name": "add", "arguments": {"a": self.n}})))
                turns.append(Turn("tool", self.word()))
            turns.append(Turn("assistant", self.word()))
        if rng.random() < 0.1 and self.kind != "chat prompt":
            turns.append(Turn("user", self.word()))
        return turns if len(turns) > 1 or self.kind != "chat prompt" else self.turns()

    def spell(self, turn: Turn, sharegpt: bool) -> dict[str, Any]:
        content = turn.text if turn.content is None else turn.content
        if not sharegpt and turn.role == "call":
            call = {"type": "function", "function": json.loads(turn.text)}
            return {"role": "assistant", "content": self.rng.choice([None, ""]), "tool_calls": [call], **turn.further}
        if not sharegpt:
            return {"role": turn.spelled or turn.role, "content": content, **turn.further}
        name = {"user": ["human"], "assistant": ["gpt"], "system": ["system"], "call": ["function_call", "tool_call"],
                "tool": ["observation", "function", "tool"]}.get(turn.role, [turn.role])  # fmt: skip
        return {"from": turn.spelled or self.rng.choice(name), "value": content, **turn.further}

    def of_turns(self, turns: list[Turn], **columns: Any) -> tuple[dict[str, Any], list[Document]]:
        tools = columns.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        system = [Turn("system", columns["system"])] if columns.get("system") else []
        if system and turns and turns[0].role == "system":
            system = []
        documents = [written([*system, *turns], self.template, tools, self.last)]
        if self.kind == "chat prompt":
            reply = turns[-1:]
            before = [self.spell(turn, False) for turn in turns[:-1]]
            for turn in turns[:-1]:
                turn.off = True
            documents = [written([*system, *turns], self.template, tools)]
            return {"prompt": before, "completion": [self.spell(turn, False) for turn in reply], **columns}, documents
        sharegpt = self.kind == "sharegpt"
        column = self.rng.choice(["conversations"]) if sharegpt else "messages"
        return {column: [self.spell(turn, sharegpt) for turn in turns], **columns}, documents

    def row(self) -> tuple[dict[str, Any], list[Document]]:
        if self.kind == "text":
            text = self.word()
            return {"text": text}, [pieces((text[0], False), (text[1:] + EOS, True))]
        if self.kind == "prompt":
            prompt, completion = self.word(), self.word()
            return {"prompt": prompt, "completion": completion}, [pieces((prompt, False), (completion + EOS, True))]
        if self.kind == "alpaca":
            prompt, more, output = self.word(), self.rng.choice([self.word(), ""]), self.word()
            joined = f"{prompt}\n\n{more}" if more else prompt
            row = {"instruction": prompt, "input": more, "output": output}
            return row, [pieces((joined, False), (output + EOS, True))]
        turns = self.turns()
        columns: dict[str, Any] = {}
        if self.rng.random() < 0.15 and turns[0].role != "system":
            columns["system"] = self.word()
        if self.rng.random() < 0.15 and self.format != "parquet":
            tools = [{"type": "function", "function": {"name": "add"}}]
            columns["tools"] = self.rng.choice([tools, json.dumps(tools)])
        return self.of_turns(turns, **columns)

    def of_conversations(self) -> bool:
        if self.kind not in ("messages", "sharegpt", "chat prompt"):
            self.kind, self.format, self.keys = "messages", self.rng.choice(["jsonl", "json", "parquet"]), {}
            self.rows = [self.row() for _ in self.rows]
        return True

    def place(self, row: dict[str, Any] | Any, documents: list[Document] | None, *names: str) -> None:
        """Put a row anywhere; without documents it is bad, and `names` are in the refusal."""
        at = self.rng.randrange(len(self.rows) + 1)
        self.rows.insert(at, (row, documents or []))
        if documents is None:
            self.names += [f"FILE:{at + 1}", *names]

    # Kinds of rows that people have.

    def marks(self) -> None:
        rng = self.rng
        self.of_conversations()
        name = rng.choice(MARK_NAMES)
        turns = self.turns()
        while sum(turn.role in ("assistant", "call") for turn in turns) < 2:
            turns = self.turns()
        if self.kind == "chat prompt":
            turns = [Turn("user", self.word()), Turn("assistant", self.word())]
        ours = [turn for turn in turns if turn.role in ("assistant", "call")]
        on, off = rng.choice([(1, 0), (True, False)] + [(1.0, 0.0)] * (self.format != "parquet"))
        defect = rng.choice(["", "", "", "fraction", "word", "two", "user", "all"])
        if self.kind == "chat prompt":
            ours[0].further[name] = on
        elif self.last:
            self.may_refuse = True
            ours[0].further[name], ours[0].off = off, True
        else:
            hidden = rng.randrange(len(ours))
            ours[hidden].further[name], ours[hidden].off = off, True
            for turn in ours:
                if not turn.off and rng.random() < 0.4:
                    turn.further[name] = on
            for turn in turns:
                if turn not in ours and rng.random() < 0.2:
                    turn.further[name] = rng.choice([off, None])
        if defect == "fraction":
            rng.choice(ours).further[name] = rng.choice([0.5, 2, -1, 0.1])
        elif defect == "word":
            rng.choice(ours).further[name] = rng.choice(["no", "false", "0", [0]])
        elif defect == "two":
            other = rng.choice([mark for mark in MARK_NAMES if mark != name])
            ours[0].further |= {name: on, other: off}
        elif defect == "user":
            next((turn for turn in turns if turn not in ours), ours[0]).further[name] = on
            if len(ours) == len(turns):
                defect = ""
        elif defect == "all":
            for turn in ours:
                turn.further[name] = off
        row, documents = self.of_turns(turns)
        if defect and rng.random() < 0.15 and defect != "two":  # as if the mark were not there
            self.keys["ignore"] = [name]
            for turn in turns:
                turn.off = False
            documents, defect = self.of_turns(turns)[1], ""
        self.place(row, None if defect else documents, *([] if defect == "all" else [name] if defect else []))

    def members(self) -> None:
        rng = self.rng
        self.of_conversations()
        name = rng.choice(["note", "turn_id", "liked", "masked", "supervise", "time", "learn"])
        values = rng.choice([[True, False], [0, 1], [False], [1], ["a", "b"], [0, 1, 2], ["x", None], [3, 1], [None],
                             [None, True], ["true", "false"], [0.5, 0.0]])  # fmt: skip
        turns = [Turn("user", self.word()), *(Turn(r, self.word()) for r in ("assistant", "user", "assistant"))]
        if self.kind == "chat prompt":
            turns = turns[:2]
        seen = []
        for number, turn in enumerate(turns):
            if number < len(values) or rng.random() < 0.7:
                turn.further[name] = values[number % len(values)]
                seen.append(turn.further[name])
        row, documents = self.of_turns(turns)
        seen = [value for value in seen if value is not None]
        self.place(row, documents)
        if seen and all(value in (0, 1, "true", "false") for value in seen):
            if rng.random() < 0.3:
                self.keys["ignore"] = [name]
            else:
                self.names = [name, "data.ignore=["]
        elif seen:
            self.ignored.append(name)

    def role(self) -> None:
        self.of_conversations()
        rng = self.rng
        role = rng.choice(["critic", "narrator", "bot2", "Assistant", "reviewer", "USER", "ipython", "bing"])
        if self.template not in KNOWN and rng.random() < 0.3:
            role = "tool"
        turns = self.turns()
        at = rng.randrange(len(turns) + 1)
        turns.insert(at, Turn(role, self.word()))
        if self.kind == "chat prompt" and turns[-1].role == role:
            turns.append(Turn("assistant", self.word()))
        self.place(self.of_turns(turns)[0], None, role)

    def systems(self) -> None:
        """The columns `system` and `tools`, with and without a first message of the same role."""
        self.of_conversations()
        rng = self.rng
        turns = [Turn("user", self.word()), Turn("assistant", self.word())]
        first, column = self.word(), self.word()
        case = rng.choice(["same", "different", "null", "bad tools"])
        if case in ("same", "different"):
            turns.insert(0, Turn("system", first))
            system = first if case == "same" else column
            row, documents = self.of_turns(turns, system=system)
            self.place(row, documents if case == "same" else None, *(["system"] if case == "different" else []))
        elif case == "null":
            row, documents = self.of_turns(turns, system=None)
            self.place(row, documents)
        else:
            tools = rng.choice(["[{", '{"a": 1}', "plain words", "[1]"])
            row, _ = self.of_turns(turns)
            self.place({**row, "tools": tools}, None, "tools")
            self.format = "jsonl"

    def parts(self) -> None:
        self.of_conversations()
        rng = self.rng
        turns = self.turns()
        number = rng.randrange(len(turns))
        turn = turns[number]
        if turn.role == "call":
            turn.role = "assistant"
        cut = rng.randrange(len(turn.text) + 1)
        texts = [turn.text[:cut], turn.text[cut:]] if rng.random() < 0.5 else [turn.text]
        turn.content = [{"type": "text", "text": text} for text in texts]
        other = rng.choice([None, None, {"type": "image_url", "image_url": {"url": "u"}}, {"type": "image"},
                            {"type": "input_audio", "input_audio": {}}, {"type": "video", "video": "v"}])  # fmt: skip
        if other:
            turn.content.insert(rng.randrange(len(turn.content) + 1), other)
        row, documents = self.of_turns(turns)
        self.place(row, None if other else documents, *([other["type"]] if other else []))
        if self.format == "parquet":  # one type a member
            self.format = "json"

    def columns(self) -> None:
        """Columns that change the meaning of others: refused by name, or ignored by `data.ignore`."""
        rng = self.rng
        if self.kind == "text":
            self.of_conversations()
        row, documents = self.row()
        name, value = rng.choice([
            ("label", False), ("label", True), ("label", 0), ("label", 1), ("kto_tag", True), ("kto_tag", False),
            ("chosen", "x"), ("rejected", "y"), ("score_rejected", 0.5),
            ("chosen", [{"role": "assistant", "content": "a"}]),
            ("weight", 0.5), ("weight", 0), ("loss_mask", [0, 1]), ("train", False), ("input", "more"),
            ("context", "more"), ("label", "false"), ("label", "True"),
        ])  # fmt: skip
        if name in row or (name in ("input", "context") and "prompt" not in row):
            name, value = "label", False
        if self.format in ("csv", "tsv") and isinstance(value, list):
            name, value = "rejected", "y"
        self.place({**row, name: value}, documents)
        if rng.random() < 0.25:
            self.keys["ignore"] = [name]
        else:
            self.names = [name, "data.ignore=["]
            if rng.random() < 0.2 and name not in ("weight", "loss_mask", "train", "input", "context"):
                self.names.append("preferences")

    def other_columns(self) -> None:
        """Columns beside the rows that change nothing: named as ignored."""
        rng = self.rng
        name, value = rng.choice([("id", 7), ("score", 0.5), ("source", "web"), ("label", "maths"), ("label", 3),
                                  ("url", None), ("prompt_id", "p"), ("topic", "a"), ("text", "t"),
                                  ("meta", {"a": 1})])  # fmt: skip
        if name in self.rows[0][0] or (self.format in ("csv", "tsv") and isinstance(value, dict)):
            name = "id"
        for number, (row, _) in enumerate(self.rows):
            if number == 0 or rng.random() < 0.7:
                row[name] = value
        if value is not None:
            self.ignored.append(name)

    def bad(self) -> None:
        """A row that cannot be used, in a format that can hold it."""
        rng = self.rng
        self.of_conversations()
        self.format = rng.choice(["jsonl", "json"])
        user, answer = Turn("user", self.word()), Turn("assistant", self.word())
        cases: dict[str, Any] = {
            "no assistant": self.of_turns([user, user])[0] if self.kind != "chat prompt" else None,
            "empty": {name: [] for name in self.of_turns([user, answer])[0]},
            "number": self.of_turns([user, Turn("assistant", "", content=3)])[0],
            "no object": rng.choice([3, "text", None]),
            "message": self.of_turns([user, answer])[0] | {next(iter(self.rows[0][0])): ["hi"]},
            "missing": {"other": 1},
            "object": self.of_turns([user, answer])[0] | {next(iter(self.rows[0][0])): {"a": 1}},
            "function_call": self.of_turns([user, Turn("assistant", "", further={"function_call": {"name": "add"}})])[
                0
            ],
            "surrogate": self.of_turns([user, Turn("assistant", "x\ud800y")])[0],
        }
        case = rng.choice([*cases, "raw", "byte"])
        if case in cases and cases[case] is not None:
            self.place(cases[case], None)
        elif self.format == "jsonl":
            self.raw[rng.randrange(len(self.rows))] = rng.choice(
                [b'{"messages": [', b"{'a': 1}", b'{"a": "\xff"}', b"words"]
            )
            self.names = [f"FILE:{next(iter(self.raw)) + 1}"]  # the first bad line
        else:
            self.cut = True
            self.names = ["FILE is damaged or cut short"]
        if self.names and not self.cut and len(self.rows) > 2 and rng.random() < 0.3:  # left out, and the others train
            self.keys["max_bad_rows"] = 0.9
            self.rows = [
                (row, [] if number in self.raw else documents) for number, (row, documents) in enumerate(self.rows)
            ]
            self.names, self.may_refuse = [], case in ("raw", "byte")

    def encoding(self) -> None:
        """How text files are written: the same rows, or a refusal of the file."""
        if self.format == "parquet":
            self.format = "jsonl"
        self.encoded: str | None = self.rng.choice(["utf-8-sig", "crlf", "blank", "utf-16", "unescaped", "indent"])
        if self.encoded == "utf-16":
            self.may_refuse = True

    def wholes(self) -> None:
        """Files of another form than a list of rows."""
        rng = self.rng
        if self.kind == "alpaca" and rng.random() < 0.7:
            self.keys.pop("columns")
            self.names = ["data.columns={prompt: instruction, input: input, completion: output}"]
            return
        self.format = "jsonl" if rng.random() < 0.5 else "json"
        rows = [row for row, _ in self.rows]
        form = rng.choice(["export", "data", "object", "two kinds", "dpo"])
        if form == "two kinds":
            other = (
                {"text": "a text"} if self.kind != "text" else {"messages": [self.spell(Turn("assistant", "a"), False)]}
            )
            self.place(other, [])
            self.names = ["missing" if self.kind != "alpaca" else "instruction"]
        elif form == "dpo":
            for row, _ in self.rows:
                row.clear()
                row.update({"prompt": "q", "chosen": "a", "rejected": "b"})
            self.keys, self.names = {}, ["preferences", "chosen", "rejected"]
        else:
            self.format = "json"
            self.whole: Any = {"export": [{"features": [], "rows": [{"row": row} for row in rows]}],
                               "data": {"version": 1, "data": rows},
                               "object": {"version": 2, **rows[0]}}[form]  # fmt: skip
            self.names = (
                ["rows"]
                if self.kind == "alpaca" and form != "object"
                else [{"export": "'.[].rows[].row'", "data": "'.data[]'", "object": ".json"}[form]]
            )

    # Files.

    def content(self, rows: list[Any]) -> bytes:
        encoded = getattr(self, "encoded", None)
        if self.format == "parquet":
            import pyarrow as pa
            from pyarrow import parquet

            names = list(dict.fromkeys(name for row in rows for name in row))
            stream = io.BytesIO()
            parquet.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), stream)
            return stream.getvalue()
        if self.format in ("csv", "tsv"):
            text = io.StringIO(newline="")
            names = list(dict.fromkeys(name for row, _ in self.rows for name in row))
            writer = csv.DictWriter(text, names, delimiter="," if self.format == "csv" else "\t", restval="")
            writer.writeheader()
            writer.writerows(rows)
            written_text = text.getvalue()
        elif self.format == "json":
            whole = getattr(self, "whole", rows)
            ascii_ = encoded not in ("unescaped", "utf-16") or "ud800" in json.dumps(rows)
            written_text = json.dumps(
                whole,
                indent=1 if encoded == "indent" or isinstance(whole, dict) or self.rng.random() < 0.5 else None,
                ensure_ascii=ascii_,
            )
        else:
            ascii_ = (encoded != "unescaped" and self.rng.random() < 0.5) or "ud800" in json.dumps(rows)
            lines = [json.dumps(row, ensure_ascii=ascii_) for row in rows]
            end = "\r\n" if encoded == "crlf" else "\n\n" if encoded == "blank" else "\n"
            written_text = end.join(lines) + (end if self.rng.random() < 0.8 else "")
        data = written_text.encode(encoded if encoded in ("utf-8-sig", "utf-16") else "utf-8")
        if self.raw:
            lines_ = data.split(b"\n")
            for number, line in self.raw.items():
                lines_[number] = line
            data = b"\n".join(lines_)
        if self.cut:
            data, self.cut = data[: -self.rng.randint(2, 9)], False
        return data

    def write(self, name: str, content: bytes) -> None:
        path = self.root / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def lay_out(self) -> Path:
        """Write the files; the train documents, those of validation, and the path to read."""
        rng = self.rng
        if self.format == "parquet":
            try:
                self.content([row for row, _ in self.rows])
            except Exception:  # arrow has one type a column
                self.format = "jsonl"
        everything = [row for row, _ in self.rows]
        self.train = [document for _, documents in self.rows for document in documents]
        self.val: list[Document] | None = None
        end = rng.choice(["jsonl", "jsonl", "ndjson"]) if self.format == "jsonl" else self.format
        for name, content in BESIDE.items():
            if rng.random() < 0.4:
                self.write(name, content)
        layout = rng.choice(
            ["file", "train", "any name", "splits", "splits", "shards", "glob", "explicit", "folders", "defect"]
        )
        if self.names and layout == "defect":
            layout = "train"
        self.layout = layout
        folder, train = self.root / "set", f"train.{end}"
        if layout == "file":
            train = f"rows.{end}"
        elif layout == "any name":
            train = f"chats.{end}"
        elif layout in ("splits", "explicit"):
            train = rng.choice([f"train.{end}", f"my-train.{end}", f"data/train-00000-of-00001.{end}"])
        elif layout == "shards":
            train = f"data/train-00000-of-00002.{end}"
        elif layout == "folders":
            train = rng.choice([f"train/a.{end}", f"training/part.{end}"])
        self.write(train, self.content(everything))
        self.names = [name.replace("FILE", Path(train).name) for name in self.names]
        if hasattr(self, "whole") and layout in ("any name", "shards"):
            self.names = [Path(train).name]  # one of several files: nothing says that all are exports
        if hasattr(self, "whole"):
            del self.whole
        self.raw = {}
        more = [self.plain_row() for _ in range(2)]
        further = self.content([row for row, _ in more])
        documents = [document for _, made in more for document in made]
        if layout == "splits":
            dev = rng.choice(["validation", "valid", "dev", "val"])
            of_split = f"data/{{}}-00000-of-00001.{end}" if "/" in train else f"{{}}.{end}"
            if rng.random() < 0.8:
                self.write(of_split.format(dev), further)
                self.val = documents
            if rng.random() < 0.6:
                self.write(of_split.format("test"), further)
        elif layout == "folders":
            self.write(f"{rng.choice(['validation', 'dev'])}/a.{end}", further)
            self.val = documents
            if rng.random() < 0.5:
                self.write(f"test/b.{end}", further)
        elif layout == "shards":
            self.write(f"data/train-00001-of-00002.{end}", further)
            self.train += documents
        elif layout == "any name":
            self.write(f"more.{end}", further)
            self.train += documents
        elif layout == "explicit":
            self.write(f"test.{end}", further)
            if rng.random() < 0.5:
                self.keys["val_path"], self.val = str(folder / f"test.{end}"), documents
            else:
                self.write(f"validation.{end}", further)
            folder = folder / train
        elif layout == "file":
            self.write(f"test.{end}", further)
            folder = folder / train
        elif layout == "glob":
            self.write(f"other/train.{end}", further)
            folder = folder / f"*.{end}"
        elif layout == "defect":
            self.defect(train, end, further)
        if self.val is None:
            self.keys["eval"] = False
        return folder

    def plain_row(self) -> tuple[dict[str, Any], list[Document]]:
        row, documents = self.row()
        if self.format in ("csv", "tsv"):
            row = {**{name: None for r, _ in self.rows for name in r}, **row}
        return row, documents

    def defect(self, train: str, end: str, further: bytes) -> None:
        """A folder of two minds."""
        rng = self.rng
        case = rng.choice(["mixture", "text", "compressed", "test only", "two splits", "empty"])
        self.layout = f"defect {case}"
        if case == "mixture":
            other = "more.csv" if end != "csv" else "more.jsonl"
            self.write(other, b'{"text": "a"}\n' if end == "csv" else b"text\r\na\r\n")
            self.names = [train, other]
        elif case == "text":
            self.write("notes.txt", b"a text\n")
            self.names = [train, "notes.txt"]
        elif case == "compressed":
            self.write(f"more.{end}.gz", b"\x1f\x8b")
            self.names = [f"more.{end}.gz"]
        elif case == "test only":
            (self.root / "set" / train).rename(self.root / "set" / f"test.{end}")
            self.names = [f"test.{end}"]
        elif case == "two splits":
            self.write(f"train_test.{end}", further)
            self.names = [f"train_test.{end}"]
        else:
            self.write(f"train-empty.{end}", b"")
            self.may_refuse = True


@cache
def tokenizer() -> tuple[str, Any]:
    """A tokenizer of one token a byte, so that no token is of two pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return made.to_str(), made


def read(draw: Draw) -> tuple[list[Document], list[Document] | None]:
    """The documents of training and validation that shardkit makes of a draw."""
    rules, made = tokenizer()
    folder = draw.root / "tok"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(rules)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATES[draw.template])
    keys = dict(draw.keys)
    evaluated = keys.pop("eval", True)
    config = RunConfig.model_validate({
        "model": {"vocab_size": 512, "max_seq_len": 4096},
        "train": {"seq_len": 4096, **({} if evaluated else {"eval_samples": 0})},
        "data": {"tokenizer": str(folder), "path": str(draw.path), "cache_dir": str(draw.root / "cache"),
                 "tokenize_workers": 1, **keys},
    })  # fmt: skip
    data = TextData(config, 512, "model.vocab_size")
    assert data.sources is not None

    def documents(stores: Any) -> list[Document]:
        samples = Documents(stores)
        result = []
        for sample in map(samples.__getitem__, range(len(samples))):
            targets = sample["is_target"].tolist()
            runs = groupby(zip(sample["tokens"].tolist(), targets, strict=True), key=lambda one: one[1])
            decoded = ((made.decode([t for t, _ in run], skip_special_tokens=False), on) for on, run in runs)
            result.append(pieces(*decoded))
        return result

    return documents(data.sources.train), documents(data.sources.val) if data.sources.val else None


def verdict(seed: int) -> tuple[str, str]:
    """`right`, `refused`, or a fault (silent, wrong refusal, cause not named, traceback), and its story."""
    root = Path(tempfile.mkdtemp(prefix="drawn"))
    out = io.StringIO()
    try:
        draw = Draw(seed, root)
        story = f"seed {seed}: {draw.what}, {draw.kind}, {draw.format}, {draw.layout}, {draw.template}, {draw.keys}"
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                train, val = read(draw)
        except (ConfigError, DataError) as error:
            message = f"{error.cause}; {error.fix}"
            if draw.names:
                missing = [name for name in draw.names if name not in message]
                return (
                    ("cause not named", f"{story}\n  {missing} missing in: {message}")
                    if missing
                    else ("refused", draw.what)
                )
            return ("refused", draw.what) if draw.may_refuse else ("wrong refusal", f"{story}\n  {message}")
        except Exception:
            return "traceback", f"{story}\n{traceback.format_exc()}"
        if draw.names:
            return "silent", f"{story}\n  trained, and should be refused for {draw.names}: {train}"
        for name, ours, expected in (("train", train, draw.train), ("val", val, draw.val)):
            if Counter(ours or []) != Counter(expected or []):
                return "silent", f"{story}\n  {name}\n   got {ours}\n   not {expected}"
        first = out.getvalue()
        if unnamed := [name for name in draw.ignored if name not in first.partition("ignored")[2]]:
            return "cause not named", f"{story}\n  {unnamed} not in: {first}"
        return "right", draw.what
    finally:
        shutil.rmtree(root)


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:200")
    first, last = map(int, parser.parse_args(arguments).seeds.split(":"))
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for seed in range(first, last):
        kind, story = verdict(seed)
        counts[kind] += 1
        if kind == "refused":
            refused[story] += 1
        elif kind != "right":
            show(f"{kind}: {story}")
    show(f"{last - first} draws: {dict(counts)}; refused: {dict(refused)}")
    return int(sum(counts.values()) > counts["right"] + counts["refused"])


if __name__ == "__main__":
    sys.exit(main())
