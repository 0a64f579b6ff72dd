"""Leaving out turns and joining messages is linear in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ragfuse.text.chat_messages import ChatMessage, turn_begins
from tests.kits.operations import MOST_GROWTH, lines


def messages(n: int) -> list[ChatMessage]:
    return [ChatMessage(role, "text") for _ in range(n) for role in ("user", "assistant")]


WORK: dict[str, tuple[Callable[[int], object], Callable[[object], object]]] = {
    "many messages of one role": (lambda n: [ChatMessage("user", "hello")] * n, ChatMessage.joined),
    "many turns to leave out": (messages, turn_begins),
}


@pytest.mark.parametrize(("make", "use"), WORK.values(), ids=WORK.keys())
def test_leaving_out_and_joining_is_linear(make, use):
    short, long = make(200), make(1600)
    assert lines(lambda: use(long)) <= MOST_GROWTH * lines(lambda: use(short))
