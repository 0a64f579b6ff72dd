"""What a chat template takes besides messages, and whether it knows of thoughts, found in its source."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragfuse.text.thoughts import Thoughts, thoughts_of

OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Names that a template is told by whoever renders it, and by nobody else."""
KEYWORDS = frozenset(
    {
        "if",
        "elif",
        "else",
        "endif",
        "for",
        "in",
        "endfor",
        "recursive",
        "set",
        "endset",
        "is",
        "not",
        "and",
        "or",
        "defined",
        "undefined",
        "none",
        "true",
        "false",
        "None",
        "True",
        "False",
        "mapping",
        "string",
        "iterable",
        "sequence",
        "number",
        "loop",
        "namespace",
        "macro",
        "endmacro",
        "call",
        "endcall",
        "filter",
        "endfilter",
        "generation",
        "endgeneration",
        "break",
        "continue",
        "range",
        "raise_exception",
        "strftime_now",
    }
)
_LOOP = re.compile(r"\bfor\s+(.*?)\s+in\b")
_CODE = re.compile(r"{#.*?#}|{[{%](.*?)[%}]}", re.DOTALL)
_TEXT = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


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
        text = "\n".join(map(str, sources))
        return ChatTemplate(names_read(text), thoughts_of(text, own))


def names_read(template: str) -> frozenset[str]:
    """Names in a template's code, its own left out. Text and comments around the code, and texts in it, are none."""
    code = [_TEXT.sub("''", block[1] or "") for block in _CODE.finditer(template)]
    found = frozenset(name for block in code for name in _NAME.findall(block))
    return (
        found
        - OWN
        - KEYWORDS
        - {name for block in code for each in _LOOP.findall(block) for name in _NAME.findall(each)}
    )
