"""Turn rows (plain text, conversations, prompts with completions) into text, and mark the characters to predict.

A row is read in this order: its columns (`Columns`), its messages in one form (`RowReader._messages`), the text that
the chat template makes of them (`Template`), and the ranges of that text to predict. Chat templates run in
transformers' sandbox only. If a template does not mark the assistant's turns with `{% generation %}`, they are located
by rendering the conversation up to each turn. This module imports neither torch nor a tokenizer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from functools import cached_property
from string import ascii_letters
from typing import Any, Literal

from ..errors import DataError, listed, one_line

Kind = Literal["text", "messages", "prompt"]
LossOn = Literal["all", "assistant", "completion"]
Span = tuple[int, int]
READS_CLOCK = "strftime_now"
"""The function that templates call to read the clock."""

_NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "text": ("text",),
}
"""Use of a column → its usual names."""
_BESIDE = ("system", "tools")
"""Columns that conversations and prompts read beside their own, if any row has them."""
_PROMPTS = ("prompt", "instruction", "question", "query")
_COMPLETIONS = ("completion", "output", "response", "answer")
_PARTS_OF_PROMPT = ("input", "context", "history", "system_prompt")
"""Columns that hold a part of what a model was asked: a prompt without them is another prompt."""
_PREFERENCE = re.compile(r"(?:.*_)?(?:chosen|rejected)(?:_.*)?|kto_tag", re.IGNORECASE)
_MARKS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Members of a turn that say whether it is to be predicted."""
_PART_MARKS = ("train_detail",)
"""Members that mark parts of a turn."""
_TURN = {"role", "content", "tool_calls"}
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "tool_call": "assistant", "function": "tool", "observation": "tool",
    "tool_response": "tool",
}  # fmt: skip
"""Roles of ShareGPT and its kin → the usual role."""
_CALLS = ("function_call", "tool_call")
_USUAL_ROLES = ("system", "user", "assistant", "tool")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "shardkit7probe"


class Message(dict[str, Any]):
    """A message as templates read it; `mark` says whether its row marks it to be predicted, or not to be."""

    mark: bool | None = None


class RowError(ValueError):
    """A row that cannot be used; the message says why, `fix` what to do if that is not to correct the row."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix


class UnknownColumnsError(DataError):
    """None of the columns is known to hold text."""


class RefusedRow(ValueError):
    """A row that says that the whole set is no data for this task; it is never left out as a bad row."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(cause)
        self.fix = fix


# Columns.


@dataclass(frozen=True)
class Columns:
    """Which column holds what: kind "text" reads `text`, "messages" `messages`, "prompt" `prompt` and `completion`."""

    kind: Kind
    names: dict[str, str]  # use → the column's name
    # columns that are there and not read, as far as they are known before the rows are read
    further: tuple[str, ...] = ()
    # `data.ignore`, names of columns and of members of turns that are as if they were not there
    ignore: tuple[str, ...] = ()

    @property
    def read(self) -> list[str]:
        """The columns that a reader of tables must give: those in use, and those that can change what they mean."""
        return [*self.names.values(), *(name for name in self.further if changes_meaning(name))]

    def values(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row's values by use ("messages", "tools", …), without null members of objects; see `plain`."""
        values = {}
        for use, name in self.names.items():
            try:
                values[use] = plain(row.get(name))
            except RecursionError:
                raise RowError(f"column {name} is nested too deeply") from None
            except ValueError as error:
                raise RowError(f"column {name} holds {error}") from None
        return values


def plain(value: Any) -> Any:
    """The value without the members of its objects that are null, at any depth; nulls in lists stay.

    Arrow and parquet give every object the members of all others, filled with nulls, so that a null and a missing
    member are the same there. They are the same in JSON lines too: tokens must not depend on the file's format.
    """
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items() if member is not None}
    if isinstance(value, (list, tuple)):
        return [plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the number {value}")
    return value


def changes_meaning(name: str) -> bool:
    """Whether a column of this name can change what the columns beside it mean, so that its values are looked at."""
    return name == "label" or name in (*_MARKS, *_PARTS_OF_PROMPT) or _PREFERENCE.fullmatch(name) is not None


def names_to_find(named: Mapping[Any, str]) -> set[str]:
    """The names of all columns that decide how rows are read; `named`: data.columns."""
    usual = {name for names in _NAMES.values() for name in names} if set(named) <= {*_BESIDE, "input"} else set()
    return {*_BESIDE, *usual, *named.values()}


def choose_columns(
    present: Sequence[str], named: Mapping[Any, str], source: str, ignore: Sequence[str] = ()
) -> Columns:
    """The columns to read of those that any row has (`present`): `named` (data.columns), else those of usual names."""
    present = [name for name in present if name not in ignore]
    for use, name in named.items():
        if name not in present:
            close = get_close_matches(name, present, n=3)
            fix = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(present) or 'no columns'}"
            raise DataError(f"data.columns.{use}={name}: {source} has no such column", fix)
    chosen: dict[str, str] = dict(named)
    if not set(chosen) - {*_BESIDE, "input"}:
        for use, usual in _NAMES.items():
            chosen.update((use, name) for name in usual[::-1] if name in present)
    preferences = [name for name in present if _PREFERENCE.fullmatch(name) and name not in chosen.values()]
    if preferences:
        raise DataError(f"{source} holds {preference_words(preferences)}", ignoring(preferences))
    beside = {use: chosen.get(use, use) for use in _BESIDE if use in chosen or use in present}
    names: dict[str, str]
    if "messages" in chosen:
        kind: Kind = "messages"
        names = {"messages": chosen["messages"], **beside}
    elif "prompt" in chosen and "completion" in chosen:
        kind = "prompt"
        names = {"prompt": chosen["prompt"], "completion": chosen["completion"], **beside}
        names |= {"input": chosen["input"]} if "input" in chosen else {}
    elif "text" in chosen:
        kind, names = "text", {"text": chosen["text"]}
    else:
        raise UnknownColumnsError(
            f"{source} has the columns {', '.join(present) or '(none)'}: none of them is known to hold text",
            _naming(present),
        )
    if unused := next((use for use in (*_BESIDE, "input") if use in named and use not in names), None):
        raise DataError(
            f"data.columns.{unused}={named[unused]} would be ignored: {source} is read as {kind}",
            f"remove data.columns.{unused}",
        )
    further = tuple(name for name in present if name not in names.values())
    return Columns(kind, names, further, tuple(ignore))


def preference_words(columns: Sequence[str]) -> str:
    return f"preferences (column{'s' * (len(columns) > 1)} {listed(columns)}), which this task does not train"


def ignoring(names: Sequence[str]) -> str:
    return (
        "give rows with one answer each, all of them to be learned; "
        f"'data.ignore=[{', '.join(names)}]' trains the other columns as if these were not there"
    )


def _naming(present: Sequence[str]) -> str:
    """How to name the columns of rows without a usual name, all parts of their prompts included."""
    prompt = next((name for name in _PROMPTS if name in present), None)
    completion = next((name for name in _COMPLETIONS if name in present), None)
    if prompt is None or completion is None:
        return (
            "name them: 'data.columns={text: NAME}', 'data.columns={messages: NAME}' or "
            "'data.columns={prompt: NAME, completion: NAME}'"
        )
    part = next((name for name in ("input", "context") if name in present), None)
    joined = f", input: {part}" if part else ""
    words = f" ({part} joins the prompt behind an empty line)" if part else ""
    return f"name them: 'data.columns={{prompt: {prompt}{joined}, completion: {completion}}}'{words}"


# The template.


@dataclass(frozen=True)
class Text:
    """The text of one sample; a row makes one or several of them."""

    text: str
    spans: list[Span] | None = None  # ranges of characters to predict; None = all characters
    rendered: bool = False  # whether a chat template wrote the text; it then contains the special tokens already
    # the text whose hash puts the row into the training or validation split, if it differs from `text`. All samples
    # of a row have the same one, so that they stay in one split
    row_text: str | None = None


@dataclass(frozen=True)
class Template:
    """A chat template, and the special tokens that it can refer to by name."""

    source: str
    special: dict[str, str]

    @property
    def marks_turns(self) -> bool:
        """Whether the template marks the assistant's turns with `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def reads(self, name: str) -> bool:
        """Whether the template mentions a member of messages, or a variable, of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Render a conversation; returns the text and the ranges of characters that the template marks as replies.

        `prompt`: also write the start of a reply, as for generation.
        """
        import jinja2
        from jinja2.exceptions import SecurityError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, marked = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=self.marks_turns,
                add_generation_prompt=prompt,
                **self.special,
            )
        except (jinja2.TemplateSyntaxError, SecurityError, OverflowError, ImportError) as error:
            raise DataError(
                f"the chat template cannot be used: {type(error).__name__}: {one_line(error)}",
                "correct it, or set data.chat_template to a file with another one",
            ) from error
        except Exception as error:  # a template can raise any error of Python: {{ 1 / 0 }}
            raise RowError(f"the chat template rejects it: {one_line(error)}") from error
        return texts[0], [(start, end) for start, end in (marked[0] if marked else []) if start < end]


def at_date(source: str, day: date) -> str:
    """Return the template's source, changed so that its clock always shows midnight of `day`.

    A macro `strftime_now` is put in front, which hides transformers' function of the same name. `%s`, the seconds since
    the epoch, is left unformatted, because it depends on the node's time zone.
    """
    values = {letter: day.strftime(f"%{letter}") for letter in ascii_letters.replace("s", "")}
    values |= {f"-{letter}": day.strftime(f"%-{letter}") for letter in "dmyHIjMS"}
    rename = "".join(f" | replace({'%' + key!r}, {value!r})" for key, value in sorted(values.items()))
    macro = f"{{{{ format | replace('%%', '\\0'){rename} | replace('\\0', '%') }}}}"
    # The macro stays on the first line, so that jinja2 trims white space there as it did before.
    first_line = re.sub(r"\A[ \t]+(?=\{[%#](?!\+))", "", source)
    return f"{{% macro strftime_now(format) %}}{macro}{{% endmacro %}}{{{{ '' }}}}{first_line}"


def no_template() -> DataError:
    """The error for conversations without a chat template."""
    return DataError(
        "the data are conversations, but the tokenizer has no chat template",
        "set data.chat_template to a file with one, or use the tokenizer of the model's instruction-tuned version",
    )


# Rows.


class RowReader:
    """Turns a row into one or several `Text`s.

    `loss_on`: the text to predict: "all", the turns of the "assistant", or the "completion", which is the last of these
    turns in a conversation. `ends`: texts of special tokens that can end a turn. White space after such a token is not
    predicted.
    """

    def __init__(
        self, columns: Columns, loss_on: LossOn, template: Template | None, ends: tuple[str, ...] = ()
    ) -> None:
        self.columns, self.loss_on, self.template, self.ends = columns, loss_on, template, ends
        self.further: set[str] = set(columns.further)  # columns that rows had and that are not read
        # member of turns that nobody reads, neither the template → whether it was true, false, 0 or 1 in all turns
        self.members: dict[str, bool] = {}
        self._ignored = {*columns.names.values(), *columns.ignore}
        self._reads: dict[str, bool] = {}

    def read(self, row: Mapping[str, Any]) -> list[Text]:
        """Return the row's samples: one, or several if the template changes earlier turns (see `_by_reply`)."""
        self._look_at_further_columns(row)
        values = self.columns.values(row)
        if self.columns.kind == "text":
            return [Text(self._string(values, "text", row))]
        tools = _tools(values.get("tools"))
        system = values.get("system") or ""
        if not isinstance(system, str):
            raise RowError(f"column {self.columns.names['system']} is not text but {type(system).__name__}")
        if self.columns.kind == "prompt" and any(isinstance(values[use], str) for use in ("prompt", "completion")):
            return [self._plain_completion(values, row, tools, system)]
        if self.columns.kind == "prompt":
            return self._completion(values, row, tools, system)
        messages = self._with_system(self._messages(values["messages"], "messages", row), system)
        return self._conversation(messages, tools, range(len(messages)))

    def _look_at_further_columns(self, row: Mapping[str, Any]) -> None:
        kind = self.columns.kind
        further = {name: value for name, value in row.items() if name not in self._ignored and value is not None}
        self.further.update(further)
        if preferences := [name for name in further if _PREFERENCE.fullmatch(name)]:
            raise RefusedRow(preference_words(preferences), ignoring(preferences))
        for name, value in further.items():
            if kind == "text" or not changes_meaning(name):
                continue
            if name == "label" and _is_mark(value, words=True):
                raise RefusedRow(
                    f"preferences (column label, here {value}), which this task does not train: an answer that is "
                    "labelled as bad would be learned",
                    ignoring([name]),
                )
            marks = value if isinstance(value, list) and value else [value]
            is_weight = name == "weight" and isinstance(value, (int, float, str)) and value != ""
            if name in _MARKS and (is_weight or all(_is_mark(mark, words=True) for mark in marks)):
                raise RefusedRow(
                    f"column {name} marks which rows or turns count, and only marks on turns are obeyed",
                    f"write the mark into each turn, or train every row alike: data.ignore=[{name}]",
                )
            if name == "system_prompt" and value and kind == "messages":
                raise RefusedRow(
                    "column system_prompt holds a part of the prompt, which would be left out",
                    f"'data.columns={{messages: {self.columns.names['messages']}, system: system_prompt}}' puts it in "
                    "front; data.ignore=[system_prompt] trains without it",
                )
            if name in _PARTS_OF_PROMPT and value not in ("", [], {}) and kind == "prompt":
                names = self.columns.names
                joined = (
                    f"'data.columns={{prompt: {names['prompt']}, input: {name}, completion: {names['completion']}}}'"
                )
                fix = f"{joined} joins it to the prompt behind an empty line; " if isinstance(value, str) else ""
                raise RefusedRow(
                    f"column {name} holds a part of the prompt, which would be left out",
                    f"{fix}data.ignore=[{name}] trains without it",
                )

    def _plain_completion(self, values: Mapping[str, Any], row: Mapping[str, Any], tools: Any, system: str) -> Text:
        prompt = self._string(values, "prompt", row, empty=True)
        completion = self._string(values, "completion", row)
        if added := values.get("input"):
            prompt = f"{prompt}\n\n{self._string(values, 'input', row)}" if added else prompt
        for name, value in (("tools", tools), ("system", system)):
            if value:
                holds = "tools" if name == "tools" else "text"
                raise RowError(f"column {name} holds {holds}, but the prompt is text: only messages can have {name}")
        return Text(prompt + completion, self._unless_all((len(prompt), len(prompt) + len(completion))))

    def _completion(self, values: Mapping[str, Any], row: Mapping[str, Any], tools: Any, system: str) -> list[Text]:
        if values.get("input"):
            raise RowError("the prompt is messages, which no further input can join")
        before = self._with_system(self._messages(values["prompt"], "prompt", row), system)
        reply = self._messages(values["completion"], "completion", row)
        messages = [*before, *reply]
        if any(message.mark for message in before):
            raise RowError("a message of the prompt is marked to be predicted")
        if any(message.mark is False for message in reply):
            return self._conversation(messages, tools, range(len(before), len(messages)))
        text, _ = self._render(messages, tools)
        start, _ = self._render(before, tools, prompt=True)
        self._check_written(messages, tools, text)
        if not text.startswith(start):
            raise RowError("the chat template renders the prompt differently with its completion behind it")
        return [Text(text, self._unless_all((len(start), self._end(text))), rendered=True)]

    def _unless_all(self, span: Span) -> list[Span] | None:
        return None if self.loss_on == "all" else [span]

    def _conversation(self, messages: list[Message], tools: Any, part: range) -> list[Text]:
        """The samples of a conversation, of which the assistant's turns among `part` are predicted unless marked."""
        text, spans = self._render(messages, tools)
        self._check_written(messages, tools, text)
        if self.loss_on == "all":
            if any(message.mark is False for message in messages):
                raise RowError(
                    "a turn is marked not to be predicted, and data.loss_on=all predicts everything",
                    "set data.loss_on=assistant, or data.ignore=[NAME] with the name of the mark",
                )
            return [Text(text, rendered=True)]
        replies = [n for n in part if messages[n]["role"] == "assistant"]
        counted = [n for n in replies if messages[n].mark is not False]
        if self.loss_on == "completion":
            counted = [n for n in replies[-1:] if n in counted]
        if replies and not counted:
            raise RowError("each turn of the assistant to predict in it is marked not to be predicted")
        if self.template is None or self.template.marks_turns:
            if self.loss_on != "completion":
                spans = self._spans_of(counted, messages, tools, spans)
            samples = [(text, spans)] if spans else []
        else:
            samples = self._by_reply(messages, tools, text, counted)
        if not samples:
            raise RowError("no turn of the assistant in it")
        if self.loss_on == "completion":
            last_text, last_spans = samples[-1]
            return [Text(last_text, last_spans[-1:], rendered=True, row_text=text)]
        return [Text(sample, spans, rendered=True, row_text=text) for sample, spans in samples]

    def _spans_of(self, counted: list[int], messages: list[Message], tools: Any, spans: list[Span]) -> list[Span]:
        """Those of the ranges that the template marks which are of the turns `counted`.

        A template may mark several ranges of a turn: the ranges up to a turn and through it are counted.
        """
        spans = list(spans)
        replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        for n in reversed([n for n in replies if n not in counted]):
            before = len(self._render(messages[:n], tools)[1]) if n > replies[0] else 0
            through = len(self._render(messages[: n + 1], tools)[1])
            if through > len(spans):
                raise RowError(
                    f"the part of the text that is message {n + 1}, which is not to be predicted, is unknown"
                )
            del spans[before:through]
        return spans

    def _by_reply(
        self, messages: list[Message], tools: Any, text: str, counted: list[int]
    ) -> list[tuple[str, list[Span]]]:
        """Split a conversation into samples, each a text with the ranges of the turns `counted`.

        A turn must be predicted after the same text that the model saw when it answered. If the template renders every
        turn alike with and without later turns, the conversation's `text` is the only sample. Some templates drop the
        reasoning of earlier turns: each turn that `text` shows in another form then goes into a sample that ends with
        it. Samples are in the order of their last turns.
        """
        turns = self._turns(messages, tools, text, counted)
        samples: list[tuple[str, list[Span]]] = []
        while turns:
            fitting = [(len(start), self._end(through)) for start, through in turns if text.startswith(through)]
            if fitting:
                samples.append((text, fitting))
            turns = [turn for turn in turns if not text.startswith(turn[1])]
            if turns:
                text = turns[-1][1]
        return samples[::-1]

    def _turns(self, messages: list[Message], tools: Any, text: str, counted: list[int]) -> list[tuple[str, str]]:
        """Return for each of these turns the text before it and the text through its end."""
        turns: list[tuple[str, str]] = []
        trailer: str | None = None
        for turn in counted:
            if trailer is None:
                trailer = self._trailer(self._render(messages[: max(turn, 1)], tools)[0], text)
            through = self._render(messages[: turn + 1], tools)[0].removesuffix(trailer)
            if turn == 0:
                start = self._start_of_first(messages[0], tools, through)
            else:
                start = self._render(messages[:turn], tools, prompt=True)[0]
            if not through.startswith(start):
                raise RowError(
                    f"the chat template does not begin turn {turn + 1} as it begins a reply (add_generation_prompt); a "
                    "template with {% generation %} would mark it"
                )
            turns.append((start, through))
        return turns

    def _start_of_first(self, message: Message, tools: Any, through: str) -> str:
        """The text before the turn of an assistant that begins the conversation, whose text through it is `through`."""
        content = _content_text(message)
        content = content if content in through else content.strip()
        if set(message) <= _TURN and not message.get("tool_calls") and content and through.count(content) == 1:
            return through[: through.index(content)]
        try:
            start = self._render([], tools, prompt=True)[0]
        except RowError:
            start = ""
        if not start.strip() or not through.startswith(start):
            raise RowError("it begins with the assistant: its turn cannot be told from the template's start")
        return start

    def _trailer(self, part: str, text: str) -> str:
        """Return the token that the template writes after the last turn only, or an empty text.

        `part` is the text of the first turns, rendered alone, which ends with such a token; `text` that of all turns.
        """
        if text.startswith(part):
            return ""
        stripped = part.rstrip()
        for token in self.ends:
            trailer = part[len(stripped) - len(token) :]
            if stripped.endswith(token) and text.endswith(trailer) and text.startswith(part.removesuffix(trailer)):
                return trailer
        return ""

    def _end(self, text: str) -> int:
        """Return where a turn that ends `text` stops: before white space that follows its last special token."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self.ends) else len(text)

    def _render(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> tuple[str, list[Span]]:
        if self.template is None:
            raise no_template()
        return self.template.render(messages, tools, prompt=prompt)

    def _check_written(self, messages: list[Message], tools: Any, text: str) -> None:
        """Refuse a conversation of which the template leaves out a message.

        A template may strip or rewrite a content, so where it is not in the text another one is tried in its place.
        """
        for n, message in enumerate(messages):
            content = _content_text(message).strip()
            if message["role"] == "assistant" or content in text:
                continue
            probe = Message({**message, "content": self._content(_PROBE, n)})
            try:
                written, _ = self._render([*messages[:n], probe, *messages[n + 1 :]], tools)
            except RowError:
                continue
            if _PROBE not in written.lower():
                raise RowError(
                    f"the chat template leaves out message {n + 1}, whose role is {message['role']}",
                    "set data.chat_template to a file with a template that writes this role",
                )

    def _string(self, values: Mapping[str, Any], use: str, row: Mapping[str, Any], empty: bool = False) -> str:
        value, name = values[use], self.columns.names[use]
        if value is None:
            raise self._missing(name, row)
        if not isinstance(value, str):
            raise RowError(f"column {name} is not text but {type(value).__name__}")
        if not (value or empty):
            raise RowError(f"column {name} is empty")
        return value

    def _missing(self, name: str, row: Mapping[str, Any]) -> RowError:
        """The error for a row without a column, which may be of another kind than the rest."""
        usual = {known for names in _NAMES.values() for known in names} - set(self.columns.names.values())
        two_kinds = usual & {*(name for name in row if row[name] is not None), *self.columns.further}
        fix = "write each kind of rows into files of its own, and name these as data.sources" if two_kinds else ""
        return RowError(f"column {name} is missing", fix)

    def _with_system(self, messages: list[Message], system: str) -> list[Message]:
        if not system:
            return messages
        if messages[0]["role"] != "system":
            return [Message(role="system", content=self._content(system, 0)), *messages]
        if _content_text(messages[0]) != system:
            raise RowError("column system and the conversation's first message are two different system texts")
        return messages

    def _messages(self, value: Any, use: str, row: Mapping[str, Any]) -> list[Message]:
        """Return messages with `role` and `content`; ShareGPT's `from` and `value` are renamed."""
        name = self.columns.names[use]
        if value is None:
            raise self._missing(name, row)
        if not isinstance(value, list):
            raise RowError(f"column {name} is no list but {type(value).__name__}")
        if not value:
            raise RowError(f"column {name} is an empty conversation")
        messages = []
        for number, given in enumerate(value, start=1):
            if not isinstance(given, dict):
                raise RowError(f"message {number} is not an object but {type(given).__name__}")
            message = Message({key: given[key] for key in given if key not in self.columns.ignore})
            is_sharegpt = "from" in message and "role" not in message
            if is_sharegpt:
                role, content = message.pop("from"), message.pop("value", None)
                message |= {"role": role, "content": content}
            self._set_role(message, number, is_sharegpt)
            self._set_mark(message, number)
            if isinstance(message.get("content"), (str, list)):
                message["content"] = self._content(message["content"], number)
            elif not message.get("tool_calls"):
                kind = type(message.get("content")).__name__
                content = "missing" if kind == "NoneType" else kind
                raise RowError(f"message {number} has no text: its content is {content}")
            if message.get("tool_calls") and self.template is not None and not self._reads_name("tool_calls"):
                raise RowError(
                    f"message {number} has tool calls, which the chat template does not write",
                    "set data.chat_template to a file with a template that writes tool_calls",
                )
            if message.get("function_call") and not self._reads_name("function_call"):
                raise RowError(
                    f"message {number} has a function_call, which the chat template does not write",
                    "write calls as tool_calls, or set data.chat_template to a file with a template that reads it",
                )
            for member in message.keys() - _TURN:
                if member not in _MARKS and not self._reads_name(member):
                    self.members[member] = self.members.get(member, True) and _is_mark(message[member], words=True)
            messages.append(message)
        return messages

    def _reads_name(self, name: str) -> bool:
        if name not in self._reads:
            self._reads[name] = self.template is not None and self.template.reads(name)
        return self._reads[name]

    def _set_role(self, message: Message, number: int, is_sharegpt: bool) -> None:
        role = message.get("role")
        if not isinstance(role, str):
            raise RowError(f"message {number} has no role")
        source = "" if self.template is None else self.template.source
        is_named = f"'{role}'" in source or f'"{role}"' in source
        if role in _ROLES and (is_sharegpt or not is_named):
            message["role"] = _ROLES[role]
            if role in _CALLS and self._reads_name("tool_calls"):
                message |= _as_calls(message)
        elif role not in _USUAL_ROLES and self.template is not None and not is_named:
            raise RowError(
                f"message {number} has the role {one_line(role, 40)}, which the chat template does not know",
                "name roles as the template does, or set data.chat_template to a file with one that knows this role",
            )

    def _set_mark(self, message: Message, number: int) -> None:
        """Take the members that say whether a turn is predicted out of it, unless the template reads them."""
        for name in _PART_MARKS:
            if message.get(name):
                raise RowError(
                    f"message {number} marks parts of its text ({name})", f"data.ignore=[{name}] trains all of it"
                )
        marks: dict[str, bool] = {}
        for name in _MARKS:
            value = message.get(name)
            if not self._reads_name(name):
                message.pop(name, None)
            if value is None:
                continue
            if not _is_mark(value):
                raise RowError(
                    f"message {number} has {name}={one_line(value, 40)}, which is neither 0 or 1 nor true or false",
                    f"data.ignore=[{name}] trains each turn as if it had none",
                )
            marks[name] = bool(value)
        if len(set(marks.values())) > 1:
            raise RowError(
                f"message {number} has the marks {' and '.join(f'{name}={value}' for name, value in marks.items())}",
                f"data.ignore=[{next(iter(marks))}] obeys the other",
            )
        message.mark = next(iter(marks.values()), None)
        if message.mark and message["role"] != "assistant":
            name = next(iter(marks))
            raise RowError(
                f"message {number} is marked to be predicted ({name}), but it is no turn of the assistant",
                f"data.ignore=[{name}] predicts the assistant's turns, whatever their marks",
            )

    def _content(self, content: str | list[Any], number: int) -> str | list[dict[str, str]]:
        """A message's content in a form that the template reads: text, or a list of parts of text."""
        if isinstance(content, str) and self._takes_text:
            return content
        parts: list[dict[str, str]] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            text = part.get("text") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(text, str):
                raise RowError(
                    f"message {number} has a part of type {one_line(kind, 40)}, and this task trains text alone",
                    "leave rows with pictures, sound or other parts out of the data",
                )
            parts.append({"type": "text", "text": text})
        return parts if self._takes_parts else "".join(part["text"] for part in parts)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes the text of a content that is a list of parts, as those of vision models do."""
        return self._writes([{"type": "text", "text": _PROBE}])

    @cached_property
    def _takes_text(self) -> bool:
        """False for templates that write only lists of parts."""
        return self._writes(_PROBE) or not self._takes_parts

    def _writes(self, content: Any) -> bool:
        try:
            text, _ = self._render([Message(role="user", content=content)], None)
        except RowError:
            return False
        return _PROBE in text.lower() and "'type'" not in text and '"type"' not in text


def _is_mark(value: Any, words: bool = False) -> bool:
    """Whether a value is true, false, 0 or 1; with `words`, also as text."""
    if words and isinstance(value, str):
        return value.strip().lower() in ("true", "false", "0", "1")
    return isinstance(value, (bool, int, float)) and value in (0, 1)


def _content_text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _as_calls(message: Message) -> dict[str, Any]:
    """ShareGPT's text of a call as `tool_calls`; nothing if it is no JSON of a call."""
    try:
        calls = json.loads(message["content"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return {}
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    return {"content": "", "tool_calls": [{"type": "function", "function": function} for function in functions]}


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
            plain(value)  # checks the numbers; nulls stay, as a text of JSON has them in every file format
        except (ValueError, RecursionError) as error:
            raise RowError(f"column tools is not JSON: {error}") from error
    if value in (None, []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("column tools is not a list of objects")
    return value
