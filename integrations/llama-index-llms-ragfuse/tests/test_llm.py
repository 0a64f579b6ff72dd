"""What RagFuseLLM has beside the contract of all frameworks: completions, counters, templates over a
schema in LlamaIndex's own calls.
"""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.llms.ragfuse import PMLPromptTemplate, RagFuseLLM, traces
from pydantic import BaseModel

from integrations.tests.kit import READ
from integrations.tests.pml import PROMPT, TRIP, VALUES, WHOLE
from ragfuse import Engine, InputError, SettingsError
from ragfuse.schemas.pml import parse_prompt


class Door(BaseModel):
    """A door."""

    is_open: bool


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine)


def n_tokens(response: Any) -> int:
    return int(response.raw["usage"]["prompt_tokens"])


def test_a_completion_is_a_message_unless_it_is_formatted(llm: RagFuseLLM, engine: Engine) -> None:
    assert n_tokens(llm.complete(READ)) == len(engine.prompt([("user", READ)]))
    assert n_tokens(llm.complete(READ, formatted=True)) == len(engine.prompt(READ))
    own = RagFuseLLM(engine=engine, completion_to_prompt=lambda text: f"Q: {text} A:")
    assert n_tokens(own.complete("Why?")) == len(engine.prompt("Q: Why? A:"))


def test_token_counters_hear_of_every_answer(llm: RagFuseLLM) -> None:
    counter = TokenCountingHandler()
    llm.callback_manager = CallbackManager([counter])
    usage = llm.chat([ChatMessage(content=READ)]).raw["usage"]
    counted = counter.prompt_llm_token_count, counter.completion_llm_token_count
    assert counted == (usage["prompt_tokens"], usage["completion_tokens"])


def test_fields_of_the_framework_are_taken_by_name_and_alias(engine: Engine) -> None:
    given = RagFuseLLM(model_name=engine.settings.model, system_prompt="Be brief.")
    assert (given.model, given.system_prompt) == (engine.settings.model, "Be brief.")
    with pytest.raises(SettingsError, match="ratio"):
        RagFuseLLM(ratios=0.5)


# templates over a schema


async def test_predictions_and_completions_of_a_template_are_what_the_engine_answers(
    llm: RagFuseLLM, engine: Engine
) -> None:
    template, expected = PMLPromptTemplate(TRIP, PROMPT), set[str]()
    with traces() as seen:
        found = {
            llm.predict(template, **VALUES),
            await llm.apredict(template, **VALUES),
            "".join(llm.stream(template, **VALUES)),
            "".join([text async for text in await llm.astream(template, **VALUES)]),
            llm.complete(template.format(**VALUES)).text,
            [each async for each in await llm.astream_complete(template.format(**VALUES))][-1].text,
        }
    expected.add(engine.answer(parse_prompt(WHOLE)).text)
    assert found == expected
    assert [trace.modules for trace in seen] == [(".", "plan")] * 6


async def test_an_object_is_asked_for_behind_a_template(engine: Engine) -> None:
    llm, template = RagFuseLLM(engine=engine, max_tokens=60), PMLPromptTemplate(TRIP, PROMPT)
    with traces() as seen:
        found = llm.structured_predict(Door, template, **VALUES)
    assert isinstance(found, Door)
    assert seen[0].modules == (".", "plan")
    assert seen[0].tokens > len(engine.prompt(parse_prompt(WHOLE))) + len("is_open")
    assert await llm.astructured_predict(Door, template, **VALUES) == found


def test_nothing_is_added_to_a_template(engine: Engine) -> None:
    told = RagFuseLLM(engine=engine, system_prompt="Be brief.")
    with pytest.raises(InputError):
        told.predict(PMLPromptTemplate(TRIP, PROMPT), **VALUES)
