"""Haystack integration of ragfuse: a chat generator that reuses the KV of retrieved documents."""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from haystack_integrations.components.generators.ragfuse.chat.chat_generator import (
        RagfuseChatGenerator,
    )

__all__ = ["RagfuseChatGenerator"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__, submod_attrs={"chat.chat_generator": ["RagfuseChatGenerator"]}
)
"""Import each public name on first use. Importing the package loads neither torch nor Haystack."""
