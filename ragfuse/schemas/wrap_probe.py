"""Finds what a chat template writes around messages, by rendering test messages and reading the
text between them.

It works for any template. A system message that a template adds by itself is left out; text that
depends on other messages is not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragfuse.schemas.layout import NO_WRAPPING, Wrapping

RenderMessages = Callable[[list[dict[str, str]], bool], str]
"""Renders messages, with the generation prompt if the second argument is True; may raise any
exception.
"""


def wrapping_of(render: RenderMessages, bos: str = "") -> tuple[str, Wrapping]:
    """Return what a chat template writes before all messages (either `bos` or nothing), and around
    each message.

    If the template cannot be probed, nothing and `NO_WRAPPING` are returned, as for a model without
    a template.
    """
    try:
        return _probed(render, bos)
    except Exception:  # a template may raise anything
        return "", NO_WRAPPING


def _probed(render: RenderMessages, bos: str) -> tuple[str, Wrapping]:
    head, after = _between(render, ["user"])
    with_prompt = _between(render, ["user"], ask=True)[1]
    _, to_answer, to_user, _, end = _between(render, ["user", "assistant", "user", "assistant"])
    ask = with_prompt.removeprefix(after) if with_prompt.startswith(after) else with_prompt
    if not to_answer.startswith(after):
        after = to_answer.removesuffix(ask)
    if end and to_user.startswith(end):
        before_user = to_user[len(end) :]
    else:  # what both end with
        ends = (head[at:] for at in range(len(head) + 1))
        before_user = next(each for each in ends if to_user.endswith(each))
    assistant = to_answer.removeprefix(after), to_user.removesuffix(before_user)
    try:
        first, behind, _ = _between(render, ["system", "user"])
    except Exception:  # the template takes no system messages: wrap them like a user's
        first, behind = head, after + before_user
    prefix = bos if bos and first.startswith(bos) and not before_user.startswith(bos) else ""
    system = first.removeprefix(prefix), behind.removesuffix(before_user)
    return prefix, Wrapping(system, (before_user, after), assistant, ask)


def _between(render: RenderMessages, roles: Sequence[str], ask: bool = False) -> list[str]:
    """Return the text before, between and after messages of these roles; ValueError if one is not
    rendered.
    """
    marks = [f"probed-{at}-{role}" for at, role in enumerate(roles)]
    text = render(
        [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)], ask
    )
    found = []
    for mark in marks:
        at = text.index(mark)
        found.append(text[:at])
        text = text[at + len(mark) :]
    return [*found, text]
