"""What a chat template takes besides messages, and whether it knows of thoughts, found in its source."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragfuse.text.thoughts import Thoughts, thoughts_of

RENDERER_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables that only whoever renders a template sets."""
FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
"""What transformers gives templates to call."""
_MARKS = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")
"""Of the text that training counts, which says nothing here."""


@dataclass(frozen=True)
class ChatTemplate:
    """names: those that it reads, its own left out: what else it is told changes nothing. thoughts: the tags around
    them, None where neither it nor the tokenizer has any."""

    names: frozenset[str] = frozenset()
    thoughts: Thoughts | None = None

    @staticmethod
    def of(source: Any, own: Collection[str]) -> ChatTemplate:
        """By its source, or those of several by name; own: the tokens that were added to the vocabulary."""
        sources: Sequence[Any] = list(source.values()) if isinstance(source, Mapping) else [source or ""]
        names = frozenset(name for each in sources for name in names_read(str(each)))
        return ChatTemplate(names, thoughts_of("\n".join(map(str, sources)), own))

    def unread(self, told: Mapping[str, Any]) -> str | None:
        """The first name of what it is told that it does not read, so that it would change nothing; None: it reads all.

        That nothing is to be thought holds by itself where a model knows of no thoughts.
        """
        holds = NO_THOUGHTS if self.thoughts is None else ()
        return next((name for name in told if name not in self.names and (name, told[name]) not in holds), None)


NO_THOUGHTS = (("enable_thinking", False), ("reasoning_effort", "none"))
"""That nothing is to be thought."""


def names_read(template: str) -> frozenset[str]:
    """Names that a template's code takes from whoever renders it, its own left out; none of one that cannot be read."""
    from jinja2 import Environment, TemplateError, meta

    world = Environment(extensions=["jinja2.ext.loopcontrols"])  # nothing is rendered
    try:
        found = meta.find_undeclared_variables(world.parse(_MARKS.sub("", template)))
    except (TemplateError, RecursionError):
        return frozenset()
    return frozenset(found) - RENDERER_NAMES - FUNCTIONS
