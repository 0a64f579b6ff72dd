"""`/v1/responses`, by OpenAI's own client: texts, streams, tools, forms, conversations, what is
stored and deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.serve import (
    BLUE,
    DOOR,
    GREEN,
    TENANTS,
    TOOL,
    Client,
    Served,
    client_of,
    refused,
    said,
    with_documents,
)
from tests.kits.thinking import thinking_model

openai = pytest.importorskip("openai", reason="the client is not installed")

TOOLS = [{"type": "function", **TOOL}]


def sessions(served: Served) -> set[str]:
    engine = served.engine()
    engine.flush()
    return {each.id for each in engine.sessions.ls() if each.persistent}


def test_an_input_is_answered_as_a_chat_is(client: Client) -> None:
    chat = client.chat(messages=[said("Be brief.", "system"), said("Who came?")])
    found = client.respond("Who came?", instructions="Be brief.")
    assert found.output_text == chat.choices[0].message.content
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.usage.output_tokens == 12
    assert found.model == client.model


def test_a_stream_has_every_event_in_order_and_ends_in_the_same_response(client: Client) -> None:
    whole = client.respond("Who kept the light?")
    events = list(client.respond("Who kept the light?", stream=True))
    kinds = [each.type.removeprefix("response.") for each in events]
    opened = ["created", "in_progress", "output_item.added", "content_part.added"]
    closed = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert (kinds[:4], kinds[-4:]) == (opened, closed)
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert "".join(each.delta for each in events[4:-4]) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text == events[-4].text
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_the_clients_own_helper_reads_the_stream_of_a_schema(client: Client) -> None:
    form = {"type": "json_schema", "name": "door", "schema": DOOR["properties"]["door"]}
    ask = {"model": client.model, "input": "Which?", "text": {"format": {**form, "strict": True}}}
    with client.openai.responses.stream(**ask, max_output_tokens=40) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(pieces) in ('"green"', '"red"')


def test_a_tool_is_called_and_its_result_is_read(client: Client) -> None:
    ask: dict[str, Any] = {"tools": TOOLS, "max_output_tokens": 200}
    first = client.respond("How many?", tool_choice="required", **ask)
    call = next(item for item in first.output if item.type == "function_call")
    assert call.name == "count_ships"
    assert json.loads(call.arguments)["door"] in ("green", "red")
    assert first.status == "completed"
    events = list(
        client.respond(
            "How many?", tool_choice={"type": "function", "name": call.name}, stream=True, **ask
        )
    )
    kinds = [each.type.removeprefix("response.") for each in events]
    at = kinds.index("function_call_arguments.delta")
    assert (kinds[at - 1], kinds[-1]) == ("output_item.added", "completed")
    assert kinds[at + 1 : at + 3] == ["function_call_arguments.done", "output_item.done"]
    assert events[at + 1].arguments == events[-1].response.output[0].arguments == call.arguments
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "forty"}]
    second = client.respond(result, previous_response_id=first.id, tool_choice="none", **ask)
    function = {"name": call.name, "arguments": call.arguments}
    called = [{"id": call.call_id, "type": "function", "function": function}]
    chat = client.chat(
        max_tokens=200,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice="none",
        messages=[
            said("How many?"),
            {"role": "assistant", "content": None, "tool_calls": called},
            {"role": "tool", "tool_call_id": call.call_id, "content": "forty"},
        ],
    )
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.output_text == chat.choices[0].message.content


def test_a_conversation_goes_on_from_any_of_its_responses(client: Client, served: Served) -> None:
    # exact, so that no answer depends on which chunks earlier tests left behind
    exact = {"ragfuse": {"policy": "full"}}
    question = "Who kept the northern light?"
    first = client.respond(question, extra_body={**with_documents(1), **exact})

    def after(response: Any, text: str) -> Any:
        return client.respond(text, previous_response_id=response.id, extra_body=exact)

    second, branch = after(first, "And the other?"), after(first, "And before?")
    third = after(second, "And then?")
    sizes = [each.usage.input_tokens for each in (first, second, third)]
    assert sizes == sorted({*sizes})
    documents = [
        {"type": "text-plain", "text": each["text"]} for each in with_documents(1)["documents"]
    ]
    asked = [*documents, {"type": "input_text", "text": f"\n\n{question}"}]
    given = [
        {"role": "user", "content": asked},
        said(first.output_text, "assistant"),
        said("And before?"),
    ]
    again = client.respond(given, store=False, extra_body=exact)
    assert again.usage.input_tokens == branch.usage.input_tokens
    assert again.output_text == branch.output_text
    assert sessions(served) & {each.id for each in (first, second, third, branch, again)} == {
        first.id
    }


def test_a_response_is_fetched_and_deleted(client: Client, served: Served) -> None:
    responses = client.openai.responses
    made = client.respond(metadata={"of": "test"})
    found = responses.retrieve(made.id)
    assert found.output_text == made.output_text
    assert found.metadata == {"of": "test"}
    assert made.id in sessions(served)
    responses.delete(made.id)
    assert made.id not in sessions(served)
    for call in (responses.retrieve, responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        client.respond(previous_response_id=made.id)


def test_what_is_not_to_be_stored_leaves_nothing(client: Client, served: Served) -> None:
    before = sessions(served)
    made = client.respond("Who knows?", store=False)
    assert sessions(served) == before
    with pytest.raises(openai.NotFoundError):
        client.openai.responses.retrieve(made.id)


IMAGE = {"type": "input_image", "image_url": "x"}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input"),
        ({"background": True}, "background"),
    ],
)
def test_a_bad_request_names_its_field(served: Served, fields: dict[str, Any], name: str) -> None:
    body = {"model": served.service.model, "input": "Who?", **fields}
    assert refused(served.post("/v1/responses", body))["param"].startswith(name)


def test_a_thought_is_an_item_of_its_own(
    make_server: Callable[..., Served], tiny_path: Path, tmp_path: Path
) -> None:
    served = make_server(model=thinking_model(tiny_path, tmp_path / "thinking"), max_tokens=40)
    whole = client_of(served).respond()
    events = list(client_of(served).respond(stream=True))
    assert whole.output[0].type == "reasoning"
    thought = "".join(each.delta for each in events if each.type == "response.reasoning_text.delta")
    assert thought == whole.output[0].content[0].text != ""
    assert events[-1].response.output_text == whole.output_text


def test_a_tenant_finds_no_response_of_another(make_server: Callable[..., Served]) -> None:
    served = make_server(TENANTS, max_tokens=4)
    blue, green = (client_of(served.of(key)) for key in (BLUE, GREEN))
    made = blue.respond()
    for call in (
        green.openai.responses.retrieve,
        green.openai.responses.delete,
        lambda id: green.respond(previous_response_id=id),
    ):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    assert blue.openai.responses.retrieve(made.id).id == made.id
