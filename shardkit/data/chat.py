"""Turn rows (plain text, conversations, prompts with completions) into text, and mark the characters to predict.

Chat templates run in transformers' sandbox only. If a template does not mark the assistant's turns with
`{% generation %}`, they are located by rendering the conversation up to each turn. This module imports neither torch
nor a tokenizer, because worker processes load it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import date
from string import ascii_letters
from typing import Any, Literal

from ..errors import DataError, one_line
from ..files.bounded import LIMITS, memory_limit, time_limit
from .rows.columns import TOOLS, Columns, RowError, plain

LossOn = Literal["all", "assistant", "completion"]
Span = tuple[int, int]
_ADDED, _GROWTH = 1 << 14, 64
"""A template may write this many characters of its own, and this many for each character of the conversation."""
READS_CLOCK = "strftime_now"
"""The function that templates call to read the clock."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "function": "tool"}
"""ShareGPT's role → the usual role."""


@dataclass(frozen=True)
class Text:
    """The text of one sample; a row makes one or several of them.

    Attributes:
        spans: ranges of characters to predict; None = all characters.
        rendered: whether a chat template wrote the text; it then contains the special tokens already.
        row_text: the text whose hash puts the row into the training or validation split, if it differs from `text`.
            All samples of a row have the same one, so that they stay in one split.
    """

    text: str
    spans: list[Span] | None = None
    rendered: bool = False
    row_text: str | None = None


def renderer() -> Any:
    """Import and return transformers' function that renders templates. Call it once outside of `limits`."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


@dataclass(frozen=True)
class Template:
    """A chat template, and the special tokens that it can refer to by name."""

    source: str
    special: dict[str, str]

    @property
    def marks_turns(self) -> bool:
        """Whether the template marks the assistant's turns with `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def render(
        self, messages: list[dict[str, Any]], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Render a conversation; returns the text and the ranges of characters that the template marks as replies.

        Args:
            prompt: also write the start of a reply, as for generation.

        Raises:
            RowError: the template rejects these messages.
            DataError: the template is of no use for any row: bad syntax, an operation that the sandbox forbids, or too
                much text.
            MemoryError: the template needs more memory than `limits` allows.
        """
        import jinja2
        from jinja2.exceptions import SecurityError

        try:
            texts, marked = renderer()(
                conversations=[messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=self.marks_turns,
                add_generation_prompt=prompt,
                **self.special,
            )
        except (DataError, MemoryError):  # raised by `limits`
            raise
        except (jinja2.TemplateSyntaxError, SecurityError, OverflowError, ImportError) as error:
            raise _unusable(f"{type(error).__name__}: {one_line(error)}") from error
        except Exception as error:  # a template can raise any error of Python: {{ 1 / 0 }}
            raise RowError(f"the chat template rejects it: {one_line(error)}") from error
        text, spans = texts[0], [(start, end) for start, end in (marked[0] if marked else []) if start < end]
        n_allowed = _ADDED + len(self.source) * (len(messages) + 1)
        if len(text) > n_allowed and len(text) > n_allowed + _GROWTH * len(json.dumps([messages, tools], default=str)):
            raise _unusable(f"it makes {len(text):,} characters of one conversation")
        if len(spans) > len(text):
            raise _unusable(f"it marks {len(spans):,} parts of {len(text):,} characters")
        return text, spans


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


def _unusable(reason: str) -> DataError:
    return DataError(
        f"the chat template cannot be used: {reason}",
        "correct it, or set data.chat_template to a file with another one",
    )


@contextmanager
def limits() -> Iterator[None]:
    """Stop a template in this block when a conversation takes more time or memory than `LIMITS["chat template"]`.

    Only the main thread gets signals, so that nothing is limited in other threads.

    Raises:
        DataError: the template reached one of the limits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _, seconds = LIMITS["chat template"].at()
    with time_limit(seconds, _unusable(f"one conversation takes it more than {seconds:g} s")), memory_limits():
        yield


def memory_limits() -> AbstractContextManager[None]:
    """Stop a template when the process has grown by more than the limit of a conversation in this block."""
    n_bytes, _ = LIMITS["chat template"].at()
    words = f"one conversation takes it more memory than it may have, {n_bytes / 2**30:.3g} GiB at most"
    return memory_limit(n_bytes, _unusable(words))


@dataclass(frozen=True)
class RowReader:
    """Turns a row into one or several `Text`s.

    Attributes:
        loss_on: the text to predict: "all", the turns of the "assistant", or the "completion", which is the last of
            these turns in a conversation.
        ends: texts of special tokens that can end a turn. White space after such a token is not predicted.
    """

    columns: Columns
    loss_on: LossOn
    template: Template | None = None
    ends: tuple[str, ...] = ()

    def read(self, row: Mapping[str, Any]) -> list[Text]:
        """Return the row's samples: one, or several if the template changes earlier turns (see `_by_reply`).

        Raises:
            RowError: the row cannot be used; the message gives the reason.
            DataError: see `Template.render`.
        """
        values = self.columns.values(row)
        if self.columns.kind == "text":
            return [Text(_string(values, "text", self.columns))]
        tools = _tools(values.get(TOOLS))
        if self.columns.kind == "prompt":
            return [self._completion(values, tools)]
        messages = _messages(values["messages"], self.columns.names["messages"])
        return self._conversation(messages, tools)

    def _completion(self, values: Mapping[str, Any], tools: Any) -> Text:
        uses = ("prompt", "completion")
        if any(isinstance(values[use], str) for use in uses):
            prompt, completion = (_string(values, use, self.columns, empty=use == "prompt") for use in uses)
            if tools is not None:
                raise RowError(f"column {TOOLS} holds tools, but the prompt is text: only messages can have tools")
            return Text(prompt + completion, self._unless_all((len(prompt), len(prompt) + len(completion))))
        before, reply = (_messages(values[use], self.columns.names[use]) for use in uses)
        text, _ = self._render([*before, *reply], tools)
        start, _ = self._render(before, tools, prompt=True)
        if not text.startswith(start):
            raise RowError("the chat template renders the prompt differently with its completion behind it")
        return Text(text, self._unless_all((len(start), self._end(text))), rendered=True)

    def _unless_all(self, span: Span) -> list[Span] | None:
        return None if self.loss_on == "all" else [span]

    def _conversation(self, messages: list[dict[str, Any]], tools: Any) -> list[Text]:
        text, spans = self._render(messages, tools)
        if self.loss_on == "all":
            return [Text(text, rendered=True)]
        if self.template is None or self.template.marks_turns:
            samples = [(text, spans)] if spans else []
        else:
            samples = self._by_reply(messages, tools, text)
        if not samples:
            raise RowError("no turn of the assistant in it")
        if self.loss_on == "completion":
            last_text, last_spans = samples[-1]
            return [Text(last_text, last_spans[-1:], rendered=True, row_text=text)]
        return [Text(sample, spans, rendered=True, row_text=text) for sample, spans in samples]

    def _by_reply(self, messages: list[dict[str, Any]], tools: Any, text: str) -> list[tuple[str, list[Span]]]:
        """Split a conversation into samples, each a text with the ranges of the assistant's turns.

        A turn must be predicted after the same text that the model saw when it answered. If the template renders every
        turn alike with and without later turns, the conversation's `text` is the only sample. Some templates drop the
        reasoning of earlier turns: each turn that `text` shows in another form then goes into a sample that ends with
        it. Samples are in the order of their last turns.
        """
        turns = self._turns(messages, tools, text)
        samples: list[tuple[str, list[Span]]] = []
        while turns:
            fitting = [(len(start), self._end(through)) for start, through in turns if text.startswith(through)]
            if fitting:
                samples.append((text, fitting))
            turns = [turn for turn in turns if not text.startswith(turn[1])]
            if turns:
                text = turns[-1][1]
        return samples[::-1]

    def _turns(self, messages: list[dict[str, Any]], tools: Any, text: str) -> list[tuple[str, str]]:
        """Return for each turn of the assistant the text before it and the text through its end."""
        turns: list[tuple[str, str]] = []
        trailer = ""
        replies = [turn for turn, message in enumerate(messages) if message.get("role") == "assistant"]
        if replies[:1] == [0]:
            raise RowError("it begins with the assistant: its turn cannot be told from the template's start")
        for turn in replies[-1:] if self.loss_on == "completion" else replies:
            if not turns:
                trailer = self._trailer(self._render(messages[:turn], tools)[0], text)
            start, _ = self._render(messages[:turn], tools, prompt=True)
            through = self._render(messages[: turn + 1], tools)[0].removesuffix(trailer)
            if not through.startswith(start):
                raise RowError(
                    f"the chat template does not begin turn {turn + 1} as it begins a reply (add_generation_prompt); a "
                    "template with {% generation %} would mark it"
                )
            turns.append((start, through))
        return turns

    def _trailer(self, part: str, text: str) -> str:
        """Return the token that the template writes after the last turn only, or an empty text.

        Args:
            part: the text of the first turns, rendered alone; it ends with such a token if there is one.
            text: the text of all turns.
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

    def _render(
        self, messages: list[dict[str, Any]], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        if self.template is None:
            raise no_template()
        return self.template.render(messages, tools, prompt=prompt)


def no_template() -> DataError:
    """The error for conversations without a chat template."""
    return DataError(
        "the data are conversations, but the tokenizer has no chat template",
        "set data.chat_template to a file with one, or use the tokenizer of the model's instruction-tuned version",
    )


def _string(values: Mapping[str, Any], use: str, columns: Columns, empty: bool = False) -> str:
    value, name = values[use], columns.names[use]
    if not isinstance(value, str):
        raise RowError(f"column {name} is {'missing' if value is None else f'not text but {type(value).__name__}'}")
    if not (value or empty):
        raise RowError(f"column {name} is empty")
    return value


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`; ShareGPT's `from` and `value` are renamed."""
    if not isinstance(value, list):
        raise RowError(f"column {name} is {'missing' if value is None else f'no list but {type(value).__name__}'}")
    if not value:
        raise RowError(f"column {name} is an empty conversation")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise RowError(f"message {number} is not an object but {type(message).__name__}")
        normalised = dict(message)
        if "from" in normalised and "role" not in normalised:
            role, content = normalised.pop("from"), normalised.pop("value", None)
            normalised = {
                **normalised,
                "role": _ROLES.get(role, role) if isinstance(role, str) else role,
                "content": content,
            }
        if not isinstance(normalised.get("role"), str):
            raise RowError(f"message {number} has no role")
        if not isinstance(normalised.get("content"), str) and not normalised.get("tool_calls"):
            kind = type(normalised.get("content")).__name__
            raise RowError(f"message {number} has no text: its content is {'missing' if kind == 'NoneType' else kind}")
        messages.append(normalised)
    return messages


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
            plain(value)  # checks the numbers; nulls stay, as a text of JSON has them in every file format
        except (ValueError, RecursionError) as error:
            raise RowError(f"column {TOOLS} is not JSON: {error}") from error
    if value in (None, []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("column tools is not a list of objects")
    return value
