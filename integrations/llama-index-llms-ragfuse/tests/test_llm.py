"""RagFuseLLM on a tiny random model: the eight calls, parameters, usage and trace."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.llms.ragfuse import RagFuseLLM

from integrations.tests.kit import READ, hits, read_and_stored
from ragfuse import Engine, InputError, SettingsError

CHAT = [ChatMessage(role="user", content=READ)]


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    llm = RagFuseLLM(engine=engine)
    read_and_stored(engine, lambda: llm.chat(CHAT))
    return llm


async def gathered(stream: Any) -> list[Any]:
    return [response async for response in await stream]


async def test_the_eight_calls_agree_and_reuse_what_is_known(llm: RagFuseLLM) -> None:
    chats = [llm.chat(CHAT), await llm.achat(CHAT), list(llm.stream_chat(CHAT))[-1]]
    chats.append((await gathered(llm.astream_chat(CHAT)))[-1])
    completions = [
        llm.complete(READ),
        await llm.acomplete(READ),
        list(llm.stream_complete(READ))[-1],
    ]
    completions.append((await gathered(llm.astream_complete(READ)))[-1])
    texts = {each.message.content for each in chats} | {each.text for each in completions}
    assert len(texts) == 1
    assert texts != {""}
    for response in (*chats, *completions):
        assert hits(response.raw["ragfuse"]) == ["first.txt", "second.txt"]
        assert response.raw["usage"] == chats[0].raw["usage"]


def test_usage_is_counted(llm: RagFuseLLM, engine: Engine) -> None:
    counter = TokenCountingHandler()
    llm.callback_manager = CallbackManager([counter])
    response = llm.chat(CHAT)
    usage = response.raw["usage"]
    assert (
        usage["prompt_tokens"]
        == len(engine.prompt([("user", READ)]))
        == counter.prompt_llm_token_count
    )
    assert usage["completion_tokens"] == 12 == counter.completion_llm_token_count
    assert (
        usage["prompt_tokens_details"]["cached_tokens"]
        > response.raw["ragfuse"]["tokens_reused"]
        > 0
    )
    assert usage["prompt_tokens_details"]["cache_creation_tokens"] == 0
    assert response.additional_kwargs["total_tokens"] == usage["total_tokens"]


def test_a_formatted_text_goes_to_the_model_as_it_is(llm: RagFuseLLM, engine: Engine) -> None:
    raw = llm.complete(READ, formatted=True).raw
    assert raw["usage"]["prompt_tokens"] == len(engine.prompt(READ))
    assert llm.complete(READ).raw["usage"]["prompt_tokens"] > raw["usage"]["prompt_tokens"]
    own = RagFuseLLM(engine=engine, completion_to_prompt=lambda text: f"Q: {text} A:")
    assert own.complete("Why?").raw["usage"]["prompt_tokens"] == len(engine.prompt("Q: Why? A:"))


def test_roles_reach_the_template_and_neighbours_are_merged(
    llm: RagFuseLLM, engine: Engine
) -> None:
    said = [
        ("developer", "Be brief."),
        ("user", "Ask."),
        ("user", "Again."),
        ("model", "Wait."),
        ("user", "And?"),
    ]
    messages = [ChatMessage(role=role, content=text) for role, text in said]
    expected = (
        "<s><|system|>Be"
        " brief.\n<|user|>Ask.\nAgain.\n<|assistant|>Wait.\n<|user|>And?\n<|assistant|>"
    )
    assert llm.chat(messages).raw["usage"]["prompt_tokens"] == len(
        engine.tokens(expected, special=True)
    )
    blocks = [
        ChatMessage(role=MessageRole.USER, blocks=[TextBlock(text="As"), TextBlock(text="k.")])
    ]
    assert (
        llm.chat(blocks).message.content == llm.chat([ChatMessage(content="Ask.")]).message.content
    )


def test_what_cannot_work_is_refused(llm: RagFuseLLM) -> None:
    image = ChatMessage(
        role="user", blocks=[TextBlock(text="What is it?"), ImageBlock(url="http://x/y.png")]
    )
    with pytest.raises(InputError, match=r"'image' cannot be read"):
        llm.chat([image])
    with pytest.raises(SettingsError, match=r"no argument 'ratios'"):
        llm.complete(READ, ratios=0.5)
    with pytest.raises(SettingsError, match="ratios"):
        RagFuseLLM(ratios=0.5)


def test_fields_of_the_framework_are_taken_by_name_and_alias(engine: Engine) -> None:
    llm = RagFuseLLM(engine=engine, callback_manager=CallbackManager(), system_prompt="Be brief.")
    assert llm.system_prompt == "Be brief."
    assert (
        RagFuseLLM(model_name=engine.settings.model, settings=engine.settings).model
        == engine.settings.model
    )
