"""Render conversations by a model's chat template, and find the template's variables, reasoning
tags and tool-call format.

The rendered text is always the template's output for the unchanged messages. A message, tool call
or tool may contain words that look like control tokens. The conversation is then rendered again,
with a mark in place of the first letter of each such word. Where the two outputs differ, a word
must be encoded as text. If a template inspects a word, such as a reasoning tag, marking the word
also changes other parts of the output. An inspected word is encoded as text wherever the word
occurs in a message's content, provided that the output has the content verbatim.

Tools are described in plain text if a template's tool-call format is unknown. Calls then have the
`DEFAULT_CALL_FORMAT` of `text/tool_calls.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ragfuse.errors import InputError
from ragfuse.text.chat_messages import ChatMessage
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, CallFormat, Pairs
from ragfuse.types.answer import ToolCall

RenderCalls = Callable[[list[dict[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""Renders messages with tools. The third argument adds the generation prompt. May raise."""

HERMES = CallFormat(
    head='<tool_call>\n{"name": "',
    inner=('", "arguments": ',),
    end="}\n</tool_call>",
    again='\n<tool_call>\n{"name": "',
    tail="",
    marker="<tool_call>",
)
LLAMA = CallFormat(
    head='{"name": "',
    inner=('", "parameters": ',),
    end="}",
    again=None,
    tail="",
    marker="",
    lead="<|python_tag|>",
)
MISTRAL_LIST = CallFormat(
    head='[TOOL_CALLS] [{"name": "',
    inner=('", "arguments": ', ', "id": "'),
    end='"}',
    again=', {"name": "',
    tail="]",
    marker="[TOOL_CALLS]",
    slots=("name", "arguments", "id"),
    id_size=9,
)
MISTRAL = CallFormat(
    head="[TOOL_CALLS]",
    inner=("[ARGS]",),
    end="",
    again="[TOOL_CALLS]",
    tail="",
    marker="[TOOL_CALLS]",
)
DEEPSEEK = CallFormat(
    head="<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>",
    inner=("\n```json\n",),
    end="\n```<\uff5ctool▁call▁end\uff5c>",
    again="\n<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>",
    tail="<\uff5ctool▁calls▁end\uff5c>",
    marker="<\uff5ctool▁calls▁begin\uff5c>",
    as_text=True,
)
QWEN_CODER = CallFormat(
    head="<tool_call>\n<function=",
    inner=(">\n",),
    end="</function>\n</tool_call>",
    again="\n<tool_call>\n<function=",
    tail="",
    marker="<tool_call>",
    pairs=Pairs("<parameter=", ">\n", "\n</parameter>\n"),
)
GLM = CallFormat(
    head="<tool_call>",
    inner=("\n",),
    end="</tool_call>",
    again="\n<tool_call>",
    tail="",
    marker="<tool_call>",
    pairs=Pairs("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
GLM_TIGHT = replace(
    GLM,
    inner=("",),
    again="<tool_call>",
    pairs=Pairs("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
)
KNOWN_FORMATS = (
    HERMES,
    LLAMA,
    MISTRAL_LIST,
    replace(MISTRAL_LIST, head='[TOOL_CALLS][{"name": "'),
    MISTRAL,
    DEEPSEEK,
    QWEN_CODER,
    GLM,
    GLM_TIGHT,
)
CALLS = (
    ToolCall("first_tool", {"first_key": "first_value", "other_key": "other_value"}, "call_1"),
    ToolCall("second_tool", {"second_key": "second_value"}, "call_2"),
)
DESCRIPTION, RESULT = "Finds the format.", "The result."


def call_format(render: RenderCalls) -> CallFormat:
    """Return the known format in which a template writes calls, or else `DEFAULT_CALL_FORMAT`."""
    return next(
        (format for format in KNOWN_FORMATS if _writes(render, format)), DEFAULT_CALL_FORMAT
    )


def _writes(render: RenderCalls, format: CallFormat) -> bool:
    """Return whether a template renders tools and writes calls in exactly this format."""
    calls = CALLS[:1] if format.again is None else CALLS
    results = [ChatMessage("tool", RESULT, tool_call_id=call.id, name=call.name) for call in calls]
    turns = [ChatMessage("user", "Which format?"), ChatMessage("assistant", "", calls), *results]
    messages = list(map(format.message, turns))
    try:
        text = render(messages, _TOOLS, False)
        # A call in bare JSON has no marker, so the call must begin the answer.
        before = "" if format.marker else render(messages[:1], _TOOLS, True)
    except Exception:  # a template may raise anything
        return False
    return all(each in text for each in (before + format.write(calls), DESCRIPTION, RESULT))


def _tool(call: ToolCall) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": "A key."} for name in call.arguments}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": call.name, "description": DESCRIPTION, "parameters": parameters},
    }


_TOOLS = tuple(map(_tool, CALLS))


THOUGHT_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Known reasoning tags. A model has the tags if the template contains the closing tag, or if the
tokenizer's added tokens include both tags.
"""


@dataclass(frozen=True)
class Thoughts:
    """The opening tag and the closing tag of a model's reasoning."""

    open: str
    close: str

    def is_open(self, prompt: str) -> bool:
        """Return whether a prompt ends with an opening reasoning tag."""
        return prompt.rstrip().endswith(self.open)


RENDERER_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
"""Variables that the renderer sets, not the caller."""
FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
"""Functions that transformers passes to templates."""
_MARKS = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")
"""Jinja tags that mark generated text for training. jinja2 cannot parse these tags."""
PARTS_PROBE = "probed-words"
NO_MORE: Mapping[str, Any] = MappingProxyType({})


class ChatTemplate:
    """A model's chat template, with its variables, tool-call format and reasoning tags.

    Args:
        tokenizer: The model's tokenizer, which has the template.

    Attributes:
        source: The Jinja template, or all templates joined if there are several. "" if none.
    """

    def __init__(self, tokenizer: Any) -> None:
        source = getattr(tokenizer, "chat_template", None) or ""
        several = source.values() if isinstance(source, Mapping) else (source,)
        self.source, self._tokenizer = "\n".join(map(str, several)), tokenizer

    @cached_property
    def names(self) -> frozenset[str]:
        """Variables that the template reads and a caller may set. Others have no effect. Empty if
        the template cannot be parsed.
        """
        from jinja2 import Environment, TemplateError, meta

        environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # parses, never renders
        try:
            found = meta.find_undeclared_variables(environment.parse(_MARKS.sub("", self.source)))
        except (TemplateError, RecursionError):
            return frozenset()
        return frozenset(found) - RENDERER_NAMES - FUNCTIONS

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """The model's reasoning tags. None if neither template nor tokenizer has known tags."""
        added = {str(token) for token in self._tokenizer.added_tokens_decoder.values()}
        tags = (
            Thoughts(*tags)
            for tags in THOUGHT_TAGS
            if tags[1] in self.source or added.issuperset(tags)
        )
        return next(tags, None)

    @cached_property
    def calls(self) -> CallFormat:
        """The format in which the template writes tool calls."""
        return call_format(self.render)

    def unread(self, variables: Mapping[str, Any]) -> str | None:
        """Return the first of these variables that the template does not read, or None.

        Variables that turn reasoning off count as read if the model has no reasoning.
        """
        accepted = NO_THOUGHTS if self.thoughts is None else ()
        unread = (name for name in variables if name not in self.names)
        return next((name for name in unread if (name, variables[name]) not in accepted), None)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] = NO_MORE,
    ) -> str:
        """Return the text of messages as the template renders them.

        Args:
            messages: Messages in OpenAI's form.
            tools: Tools that the template describes to the model.
            add_generation_prompt: True to add the text after which the model answers.
            more: Further variables of the template.
        """
        forms = [self._in_its_form(message) for message in messages]
        return self._rendered(
            forms, tools, {**more, "add_generation_prompt": add_generation_prompt}
        )

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any],
    ) -> str:
        given = [dict(tool) for tool in tools] or None
        return str(
            self._tokenizer.apply_chat_template(messages, tools=given, tokenize=False, **more)
        )

    def _in_its_form(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message, with text as a list of one part if the template takes only parts."""
        content = message.get("content")
        if not isinstance(content, str) or not self._takes_parts:
            return dict(message)
        return {**message, "content": [{"type": "text", "text": content}]}

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the template renders a list of parts, but cannot render a text as content."""
        for content, is_list in (
            (PARTS_PROBE, False),
            ([{"type": "text", "text": PARTS_PROBE}], True),
        ):
            try:
                text = self._rendered([{"role": "user", "content": content}], (), {})
            except Exception:  # a template may raise anything
                continue
            if PARTS_PROBE in text:
                return is_list
        return False


NO_THOUGHTS = (("enable_thinking", False), ("reasoning_effort", "none"))
"""Template variables, each with the value that turns reasoning off."""


Chars = tuple[int, int]
"""A span lo:hi of characters in a text."""
Write = Callable[[list[dict[str, Any]], list[Any]], str]
"""Renders messages and tools with the chat template, which may reject messages (InputError)."""
Forged = Callable[..., Sequence[Chars]]
"""Returns the spans in a text that look like a control token."""
Word = tuple[str, str]
"""(role of the message, lowercase word). The role is "" for words outside message contents."""

MARKS = "~^`|@0123456789QXZJqxzj" + "".join(map(chr, range(0xE000, 0xE100)))
"""Characters that most templates do not change. The mark is the first one not in the text."""
MAX_INSPECTED_WORDS = 16
"""At most this many words are marked one by one, to find out which words the template inspects."""


@dataclass(frozen=True)
class Rendered:
    """The text that a chat template rendered, and the place of each message's content in the text.

    Args:
        text: The rendered text.
        bare: Spans that look like a control token but must be encoded as text.
        contents: The span of each message's content, without surrounding white space. None if the
            content is not in the text verbatim.
    """

    text: str
    bare: tuple[Chars, ...] = ()
    contents: tuple[Chars | None, ...] = ()


def rendered(
    write: Write,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    forged: Forged,
) -> Rendered:
    """Render a conversation, and find the spans that only look like a control token.

    Args:
        write: Renders messages and tools with the chat template.
        messages: The messages in the form that the template takes.
        tools: The tools.
        forged: Returns the spans in a text that look like a control token.

    Raises:
        InputError: The template drops a message whose role is not "assistant".
    """
    text = write([dict(message) for message in messages], list(tools))
    contents = tuple(_places(text, messages))
    used = set(text)
    mark = next(letter for letter in MARKS if letter not in used)
    _check_complete(write, messages, tools, mark)
    words = dict[Word, None]()  # all words that look like a control token, in order

    def marks_on(value: Any, role: str, chosen: Word | None) -> Any:
        """Return a JSON value with `mark` as first letter of `chosen`, or of all words if None."""
        if isinstance(value, str):
            letters = list(value)
            for lo, hi in forged(value):
                word = role, value[lo:hi].lower()
                words[word] = None
                if chosen in (None, word):
                    letters[lo] = mark
            return "".join(letters)
        if isinstance(value, Mapping):
            return {
                marks_on(name, role, chosen): marks_on(each, role, chosen)
                for name, each in value.items()
            }
        is_list = isinstance(value, list | tuple)
        return [marks_on(each, role, chosen) for each in value] if is_list else value

    def marked(chosen: Word | None = None) -> set[int] | None:
        """Return the indices of marks in the output, or None if any other output changed."""
        told = [
            {
                name: marks_on(value, str(message["role"]) if name == "content" else "", chosen)
                for name, value in message.items()
                if name != "role"
            }
            | {"role": message["role"]}
            for message in messages
        ]
        told_of = marks_on(list(tools), "", chosen)
        if not words:
            return set()
        try:
            seen = write(told, told_of)
        except InputError:
            return None
        places = [at for at, letter in enumerate(seen) if letter == mark]
        begins = [0, *(at + 1 for at in places)]
        is_same = map(text.startswith, seen.split(mark), begins)
        return set(places) if len(seen) == len(text) and all(is_same) else None

    own = marked()
    inspected = set[Word]()
    if own is None:
        own, inspected = set(), set(words)
        for word in list(words)[:MAX_INSPECTED_WORDS]:
            found = marked(word)
            if found is not None:
                own |= found
                inspected.remove(word)
    where = [
        (lo, hi, str(message["role"]))
        for message, (lo, hi) in zip(messages, (chars or (0, 0) for chars in contents), strict=True)
        if inspected
    ]

    def is_bare(lo: int, hi: int) -> bool:
        word = text[lo:hi].lower()
        return lo in own or any(
            a <= lo and hi <= b and (role, word) in inspected for a, b, role in where
        )

    bare = (chars for chars in (forged(text) if words else ()) if is_bare(*chars))
    return Rendered(text, tuple(sorted(bare)), contents)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _places(text: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[Chars | None]:
    """Yield the span of each message's content. Contents are searched for in order."""
    at = 0
    for message in messages:
        core = _content(message).strip()
        lo = text.find(core, at) if core else -1
        if lo >= 0:
            at = lo + len(core)
        yield (lo, at) if lo >= 0 else None


def _check_complete(
    write: Write, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], mark: str
) -> None:
    """Raise InputError if the template drops a message whose role is not "assistant"."""
    told, roles = [], list[str]()
    for message in messages:
        content, role = _content(message), message["role"]
        if role != "assistant" and content.strip():
            content += mark
            roles.append(role)
        told.append({**message, "content": content})
    if write(told, list(tools)).count(mark) < len(roles):
        raise InputError(
            f"The chat template leaves out messages of role {' or '.join(sorted({*roles}))}."
            " Use other roles (often user and assistant), or pass one text instead of messages."
        )
