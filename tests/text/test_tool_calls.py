"""How calls of tools stand in text: found on each template, written, read back, never mistaken for text."""

import json

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ragfuse.text.call_probe import call_format
from ragfuse.text.chat_messages import ChatMessage, Piece
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, CallFormat, CallReader, Pairs, spelled
from ragfuse.types.answer import ToolCall

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
elif m.tool_calls %}<|assistant|><|calls|>{% for call in m.tool_calls %}<|call|>function<|sep|>{{ call.function.name }}
```json
{{ call.function.arguments + '' }}
```<|end|>{% endfor %}<|im_end|>{% elif m.role == 'tool' %}<|result|>{{ m.content }}{% else %}<|assistant|>{{
m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
THINKS = HERMES.replace(
    "{% if m.content %}",
    "{% if loop.last and m.role == 'assistant' %}\n<think>\n\n</think>\n{% endif %}{% if m.content %}",
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
)
NEWER = """{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{%
endif %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}{% for call in m.tool_calls %}[TOOL_CALLS]{{
call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>{% elif m.role == 'tool' %}{{
'[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"""
SILENT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
OWN = ["<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|calls|>", "<|call|>"]
TYPES = {"weather": json.dumps({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})}
A, B = ToolCall("weather", {"city": 'Rom "a"\n', "days": 2}), ToolCall("walk.to", {})


def render_of(source: str):
    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    world = ImmutableSandboxedEnvironment(trim_blocks=False, lstrip_blocks=False)
    world.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    world.globals["raise_exception"] = refuse
    template = world.from_string(source)
    return lambda messages, tools=(), ask=True: template.render(
        messages=messages, tools=list(tools) or None, add_generation_prompt=ask
    )


def format_of(source: str) -> CallFormat:
    return call_format(render_of(source), OWN, ["<|im_end|>"])


def test_hermes_is_found():
    for source in (HERMES, THINKS):
        found = format_of(source)
        assert found.native
        assert found.marker == "<tool_call>"
        assert not found.as_text
        assert found.head.strip() == '<tool_call>\n{"name": "'
        assert found.inner == ('", "arguments": ',)
        assert found.again == '}\n</tool_call>\n<tool_call>\n{"name": "'
        assert found.tail == "}\n</tool_call>"


EMPTY = "\n<think></think>"
THOUGHTS = {
    "an empty one before every answer": lambda source: source.replace(
        "<|im_start|>{{ m.role }}", "<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}" + EMPTY + "{% endif %}"
    ),
    "begun by the prompt, gone from earlier turns": lambda source: THOUGHTS["an empty one before the last answer"](
        source
    ).replace(
        "{% if add_generation_prompt %}<|im_start|>assistant\n",
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
    ),
    "an empty one before the last answer": lambda source: source.replace(
        "{% if m.content %}",
        "{% if loop.last and m.role == 'assistant' %}\n<think>\n\n</think>\n{% endif %}{% if m.content %}",
    ),
    "an empty one in the prompt": lambda source: source.replace(
        "{% if add_generation_prompt %}<|im_start|>assistant\n",
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
}


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("[THINK]", "[/THINK]")], ids=lambda tags: tags[0])
@pytest.mark.parametrize("thoughts", THOUGHTS)
@pytest.mark.parametrize("calls", ["HERMES", "CODER", "GLM", "TIGHT"])
def test_a_call_is_found_whatever_thoughts_a_template_writes_before_it(calls, thoughts, tags):
    bare = globals()[calls]
    source = THOUGHTS[thoughts](bare)
    assert source != bare
    wanted, found = format_of(bare), format_of(source.replace("<think>", tags[0]).replace("</think>", tags[1]))
    assert found.native
    assert found.head.strip() == wanted.head.strip()
    assert (found.inner, found.again, found.tail, found.pairs) == (
        wanted.inner,
        wanted.again,
        wanted.tail,
        wanted.pairs,
    )
    assert found.marker == wanted.marker


def test_bare_json_is_found_with_one_call_at_a_time():
    found = format_of(LLAMA)
    assert (found.head, found.inner, found.tail) == ('{"name": "', ('", "parameters": ',), "}")
    assert found.native
    assert found.again is None
    assert found.marker == ""


def test_a_list_of_calls_with_ids_of_nine_letters_is_found():
    found = format_of(MISTRAL)
    assert found.native
    assert found.id_size == 9
    assert found.slots == ("name", "arguments", "id")
    assert found.marker == "[TOOL_CALLS]"
    assert found.head == '[TOOL_CALLS] [{"name": "'
    assert found.tail == '"}]'
    assert found.again == '"}, {"name": "'


def test_arguments_that_must_be_text_are_found():
    found = format_of(DEEP)
    assert found.native
    assert found.as_text
    assert found.marker == "<|calls|>"
    assert found.inner == ("\n```json\n",)
    assert found.tail == "\n```<|end|>"


def test_arguments_that_are_written_one_by_one_are_found():
    found = format_of(CODER)
    assert found.native
    assert (found.head, found.inner) == ("<tool_call>\n<function=", (">\n",))
    assert found.pairs == Pairs("<parameter=", ">\n", "\n</parameter>\n")
    assert found.tail == "</function>\n</tool_call>"
    assert found.again == "</function>\n</tool_call>\n<tool_call>\n<function="
    for source, gap in ((GLM, "\n"), (TIGHT, "")):
        found = format_of(source)
        assert (found.head, found.inner, found.tail) == ("<tool_call>", (gap,), "</tool_call>")
        assert found.pairs == Pairs("<arg_key>", f"</arg_key>{gap}<arg_value>", f"</arg_value>{gap}")


def test_a_name_before_its_arguments_without_quotes_is_found():
    found = format_of(NEWER)
    assert (found.head, found.inner, found.again, found.tail) == ("[TOOL_CALLS]", ("[ARGS]",), "[TOOL_CALLS]", "")
    assert found.marker == "[TOOL_CALLS]"


def test_a_token_before_bare_json_belongs_to_the_call():
    found = call_format(render_of(LLAMA), [*OWN, "<|python_tag|>"], ["<|im_end|>"])
    for lead in ("", "<|python_tag|>"):
        (call,) = found.read(lead + found.write((A,)))
        assert (call.name, call.arguments) == (A.name, A.arguments)
        assert found.opens(f"{lead} See") == -1
    assert ready(found, "<|pyth") == 0 == ready(found, "<|python_tag|>")
    assert ready(found, "<b>") == 3


@pytest.mark.parametrize("source", [CODER, GLM, TIGHT], ids=["coder", "glm", "tight"])
def test_values_that_stand_as_they_are_are_read_by_their_schema(source: str):
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
        [found.message(ChatMessage("assistant", "", (ToolCall("walk", arguments, "1"),)), "", lambda value: value)],
        (),
        False,
    )
    assert text in rendered  # as the template itself writes it
    (call,) = found.read(text, {"walk": json.dumps(schema)})
    assert call.arguments == arguments
    (python,) = found.read(text.replace("true", "True"), {"walk": json.dumps(schema)})
    assert python.arguments["sure"] is True


@pytest.mark.parametrize("source", [CODER, GLM, TIGHT], ids=["coder", "glm", "tight"])
def test_a_call_without_the_white_space_of_its_format_is_read_too(source: str):
    found = format_of(source)
    tight = "".join(line.strip() for line in found.write((ToolCall("walk", {"to": "Rome", "by": "bus"}),)).splitlines())
    (call,) = found.read(tight)
    assert (call.name, call.arguments) == ("walk", {"to": "Rome", "by": "bus"})


@pytest.mark.parametrize("source", [SILENT, XML], ids=["no tools", "no way to tell"])
def test_what_fits_no_format_is_written_in_plain_words(source: str):
    assert format_of(source) is DEFAULT_CALL_FORMAT


def ready(format: CallFormat, text: str) -> int:
    """How much of a text's beginning is no part of a call, whatever follows."""
    at = format.opens(text)
    return at if at >= 0 else len(text) - format.undecided(text)


FORMATS = [DEFAULT_CALL_FORMAT, *map(format_of, (HERMES, LLAMA, MISTRAL, DEEP, CODER, GLM, TIGHT, NEWER))]
IDS = ["plain", "hermes", "llama", "mistral", "deep", "coder", "glm", "tight", "newer"]


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_what_is_written_is_read_back_with_new_ids(format: CallFormat):
    calls = (A, B) if format.again is not None else (A,)
    read = format.read(format.write(calls), TYPES)
    assert [(call.name, call.arguments) for call in read] == [(call.name, call.arguments) for call in calls]
    assert len({call.id for call in read}) == len(calls)
    assert all(call.id.startswith("call_") for call in read)


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_a_call_that_is_cut_off_is_none_and_its_markup_no_text(format: CallFormat):
    whole = format.write((A,))
    for size in range(len(format.head), len(whole) - len(format.tail)):
        assert format.read(whole[:size]) == ()
        assert format.opens(whole[:size]) == 0


@pytest.mark.parametrize("format", [DEFAULT_CALL_FORMAT, *map(format_of, (HERMES, MISTRAL, DEEP, CODER, GLM, NEWER))])
def test_text_is_ready_only_where_no_call_can_begin(format: CallFormat):
    text = "Let me see <b>.\n\n" + format.write((A,))
    ends = [ready(format, text[:size]) for size in range(len(text) + 1)]
    assert ends == sorted(ends)
    assert ends[-1] == len("Let me see <b>.") == max(ends)


def test_text_before_bare_json_is_text():
    found = format_of(LLAMA)
    assert found.opens('See {"name": "x"}') == -1
    assert ready(found, 'See {"name"') == len('See {"name"')
    assert ready(found, " ") == ready(found, '{"na') == 0


def test_a_call_made_twice_is_made_once():
    text = DEFAULT_CALL_FORMAT.write((A, B, A))
    assert [call.name for call in DEFAULT_CALL_FORMAT.read(text)] == ["weather", "walk.to"]
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
    assert DEFAULT_CALL_FORMAT.read("".join(piece.text for piece in told[2].content))[0].arguments == {"city": "Rome"}
    assert chunk in told[3].content
    said = "".join(piece.text for piece in told[3].content)
    assert said.count("<tool_response>") == 2
    assert said.endswith("So?")
