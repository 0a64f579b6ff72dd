"""`/v1/responses`, by OpenAI's own client: texts, streams, tools, forms, conversations, what is
stored and deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragfuse.serve.keys import APITenant, Keys
from tests.serve.kit import Served, serving, settings_of, with_documents
from tests.thinking import thinking_model

openai = pytest.importorskip("openai", reason="the client is not installed")

TOOL = {
    "type": "function",
    "name": "count_ships",
    "description": "Counts.",
    "parameters": {
        "type": "object",
        "properties": {"door": {"enum": ["green", "red"]}},
        "required": ["door"],
    },
}


@pytest.fixture
def client(served: Served) -> Any:
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def model(served: Served) -> str:
    return served.service.model


def sessions(served: Served) -> set[str]:
    engine = served.service.engine(APITenant(""))
    engine.flush()
    return {each.id for each in engine.sessions.ls() if each.persistent}


def test_an_input_is_answered_as_a_chat_is(client: Any, model: str) -> None:
    chat = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Who came?"},
        ],
    )
    found = client.responses.create(model=model, instructions="Be brief.", input="Who came?")
    assert found.output_text == chat.choices[0].message.content
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.usage.output_tokens == 12
    assert found.model == model


def test_messages_and_documents_are_read_as_a_chats_are(client: Any, model: str) -> None:
    said = [{"role": "user", "content": [{"type": "input_text", "text": "Which door is green?"}]}]
    new = "Say one colour of a door alone."  # so that no known beginning holds the documents
    ask = {
        "model": model,
        "instructions": new,
        "input": said,
        "store": False,
        "extra_body": with_documents(2),
    }
    found = client.responses.create(**ask)
    chunks = [each for each in found.model_extra["ragfuse"]["segments"] if each["kind"] == "chunk"]
    assert [each["source"] for each in chunks] == ["book-0", "book-1"]


def test_a_stream_has_every_event_in_order_and_ends_in_the_same_response(
    client: Any, model: str
) -> None:
    whole = client.responses.create(model=model, input="Who kept the light?")
    events = list(client.responses.create(model=model, input="Who kept the light?", stream=True))
    kinds = [each.type for each in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert (
        "".join(each.delta for each in events if each.type.endswith("text.delta"))
        == whole.output_text
    )
    last = events[-1].response
    assert last.output_text == whole.output_text == events[-4].text
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_the_clients_own_helper_reads_the_stream(client: Any, model: str) -> None:
    form = {
        "type": "json_schema",
        "name": "door",
        "schema": {"enum": ["green", "red"]},
        "strict": True,
    }
    ask = {"model": model, "input": "Which?", "text": {"format": form}, "max_output_tokens": 40}
    with client.responses.stream(**ask) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(pieces) in ('"green"', '"red"')


def test_a_tool_is_called_and_its_result_is_read(client: Any, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "tools": [TOOL], "max_output_tokens": 200}
    first = client.responses.create(input="How many?", tool_choice="required", **ask)
    call = next(item for item in first.output if item.type == "function_call")
    assert call.name == "count_ships"
    assert json.loads(call.arguments)["door"] in ("green", "red")
    assert first.status == "completed"
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "forty"}]
    second = client.responses.create(
        input=result, previous_response_id=first.id, tool_choice="none", **ask
    )
    chat = client.chat.completions.create(
        model=model,
        max_tokens=200,
        tools=[{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}],
        tool_choice="none",
        messages=[
            {"role": "user", "content": "How many?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "forty"},
        ],
    )
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.output_text == chat.choices[0].message.content


def test_a_call_is_streamed_with_its_arguments(client: Any, model: str) -> None:
    choice = {"type": "function", "name": "count_ships"}
    events = list(
        client.responses.create(
            model=model,
            input="How many?",
            tools=[TOOL],
            tool_choice=choice,
            stream=True,
            max_output_tokens=200,
        )
    )
    kinds = [each.type for each in events]
    at = kinds.index("response.function_call_arguments.delta")
    assert kinds[at - 1 : at + 3] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert events[at + 1].arguments == events[-1].response.output[0].arguments
    assert kinds[-1] == "response.completed"


def test_a_conversation_goes_on_from_any_of_its_responses(
    client: Any, model: str, served: Served
) -> None:
    exact = {
        "ragfuse": {"policy": "full"}
    }  # so that an answer does not depend on which chunks earlier tests left behind
    ask: dict[str, Any] = {"model": model, "extra_body": exact}
    first = client.responses.create(
        model=model, input="Who kept the northern light?", extra_body={**with_documents(1), **exact}
    )
    second = client.responses.create(input="And the other?", previous_response_id=first.id, **ask)
    branch = client.responses.create(input="And before?", previous_response_id=first.id, **ask)
    third = client.responses.create(input="And then?", previous_response_id=second.id, **ask)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert third.usage.input_tokens > second.usage.input_tokens
    given = [{"role": "user", "content": "Who kept the northern light?"}]
    given += [
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And before?"},
    ]
    documents = [
        {"type": "text-plain", "text": each["text"]} for each in with_documents(1)["documents"]
    ]
    given[0]["content"] = [
        *documents,
        {"type": "input_text", "text": "\n\nWho kept the northern light?"},
    ]
    again = client.responses.create(input=given, store=False, **ask)
    assert again.usage.input_tokens == branch.usage.input_tokens
    assert again.output_text == branch.output_text
    assert {first.id, branch.id} <= sessions(served)
    assert not {second.id, third.id, again.id} & sessions(served)


def test_a_response_is_fetched_and_deleted(client: Any, model: str, served: Served) -> None:
    made = client.responses.create(model=model, input="Who?", metadata={"of": "test"})
    found = client.responses.retrieve(made.id)
    assert found.output_text == made.output_text
    assert found.metadata == {"of": "test"}
    items = client.responses.input_items.list(made.id).data
    assert [(item.role, item.content[0].text) for item in items] == [("user", "Who?")]
    assert made.id in sessions(served)
    client.responses.delete(made.id)
    assert made.id not in sessions(served)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError, match="whole conversation"):
        client.responses.create(model=model, input="And?", previous_response_id=made.id)


def test_what_is_not_to_be_stored_leaves_nothing(client: Any, model: str, served: Served) -> None:
    before = sessions(served)
    made = client.responses.create(model=model, input="Who knows?", store=False)
    assert sessions(served) == before
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    served: Served, fields: dict[str, Any], name: str
) -> None:
    body = {"model": served.service.model, "input": "Who?", **fields}
    answer = served.post("/v1/responses", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(name)


def test_a_thought_is_an_item_of_its_own(tiny_path: Path, tmp_path: Path) -> None:
    folder = thinking_model(tiny_path, tmp_path / "thinking")
    settings = settings_of(folder, tmp_path, max_tokens=40)
    with serving(settings) as served:
        client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=60)
        whole = client.responses.create(model=served.service.model, input="Who?")
        events = list(
            client.responses.create(model=served.service.model, input="Who?", stream=True)
        )
    assert whole.output[0].type == "reasoning"
    thought = "".join(each.delta for each in events if each.type == "response.reasoning_text.delta")
    assert thought == whole.output[0].content[0].text != ""
    assert events[-1].response.output_text == whole.output_text


@pytest.fixture
def two(varied_path: Path, tmp_path: Path) -> Iterator[Served]:
    settings = settings_of(varied_path, tmp_path, max_tokens=4)
    with serving(
        settings, Keys(["blue:a-key-of-the-blue-tenant", "red:a-key-of-the-red-tenant"])
    ) as served:
        yield served


def test_a_tenant_finds_no_response_of_another(two: Served) -> None:
    blue, red = (
        openai.OpenAI(base_url=two.url, api_key=f"a-key-of-the-{name}-tenant", max_retries=0)
        for name in ("blue", "red")
    )
    made = blue.responses.create(model=two.service.model, input="Who?")
    for call in (red.responses.retrieve, red.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        red.responses.create(model=two.service.model, input="And?", previous_response_id=made.id)
    assert blue.responses.retrieve(made.id).id == made.id
