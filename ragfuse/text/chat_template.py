"""Finds in the source of a chat template which variables it reads, and which tags it puts around reasoning."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragfuse.text.thoughts import Thoughts, thoughts_of

RENDERER_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables that the renderer sets, not the caller."""
FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
"""Functions that transformers passes to templates."""
_MARKS = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")
"""Tags that mark generated text for training; jinja2 cannot parse them, and they do not matter here."""


@dataclass(frozen=True)
class ChatTemplate:
    """The variables and the reasoning tags of a chat template.

    Args:
        names: Variables that it reads and does not set itself; any other variable has no effect.
        thoughts: The reasoning tags; None: neither the template nor the tokenizer has any.
    """

    names: frozenset[str] = frozenset()
    thoughts: Thoughts | None = None

    @staticmethod
    def of(source: Any, added_tokens: Collection[str]) -> ChatTemplate:
        """Read a template.

        Args:
            source: The template's Jinja source, or a mapping with the sources of several templates by name.
            added_tokens: The tokens that were added to the vocabulary.
        """
        sources: Sequence[Any] = list(source.values()) if isinstance(source, Mapping) else [source or ""]
        names = frozenset(name for each in sources for name in names_read(str(each)))
        return ChatTemplate(names, thoughts_of("\n".join(map(str, sources)), added_tokens))

    def unread(self, variables: Mapping[str, Any]) -> str | None:
        """Return the first of these variables that the template does not read; None if it reads all.

        Variables that turn thinking off (`NO_THOUGHTS`) are always accepted for a model without reasoning tags.
        """
        accepted = NO_THOUGHTS if self.thoughts is None else ()
        unread = (each for each in variables.items() if each[0] not in self.names and each not in accepted)
        return next((name for name, _ in unread), None)


NO_THOUGHTS = (("enable_thinking", False), ("reasoning_effort", "none"))
"""Variables and values that turn thinking off."""


def names_read(template: str) -> frozenset[str]:
    """Return the variables that a template reads from its caller; none if the template cannot be parsed."""
    from jinja2 import Environment, TemplateError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # nothing is rendered
    try:
        found = meta.find_undeclared_variables(environment.parse(_MARKS.sub("", template)))
    except (TemplateError, RecursionError):
        return frozenset()
    return frozenset(found) - RENDERER_NAMES - FUNCTIONS
