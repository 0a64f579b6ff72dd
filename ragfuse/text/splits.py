"""Split texts into chunks of so many tokens, by LangChain's splitter: for ingests and uploads
alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ragfuse.settings import Settings


def split_text(text: str, settings: Settings, tokenizer: Any) -> list[str]:
    """Return the chunks of a text, split as the settings say; lengths are counted in tokens of the
    LLM.
    """
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    splitter = RecursiveCharacterTextSplitter(
        chunk_size=settings.chunk_tokens,
        chunk_overlap=settings.chunk_overlap,
        length_function=_token_counter(tokenizer),
    )
    return splitter.split_text(text)


def _token_counter(tokenizer: Any) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text.

    A splitter calls it for every word, often more than once: so it caches, and bypasses the
    tokenizer's Python code where it can.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation is not None:
        return lambda text: len(tokenizer.tokenize(text))
    return lru_cache(1 << 16)(lambda text: len(backend.encode(text, add_special_tokens=False)))
