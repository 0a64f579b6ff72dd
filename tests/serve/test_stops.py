"""Where an answer ends and how it calls tools, over HTTP, streamed or not: the same as through an
engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from ragfuse import Settings
from tests.engine.test_native_calls import TOOLS, save_with_template
from tests.serve.kit import QUESTION, Served, serving
from tests.serve.test_fields import asked, joined, pieces, whole

PROMPT = "The keeper of the lighthouse"


def both_ways(served: Served, kind: str, **fields: Any) -> tuple[dict[str, Any], int]:
    """What the one answer says, the same streamed and whole, and how many tokens were written."""
    answer = asked(served, kind, fields)
    assert answer.status_code == 200, answer.text
    streamed = joined(pieces(asked(served, kind, fields, {"stream": True}).text))
    assert streamed == whole(answer)
    return streamed[0], answer.json()["usage"]["completion_tokens"]


def server(folder: Path, home: Path) -> Iterator[Served]:
    with serving(
        Settings(model=str(folder), dtype="float32", store=home, home=home, max_tokens=12)
    ) as made:
        yield made


@pytest.fixture(scope="module")
def stopping(
    served: Served, varied_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server over the same model, whose generation config names stop strings and wants token
    healing.
    """
    home = tmp_path_factory.mktemp("stopping")
    shutil.copytree(varied_path, home / "model")
    config = GenerationConfig.from_pretrained(varied_path)
    stops = [both_ways(served, kind)[0]["text"][4:6] for kind in ("chat", "text")]
    config.update(stop_strings=stops, token_healing=True)
    config.save_pretrained(home / "model")
    yield from server(home / "model", home / "store")


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_stop_strings_of_a_generation_config_end_answers_over_http(
    served: Served, stopping: Served, kind: str
) -> None:
    free, _ = both_ways(served, kind)
    stops = [both_ways(served, each)[0]["text"][4:6] for each in ("chat", "text")]
    held, _ = both_ways(stopping, kind)
    assert held["text"] == min((free["text"].split(stop)[0] for stop in stops), key=len)
    assert held["why"] == "stop"
    sooner, _ = both_ways(stopping, kind, stop=free["text"][1])
    assert sooner["text"] == free["text"].split(free["text"][1])[0]


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stop_string_that_begins_in_the_prompt_does_not_end_the_answer(
    served: Served, kind: str
) -> None:
    free, n_tokens = both_ways(served, kind)
    first, before = free["text"][0], (f"{QUESTION}\n" if kind == "chat" else PROMPT)
    stops = [before, before[-1] + first, before[-4:] + free["text"][:2], "<|assistant|>" + first]
    held, n_held = both_ways(served, kind, stop=stops)
    assert (held, n_held) == (free, n_tokens)


@pytest.fixture(scope="module")
def padding(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over a model that may write anything."""
    yield from server(tiny_path, tmp_path_factory.mktemp("padding"))


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_pad_tokens_that_a_model_writes_are_counted_over_http(padding: Served, kind: str) -> None:
    pad = AutoTokenizer.from_pretrained(padding.service.settings.model).pad_token_id
    told, n_tokens = both_ways(padding, kind, logit_bias={str(pad): 100}, max_tokens=9)
    assert (told["text"], told["why"], n_tokens) == ("", "length", 9)


@pytest.fixture(scope="module", params=["coder", "glm", "args", "bare"])
def native(
    request: pytest.FixtureRequest, tiny_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A server over a model whose chat template writes calls in its own way."""
    home = tmp_path_factory.mktemp(request.param)
    save_with_template(tiny_path, home / "model", request.param)
    yield from server(home / "model", home / "store")


def test_calls_of_a_native_format_are_openai_s_over_http(native: Served) -> None:
    ask = {
        "tools": list(TOOLS),
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 120,
    }
    warm = {"temperature": 1.2, "seed": 1}
    answer = asked(native, "chat", ask, warm)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] in ("weather", "news")
    streamed = pieces(asked(native, "chat", ask, warm, {"stream": True}).text)
    assert joined(streamed) == whole(answer)
    assert joined(streamed)[0]["why"] == "tool_calls"
    (delta,) = (
        each for event in streamed for each in event["choices"][0]["delta"].get("tool_calls", ())
    )
    assert delta["function"] == call["function"]


def test_a_call_without_room_ends_at_the_length_over_http(native: Served) -> None:
    for choice, limit in (("required", 1), ({"type": "function", "function": {"name": "news"}}, 8)):
        told, n_tokens = both_ways(
            native, "chat", tools=list(TOOLS), tool_choice=choice, max_tokens=limit
        )
        assert (told["text"], told["calls"], told["why"], n_tokens) == ("", 0, "length", limit)
