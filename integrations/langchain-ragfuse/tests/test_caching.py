"""LangChain's own cache of answers: another wish is another answer."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_ragfuse import ChatRagFuse, RagFuseLLM

from ragfuse import Engine, Grammar

ASKED = "The lighthouse keeper counted forty ships that night. How many ships were there?"


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.content)


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
async def test_models_with_other_fields_never_get_each_others_answers(
    kind: Any, engine: Engine
) -> None:
    bare, cache = kind(engine=engine, cache=False), InMemoryCache()
    whole = text_of(bare.invoke(ASKED))
    wishes: list[dict[str, Any]] = [
        {},
        {"stop": [whole[4:6]]},
        {"max_tokens": 3},
        {"reuse": False, "max_tokens": 5},
    ]
    wishes += [{"grammar": Grammar.regex(f"{letter}{{3}}")} for letter in "ab"]
    for wish in wishes:
        llm = kind(engine=engine, cache=cache, **wish)
        expected = text_of(kind(engine=engine, cache=False, **wish).invoke(ASKED))
        assert (
            text_of(llm.invoke(ASKED))
            == text_of(llm.invoke(ASKED))
            == text_of(await llm.ainvoke(ASKED))
            == expected
        )
    assert len(cache._cache) == len(wishes)
