"""Finds the format of tool calls in a chat template by rendering probe calls and reading the text around them.

No model family is known by name. Arguments may be one JSON object, or names and values one by one. If a template
ignores tools or writes calls in any other way, `DEFAULT_CALL_FORMAT` of `text/tool_calls.py` is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragfuse.text.chat_messages import ChatMessage
from ragfuse.text.thoughts import THOUGHT_TAGS
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, CallFormat, Pairs, Slot
from ragfuse.types.answer import ToolCall

RenderCalls = Callable[[list[dict[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""Renders messages and tools, and at the end the beginning of an answer if the third argument is true; may raise."""

PROBE_QUESTION, PROBE_RESULT, PROBE_TEXT = "What is probed?", "prober-result", "prober-text"
FIRST = ToolCall("probe_tool_one", {"probe_key_one": "probe_value_one"}, "call_probe_one")
SECOND = ToolCall("probe_tool_two", {"probe_key_two": "probe_value_two"}, "call_probe_two")
UNTEMPLATED_CALL_TOKENS = ("<|python_tag|>",)
"""Tokens that models write before a call in bare JSON although their templates do not."""


def call_format(render: RenderCalls, added_tokens: Sequence[str], ends: Sequence[str]) -> CallFormat:
    """Return a chat template's format of tool calls; `DEFAULT_CALL_FORMAT` if none is found.

    Args:
        render: The chat template.
        added_tokens: Texts of the tokens that were added to the vocabulary.
        ends: Texts of the tokens that end an answer.
    """
    for as_text in (False, True):
        for id_size in (0, 9):
            attempt = replace(DEFAULT_CALL_FORMAT, native=True, as_text=as_text, id_size=id_size)
            try:
                calls = tuple(replace(call, id=call.id[-id_size:].replace("_", "0")) for call in (FIRST, SECOND))
                found = _Probe(render, added_tokens, ends, attempt, *calls).found()
            except Exception:  # a template may raise anything; an unknown format raises _Unfit
                continue
            if found is not None:
                return found
    return DEFAULT_CALL_FORMAT


class _Unfit(Exception):
    """Raised for a template whose calls have an unknown format."""


@dataclass(frozen=True)
class _Probe:
    """A probe of a template with calls passed in one form."""

    render: RenderCalls
    added_tokens: Sequence[str]
    ends: Sequence[str]
    form: CallFormat
    first: ToolCall
    second: ToolCall

    def found(self) -> CallFormat | None:
        """Return the format of calls; None if the template ignores tools."""
        question = [{"role": "user", "content": PROBE_QUESTION}]
        prompt = self.render(question, _TOOLS, True)
        if self.first.name not in prompt or self.first.name in self.render(question, (), True):
            return None
        answer = self._answer(prompt, (self.first,))
        try:
            slots, gaps = _gaps(answer, self.first)
        except ValueError:  # no JSON object
            return self._with_pairs(prompt, answer)
        head, *inner = gaps[:-1]
        if not head.strip():
            raise _Unfit("nothing says where a call begins")
        marker = self._marker(head)
        return replace(
            self.form,
            head=head,
            inner=tuple(inner),
            tail=gaps[-1],
            slots=slots,
            again=self._between_calls(prompt, gaps),
            marker=marker,
            lead="" if marker else next((lead for lead in UNTEMPLATED_CALL_TOKENS if lead in self.added_tokens), ""),
        )

    def _with_pairs(self, prompt: str, answer: str) -> CallFormat:
        """Return the format of a template that writes arguments one by one; `answer` has one call."""
        (key, value), (other, last) = *self.first.arguments.items(), *self.second.arguments.items()
        both = replace(self.first, arguments={key: value, other: last})
        head, opening, between, closing = _between(answer, self.first.name, key, value)
        found = _between(self._answer(prompt, (both,)), self.first.name, key, value, other, last)
        if (*found[:3], *found[4:]) != (head, opening, between, between, closing) or not head.strip():
            raise _Unfit("arguments are not written alike")
        bare = self._without_arguments(prompt, head)
        inner, pairs, tail = _parted(opening, between, found[3], closing, bare)
        marker = self._marker(head)
        if not marker:
            raise _Unfit("nothing says where a call begins")
        again = self._between_paired_calls(prompt, closing, pairs.after)
        return replace(self.form, head=head, inner=(inner,), tail=tail, again=again, marker=marker, pairs=pairs)

    def _without_arguments(self, prompt: str, head: str) -> str | None:
        """Return the text after the name in a call without arguments; None if the template rejects such a call."""
        try:
            return self._answer(prompt, (replace(self.first, arguments={}),))[len(head) + len(self.first.name) :]
        except Exception:  # a template may raise anything
            return None

    def _between_paired_calls(self, prompt: str, closing: str, after: str) -> str | None:
        """Return the text between two calls, as `_between_calls` does, for arguments that are written one by one."""
        (key, value), (other, last) = *self.first.arguments.items(), *self.second.arguments.items()
        try:
            both = self._answer(prompt, (self.first, self.second))
            *_, middle, _, _, end = _between(both, self.first.name, key, value, self.second.name, other, last)
        except Exception:  # refused, or written as something else
            return None
        return middle[len(after) :] if middle.startswith(after) and end == closing else None

    def _answer(self, prompt: str, calls: Sequence[ToolCall]) -> str:
        """Return the text of an answer with these calls, from the end of the prompt to the end of the answer."""
        question = ChatMessage("user", PROBE_QUESTION)
        results = [ChatMessage("tool", PROBE_RESULT, tool_call_id=call.id, name=call.name) for call in calls]
        whole = self._render([question, ChatMessage("assistant", "", tuple(calls)), *results])
        plain = self._render([question, ChatMessage("assistant", PROBE_TEXT)])
        if PROBE_RESULT not in whole:
            raise _Unfit("results are left out")
        places = [
            place for begin in (prompt, plain[: plain.index(PROBE_TEXT)]) for place in (begin, _before_thought(begin))
        ]
        start = next((begin for begin in places if whole.startswith(begin)), None)
        if start is None:
            raise _Unfit("an answer does not begin where it is asked for")
        answer = _behind_thought(whole[len(start) :])
        after = answer.index(next(iter(calls[-1].arguments.values()), calls[-1].name))
        stops = [at for at in (answer.find(end, after) for end in self.ends) if at >= 0]
        if not stops:
            raise _Unfit("an answer does not end")
        return answer[: min(stops)]

    def _render(self, turns: Sequence[ChatMessage]) -> str:
        messages = [self.form.message(turn, str(turn.content), lambda value: value) for turn in turns]
        return self.render(messages, _TOOLS, False)

    def _between_calls(self, prompt: str, gaps: Sequence[str]) -> str | None:
        """Return the text between two calls of one answer; None if the template writes one call only."""
        try:
            both = self._answer(prompt, (self.first, self.second))
            first, rest = _cut(both, self.first)
            second, tail = _cut(rest, self.second)
        except Exception:  # refused, or written as something else
            return None
        fits = first == list(gaps[:-1]) and second[1:] == first[1:] and tail == gaps[-1]
        return second[0] if fits else None

    def _marker(self, head: str) -> str:
        """Return the text that begins a call and nothing else; "" if there is none."""
        text = head.lstrip()
        for token in sorted(self.added_tokens, key=len, reverse=True):
            if token and text.startswith(token):
                return token
        stop = next((at for at, letter in enumerate(text) if letter.isspace() or letter in "{["), len(text))
        return text[:stop]


def _before_thought(prompt: str) -> str:
    """Remove the thinking tags at the end of a prompt, which templates leave out in earlier answers."""
    found = next((each for each in (tag.search(prompt) for tag, _ in _EMPTY) if each is not None), None)
    return prompt if found is None else prompt[: found.start()]


def _behind_thought(answer: str) -> str:
    """Remove the empty thinking tags that templates write in answers without reasoning."""
    found = next((each for each in (tags.match(answer) for _, tags in _EMPTY) if each is not None), None)
    return answer if found is None else answer[found.end() :]


_EMPTY = tuple(
    (
        re.compile(rf"{re.escape(open)}\s*(?:{re.escape(close)}\s*)?\Z"),
        re.compile(rf"\s*{re.escape(open)}\s*{re.escape(close)}"),
    )
    for open, close in THOUGHT_TAGS
)


def _gaps(answer: str, call: ToolCall) -> tuple[tuple[Slot, ...], list[str]]:
    """Return the slots of an answer's call (name, arguments, id) in order, and the texts before, between and after."""
    found = sorted(_spans(answer, call))
    edges = [0, *(edge for lo, hi, _ in found for edge in (lo, hi)), len(answer)]
    return tuple(slot for *_, slot in found), [answer[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _between(answer: str, *words: str) -> list[str]:
    """Return the texts around these words; raises ValueError if one is missing, _Unfit if one occurs twice."""
    found = []
    for word in words:
        before, word_, answer = answer.partition(word)
        if not word_:
            raise ValueError(f"{word} is not written")
        found.append(before)
    if any(word in text for word in words for text in (*found, answer)):
        raise _Unfit("what a call says is written twice")
    return [*found, answer]


def _parted(opening: str, between: str, middle: str, closing: str, bare: str | None) -> tuple[str, Pairs, str]:
    """Split the texts seen around arguments into the text after a tool's name, the `Pairs`, and the end of a call.

    Args:
        opening: Text between the tool's name and the first argument's name.
        between: Text between an argument's name and its value.
        middle: Text between a value and the next argument's name.
        closing: Text after the last value.
        bare: Text after the tool's name in a call without arguments; None: unknown.
    """
    found = []
    for size in range(1, len(middle)):
        before, after = middle[-size:], middle[:-size]
        inner, tail = opening[:-size], closing[len(after) :]
        fits = opening.endswith(before) and closing.startswith(after) and before.strip() and after.strip()
        if fits and tail.strip() and (bare is None or bare.split() == (inner + tail).split()):
            found.append((before[0] in "<[", size, inner, Pairs(before, between, after), tail))
    if not found:
        raise _Unfit("nothing says where an argument ends")
    *_, inner, pairs, tail = max(found, key=lambda each: each[:2])
    return inner, pairs, tail


def _cut(answer: str, call: ToolCall) -> tuple[list[str], str]:
    """Return the texts before and between the slots of an answer's first call, and the text after it."""
    gaps = _gaps(answer, call)[1]
    return gaps[:-1], gaps[-1]


def _spans(answer: str, call: ToolCall) -> Iterator[tuple[int, int, Slot]]:
    at = answer.index(call.name)
    yield at, at + len(call.name), "name"
    key = answer.index(next(iter(call.arguments)))
    start = answer.rindex("{", 0, key)
    value, end = json.JSONDecoder().raw_decode(answer, start)
    if value != dict(call.arguments):
        raise _Unfit("arguments are no JSON object")
    yield start, end, "arguments"
    if call.id in answer:
        yield answer.index(call.id), answer.index(call.id) + len(call.id), "id"


def _tool(call: ToolCall) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": "A key."} for name in call.arguments}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": call.name, "description": "Probes.", "parameters": parameters},
    }


_TOOLS = (_tool(FIRST), _tool(SECOND))
