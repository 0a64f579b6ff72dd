"""LangChain's own cache of answers: another wish is another answer."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_ragfuse import ChatRagFuse, RagFuseLLM

from ragfuse import Engine, Grammar

ASKED = "The lighthouse keeper counted forty ships that night. How many ships were there?"


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
async def test_models_with_other_fields_never_get_each_others_answers(
    kind: Any, engine: Engine
) -> None:
    saved = set[tuple[str, str]]()

    class Watched(InMemoryCache):
        def update(self, prompt: str, llm_string: str, return_val: Any) -> None:
            saved.add((prompt, llm_string))
            super().update(prompt, llm_string, return_val)

    cache = Watched()
    wishes: list[dict[str, Any]] = [{}, {"stop": ["e"]}, {"reuse": False, "max_tokens": 3}]
    wishes += [{"grammar": Grammar.regex(f"{letter}{{3}}")} for letter in "ab"]
    for wish in wishes:
        llm = kind(engine=engine, cache=cache, **wish)
        answers = [llm.invoke(ASKED), llm.invoke(ASKED), await llm.ainvoke(ASKED)]
        answers.append(kind(engine=engine, cache=False, **wish).invoke(ASKED))
        assert len({getattr(each, "content", each) for each in answers}) == 1
    assert len(saved) == len(wishes)
