"""Thoughts, penalties, ends and calls one by one: fields of an answer and of a question as
LlamaIndex has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ThinkingBlock
from llama_index.llms.ragfuse import RagFuseLLM
from llama_index.llms.ragfuse.convert import to_ragfuse_messages

from ragfuse import Engine, Settings
from tests.scripted import Script, spelled
from tests.thinking import thinking_model

QUESTION = "How many ships came in on Tuesday?"
ASKED = [ChatMessage(role=MessageRole.USER, content=QUESTION)]


@pytest.fixture(scope="module")
def thinking(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine over a model whose prompts open a thought."""
    home = tmp_path_factory.mktemp("thinking")
    folder = thinking_model(tiny_path, home / "model")
    with Engine(
        Settings(model=str(folder), dtype="float32", store=home / "store", home=home, max_tokens=40)
    ) as made:
        yield made


def saying(engine: Engine, text: str) -> dict[str, Any]:
    """What makes one answer say this and end."""
    end = engine.model.tokenizer.eos_token_id
    return {"generate_kwargs": {"logits_processor": [Script([*spelled(engine, text), end])]}}


def test_a_thought_is_a_block_of_its_own(thinking: Engine) -> None:
    llm = RagFuseLLM(engine=thinking)
    answer = llm.chat(ASKED, **saying(thinking, "I count.\n</think>\n\nForty."))
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
    plain = llm.chat(ASKED, **saying(thinking, "</think>Forty."))
    assert [block.block_type for block in plain.message.blocks] == ["text"]
    assert "reasoning_content" not in plain.raw
    told = llm.complete(QUESTION, **saying(thinking, "I count.</think>Forty."))
    assert (told.text, told.raw["reasoning_content"]) == ("Forty.", "I count.")


async def test_streams_say_thoughts_as_such_too(thinking: Engine) -> None:
    llm = RagFuseLLM(engine=thinking)
    text = "I count.\n</think>\n\nForty."
    pieces = list(llm.stream_chat(ASKED, **saying(thinking, text)))
    others = [each async for each in await llm.astream_chat(ASKED, **saying(thinking, text))]
    for each in (pieces, others):
        assert "".join(piece.delta or "" for piece in each) == "Forty."
        thoughts = [piece.additional_kwargs.get("thinking_delta", "") for piece in each]
        assert "".join(thoughts) == "I count."
        assert len([thought for thought in thoughts if thought]) > 3
        assert [block.block_type for block in each[-1].message.blocks] == ["thinking", "text"]
        middle = each[len(each) - 3].message
        assert middle.blocks[0].content == "I count."
    said = list(llm.stream_complete(QUESTION, **saying(thinking, text)))
    assert "".join(piece.delta or "" for piece in said) == said[-1].text == "Forty."
    awaited = await llm.achat(ASKED, **saying(thinking, text))
    assert awaited.message.blocks[0].content == "I count."


def test_an_answer_with_its_thought_is_a_message_of_the_next_question(thinking: Engine) -> None:
    llm = RagFuseLLM(engine=thinking)
    answer = llm.chat(ASKED, **saying(thinking, "Hm</think>Forty.")).message
    more = [*ASKED, answer, ChatMessage(role=MessageRole.USER, content="Sure?")]
    bare = [*ASKED, ChatMessage(role=MessageRole.ASSISTANT, content="Forty."), more[-1]]
    counts = [llm.chat(each, max_tokens=2).raw["usage"]["prompt_tokens"] for each in (more, bare)]
    assert counts[0] == counts[1]
