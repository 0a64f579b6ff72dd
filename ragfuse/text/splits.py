"""Split texts into chunks of so many tokens, by LangChain's splitter: for ingests and uploads
alike.
"""

from __future__ import annotations

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
        # It is called for every word, and for most more than once.
        length_function=lru_cache(1 << 16)(lambda text: len(tokenizer.tokenize(text))),
    )
    return splitter.split_text(text)
