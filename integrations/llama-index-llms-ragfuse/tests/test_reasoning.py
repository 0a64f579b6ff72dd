"""Thoughts, penalties, ends and calls one by one: fields of an answer and of a question as LlamaIndex has them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.ragfuse import RagFuseLLM
from llama_index.llms.ragfuse.convert import to_ragfuse_messages
from transformers import GenerationConfig

from ragfuse import Ask, Engine, InputError, Settings
from tests.scripted import Script, spelled
from tests.thinking import thinking_model

QUESTION = "How many ships came in on Tuesday?"
ASKED = [ChatMessage(role=MessageRole.USER, content=QUESTION)]


@pytest.fixture(scope="module")
def thinking(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine over a model whose prompts open a thought."""
    home = tmp_path_factory.mktemp("thinking")
    folder = thinking_model(tiny_path, home / "model")
    with Engine(Settings(model=str(folder), dtype="float32", store=home / "store", home=home, max_tokens=40)) as made:
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
    assert [turn.reasoning for turn in to_ragfuse_messages([*ASKED, answer.message])] == ["", "I count."]
    assert to_ragfuse_messages([answer.message, answer.message])[0].reasoning == "I count.\nI count."
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


@pytest.mark.parametrize(
    "given",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 3.0},
        {"logit_bias": {70: 100.0}},
        {"temperature": 1.5, "seed": 3, "min_p": 0.5},
    ],
    ids=lambda given: [*given][-1],
)
def test_penalties_are_fields_and_words_of_a_call(engine: Engine, given: dict[str, Any]) -> None:
    options = {name: value for name, value in given.items() if name != "seed"}
    options |= {"do_sample": True} if "temperature" in given else {}
    question = [("user", QUESTION)]
    wanted = engine.answer(question, Ask(options=options, seed=given.get("seed"))).text
    assert wanted != engine.answer(question, Ask()).text
    assert RagFuseLLM(engine=engine, **given).chat(ASKED).message.content == wanted
    assert RagFuseLLM(engine=engine).chat(ASKED, **given).message.content == wanted
    assert list(RagFuseLLM(engine=engine).stream_chat(ASKED, **given))[-1].message.content == wanted
    assert RagFuseLLM(engine=engine, **given).complete(QUESTION).text == wanted


def test_a_bias_for_no_token_is_told(engine: Engine) -> None:
    with pytest.raises(InputError, match=r"999999, which is not a token id"):
        RagFuseLLM(engine=engine).chat(ASKED, logit_bias={999999: 1.0})


def knock(times: int) -> str:
    """Knock at a door."""
    return "Nobody is there."


def test_one_call_is_made_where_several_are_not_wanted(engine: Engine) -> None:
    llm = RagFuseLLM(engine=engine, max_tokens=160, temperature=1.3)
    door = FunctionTool.from_defaults(knock)
    told = llm._prepare_chat_with_tools([door], tool_required=True)
    assert told["parallel_tool_calls"] is False
    assert "parallel_tool_calls" not in llm._prepare_chat_with_tools([door], allow_parallel_tool_calls=True)
    for seed in range(3):
        answer = llm.chat(**{**told, "messages": ASKED}, seed=seed)
        assert len([block for block in answer.message.blocks if isinstance(block, ToolCallBlock)]) == 1


def test_stop_strings_count_in_the_answer_alone_those_of_a_generation_config_too(
    tiny_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_path, tmp_path / "model")
    config = GenerationConfig.from_pretrained(tiny_path)
    config.update(stop_strings=["<end>"], token_healing=True)
    config.save_pretrained(tmp_path / "model")
    with Engine(Settings(model=str(tmp_path / "model"), dtype="float32", store=tmp_path, max_tokens=24)) as made:
        llm = RagFuseLLM(engine=made)
        for stop in ([], ["\nSay", "Tuesday?\nS", "<|assistant|>S"]):
            told = {"stop": stop, **saying(made, "Say<end>x")}
            assert llm.chat(ASKED, **told).message.content == "Say"
            told = {"stop": stop, **saying(made, "Say<end>x")}
            assert "".join(each.delta for each in llm.stream_chat(ASKED, **told)) == "Say"
        assert llm.chat(ASKED, stop=["a"], **saying(made, "Say<end>x")).message.content == "S"


def test_pad_tokens_that_a_model_writes_are_counted(engine: Engine) -> None:
    bias = {engine.model.tokenizer.pad_token_id: 100.0}
    answer = RagFuseLLM(engine=engine, logit_bias=bias, max_tokens=9).chat(ASKED)
    assert (answer.message.content, answer.raw["finish_reason"]) == ("", "length")
    assert answer.raw["usage"]["completion_tokens"] == 9
