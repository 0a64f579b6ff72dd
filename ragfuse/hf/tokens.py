"""A tokenizer for what others wrote: nothing in a text is read as what a chat template alone may write."""

from __future__ import annotations

import copy

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase


def for_contents(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase | None:
    """A copy to which tokens that the chat template writes, such as those around calls and results, are special too.

    Many tokenizers count these as words, so that `split_special_tokens` would leave them whole.
    """
    own = copy.deepcopy(tokenizer)
    if own is not None and own.is_fast:
        template = str(getattr(own, "chat_template", None) or "")
        words = [str(token) for token in own.added_tokens_decoder.values() if not token.special]
        marks = [AddedToken(word, special=True, normalized=False) for word in words if _is_mark(word, template)]
        own.add_tokens(marks, special_tokens=True)
    return own


def _is_mark(word: str, template: str) -> bool:
    """Whether a template writes it, and no text does by chance."""
    return word in template and not word.isspace() and not word.isalnum()
