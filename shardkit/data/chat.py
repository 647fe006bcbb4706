"""Rows of a data set as text, with the parts of it that are to be predicted: plain text, conversations, prompts.

Chat templates run in transformers' sandbox alone. Without `{% generation %}` in the template, the assistant's parts are
found by rendering the conversation up to each of its turns. No torch, no tokenizer: these functions run in workers.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from ..errors import DataError

Kind = Literal["text", "messages", "prompt"]
LossOn = Literal["all", "assistant", "completion"]
Span = tuple[int, int]
TEMPLATE_S = 20
"""Longest time that a template may take for one conversation."""
TEMPLATE_BYTES = 1 << 30
"""Most memory that a template may take for one conversation, beside what the process has."""
_LONGEST = 1 << 26
_ADDED, _GROWTH = 1 << 14, 64
"""Characters that a template may add to its own and the conversation's, and its characters for one of these."""
_REASON = 300
"""Most characters of a template's own message."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "text": ("text",),
}
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "function": "tool"}
"""ShareGPT's names of roles, and ours."""


class RowError(ValueError):
    """A row that cannot be used; the message says why."""


@dataclass(frozen=True)
class Columns:
    """Which column holds what: kind "text" reads `text`, "messages" `messages`, "prompt" `prompt` and `completion`."""

    kind: Kind
    names: dict[str, str]

    @property
    def read(self) -> list[str]:
        return list(self.names.values())


@dataclass(frozen=True)
class Text:
    """A row's text.

    Attributes:
        prompt: comes before `text` and is tokenised by itself; None without one.
        learns_prompt: the prompt is to be predicted too.
        spans: ranges of characters of `text` to predict; None = all of them.
        rendered: by a chat template, which has put the special tokens in.
    """

    text: str
    prompt: str | None = None
    learns_prompt: bool = False
    spans: list[Span] | None = None
    rendered: bool = False


def choose_columns(present: Sequence[str], given: Mapping[Any, str], where: str) -> Columns:
    """The columns to read: `given` (data.columns), else those with a usual name.

    Raises:
        DataError: a given column is absent, or none has a usual name; names the columns that are there.
    """
    for use, name in given.items():
        if name not in present:
            close = get_close_matches(name, present, n=3)
            fix = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(present) or 'no columns'}"
            raise DataError(f"data.columns.{use}={name}: {where} has no such column", fix)
    found: dict[str, str] = dict(given)
    if not found:
        for use, names in _NAMES.items():
            found.update((use, name) for name in names[::-1] if name in present)
    if "messages" in found:
        extra = {"tools": "tools"} if "tools" in present else {}
        return Columns("messages", {"messages": found["messages"], **extra})
    if "prompt" in found and "completion" in found:
        return Columns("prompt", {"prompt": found["prompt"], "completion": found["completion"]})
    if "text" in found:
        return Columns("text", {"text": found["text"]})
    raise DataError(
        f"{where} has the columns {', '.join(present) or '(none)'}: none of them is known to hold text",
        "name them: data.columns={text: NAME}, {messages: NAME} or {prompt: NAME, completion: NAME}",
    )


def renderer() -> Any:
    """transformers' function that renders templates. The first call imports it, so it must not be under `limits`."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


@dataclass(frozen=True)
class Template:
    """A chat template and the special tokens that it may use by name."""

    source: str
    special: dict[str, str]

    @property
    def marks_turns(self) -> bool:
        """Whether it marks the assistant's parts with `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def render(
        self, messages: list[dict[str, Any]], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The conversation's text and the ranges that the template marks; `prompt` adds the start of a reply.

        Raises:
            RowError: the template rejects these messages.
            DataError: the template cannot be used at all: bad syntax, forbidden by the sandbox, too much text.
            MemoryError: it takes more memory than it may, see `limits`.
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
        except (DataError, MemoryError):  # of `limits`
            raise
        except (jinja2.TemplateSyntaxError, SecurityError, OverflowError, ImportError) as error:
            raise _unusable(f"{type(error).__name__}: {_reason(error)}") from error
        except Exception as error:  # a template can make Python raise anything: {{ 1 / 0 }}
            raise RowError(f"the chat template rejects it: {_reason(error)}") from error
        text, spans = texts[0], [(start, end) for start, end in (marked[0] if marked else []) if start < end]
        if len(text) > self._most(len(text), messages, tools):
            raise _unusable(f"it makes {len(text):,} characters of one conversation")
        if len(spans) > len(text):
            raise _unusable(f"it marks {len(spans):,} parts of {len(text):,} characters")
        return text, spans

    def _most(self, found: int, messages: list[dict[str, Any]], tools: Any) -> int:
        """The most characters that a template may make of a conversation; exact only where `found` may be more."""
        own = _ADDED + len(self.source) * (len(messages) + 1)
        if found <= own:
            return min(own, _LONGEST)
        return min(own + _GROWTH * len(json.dumps([messages, tools], default=str)), _LONGEST)


def _unusable(reason: str) -> DataError:
    return DataError(
        f"the chat template cannot be used: {reason}",
        "correct it, or set data.chat_template to a file with another one",
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error)[:_REASON].split())


@contextmanager
def limits(seconds: float, n_bytes: int = TEMPLATE_BYTES) -> Iterator[None]:
    """Interrupt a template that does not end, and refuse it memory beyond `n_bytes` more than the process has.

    Other threads than the main one get no signals, and no limits. Memory is limited on Linux alone.

    Raises:
        DataError: the time is over, or memory has run out.
    """
    try:
        if threading.current_thread() is threading.main_thread():
            with _time_limit(seconds), _memory_limit(n_bytes):
                yield
        else:
            yield
    except MemoryError as error:
        most = f"{n_bytes / 2**30:.3g} GiB"
        raise _unusable(f"one conversation takes it more memory than it may have, {most} at most") from error


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _unusable(f"one conversation takes it more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again: jinja2 swallows any exception while it computes a template's constants.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _memory_limit(n_bytes: int) -> Iterator[None]:
    """A limit of the whole process, so nothing but the template should need much meanwhile."""
    used = _data_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if used is None or (soft != resource.RLIM_INFINITY and soft <= used + n_bytes):
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (used + n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int | None:
    """The bytes of this process that RLIMIT_DATA counts, or a little more; None where the system does not tell."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # not `open`: it would take as long as a short template
    except FileNotFoundError:
        return None
    try:
        return int(os.read(file, 256).split()[5]) * resource.getpagesize()
    finally:
        os.close(file)


@dataclass(frozen=True)
class RowReader:
    """Turns a row into a `Text`.

    Attributes:
        loss_on: all = every token; assistant = the assistant's turns; completion = the last of them, or the completion.
        ends: texts of tokens that may end a turn: white space behind them is not predicted.
    """

    columns: Columns
    loss_on: LossOn
    template: Template | None = None
    ends: tuple[str, ...] = ()

    def read(self, row: Mapping[str, Any]) -> Text:
        """The row's text.

        Raises:
            RowError: says why the row cannot be used.
            DataError: see `Template.render`.
        """
        if self.columns.kind == "text":
            return Text(_string(row, self.columns.names["text"]))
        if self.columns.kind == "prompt":
            return self._completion(row)
        name = self.columns.names["messages"]
        messages = _messages(row.get(name), name)
        tools = row.get("tools") if "tools" in self.columns.names else None
        return self._conversation(messages, _tools(tools))

    def _completion(self, row: Mapping[str, Any]) -> Text:
        names = [self.columns.names[use] for use in ("prompt", "completion")]
        if any(isinstance(row.get(name), str) for name in names):
            prompt, completion = (_string(row, name, empty=name == names[0]) for name in names)
            return Text(completion, prompt=prompt, learns_prompt=self.loss_on == "all")
        before, reply = (_messages(row.get(name), name) for name in names)
        text, _ = self._render([*before, *reply])
        start, _ = self._render(before, prompt=True)
        if not text.startswith(start):
            raise RowError("the chat template renders the prompt differently with its completion behind it")
        return Text(text, spans=None if self.loss_on == "all" else [(len(start), self._end(text))], rendered=True)

    def _conversation(self, messages: list[dict[str, Any]], tools: Any) -> Text:
        text, spans = self._render(messages, tools)
        if self.loss_on == "all":
            return Text(text, rendered=True)
        if self.template is not None and not self.template.marks_turns:
            spans = self._turns(messages, tools, text)
        if not spans:
            raise RowError("no turn of the assistant in it")
        return Text(text, spans=spans[-1:] if self.loss_on == "completion" else spans, rendered=True)

    def _turns(self, messages: list[dict[str, Any]], tools: Any, text: str) -> list[Span]:
        """The ranges of the assistant's turns: from the start of each reply to the end of its turn."""
        spans: list[Span] = []
        trailer = ""
        for turn, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            if not turn:
                raise RowError("it begins with the assistant: its turn cannot be told from the template's start")
            if not spans:
                trailer = self._trailer(self._render(messages[:turn], tools)[0], text)
            before, _ = self._render(messages[:turn], tools, prompt=True)
            through = self._render(messages[: turn + 1], tools)[0].removesuffix(trailer)
            if not text.startswith(through) or not through.startswith(before):
                raise RowError(
                    f"the chat template renders turn {turn + 1} differently with later turns behind it; a template "
                    "with {% generation %} would mark it"
                )
            spans.append((len(before), self._end(through)))
        return spans

    def _trailer(self, part: str, text: str) -> str:
        """A token that the template puts behind the last turn, whichever that is; `part`: the text of some turns."""
        if text.startswith(part):
            return ""
        stripped = part.rstrip()
        for token in self.ends:
            trailer = part[len(stripped) - len(token) :]
            if stripped.endswith(token) and text.endswith(trailer) and text.startswith(part.removesuffix(trailer)):
                return trailer
        return ""

    def _end(self, text: str) -> int:
        """The end of a turn, without white space behind the token that ends it."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self.ends) else len(text)

    def _render(
        self, messages: list[dict[str, Any]], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        if self.template is None:
            raise no_template()
        return self.template.render(messages, tools, prompt=prompt)


def no_template() -> DataError:
    return DataError(
        "the data are conversations, but the tokenizer has no chat template",
        "set data.chat_template to a file with one, or use the tokenizer of the model's instruction-tuned version",
    )


def _string(row: Mapping[str, Any], name: str, empty: bool = False) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise RowError(f"column {name} is {'missing' if value is None else f'not text but {type(value).__name__}'}")
    if not (value or empty):
        raise RowError(f"column {name} is empty")
    return value


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Messages with `role` and `content`, of either convention."""
    if not isinstance(value, list):
        raise RowError(f"column {name} is {'missing' if value is None else f'no list but {type(value).__name__}'}")
    if not value:
        raise RowError(f"column {name} is an empty conversation")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise RowError(f"message {number} is not an object but {type(message).__name__}")
        kept = {key: item for key, item in message.items() if item is not None}
        if "from" in kept and "role" not in kept:
            role, content = kept.pop("from"), kept.pop("value", None)
            kept = {**kept, "role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": content}
        if not isinstance(kept.get("role"), str):
            raise RowError(f"message {number} has no role")
        if not isinstance(kept.get("content"), str) and not kept.get("tool_calls"):
            kind = type(kept.get("content")).__name__
            raise RowError(f"message {number} has no text: its content is {'missing' if kind == 'NoneType' else kind}")
        messages.append(kept)
    return messages


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"column tools is not JSON: {error}") from error
    if value in (None, []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("column tools is not a list of objects")
    return value
