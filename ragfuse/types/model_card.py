"""What a program that asks a model needs to know of it, in this process or at a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelCard:
    """A model as those who ask it see it.

    Args:
        name: Its name.
        max_context: Most tokens of prompt and answer; None: no limit is known.
        has_chat_template: Whether messages are rendered by a chat template of its own.
        max_tokens: Most tokens of an answer that asks for no other number.
        refusal: Why its KV is not reused; "" where it is.
    """

    name: str
    max_context: int | None
    has_chat_template: bool
    max_tokens: int
    refusal: str = ""
