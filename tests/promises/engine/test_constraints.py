"""Tools and grammars through an engine: what is asked for holds, on random weights and on the
embedded model.
"""

import json
import re

import jsonschema
import pytest
import torch

from ragfuse import Ask, Engine, Grammar, InputError, Settings, SettingsError
from ragfuse.hf.grammar import GrammarCompiler, GrammarProcessor
from tests.promises.engine.test_native_calls import ASKED, CITY

TWO = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 8},
        "body": {"type": "string", "maxLength": 8},
    },
    "required": ["title", "body"],
}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "children": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
            },
            "required": ["name", "children"],
        },
        "leaf": {"type": "object", "properties": {"size": DIGIT}, "required": ["size"]},
    },
}
MAIL = {
    "type": "object",
    "properties": {"mail": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.org$"}},
    "required": ["mail"],
}


def tool(name="weather", parameters=CITY):
    return {
        "type": "function",
        "function": {"name": name, "description": "D.", "parameters": parameters},
    }


WARM = {"do_sample": True, "temperature": 1.5, "top_k": 0}


@pytest.fixture(scope="module")
def random_engine(tiny_path, tmp_path_factory):
    """An engine over random weights, whose tokens are bytes: nothing holds by itself."""
    folder = tmp_path_factory.mktemp("calling")
    with Engine(
        Settings(model=str(tiny_path), dtype="float32", store=folder, home=folder, max_tokens=150)
    ) as engine:
        yield engine


def fits(text, schema):
    jsonschema.validate(json.loads(text), schema)
    return True


@pytest.mark.parametrize("options", [{}, WARM], ids=["greedy", "drawn"])
@pytest.mark.parametrize("schema", [TWO, TREE, MAIL], ids=["two", "tree", "mail"])
def test_random_weights_write_json_of_a_schema(random_engine, schema, options):
    answer = random_engine.answer(
        "Write.", Ask(grammar=Grammar.json(schema), max_tokens=400, options=options)
    )
    assert fits(answer.text, schema)
    assert answer.finish_reason == "stop"


def test_rows_of_a_batch_follow_the_grammar_each_by_itself(random_engine):
    ask = Ask(grammar=Grammar.json(TWO), max_tokens=150)
    texts = ["Write.", "Write a longer one, please.", "Hm"]
    together = random_engine.batch(texts, ask)
    assert [answer.text for answer in together] == [
        random_engine.answer(text, ask).text for text in texts
    ]
    assert all(fits(answer.text, TWO) for answer in together)


def test_choices_patterns_and_rules_hold(random_engine):
    for grammar, wanted in (
        (Grammar.choice(["yes", "no, never"]), "yes|no, never"),
        (Grammar.regex("[0-9]{4}"), "[0-9]{4}"),
        (Grammar.lark('start: "(" /[ab]{2}/ ")"'), r"\([ab]{2}\)"),
    ):
        assert re.fullmatch(wanted, random_engine.answer("Say.", Ask(grammar=grammar)).text)


@pytest.mark.parametrize(
    "given",
    [
        {"stop": ['"', "{"]},
        {"options": {"min_new_tokens": 150, "suppress_tokens": [34]}},
    ],
)
def test_stop_strings_and_suppressed_tokens_give_way_to_a_grammar(random_engine, given):
    ask = Ask(grammar=Grammar.json(TWO), max_tokens=150, **given)
    assert fits(random_engine.answer("Write.", ask).text, TWO)


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_tool_that_must_be_called_is_called(random_engine, choice):
    ask = Ask(tools=[tool(), tool("other")], tool_choice=choice, max_tokens=400)
    answer = random_engine.answer(ASKED, ask)
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")
    assert answer.tool_calls
    assert list(random_engine.stream(ASKED, ask)) == []
    for call in answer.tool_calls:
        assert call.name in ((choice,) if choice == "weather" else ("weather", "other"))
        jsonschema.validate(call.arguments, CITY)
        assert call.id.startswith("call_")


def test_a_tool_that_need_not_be_called_leaves_text_and_one_that_must_not_is_not_in_the_prompt(
    random_engine,
):
    for choice in ("auto", "none"):
        answer = random_engine.answer(ASKED, Ask(tools=[tool()], tool_choice=choice, max_tokens=20))
        assert (answer.tool_calls, answer.finish_reason) == ((), "length")
        assert len(answer.text) > 5
    with_none = random_engine.plan(ASKED, Ask(tools=[tool()], tool_choice="none")).prompt.token_ids
    assert (
        with_none
        == random_engine.prompt(ASKED).token_ids
        != random_engine.prompt(ASKED, [tool()]).token_ids
    )


def of_a(schema):
    return {"type": "object", "properties": {"a": schema}}


BAD = {
    "a type": ({"tools": [tool("odd", of_a({"type": "nonsense"}))]}, "odd"),
    "no object": ({"tools": [tool("odd", {"type": "string"})]}, "odd"),
    "two of a name": ({"tools": [tool(), tool()]}, "weather"),
    "a name": ({"tools": [tool("two words")]}, "two words"),
    "an unknown choice": ({"tools": [tool()], "tool_choice": "sunshine"}, "sunshine"),
    "grammar and call": (
        {"tools": [tool()], "tool_choice": "required", "grammar": Grammar.json()},
        "grammar",
    ),
    "a schema": ({"grammar": Grammar.json({"type": "nonsense"})}, "nonsense"),
    "rules": ({"grammar": Grammar.lark("start: x")}, "unknown name"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_told_before_anything_is_loaded(case, tmp_path):
    options, words = BAD[case]
    with Engine(Settings(model=str(tmp_path / "none"), store=tmp_path)) as engine:
        for ask in (
            engine.answer,
            engine.stream,
            engine.plan,
            lambda question, how: engine.batch([question], how),
        ):
            with pytest.raises(InputError, match=words):
                ask(ASKED, Ask(**options))


def test_what_decoding_does_not_hold_of_a_schema_is_logged(random_engine, caplog):
    code = {"type": "string", "pattern": "^(?!x)[a-z]$", "maxLength": 2}
    schema = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    answer = random_engine.answer("Write.", Ask(grammar=Grammar.json(schema), max_tokens=60))
    assert set(json.loads(answer.text)) == {"code"}
    assert "code: pattern" in caplog.text


def test_more_columns_than_tokens_are_never_written(random_engine):
    n_tokens = len(random_engine.model.tokenizer)
    compiler = GrammarCompiler(random_engine.model.tokenizer, n_tokens + 40, (2,))
    wide = GrammarProcessor(compiler, Grammar.regex("[^q]+"))
    scores = wide(torch.zeros((1, 3), dtype=torch.int64), torch.zeros((1, n_tokens + 40)))
    assert scores[0, n_tokens:].isneginf().all()
    assert not scores.isneginf().all()


def test_what_a_grammar_makes_is_no_call(random_engine):
    said = 'a<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    answer = random_engine.answer(
        ASKED, Ask(tools=[tool()], grammar=Grammar.choice([said]), max_tokens=80)
    )
    assert (answer.text, answer.tool_calls, answer.finish_reason) == (said, (), "stop")


@pytest.mark.parametrize(("first", "named"), [("{", []), ("<", ["weather"])])
def test_an_answer_of_a_schema_may_call_tools_instead(random_engine, first, named):
    options = {"logit_bias": {random_engine.tokens(first)[0]: 100.0}}
    one = {"tools": [tool(parameters={"type": "object"})], "parallel_tool_calls": False}
    answer = random_engine.answer(ASKED, Ask(grammar=Grammar.json(TWO), options=options, **one))
    assert [call.name for call in answer.tool_calls] == named
    assert answer.text == "" if named else set(json.loads(answer.text)) == {"title", "body"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("min_p", "much"),
        ("temperature", float("nan")),
    ],
)
def test_numbers_of_sampling_outside_of_their_range_are_told(name, value):
    for make in (Ask.generate_options, lambda options: Ask(options=options)):
        with pytest.raises(SettingsError, match=rf"^{name}: .*found") as refused:
            make({name: value})
        assert refused.value.argument == name


def test_options_that_change_nothing_without_a_temperature_are_left_out():
    given = {"top_p": 0.5, "top_k": 5, "min_p": None, "presence_penalty": 1, "max_tokens": 3}
    assert Ask.generate_options(given) == {"presence_penalty": 1.0}
    sampled = {
        "temperature": 2.0,
        "top_p": 0.5,
        "top_k": 5,
        "presence_penalty": 1.0,
        "do_sample": True,
    }
    assert Ask.generate_options({**given, "temperature": 2}) == sampled
    assert Ask.generate_options({"temperature": 0}) == {}
