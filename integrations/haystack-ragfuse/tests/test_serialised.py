"""Generators and pipelines written to YAML and read back answer the same; no secret is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from haystack import Pipeline
from haystack.components.generators.utils import print_streaming_chunk
from haystack.core.serialization import component_from_dict, component_to_dict
from haystack.testing.callable_serialization.random_callable import callable_to_deserialize
from haystack.tools import Tool
from haystack.utils import Secret
from haystack_integrations.components.generators.ragfuse import RagfuseChatGenerator

from integrations.tests.doors import Paint
from integrations.tests.haystack_pipelines import asked, rag
from ragfuse import Engine, Grammar, InputError, Settings

TOOL = Tool(
    name="greet",
    description="Greets.",
    parameters={"type": "object", "properties": {"hello": {"type": "string"}}},
    function=callable_to_deserialize,
)


def test_a_generator_is_read_back_as_it_was(tiny_path: Path, tmp_path: Path) -> None:
    made = RagfuseChatGenerator(
        str(tiny_path),
        dtype="float32",
        store=str(tmp_path / "store"),
        settings=Settings(max_tokens=7, learn="retrieved"),
        generation_kwargs={"ratio": 0.3, "stop": ["x"], "response_format": Paint},
        tools=[TOOL],
        streaming_callback=print_streaming_chunk,
    )
    written = component_to_dict(made, "llm")
    read = component_from_dict(RagfuseChatGenerator, written, "llm")
    assert component_to_dict(read, "llm") == written
    assert read.get_engine() is made.get_engine()
    assert read.get_engine().settings.max_tokens == 7
    assert read.generation_kwargs["response_format"]["json_schema"]["name"] == "Paint"
    assert (read.streaming_callback, read.tools) == (print_streaming_chunk, [TOOL])


def test_a_pipeline_goes_through_yaml(tiny_settings: Settings) -> None:
    pipeline = rag(RagfuseChatGenerator(settings=tiny_settings))
    read = Pipeline.loads(pipeline.dumps())
    assert read.to_dict()["components"] == pipeline.to_dict()["components"]
    assert asked(read, "Who?").text == asked(pipeline, "Who?").text


def test_keys_are_written_as_the_name_of_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    made = RagfuseChatGenerator(
        base_url="http://127.0.0.1:9", api_key=Secret.from_env_var("MY_KEY"), max_retries=0
    )
    written = component_to_dict(made, "llm")
    assert "sesame" not in str(written)
    read = component_from_dict(RagfuseChatGenerator, written, "llm")
    assert read.api_key == Secret.from_env_var("MY_KEY")
    assert (read.base_url, read.max_retries) == ("http://127.0.0.1:9/v1", 0)


def test_a_grammar_has_no_form_in_a_file(engine: Engine) -> None:
    llm = RagfuseChatGenerator(engine=engine, generation_kwargs={"grammar": Grammar.regex("a+")})
    with pytest.raises(InputError, match="grammar"):
        llm.to_dict()
