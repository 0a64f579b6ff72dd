"""Templates over a schema in LangChain's pipes: the text model, batches, progress."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_ragfuse import ChatRagFuse, PMLPromptTemplate, RagFuseLLM

from integrations.tests.pml import PROMPT, TRIP, VALUES, WHOLE
from ragfuse import Engine, InputError
from ragfuse.schemas.pml import parse_prompt


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
async def test_a_pipe_answers_batches_of_a_schema_that_is_encoded_once(
    kind: Any, engine: Engine
) -> None:
    heard: list[Any] = []
    template = PMLPromptTemplate(TRIP, PROMPT)
    template.register(kind(engine=engine), progress=heard.append)
    chain = template | kind(engine=engine)
    others = [VALUES, {**VALUES, "question": "Where?"}]
    found = chain.batch(others)
    wanted = engine.answer(parse_prompt(WHOLE)).text
    assert (found[0] if kind is RagFuseLLM else found[0].content) == wanted
    assert [each.encoded for each in heard] == [*range(1, len(heard) + 1)] != []
    heard.clear()
    again = await chain.abatch(others)
    assert [getattr(each, "content", each) for each in again] == [
        getattr(each, "content", each) for each in found
    ]
    assert heard == []


def test_a_filled_template_is_counted_and_stands_alone(engine: Engine) -> None:
    messages = PMLPromptTemplate(TRIP, PROMPT).invoke(VALUES).to_messages()
    counted = ChatRagFuse(engine=engine).get_num_tokens_from_messages(messages)
    assert counted == len(engine.prompt(parse_prompt(WHOLE)))
    with pytest.raises(InputError):
        ChatRagFuse(engine=engine).invoke([*messages, HumanMessage("And now?")])
