"""Thoughts, penalties, ends and calls one by one: fields of an answer and of a question as LangChain has them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_ragfuse import ChatRagFuse, RagFuseLLM
from langchain_ragfuse.messages import to_ragfuse_messages
from langchain_tests.utils.stream_lifecycle import assert_valid_event_stream
from transformers import GenerationConfig

from ragfuse import Ask, Engine, InputError, Settings
from tests.scripted import Script, spelled
from tests.thinking import thinking_model

ASKED = "How many ships came in on Tuesday?"


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
    return {"model_kwargs": {"logits_processor": [Script([*spelled(engine, text), end])]}}


def test_a_thought_is_reasoning_content_and_a_block_of_its_own(thinking: Engine) -> None:
    llm = ChatRagFuse(engine=thinking)
    answer = llm.invoke(ASKED, **saying(thinking, "I count.\n</think>\n\nForty."))
    assert answer.content == "Forty."
    assert answer.additional_kwargs["reasoning_content"] == "I count."
    assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]
    assert answer.content_blocks[0]["reasoning"] == "I count."
    plain = llm.invoke(ASKED, **saying(thinking, "</think>Forty."))
    assert (plain.content, plain.additional_kwargs) == ("Forty.", {})


async def test_streams_say_thoughts_as_such_too(thinking: Engine) -> None:
    llm = ChatRagFuse(engine=thinking)
    text = "I count.\n</think>\n\nForty."
    chunks = list(llm.stream(ASKED, **saying(thinking, text)))
    others = [chunk async for chunk in llm.astream(ASKED, **saying(thinking, text))]
    for each in (chunks, others):
        assert "".join(str(chunk.text) for chunk in each) == "Forty."
        thoughts = [chunk.additional_kwargs.get("reasoning_content", "") for chunk in each]
        assert "".join(thoughts) == "I count."
        assert len([thought for thought in thoughts if thought]) > 3
        whole = each[0]
        for chunk in each[1:]:
            whole = whole + chunk
        assert whole.additional_kwargs["reasoning_content"] == "I count."
        assert whole.content == "Forty."
    awaited = await llm.ainvoke(ASKED, **saying(thinking, text))
    assert awaited.additional_kwargs["reasoning_content"] == "I count."


@pytest.mark.parametrize("version", ["v0", "v1"])
async def test_events_and_blocks_of_a_thought_a_text_and_a_call(thinking: Engine, version: str) -> None:
    llm = ChatRagFuse(engine=thinking, output_version=version, max_tokens=200).bind_tools([knock])
    call = '<tool_call>\n{"name": "knock", "arguments": {"times": 1}}\n</tool_call>'
    said = saying(thinking, f"I count.\n</think>\n\nSo.{call}")
    events = llm.stream_events(ASKED, version="v3", **said)
    assert_valid_event_stream(list(events))
    others = await llm.astream_events(ASKED, version="v3", **said)
    assert_valid_event_stream([each async for each in others])
    chunks = list(llm.stream(ASKED, **said))
    for answer in (llm.invoke(ASKED, **said), sum(chunks[1:], chunks[0]), events.output_message):
        blocks = answer.content_blocks
        assert [block["type"] for block in blocks] == ["reasoning", "text", "tool_call"]
        assert [block.get("reasoning") or block.get("text") for block in blocks[:2]] == ["I count.", "So."]
        assert set(answer.tool_calls[0]["args"]) == {"times"}
        assert to_ragfuse_messages([HumanMessage(ASKED), answer])[1].reasoning == "I count."
        assert version == "v0" or isinstance(answer.content, list)


def test_an_answer_with_its_thought_is_a_message_of_the_next_question(thinking: Engine) -> None:
    llm = ChatRagFuse(engine=thinking)
    answer = llm.invoke(ASKED, **saying(thinking, "Hm</think>Forty."))
    assert llm.invoke([HumanMessage(ASKED), answer, HumanMessage("Sure?")]).response_metadata["ragfuse"]["tokens"]
    blocks = AIMessage(content=answer.content_blocks)  # type: ignore[arg-type]
    told = [llm.get_num_tokens_from_messages([HumanMessage(ASKED), each]) for each in (answer, blocks)]
    assert told[0] == told[1]
    for each in (
        answer,
        blocks,
        AIMessage([{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Forty."}]),
    ):
        assert [turn.reasoning for turn in to_ragfuse_messages([HumanMessage(ASKED), each])] == ["", "Hm"]
    assert to_ragfuse_messages([HumanMessage(ASKED), AIMessage("Forty.")])[1].reasoning == ""


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
    for kind, asked in ((ChatRagFuse, [("user", ASKED)]), (RagFuseLLM, ASKED)):
        wanted = engine.answer(asked, Ask(options=options, seed=given.get("seed"))).text
        assert wanted != engine.answer(asked, Ask()).text
        field, call = kind(engine=engine, **given).invoke(ASKED), kind(engine=engine).invoke(ASKED, **given)
        for answer in (field, call):
            assert getattr(answer, "content", answer) == wanted
        streamed = "".join(getattr(each, "content", each) for each in kind(engine=engine, **given).stream(ASKED))
        assert streamed == wanted


def test_a_bias_for_no_token_is_told(engine: Engine) -> None:
    with pytest.raises(InputError, match=r"999999, which is not a token id"):
        ChatRagFuse(engine=engine).invoke(ASKED, logit_bias={999999: 1.0})


@tool
def knock(times: int) -> str:
    """Knock at a door."""
    return "Nobody is there."


def test_one_call_is_made_where_several_are_not_wanted(engine: Engine) -> None:
    llm = ChatRagFuse(engine=engine, max_tokens=160, temperature=1.3)
    one = llm.bind_tools([knock], tool_choice="any", parallel_tool_calls=False)
    assert [len(one.invoke(ASKED, seed=seed).tool_calls) for seed in range(3)] == [1, 1, 1]
    whole = None
    for chunk in one.stream(ASKED, seed=1):
        whole = chunk if whole is None else whole + chunk
    assert len(whole.tool_calls) == 1  # type: ignore[union-attr]
    assert one.kwargs["parallel_tool_calls"] is False  # type: ignore[attr-defined]
    assert "parallel_tool_calls" not in llm.bind_tools([knock]).kwargs  # type: ignore[attr-defined]


def test_stop_strings_count_in_the_answer_alone_those_of_a_generation_config_too(
    tiny_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_path, tmp_path / "model")
    config = GenerationConfig.from_pretrained(tiny_path)
    config.update(stop_strings=["<end>"], token_healing=True)
    config.save_pretrained(tmp_path / "model")
    with Engine(Settings(model=str(tmp_path / "model"), dtype="float32", store=tmp_path, max_tokens=24)) as made:
        llm = ChatRagFuse(engine=made)
        for stop in ([], ["\nSay", "Tuesday?\nS", "<|assistant|>S"]):
            told = {"stop": stop, **saying(made, "Say<end>x")}
            assert llm.invoke(ASKED, **told).content == "Say"
            told = {"stop": stop, **saying(made, "Say<end>x")}
            assert "".join(str(each.text) for each in llm.stream(ASKED, **told)) == "Say"
        assert llm.invoke(ASKED, stop=["a"], **saying(made, "Say<end>x")).content == "S"


def test_pad_tokens_that_a_model_writes_are_counted(engine: Engine) -> None:
    bias = {engine.model.tokenizer.pad_token_id: 100.0}
    answer = ChatRagFuse(engine=engine, logit_bias=bias, max_tokens=9).invoke(ASKED)
    assert (answer.content, answer.response_metadata["finish_reason"]) == ("", "length")
    assert answer.usage_metadata["output_tokens"] == 9
