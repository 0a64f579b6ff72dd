"""Templates of other libraries as schemas, by what they have; the libraries' own where they are
installed.
"""

from typing import get_args

import pytest

from ragfuse.errors import PMLError
from ragfuse.schemas.frontends.templates import Syntax, from_template
from ragfuse.schemas.nodes import Param, Role, Schema, TextNode

WANTED = (
    Role("system", (TextNode("You know "), Param("topic", 8), TextNode("."))),
    Role("user", (Param("question", 30), TextNode("\n{in JSON}"))),
    Role("assistant", (TextNode("So:"),)),
)
ROOMS = {"topic": 8, "question": 30}


PAIRS = [("system", "You know {topic}."), ("human", "{question}\n{{in JSON}}"), ("ai", "So:")]


def test_pairs_become_messages_a_text_the_schema_s_own_and_variables_parameters():
    assert from_template("t", PAIRS, ROOMS) == Schema("t", WANTED)
    x = Param("x", 3)
    assert from_template("t", "a{x}b{x}", 3).items == (TextNode("a"), x, TextNode("b"), x)


def test_langchain_s_prompts_are_taken():
    prompts = pytest.importorskip("langchain_core.prompts")
    chat = prompts.ChatPromptTemplate.from_messages(PAIRS)
    assert from_template("t", chat, ROOMS).items == WANTED
    plain = prompts.PromptTemplate.from_template("a{topic}")
    assert from_template("t", plain, ROOMS).items == (TextNode("a"), Param("topic", 8))
    jinja = prompts.ChatPromptTemplate.from_messages(
        [("human", "a {{topic}} {b}")], template_format="jinja2"
    )
    assert from_template("t", jinja, 8).items == (
        Role("user", (TextNode("a "), Param("topic", 8), TextNode(" {b}"))),
    )
    messages = pytest.importorskip("langchain_core.messages")
    fixed = prompts.ChatPromptTemplate.from_messages(
        [messages.SystemMessage("no {variable}"), ("human", "{topic}")]
    )
    assert from_template("t", fixed, ROOMS).items[0] == Role("system", (TextNode("no {variable}"),))
    history = prompts.ChatPromptTemplate.from_messages(
        [prompts.MessagesPlaceholder("history"), ("human", "{topic}")]
    )
    with pytest.raises(PMLError, match="MessagesPlaceholder in a template"):
        from_template("t", history, ROOMS)


def test_llama_index_s_prompts_are_taken():
    prompts = pytest.importorskip("llama_index.core.prompts")
    rich = prompts.RichPromptTemplate(
        """{% chat role="system" %}You know {{ topic }}.{% endchat %}

{% chat role="user" %}{{question}}
{in JSON}{% endchat %}{% chat role="assistant" %}So:{% endchat %}"""
    )
    assert from_template("t", rich, ROOMS).items == WANTED
    for syntax in get_args(Syntax):  # which counts for texts and pairs alone
        plain = from_template("t", prompts.PromptTemplate("a{topic}"), ROOMS, syntax)
        assert plain.items == (TextNode("a"), Param("topic", 8))
    chat = prompts.ChatPromptTemplate.from_messages(
        [("system", "You know {topic}."), ("user", "{question}")]
    )
    assert from_template("t", chat, ROOMS).items == (
        WANTED[0],
        Role("user", (Param("question", 30),)),
    )


@pytest.mark.parametrize(
    ("template", "syntax", "found"),
    [
        ("a {x} {y}", "f-string", "t:1:1: found variable 'y' without a maximum length"),
        ("a\n{x.y}", "f-string", "'x.y' in a template|variable 'x.y'"),
        ("{x:>3}", "f-string", "variable 'x:.*' in a template"),
        ("{x!r}", "f-string", "variable 'x:.*' in a template"),
        ("{}", "f-string", "'' in a template"),
        ("{x", "f-string", "str.format cannot read"),
        ("a\n{% if x %}b{% endif %}", "jinja2", "if x %}b"),
        ("{{ x | upper }}", "jinja2", "'{{ x | upper }}' in a template"),
        ("{{ x", "jinja2", "'{{ x' in a template"),
        ("{{x}}", "mustache", "f-string or jinja2"),
        ("{# no #}a", "jinja2", "'{# no #}a' in a template"),
        ("{{- x -}}", "jinja2", "'{{- x -}}' in a template"),
        ([("tool", "a")], "f-string", "role 'tool'"),
    ],
)
def test_what_no_schema_can_hold_is_refused(template, syntax, found):
    with pytest.raises(PMLError, match=found):
        from_template("t", template, {"x": 3}, syntax)


@pytest.mark.parametrize("text", ["a{{ x }}\n", ' {"a": {{x}}} }', "{{ x }}-{{ x }}\n\n"])
def test_jinja_s_variables_are_read_as_jinja_does(text):
    items = from_template("t", text, 3, "jinja2").items
    said = "".join(
        "X" if isinstance(item, Param) else item.text
        for item in items
        if isinstance(item, Param | TextNode)
    )
    assert said == pytest.importorskip("jinja2").Template(text).render(x="X")
