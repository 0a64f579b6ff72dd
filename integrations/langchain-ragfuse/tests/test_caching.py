"""LangChain's own cache of answers: another wish is another answer."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.tools import tool
from langchain_ragfuse import ChatRagFuse, RagFuseLLM

from ragfuse import Engine, Grammar

ASKED = "The lighthouse keeper counted forty ships that night. How many ships were there?"


@tool
def count(is_night: bool) -> str:
    """Count the ships."""
    return "forty"


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.content)


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
async def test_models_with_other_fields_never_get_each_others_answers(kind: Any, engine: Engine) -> None:
    bare, cache = kind(engine=engine, cache=False), InMemoryCache()
    whole = text_of(bare.invoke(ASKED))
    wishes: list[dict[str, Any]] = [{}, {"stop": [whole[4:6]]}, {"max_tokens": 3}, {"reuse": False, "max_tokens": 5}]
    wishes += [{"grammar": Grammar.regex(f"{letter}{{3}}")} for letter in "ab"]
    for wish in wishes:
        llm = kind(engine=engine, cache=cache, **wish)
        expected = text_of(kind(engine=engine, cache=False, **wish).invoke(ASKED))
        assert text_of(llm.invoke(ASKED)) == text_of(llm.invoke(ASKED)) == text_of(await llm.ainvoke(ASKED)) == expected
    assert len(cache._cache) == len(wishes)


def test_tools_and_forms_of_a_call_have_answers_of_their_own(engine: Engine) -> None:
    llm, answers = ChatRagFuse(engine=engine, cache=InMemoryCache(), max_tokens=60), []
    bound = [llm, llm.bind_tools([count], tool_choice="any"), llm.bind(grammar=Grammar.choice(["yes", "no"]))]
    for each in bound:
        first, again = each.invoke(ASKED), each.invoke(ASKED)
        assert (first.content, first.tool_calls) == (again.content, again.tool_calls)
        answers.append(first)
    assert [bool(answer.tool_calls) for answer in answers] == [False, True, False]
    assert answers[2].content in ("yes", "no")
