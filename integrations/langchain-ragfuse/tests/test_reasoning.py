"""Thoughts, penalties, ends and calls one by one: fields of an answer and of a question as
LangChain has them.
"""

from __future__ import annotations

from langchain_core.messages import AIMessage, HumanMessage
from langchain_ragfuse import ChatRagFuse
from langchain_ragfuse.messages import to_ragfuse_messages

from integrations.tests.thoughts import saying
from ragfuse import Engine

ASKED = "How many ships came in on Tuesday?"


def test_a_thought_is_reasoning_content_and_a_block_of_its_own(thinking: Engine) -> None:
    llm = ChatRagFuse(engine=thinking)
    answer = llm.invoke(ASKED, model_kwargs=saying(thinking, "I count.\n</think>\n\nForty."))
    assert answer.content == "Forty."
    assert answer.additional_kwargs["reasoning_content"] == "I count."
    assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]
    assert answer.content_blocks[0]["reasoning"] == "I count."
    plain = llm.invoke(ASKED, model_kwargs=saying(thinking, "</think>Forty."))
    assert (plain.content, plain.additional_kwargs) == ("Forty.", {})


async def test_streams_say_thoughts_as_such_too(thinking: Engine) -> None:
    llm = ChatRagFuse(engine=thinking)
    text = "I count.\n</think>\n\nForty."
    chunks = list(llm.stream(ASKED, model_kwargs=saying(thinking, text)))
    others = [chunk async for chunk in llm.astream(ASKED, model_kwargs=saying(thinking, text))]
    for each in (chunks, others):
        assert "".join(str(chunk.text) for chunk in each) == "Forty."
        thoughts = [chunk.additional_kwargs.get("reasoning_content", "") for chunk in each]
        assert "".join(thoughts) == "I count."
        assert len([thought for thought in thoughts if thought]) > 3
        whole = sum(each[1:], each[0])
        assert whole.additional_kwargs["reasoning_content"] == "I count."
        assert whole.content == "Forty."
    awaited = await llm.ainvoke(ASKED, model_kwargs=saying(thinking, text))
    assert awaited.additional_kwargs["reasoning_content"] == "I count."


def test_an_answer_with_its_thought_is_a_message_of_the_next_question(thinking: Engine) -> None:
    llm = ChatRagFuse(engine=thinking)
    answer = llm.invoke(ASKED, model_kwargs=saying(thinking, "Hm</think>Forty."))
    assert llm.invoke([HumanMessage(ASKED), answer, HumanMessage("Sure?")]).response_metadata[
        "ragfuse"
    ]["tokens"]
    blocks = AIMessage(content=answer.content_blocks)  # type: ignore[arg-type]
    told = [
        llm.get_num_tokens_from_messages([HumanMessage(ASKED), each]) for each in (answer, blocks)
    ]
    assert told[0] == told[1]
    for each in (
        answer,
        blocks,
        AIMessage([{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Forty."}]),
    ):
        assert [turn.reasoning for turn in to_ragfuse_messages([HumanMessage(ASKED), each])] == [
            "",
            "Hm",
        ]
    assert to_ragfuse_messages([HumanMessage(ASKED), AIMessage("Forty.")])[1].reasoning == ""
