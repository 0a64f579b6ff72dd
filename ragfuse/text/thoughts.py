"""The tags around a model's reasoning in its text, found in its chat template or tokenizer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

THOUGHT_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Known reasoning tags (opening, closing); a model's own are found in its template or vocabulary, not by its name."""


@dataclass(frozen=True)
class Thoughts:
    """The tags around thoughts."""

    open: str
    close: str

    def is_open(self, prompt: str, within: bool = False) -> bool:
        """Return whether a prompt ends with an opening tag, so that the answer begins with reasoning.

        within: return whether the prompt ends anywhere inside reasoning.
        """
        if within:
            return prompt.rfind(self.open) > prompt.rfind(self.close)
        return prompt.rstrip().endswith(self.open)


def thoughts_of(template: str, added_tokens: Collection[str]) -> Thoughts | None:
    """Return the reasoning tags of a model; None if it has none.

    Args:
        template: Its chat template; one that contains only the closing tag also counts.
        added_tokens: The tokens that were added to its vocabulary.
    """
    for open, close in THOUGHT_TAGS:
        if close in template or (open in added_tokens and close in added_tokens):
            return Thoughts(open, close)
    return None
