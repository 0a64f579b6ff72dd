"""How calls of tools stand in text: known by each template, written, read back, never mistaken for
text.
"""

import json

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ragfuse.text import chat_template as formats
from ragfuse.text.chat_messages import ChatMessage, Piece
from ragfuse.text.chat_template import call_format
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, CallFormat, CallReader, spelled
from ragfuse.types.answer import ToolCall


def read(format, text, schemas=None):
    """All complete calls in an answer."""
    at = format.opens(text)
    return CallReader(format, schemas or {}).read(text, at) if at >= 0 else ()


HERMES = """{% if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}{% if m.content %}
{{ m.content }}{% endif %}{% for call in m.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{
raise_exception('one call at a time') }}{% endif %}<|start|>assistant<|sep|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{
m.tool_calls[0].function.arguments | tojson }}}<|im_end|>{%
elif m.role == 'tool' %}<|start|>ipython<|sep|>

{{ m.content | tojson }}<|im_end|>{% else %}<|start|>{{ m.role }}<|sep|>

{% if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{% endif %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}{%
if add_generation_prompt %}<|start|>assistant<|sep|>

{% endif %}"""
MISTRAL = """{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] {{
tools | tojson }}[/AVAILABLE_TOOLS]{%
endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{%
if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}{% set out = call.function | tojson %}{{
out[:-1] }}, "id": "{{ call.id }}"}{{ "]" if loop.last else ", " }}{% endfor %}<|im_end|>{% elif m.role == 'tool' %}{%
if m.tool_call_id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}[TOOL_RESULTS] {"content": {{
m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% else %} {{ m.content }}<|im_end|>{%
endif %}{% endfor %}"""
DEEP = """{% for m in messages %}{% if m.role == 'user' %}{% if tools %}{{ tools | tojson }}{% endif %}<|user|>{{
m.content }}{%
elif m.tool_calls %}<|assistant|><\uff5ctool▁calls▁begin\uff5c>{% for call in m.tool_calls %}{{
'' if loop.first else '\n' }}<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>{{ call.function.name }}
```json
{{ call.function.arguments + '' }}
```<\uff5ctool▁call▁end\uff5c>{% endfor %}<\uff5ctool▁calls▁end\uff5c><|im_end|>{%
elif m.role == 'tool' %}<|result|>{{ m.content }}{% else %}<|assistant|>{{
m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
THINKS = HERMES.replace(
    "{% if m.content %}",
    "{% if loop.last and m.role == 'assistant' %}\n<think>\n\n</think>\n{% endif %}{% if"
    " m.content %}",
)
XML = HERMES.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    "<function={{ call.function.name }}>"
    "{% for k, v in call.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}",
)
BEGIN, REST = HERMES.split("{% for call in m.tool_calls %}")
END = REST[REST.index("{% endfor %}") :]
EACH = "{% for call in m.tool_calls %}"
PAIR = "{% for k, v in call.function.arguments.items() %}"
CODER = f"""{BEGIN}{EACH}
<tool_call>
<function={{{{ call.function.name }}}}>
{PAIR}<parameter={{{{ k }}}}>
{{{{ v if v is string else v | tojson }}}}
</parameter>
{{% endfor %}}</function>
</tool_call>{END}"""
GLM = f"""{BEGIN}{EACH}
<tool_call>{{{{ call.function.name }}}}
{PAIR}<arg_key>{{{{ k }}}}</arg_key>
<arg_value>{{{{ v if v is string else v | tojson }}}}</arg_value>
{{% endfor %}}</tool_call>{END}"""
TIGHT = (
    GLM.replace("}}\n{% for k", "}}{% for k")
    .replace("</arg_key>\n", "</arg_key>")
    .replace("</arg_value>\n", "</arg_value>")
    .replace("\n<tool_call>", "<tool_call>")
)
NEWER = """{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{%
endif %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}{% for call in m.tool_calls %}[TOOL_CALLS]{{
call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>{% elif m.role == 'tool' %}{{
'[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"""
SILENT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor"
    " %}<|im_start|>assistant\n"
)
TYPES = {
    "weather": json.dumps({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
}
A, B = ToolCall("weather", {"city": 'Rom "a"\n', "days": 2}), ToolCall("walk.to", {})


def render_of(source: str):
    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    world = ImmutableSandboxedEnvironment(trim_blocks=False, lstrip_blocks=False)
    world.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    world.globals["raise_exception"] = refuse
    template = world.from_string(source)
    return lambda messages, tools=(), ask=True: template.render(
        messages=messages, tools=list(tools) or None, add_generation_prompt=ask
    )


def format_of(source: str) -> CallFormat:
    return call_format(render_of(source))


WRITES = {
    "hermes": (HERMES, formats.HERMES),
    "hermes behind a thought": (THINKS, formats.HERMES),
    "llama": (LLAMA, formats.LLAMA),
    "mistral list": (MISTRAL, formats.MISTRAL_LIST),
    "mistral": (NEWER, formats.MISTRAL),
    "deepseek": (DEEP, formats.DEEPSEEK),
    "coder": (CODER, formats.QWEN_CODER),
    "glm": (GLM, formats.GLM),
    "tight": (TIGHT, formats.GLM_TIGHT),
    "no tools": (SILENT, DEFAULT_CALL_FORMAT),
    "no known format": (XML, DEFAULT_CALL_FORMAT),
    "bare JSON behind an unknown mark": (
        LLAMA.replace('{"name"', '<|call|>{"name"'),
        DEFAULT_CALL_FORMAT,
    ),
}


@pytest.mark.parametrize(("source", "wanted"), WRITES.values(), ids=WRITES.keys())
def test_a_template_is_known_by_the_calls_that_it_writes(source, wanted):
    assert format_of(source) is wanted


def test_a_token_before_bare_json_belongs_to_the_call():
    found = format_of(LLAMA)
    for lead in ("", "<|python_tag|>"):
        (call,) = read(found, lead + found.write((A,)))
        assert (call.name, call.arguments) == (A.name, A.arguments)
        assert found.opens(f"{lead} See") == -1
    assert ready(found, "<|pyth") == 0 == ready(found, "<|python_tag|>")
    assert ready(found, "<b>") == 3


@pytest.mark.parametrize("source", [CODER, GLM, TIGHT], ids=["coder", "glm", "tight"])
def test_values_that_stand_as_they_are_are_read_by_their_schema(source):
    arguments = {
        "code": 'if x < 1:\n\tprint("</p>")\n',
        "text": "5",
        "count": 5,
        "share": 0.5,
        "sure": True,
        "all": ["a", {"b": None}],
        "nothing": None,
        "either": 7,
        "any": {"x": "y"},
        "é": "ü",
    }
    kinds = {
        "code": "string",
        "text": "string",
        "count": "integer",
        "share": "number",
        "sure": "boolean",
        "all": "array",
    }
    schema = {
        "type": "object",
        "properties": {
            **{name: {"type": kind} for name, kind in kinds.items()},
            "nothing": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/number"}]},
            "any": {},
        },
        "$defs": {"number": {"type": "integer"}},
    }
    found = format_of(source)
    text = found.write((ToolCall("walk", arguments),))
    rendered = render_of(source)(
        [found.message(ChatMessage("assistant", "", (ToolCall("walk", arguments, "1"),)))],
        (),
        False,
    )
    assert text in rendered  # as the template itself writes it
    (call,) = read(found, text, {"walk": json.dumps(schema)})
    assert call.arguments == arguments
    (python,) = read(found, text.replace("true", "True"), {"walk": json.dumps(schema)})
    assert python.arguments["sure"] is True


def ready(format: CallFormat, text: str) -> int:
    """How much of a text's beginning is no part of a call, whatever follows."""
    at = format.opens(text)
    return at if at >= 0 else len(text) - format.undecided(text)


FORMATS = [
    DEFAULT_CALL_FORMAT,
    *map(format_of, (HERMES, LLAMA, MISTRAL, DEEP, CODER, GLM, TIGHT, NEWER)),
]
IDS = ["plain", "hermes", "llama", "mistral", "deep", "coder", "glm", "tight", "newer"]


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_what_is_written_is_read_back_with_new_ids(format):
    calls = (A, B) if format.again is not None else (A,)
    found = read(format, format.write(calls), TYPES)
    assert [(call.name, call.arguments) for call in found] == [
        (call.name, call.arguments) for call in calls
    ]
    assert len({call.id for call in found}) == len(calls)
    assert all(call.id.startswith("call_") for call in found)


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_a_call_that_is_cut_off_is_none_and_its_markup_no_text(format):
    whole = format.write((A,))
    for size in range(len(format.head), len(whole) - len(format.tail)):
        assert read(format, whole[:size]) == ()
        assert format.opens(whole[:size]) == 0


@pytest.mark.parametrize(
    "format", [DEFAULT_CALL_FORMAT, *map(format_of, (HERMES, MISTRAL, DEEP, CODER, GLM, NEWER))]
)
def test_text_is_ready_only_where_no_call_can_begin(format):
    text = "Let me see <b>.\n\n" + format.write((A,))
    ends = [ready(format, text[:size]) for size in range(len(text) + 1)]
    assert ends == sorted(ends)
    assert ends[-1] == len("Let me see <b>.") == max(ends)


def test_a_call_made_twice_is_made_once():
    text = DEFAULT_CALL_FORMAT.write((A, B, A))
    assert [call.name for call in read(DEFAULT_CALL_FORMAT, text)] == ["weather", "walk.to"]
    for calls, repeats in (((A, B, A), True), ((A, B), False)):
        reader = CallReader(DEFAULT_CALL_FORMAT)
        reader.read(DEFAULT_CALL_FORMAT.write(calls), 0)
        assert reader.repeats is repeats


def test_plain_words_tell_of_tools_calls_and_results_and_keep_chunks():
    chunk = Piece("It rains in Rome.", "chunk", "news")
    turns = [
        ChatMessage("user", (Piece("Weather?"),)),
        ChatMessage("assistant", (), (ToolCall("weather", {"city": "Rome"}, "1"),)),
        ChatMessage("tool", (chunk,), tool_call_id="1"),
        ChatMessage("tool", (Piece("12 degrees"),), tool_call_id="2"),
        ChatMessage("user", (Piece("So?"),)),
    ]
    told = spelled(turns, [{"type": "function", "function": {"name": "weather"}}])
    assert [turn.role for turn in told] == ["system", "user", "assistant", "user"]
    assert '{"name": "weather"}' in told[0].content[0].text
    assert read(DEFAULT_CALL_FORMAT, told[2].text)[0].arguments == {"city": "Rome"}
    assert chunk in told[3].content
    said = told[3].text
    assert said.count("<tool_response>") == 2
    assert said.endswith("So?")
