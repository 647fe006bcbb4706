"""A chat template of a stranger: its own messages are one line."""

from __future__ import annotations

import pytest

from shardkit.data.chat import RowError, Template

from .chats import conversation

pytest.importorskip("transformers")


def test_a_templates_own_message_is_cut() -> None:
    with pytest.raises(RowError) as caught:
        Template("{{ raise_exception('x ' * 10**6) }}", {}).render(conversation(1))
    assert len(str(caught.value)) < 400
