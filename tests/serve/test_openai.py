"""OpenAI's own client against a server: chats, texts, streams, tools, grammars, probabilities,
usage, errors.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragfuse import Engine
from ragfuse.serve.keys import APITenant
from tests.serve.kit import Served, said, with_documents

openai = pytest.importorskip("openai", reason="the client is not installed")

TOOL = {
    "type": "function",
    "function": {
        "name": "count_ships",
        "description": "Counts.",
        "parameters": {
            "type": "object",
            "properties": {"door": {"enum": ["green", "red"]}},
            "required": ["door"],
        },
    },
}


@pytest.fixture
def client(served: Served) -> Any:
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def model(served: Served) -> str:
    return served.service.model


def engine_of(served: Served) -> Engine:
    return served.service.engine(APITenant(""))


def test_a_chat_is_answered_as_the_engine_answers_it(
    client: Any, model: str, served: Served
) -> None:
    answer = client.chat.completions.create(model=model, messages=[said("Who?")])
    expected = engine_of(served).answer([("user", "Who?")])
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason == "length"
    assert answer.usage.completion_tokens == len(expected.token_ids) == 12
    assert answer.usage.prompt_tokens == expected.trace.tokens
    assert answer.model_extra["ragfuse"]["tokens"] == expected.trace.tokens


def test_documents_of_an_extra_body_are_cached_and_counted(
    client: Any, model: str, served: Served
) -> None:
    ask = {
        "model": model,
        "messages": [said("Which door is green?")],
        "extra_body": with_documents(4),
    }
    client.chat.completions.create(**ask)
    engine_of(served).flush()
    # no beginning of a prompt yet
    ask["messages"].insert(0, said("Name the colour, and nothing besides.", "system"))
    answer = client.chat.completions.create(**ask)
    trace = answer.model_extra["ragfuse"]
    chunks = [each for each in trace["segments"] if each["kind"] == "chunk"]
    assert [each["source"] for each in chunks] == [f"book-{at}" for at in range(4)]
    assert all(each["hit"] for each in trace["segments"])
    assert (
        answer.usage.prompt_tokens_details.cached_tokens
        == trace["tokens_reused"] + trace["tokens_recomputed"]
        > 0
    )


def test_a_prompt_that_is_asked_again_is_cached_but_for_its_last_token(
    client: Any, model: str, served: Served
) -> None:
    ask = {
        "model": model,
        "messages": [said("Is any door of another colour than these, and whose?")],
    }
    client.chat.completions.create(**ask)
    engine_of(served).flush()
    answer = client.chat.completions.create(**ask)
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
    assert {
        (each["kind"], each["exact"]) for each in answer.model_extra["ragfuse"]["segments"]
    } == {("prefix", True)}


def test_a_stream_says_the_same_and_then_usage(client: Any, model: str) -> None:
    ask = {"model": model, "messages": [said("Who?")]}
    whole = client.chat.completions.create(**ask)
    chunks = list(
        client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-2].model_extra["ragfuse"]["tokens"] == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_seed_repeats_what_was_drawn_and_several_answers_differ(client: Any, model: str) -> None:
    ask = {"model": model, "messages": [said("Who?")], "temperature": 1.5, "seed": 7, "n": 3}
    first, second = (client.chat.completions.create(**ask) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    drawn = client.chat.completions.create(**{**ask, "n": 1}).choices[0].message.content
    assert drawn == texts[0]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_a_prompt_counts_once_however_many_answers_it_gets(client: Any, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": [said("Who?")], "max_tokens": 4}
    one, three = (client.chat.completions.create(**ask, n=n).usage for n in (1, 3))
    assert three.prompt_tokens == one.prompt_tokens
    assert three.prompt_tokens_details.cached_tokens < one.prompt_tokens
    assert three.completion_tokens == 3 * one.completion_tokens
    assert three.total_tokens == three.prompt_tokens + three.completion_tokens
    *_, last = client.chat.completions.create(
        **ask, n=3, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage.total_tokens == three.total_tokens
    ask = {"model": model, "prompt": ["Who came by boat?", "Where?"], "max_tokens": 4}
    one, two = (client.completions.create(**ask, n=n).usage for n in (1, 2))
    assert two.prompt_tokens == one.prompt_tokens
    assert two.completion_tokens == 2 * one.completion_tokens


@pytest.mark.parametrize("streams", [False, True])
def test_probabilities_come_for_every_token(client: Any, model: str, streams: bool) -> None:
    ask = {"model": model, "messages": [said("Who?")], "logprobs": True, "top_logprobs": 3}
    if streams:
        chunks = list(client.chat.completions.create(**ask, stream=True))
        found = [
            each for c in chunks if c.choices[0].logprobs for each in c.choices[0].logprobs.content
        ]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        choice = client.chat.completions.create(**ask).choices[0]
        found, text = choice.logprobs.content, choice.message.content
    assert "".join(each.token for each in found) == text
    for each in found:
        # greedy: the likeliest
        assert each.logprob == max(other.logprob for other in each.top_logprobs) <= 0
        assert [other.logprob for other in each.top_logprobs] == sorted(
            (other.logprob for other in each.top_logprobs), reverse=True
        )
        assert len(each.top_logprobs) == 3


def test_a_tool_is_called_with_arguments_that_fit(client: Any, model: str) -> None:
    ask: dict[str, Any] = {
        "model": model,
        "messages": [said("How many?")],
        "tools": [TOOL],
        "max_tokens": 200,
    }
    answer = client.chat.completions.create(**ask, tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "count_ships"
    assert json.loads(call.function.arguments)["door"] in ("green", "red")
    named = {"type": "function", "function": {"name": "count_ships"}}
    chunks = list(client.chat.completions.create(**ask, tool_choice=named, stream=True))
    calls = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    result = [
        *ask["messages"],
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "nine"},
    ]
    after = client.chat.completions.create(
        model=model, messages=result, tools=[TOOL], tool_choice="none"
    )
    assert after.choices[0].message.tool_calls is None
    plain = client.chat.completions.create(model=model, messages=ask["messages"])
    assert after.usage.prompt_tokens > plain.usage.prompt_tokens + len("nine")


def test_an_answer_follows_a_schema(client: Any, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"hue": {"enum": ["blue", "white"]}},
        "required": ["hue"],
    }
    form = {
        "type": "json_schema",
        "json_schema": {"name": "door", "schema": schema, "strict": True},
    }
    answer = client.chat.completions.create(
        model=model, messages=[said("Which?")], response_format=form, max_completion_tokens=64
    )
    assert json.loads(answer.choices[0].message.content)["hue"] in ("blue", "white")
    assert answer.choices[0].finish_reason == "stop"


def test_texts_go_on_and_each_prompt_has_its_answer(
    client: Any, model: str, served: Served
) -> None:
    answer = client.completions.create(
        model=model, prompt=["Once", "Twice"], max_tokens=5, logprobs=2
    )
    engine = engine_of(served)
    expected = [engine.answer(text).text[:5] for text in ("Once", "Twice")]
    assert [choice.text for choice in answer.choices] == expected
    assert "".join(answer.choices[1].logprobs.tokens) == expected[1]
    assert answer.choices[1].logprobs.text_offset == [0, 1, 2, 3, 4]
    chunks = list(client.completions.create(model=model, prompt="Once", max_tokens=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0]


def test_documents_before_a_text_are_chunks_too(client: Any, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="Who?", max_tokens=2, extra_body=with_documents(2)
    )
    assert [each["source"] for each in answer.model_extra["ragfuse"]["segments"]] == [
        "book-0",
        "book-1",
    ]


def test_the_model_and_the_embedder_are_listed(client: Any, model: str) -> None:
    assert [each.id for each in client.models.list()] == [model, "minilm-l6"]
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 3}, "temperature"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"documents": [""]}}, "documents.0.text"),
        ({"extra_body": {"ragfuse": {"policy": "best"}}}, "policy"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages.0.content.0.type",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_cannot_be_done_is_a_bad_request_that_says_so(
    client: Any, model: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": model, "messages": [said("Who?")], **fields})
    assert caught.value.param == named
    assert caught.value.body["message"]
    assert "Traceback" not in caught.value.body["message"]


async def test_an_async_client_streams(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=served.service.model, messages=[said("Who?")], stream=True
        )
        texts = [chunk.choices[0].delta.content async for chunk in stream]
    assert len("".join(text or "" for text in texts)) == 12
