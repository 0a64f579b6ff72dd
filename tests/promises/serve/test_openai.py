"""OpenAI's own client against a server: chats, texts, streams, tools, grammars, probabilities,
usage, errors.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.serve import TOOL, Client, Served, events, said, with_documents

openai = pytest.importorskip("openai", reason="the client is not installed")

TOOLS = [{"type": "function", "function": TOOL}]


def test_a_chat_is_answered_as_the_engine_answers_it(client: Client, served: Served) -> None:
    answer = client.chat()
    expected = served.engine().answer([("user", "Who?")])
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason == "length"
    assert answer.usage.completion_tokens == len(expected.token_ids) == 12
    assert answer.usage.prompt_tokens == expected.trace.tokens
    assert answer.model_extra["ragfuse"]["tokens"] == expected.trace.tokens


def test_documents_are_cached_and_counted(client: Client, served: Served) -> None:
    messages = [said("Which door is green?")]
    client.chat(messages=messages, extra_body=with_documents(4))
    served.engine().flush()
    # another beginning, so that no known one holds the documents
    messages.insert(0, said("Name the colour, and nothing besides.", "system"))
    answer = client.chat(messages=messages, extra_body=with_documents(4))
    trace = answer.model_extra["ragfuse"]
    chunks = [each for each in trace["segments"] if each["kind"] == "chunk"]
    assert [each["source"] for each in chunks] == [f"book-{at}" for at in range(4)]
    assert all(each["hit"] for each in trace["segments"])
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached == trace["tokens_reused"] + trace["tokens_recomputed"] > 0


def test_a_stream_gives_the_same_text_and_then_usage(client: Client) -> None:
    whole = client.chat()
    chunks = list(client.chat(stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    texts = [choice.delta.content for choice in choices if choice.delta.content]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) > 3
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-2].model_extra["ragfuse"]["tokens"] == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_seed_repeats_an_answer_and_several_answers_differ(client: Client) -> None:
    ask: dict[str, Any] = {"temperature": 1.5, "seed": 7, "n": 3}
    texts = [choice.message.content for choice in client.chat(**ask).choices]
    assert len(set(texts)) == 3
    assert client.chat(**{**ask, "n": 1}).choices[0].message.content == texts[0]


def test_a_prompt_counts_once_however_many_answers_it_gets(client: Client) -> None:
    one, three = (client.chat(max_tokens=4, n=n).usage for n in (1, 3))
    assert three.prompt_tokens == one.prompt_tokens
    assert three.prompt_tokens_details.cached_tokens < one.prompt_tokens
    assert three.completion_tokens == 3 * one.completion_tokens
    assert three.total_tokens == three.prompt_tokens + three.completion_tokens
    usage = {"include_usage": True}
    *_, last = client.chat(max_tokens=4, n=3, stream=True, stream_options=usage)
    assert last.usage.total_tokens == three.total_tokens
    prompts = ["Who came by boat?", "Where?"]
    one, two = (client.text(prompts, max_tokens=4, n=n).usage for n in (1, 2))
    assert two.prompt_tokens == one.prompt_tokens
    assert two.completion_tokens == 2 * one.completion_tokens


def test_every_token_has_its_probability(client: Client) -> None:
    choice = client.chat(logprobs=True, top_logprobs=3).choices[0]
    found = choice.logprobs.content
    assert "".join(each.token for each in found) == choice.message.content
    for each in found:
        top = [other.logprob for other in each.top_logprobs]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert each.logprob == top[0] <= 0  # greedy: the likeliest


def test_each_text_prompt_is_continued(client: Client, served: Served) -> None:
    choices = client.text(["Once", "Twice"], max_tokens=5, logprobs=2).choices
    expected = [served.engine().answer(text).text[:5] for text in ("Once", "Twice")]
    assert [choice.text for choice in choices] == expected
    assert "".join(choices[1].logprobs.tokens) == expected[1]
    assert choices[1].logprobs.text_offset == [0, 1, 2, 3, 4]
    chunks = client.text("Once", max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0]


def test_token_ids_come_where_they_are_asked_for(served: Served) -> None:
    wanted = {"ragfuse": {"token_ids": True}}
    whole = served.chat(**wanted).json()["choices"][0]["token_ids"]
    plain = served.chat().json()
    assert len(whole) == plain["usage"]["completion_tokens"]
    assert "token_ids" not in plain["choices"][0]
    streamed = [event["choices"][0] for event in events(served.chat(stream=True, **wanted))]
    assert [each["token_ids"] for each in streamed if "token_ids" in each] == [whole]


def test_the_model_and_the_embedder_are_listed(client: Client) -> None:
    models = client.openai.models
    assert [each.id for each in models.list()] == [client.model, "minilm-l6"]
    assert models.retrieve(client.model).id == client.model
    with pytest.raises(openai.NotFoundError):
        models.retrieve("another")


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"documents": [""]}}, "documents.0.text"),
        ({"extra_body": {"ragfuse": {"policy": "best"}}}, "policy"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    ],
)
def test_a_bad_request_names_its_field(client: Client, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat(**fields)
    assert caught.value.param == named
