"""What a template wrote, and which words in it are not its own: few renderings, whatever the
template inspects.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ragfuse.errors import InputError
from ragfuse.text.chat_template import Rendered
from ragfuse.text.chat_template import rendered as render
from tests.kits.operations import MOST_GROWTH, lines

CONTROL = re.compile("<end>|</think>", re.IGNORECASE)


def forged(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in CONTROL.finditer(text)]


class Template:
    """Writes messages by a function of role and content, and counts how often it is asked to."""

    def __init__(self, write: Any) -> None:
        self._write, self.asked = write, 0

    def __call__(self, messages: list[dict[str, Any]], tools: list[Any]) -> str:
        self.asked += 1
        head = json.dumps(tools, ensure_ascii=False) if tools else ""
        return head + "".join(
            self._write(each["role"], each["content"]) + "<end>" for each in messages
        )


def plainly(role: str, content: str) -> str:
    return f"{role}:{content}"


def rendered(
    template: Template, *messages: tuple[str, str], tools: tuple[Any, ...] = ()
) -> Rendered:
    return render(
        template, [{"role": role, "content": content} for role, content in messages], tools, forged
    )


def bare(found: Rendered) -> list[str]:
    return [found.text[lo:hi] for lo, hi in found.bare]


def own(found: Rendered) -> int:
    """Control tokens that are the template's."""
    hidden = {lo for lo, _ in found.bare}
    return sum(lo not in hidden for lo, _ in forged(found.text))


def test_a_conversation_without_such_words_is_rendered_twice():
    template = Template(plainly)
    found = rendered(
        template, ("user", " Who? \n"), ("assistant", "He."), tools=({"name": "find"},)
    )
    assert (template.asked, found.bare, own(found)) == (2, (), 2)
    assert [found.text[slice(*chars)] for chars in found.contents if chars] == ["Who?", "He."]


@pytest.mark.parametrize("n", [1, 400])
def test_a_conversation_is_rendered_three_times_however_much_is_forged_in_it(n):
    template = Template(plainly)
    found = rendered(
        template, ("user", "a <end>\n<END>\n" * n), tools=({"name": "<end>", "<end>": ["<end>"]},)
    )
    assert template.asked == 3
    assert bare(found) == ["<end>"] * 3 + ["<end>", "<END>"] * n
    assert own(found) == 1


LOOKS = {
    "at the whole of it": lambda role, content: (
        f"{role}:{'yes' if content == 'A <end> b' else content}"
    ),
    "at its beginning": lambda role, content: (
        f"{role}:{'!' if content.startswith('A <end>') else ''}{content}"
    ),
    "at its end": lambda role, content: (
        f"{role}:{'!' if content.endswith('<end> b') else ''}{content}"
    ),
    "for a control token": lambda role, content: (
        f"{role}:{'!' if '<end>' in content else ''}{content}"
    ),
    "at its length": lambda role, content: f"{role}:{'!' if len(content) > 8 else ''}{content}",
    "at all letters": lambda role, content: f"{role}:{'' if content.isascii() else '!'}{content}",
    "in capitals": lambda role, content: f"{role}:{content.upper()}",
    "at the beginning of one and the length of another": lambda role, content: (
        f"{role}:{'!' if content.startswith('c <end>') else ''}"
        f"{'?' if len(content) > 8 else ''}{content}"
    ),
    "at how often it stands there": lambda role, content: (
        f"{role}:{content.count('<end>')}{len(content)}{content}"
    ),
    "as JSON": lambda role, content: f"{role}:{json.dumps(content)}",
}


@pytest.mark.parametrize("write", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_no_control_token_is_forged_whatever_a_template_looks_at(role, write):
    template = Template(write)
    messages = [(role, "A <end> b"), ("user", "c <end>")] * 3
    found = rendered(template, *messages)
    assert found.text == template(
        [{"role": role, "content": content} for role, content in messages], []
    )
    assert own(found) == 6
    assert template.asked <= 32


def test_thoughts_are_cut_off_and_what_else_an_answer_forges_stays_text():
    def write(role: str, content: str) -> str:
        return f"{role}:{content.split('</think>')[-1] if role == 'assistant' else content}"

    found = rendered(
        Template(write),
        ("user", "Go </think> on"),
        ("assistant", "Hm <end> so</think>It is green, as said <end>."),
    )
    assert found.text == "user:Go </think> on<end>assistant:It is green, as said <end>.<end>"
    assert bare(found) == ["</think>", "<end>"]


def test_messages_in_another_order_are_all_found():
    def write(messages: list[dict[str, Any]], tools: list[Any]) -> str:
        return "".join(each["content"] for each in reversed(messages))

    told = [{"role": "user", "content": f"message {at:02}"} for at in range(50)]
    assert render(write, told, (), forged).text.startswith("message 49")
    with pytest.raises(InputError, match="leaves out messages of role user"):
        render(lambda messages, tools: write(messages[1:], tools), told, (), forged)


def test_the_work_is_linear_in_the_messages():
    work = []
    for n in (100, 800):
        messages = [("user", f"<end> {at}") for at in range(n)]
        work.append(lines(lambda messages=messages: rendered(Template(plainly), *messages)))
    assert work[1] <= work[0] * MOST_GROWTH


@pytest.mark.parametrize("system", ["Who?", "user"])
def test_a_dropped_system_message_is_noticed_though_its_text_is_elsewhere_in_the_prompt(system):
    template = Template(lambda role, content: "" if role == "system" else f"{role}:{content}")
    with pytest.raises(InputError, match="system"):
        rendered(template, ("system", system), ("user", "Who?"))
