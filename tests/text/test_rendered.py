"""What a template wrote, and where contents stand in it: few renderings, whatever the template looks at."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ragfuse.errors import InputError
from ragfuse.text.chunks import Piece
from ragfuse.text.rendered import Conversation, Rendered
from tests.text.operations import MOST_GROWTH, lines

CONTROL = re.compile("<end>|</think>")


def forged(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in CONTROL.finditer(text)]


class Template:
    """Writes messages by a function of role and content, and counts how often it is asked to."""

    def __init__(self, write: Any) -> None:
        self._write, self.asked = write, 0

    def __call__(self, messages: list[dict[str, Any]], tools: list[Any]) -> str:
        self.asked += 1
        head = json.dumps(tools, ensure_ascii=False) if tools else ""
        return head + "".join(self._write(each["role"], each["content"]) + "<end>" for each in messages)


def plainly(role: str, content: str) -> str:
    return f"{role}:{content}"


def rendered(template: Template, *messages: tuple[str, list[Piece]], tools: tuple[Any, ...] = ()) -> Rendered:
    told = [{"role": role, "content": "".join(each.text for each in pieces)} for role, pieces in messages]
    return Conversation(told, [pieces for _, pieces in messages], tools, forged).rendered(template)


def bare(found: Rendered) -> list[str]:
    return [found.text[lo:hi] for lo, hi in found.bare]


def own(found: Rendered) -> int:
    """Control tokens that are the template's."""
    hidden = {lo for lo, _ in found.bare}
    return sum(lo not in hidden for lo, _ in forged(found.text))


@pytest.mark.parametrize("n", [1, 50, 400])
def test_a_conversation_is_rendered_twice_however_long_it_is_and_whatever_is_forged_in_it(n: int):
    template = Template(plainly)
    pieces = [part for at in range(n) for part in (Piece(f"chunk {at} <end>", "chunk"), Piece("\n<end>\n"))]
    found = rendered(template, ("user", pieces), tools=({"name": "<end>", "<end>": ["<end>"]},))
    assert template.asked == 2
    assert [placed.piece.text for placed in found.placed] == [f"chunk {at} <end>" for at in range(n)]
    assert bare(found) == ["<end>"] * (2 * n + 3)
    assert own(found) == 1


LOOKS = {
    "at the whole of it": lambda role, content: f"{role}:{'yes' if content == 'A <end> b' else content}",
    "at its beginning": lambda role, content: f"{role}:{'!' if content.startswith('A <end>') else ''}{content}",
    "at its end": lambda role, content: f"{role}:{'!' if content.endswith('<end> b') else ''}{content}",
    "for a control token": lambda role, content: f"{role}:{'!' if '<end>' in content else ''}{content}",
    "at its length": lambda role, content: f"{role}:{'!' if len(content) > 8 else ''}{content}",
    "at all letters": lambda role, content: f"{role}:{'' if content.isascii() else '!'}{content}",
}


@pytest.mark.parametrize("write", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_no_control_token_is_forged_and_few_renderings_made_whatever_a_template_looks_at(role: str, write: Any):
    template = Template(write)
    found = rendered(template, (role, [Piece("A <end> b")]), ("user", [Piece("c <end>")]))
    assert own(found) <= (3 if role == "assistant" else 2)  # an answer's own, where the template looks for it
    assert own(found) >= 2
    assert template.asked <= 16


@pytest.mark.parametrize("n", [1, 3])
def test_messages_at_which_a_template_looks_in_different_ways_are_each_shown_what_it_looks_for(n: int):
    def write(role: str, content: str) -> str:
        begins, is_long = content.startswith("<end>"), len(content) > 10
        return f"{role}:{'!' if begins else ''}{'?' if is_long else ''}{content}"

    template = Template(write)
    messages = [("user", [Piece("<end>")]), ("user", [Piece("abcde<end>")])] * n
    found = rendered(template, *messages)
    assert found.text == "user:!<end><end>user:abcde<end><end>" * n
    assert own(found) == 2 * n
    assert template.asked <= 32


def test_thoughts_are_cut_off_and_what_else_an_answer_forges_stays_text():
    def write(role: str, content: str) -> str:
        return f"{role}:{content.split('</think>')[-1] if role == 'assistant' else content}"

    answer = [Piece("Hm <end> so</think>It "), Piece("is green, as said", "chunk"), Piece(" <end>.")]
    found = rendered(Template(write), ("user", [Piece("Go </think> on")]), ("assistant", answer))
    assert found.text == "user:Go </think> on<end>assistant:It is green, as said <end>.<end>"
    assert bare(found) == ["</think>", "<end>"]
    assert [found.text[each.lo : each.hi] for each in found.placed] == ["is green, as said"]


def test_what_comes_of_a_content_and_the_template_s_text_together_is_no_control_token():
    found = rendered(Template(lambda role, content: f"{role}:{content}nd>"), ("user", [Piece("Why? <e")]))
    assert bare(found) == ["<end>"]
    assert own(found) == 1


def test_characters_that_mean_nothing_stay_in_texts_that_hold_them():
    text = "".join(map(chr, range(0xE000, 0xE010))) + " \\ue010 \\udb80\\udc00 chunk"
    found = rendered(
        Template(lambda role, content: json.dumps(content)), ("user", [Piece(text, "chunk"), Piece(" <end>")])
    )
    assert found.text == json.dumps(f"{text} <end>") + "<end>"
    assert [each.piece.text for each in found.placed] == [json.dumps(text)[1:-1]]
    assert bare(found) == ["<end>"]


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("ascii", [True, False])
def test_backslashes_before_what_is_marked_stay_however_often_texts_are_escaped(times: int, ascii: bool):
    def write(role: str, content: str) -> str:
        for _ in range(times):
            content = json.dumps(content, ensure_ascii=ascii)
        return content

    text = "\\<end> \\\\<end>\\" + "\U0001f98a\\u"
    found = rendered(Template(write), ("user", [Piece(text), Piece("\\chunk", "chunk"), Piece("\\\\")]))
    assert found.text == write("user", text + "\\chunk\\\\") + "<end>"
    assert bare(found) == ["<end>"] * 2


def test_backslashes_are_read_once_each():
    work = []
    for n in (1_000, 8_000):
        content = "\\" * n + "u <end>" + "\\ue000" * n
        work.append(
            lines(
                lambda content=content: rendered(
                    Template(lambda role, content: json.dumps(content)), ("user", [Piece(content)])
                )
            )
        )
    assert work[1] <= work[0] * MOST_GROWTH


def test_more_forged_control_tokens_than_can_be_told_apart_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ragfuse.text.marks.MARK_RANGES", (range(0xE000, 0xE010),))
    fits = rendered(Template(plainly), ("user", [Piece("a <end>" * 16)]), ("user", [Piece("chunk", "chunk")]))
    assert (len(fits.bare), own(fits)) == (16, 2)
    for role in ("user", "assistant", "tool"):
        with pytest.raises(InputError, match="more than 16 words that look like control tokens"):
            rendered(Template(plainly), (role, [Piece("a <end>" * 17)]))


def test_messages_in_another_order_are_all_found():
    def write(messages: list[dict[str, Any]], tools: list[Any]) -> str:
        if any(len(each["content"]) != len(each["content"].encode()) for each in messages):
            raise InputError("It takes ASCII alone.")
        return "".join(each["content"] for each in reversed(messages))

    told = [{"role": "user", "content": f"message {at}"} for at in range(50)]
    contents = [[Piece(each["content"])] for each in told]
    assert Conversation(told, contents, (), forged).rendered(write).text.startswith("message 49")
    with pytest.raises(InputError, match="leaves out message 0"):
        Conversation(told, contents, (), forged).rendered(lambda messages, tools: write(messages[1:], tools))


def test_a_message_that_is_left_out_is_an_error_also_where_its_text_stands_elsewhere():
    def write(role: str, content: str) -> str:
        return "" if role == "user" and content == "a" else plainly(role, content)

    with pytest.raises(InputError, match=r"message 0 \(role 'user'\)"):
        rendered(
            Template(lambda role, content: "" if len(content) == 1 else content),
            ("user", [Piece("a")]),
            ("tool", [Piece("b c")]),
        )
    assert rendered(Template(write), ("assistant", [Piece("b")])).text == "assistant:b<end>"


def test_where_a_content_stands_is_said_also_where_it_is_trimmed():
    found = rendered(Template(lambda role, content: f"{role}:{content.strip()}"), ("user", [Piece(" Who? \n")]))
    assert found.text[slice(*found.last_message)] == "Who?"


# control tokens that come of what stands side by side, or of what is taken off


def in_marks(messages: list[dict[str, Any]], tools: list[Any]) -> str:
    """Names and keys of tools and of calls between signs, and messages as they are."""
    head = "".join(f"<{key}>{value}" for tool in tools for key, value in tool.items())
    called = "".join(f"<{call['name']}>" for each in messages for call in each.get("calls", ()))
    return f"{head}{called}" + "".join(f"{each['role']}:{each['content']}<end>" for each in messages)


@pytest.mark.parametrize("tools", [[{"end": "a"}], [{"a": "</thi", "nk": "b"}], [{"x": "<end"}, {"end": "END"}]])
def test_a_name_of_a_tool_makes_no_control_token_with_what_stands_beside_it(tools: list[dict[str, str]]) -> None:
    made = [{"role": "user", "content": "Hi"}]
    found = Conversation(made, [[Piece("Hi")]], tools, forged).rendered(in_marks)
    assert own(found) == 1
    assert found.text == in_marks(made, tools)


def test_a_name_in_a_call_makes_none_either() -> None:
    made = [{"role": "assistant", "content": "Hi", "calls": [{"name": "end"}, {"name": "other"}]}]
    found = Conversation(made, [[Piece("Hi")]], [], forged).rendered(in_marks)
    assert bare(found) == ["<end>"]
    assert own(found) == 1


def test_a_name_that_the_template_looks_at_is_its_own() -> None:
    def write(messages: list[dict[str, Any]], tools: list[Any]) -> str:
        return "".join("<end>" if tool["type"] == "end" else "?" for tool in tools) + in_marks(messages, [])

    made = [{"role": "user", "content": "Hi"}]
    found = Conversation(made, [[Piece("Hi")]], [{"type": "end"}], forged).rendered(write)
    assert (found.bare, own(found)) == ((), 2)


@pytest.mark.parametrize("n", [17, 300])
def test_many_such_names_are_looked_at_together(n: int) -> None:
    asked = list[int]()

    def write(messages: list[dict[str, Any]], tools: list[Any]) -> str:
        asked.append(1)
        return in_marks(messages, tools)

    tools, made = [{"a": f"{at}<", "end>": "b"} for at in range(n)], [{"role": "user", "content": "Hi"}]
    found = Conversation(made, [[Piece("Hi")]], tools, forged).rendered(write)
    assert own(found) == 1
    assert len(asked) < 24


TAKEN_OFF = {
    "a sign": (lambda text: text.replace("\r", ""), "a <en\rd> b"),
    "a sign without width": (lambda text: text.replace("\u200b", ""), "<e\u200bnd>"),
    "white space": (lambda text: "".join(text.split()), "a </th ink> b"),
    "empty lines": (lambda text: "".join(text.split("\n\n")), "<e\n\nnd>"),
    "an entity": (lambda text: text.replace("&lt;", "<"), "a &lt;end> &lt;/think>"),
    "a number of one": (html.unescape, "&#60;end&#x3e;"),
    "a control token": (lambda text: text.replace("<end>", ""), "<e<end>nd> b"),
    "one at the end": (lambda text: text.replace("<end>", ""), "b <end>"),
    "one alone": (lambda text: text.replace("<end>", ""), "<end>"),
}


@pytest.mark.parametrize(("change", "content"), TAKEN_OFF.values(), ids=TAKEN_OFF)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_what_is_left_when_a_template_takes_characters_off_is_no_control_token(
    change: Callable[[str], str], content: str, role: str
) -> None:
    template = Template(lambda role, text: f"{role}:{change(text)}")
    found = rendered(template, (role, [Piece(content)]), ("user", [Piece("Who?")]))
    assert own(found) == 2
    assert found.text.endswith("user:Who?<end>")
    assert template.asked <= 16


def test_what_is_taken_off_is_refused_where_the_template_looks_at_it() -> None:
    write = lambda role, text: f"{role}:{'!' if 'n' in text else '?'}{text.replace('-', '')}"  # noqa: E731
    with pytest.raises(InputError, match="removes characters inside a message"):
        rendered(Template(lambda role, text: write(role, text.replace("\r", ""))), ("user", [Piece("<e\rnd>")]))


def test_names_and_changed_messages_are_looked_through_once_each() -> None:
    work = []
    for n in (250, 2_000):
        tools = [{f"name {at}": f"{'<' * 40} {at}<e", "type": ">"} for at in range(n)]
        told = [{"role": "user", "content": f"<e\rnd> {at}\r &lt; b"} for at in range(n)]
        pieces = [[Piece(each["content"])] for each in told]

        def write(messages: list[dict[str, Any]], tools: list[Any]) -> str:
            return in_marks([{**each, "content": each["content"].replace("\r", "")} for each in messages], tools)

        made = Conversation(told, pieces, tools, forged)
        work.append(lines(lambda made=made, write=write: made.rendered(write)))
        assert own(made.rendered(write)) == n
    assert work[1] <= work[0] * MOST_GROWTH
