"""Thoughts, penalties, ends and calls one by one: fields of an answer and of a question as
LlamaIndex has them.
"""

from __future__ import annotations

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ThinkingBlock
from llama_index.llms.ragfuse import RagFuseLLM
from llama_index.llms.ragfuse.convert import to_ragfuse_messages

from integrations.tests.thoughts import saying
from ragfuse import Engine

QUESTION = "How many ships came in on Tuesday?"
ASKED = [ChatMessage(role=MessageRole.USER, content=QUESTION)]


def test_a_thought_is_a_block_of_its_own(thinking: Engine) -> None:
    llm = RagFuseLLM(engine=thinking)
    answer = llm.chat(ASKED, generate_kwargs=saying(thinking, "I count.\n</think>\n\nForty."))
    thought, text = answer.message.blocks
    assert isinstance(thought, ThinkingBlock)
    assert thought.content == "I count."
    assert isinstance(text, TextBlock)
    assert answer.message.content == "Forty."
    assert answer.raw["reasoning_content"] == "I count."
    assert [turn.reasoning for turn in to_ragfuse_messages([*ASKED, answer.message])] == [
        "",
        "I count.",
    ]
    assert (
        to_ragfuse_messages([answer.message, answer.message])[0].reasoning == "I count.\nI count."
    )
    plain = llm.chat(ASKED, generate_kwargs=saying(thinking, "</think>Forty."))
    assert [block.block_type for block in plain.message.blocks] == ["text"]
    assert "reasoning_content" not in plain.raw
    told = llm.complete(QUESTION, generate_kwargs=saying(thinking, "I count.</think>Forty."))
    assert (told.text, told.raw["reasoning_content"]) == ("Forty.", "I count.")


async def test_streams_say_thoughts_as_such_too(thinking: Engine) -> None:
    llm = RagFuseLLM(engine=thinking)
    text = "I count.\n</think>\n\nForty."
    pieces = list(llm.stream_chat(ASKED, generate_kwargs=saying(thinking, text)))
    others = [
        each async for each in await llm.astream_chat(ASKED, generate_kwargs=saying(thinking, text))
    ]
    for each in (pieces, others):
        assert "".join(piece.delta or "" for piece in each) == "Forty."
        thoughts = [piece.additional_kwargs.get("thinking_delta", "") for piece in each]
        assert "".join(thoughts) == "I count."
        assert len([thought for thought in thoughts if thought]) > 3
        assert [block.block_type for block in each[-1].message.blocks] == ["thinking", "text"]
        middle = each[len(each) - 3].message
        assert middle.blocks[0].content == "I count."
    said = list(llm.stream_complete(QUESTION, generate_kwargs=saying(thinking, text)))
    assert "".join(piece.delta or "" for piece in said) == said[-1].text == "Forty."
    awaited = await llm.achat(ASKED, generate_kwargs=saying(thinking, text))
    assert awaited.message.blocks[0].content == "I count."


def test_an_answer_with_its_thought_is_a_message_of_the_next_question(thinking: Engine) -> None:
    llm = RagFuseLLM(engine=thinking)
    answer = llm.chat(ASKED, generate_kwargs=saying(thinking, "Hm</think>Forty.")).message
    more = [*ASKED, answer, ChatMessage(role=MessageRole.USER, content="Sure?")]
    bare = [*ASKED, ChatMessage(role=MessageRole.ASSISTANT, content="Forty."), more[-1]]
    counts = [llm.chat(each, max_tokens=2).raw["usage"]["prompt_tokens"] for each in (more, bare)]
    assert counts[0] == counts[1]
