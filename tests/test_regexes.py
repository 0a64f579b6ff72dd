"""No regular expression of ragfuse can be made to look at the same letters again and again.

Read from the syntax trees, and the expressions from what `re` itself parses them to. Two shapes are
refused: a repeat without a bound inside of another one, and a repeat of any letter at all without a
bound before something that may be missing, such as `<.*?>`: each `<` of a text without `>` makes it
run to the end once more.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from re import _parser
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}  # a possessive repeat never gives anything back
FEW = 1000


def faults(pattern: str, flags: int = 0) -> list[str]:
    """Why a pattern may take more than linear time, as far as is seen here."""
    return [
        *_nested(_parser.parse(pattern, flags), False),
        *_runaway(_parser.parse(pattern, flags), False),
    ]


def _nested(items: Any, inside: bool) -> Iterator[str]:
    for op, argument in items:
        is_repeat = str(op) in REPEATS and argument[1] > FEW
        if is_repeat and inside:
            yield "a repeat in a repeat"
        for below in _below(op, argument):
            yield from _nested(below, inside or (is_repeat and _is_loose(argument[2])))


def _is_loose(items: Any) -> bool:
    """Whether what is repeated may itself be cut in more than one way: it holds nothing but
    repeats.
    """
    return all(
        str(op) in REPEATS or str(op) in ("SUBPATTERN", "BRANCH", "AT", "ASSERT", "ASSERT_NOT")
        for op, _ in items
    )


def _runaway(items: Any, followed: bool) -> Iterator[str]:
    """Repeats of anything, behind something that may stand anywhere and before something that may
    be missing.
    """
    listed = list(items)
    for at, (op, argument) in enumerate(listed):
        behind = followed or any(str(other) not in ("AT",) for other, _ in listed[at + 1 :])
        if str(op) in REPEATS and argument[1] > FEW and _is_anything(argument[2]) and behind:
            yield "a repeat of anything before something that may be missing"
        for below in _below(op, argument):
            yield from _runaway(below, behind)


def _is_anything(items: Any) -> bool:
    return len(items) == 1 and str(items[0][0]) == "ANY"


def _below(op: Any, argument: Any) -> Iterator[Any]:
    if str(op) in {*REPEATS, "POSSESSIVE_REPEAT"}:
        yield argument[2]
    elif str(op) == "SUBPATTERN":
        yield argument[3]
    elif str(op) == "BRANCH":
        yield from argument[1]
    elif str(op) in ("ASSERT", "ASSERT_NOT"):
        yield argument[1]
    elif str(op) == "ATOMIC_GROUP":
        yield argument


def patterns() -> list[tuple[str, str]]:
    """(where, pattern) of every text that is given to a function of `re`, its names being values of
    the module.
    """
    found = []
    for path in sorted((ROOT / "ragfuse").rglob("*.py")):
        if "bench" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).startswith("re.")
                and node.args
            ):
                text = _text(node.args[0])
                if text is not None and ast.unparse(node.func) not in ("re.escape",):
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", text))
    return found


def _text(node: ast.expr) -> str | None:
    """A literal; of an f-string each value as a letter of a class of its own."""
    if isinstance(node, ast.Constant):
        return node.value.decode() if isinstance(node.value, bytes) else str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "[a-z]" if isinstance(part, ast.FormattedValue) else str(part.value)
            for part in node.values
        )
    return None


@pytest.mark.parametrize(
    "pattern",
    [r"{#.*?#}", r"//.*@", r"(a+)+b", r"(?:\s*)*x", r"a(?:.*)b", r"<[^>]*?(.+)>", r"(?s)(.*)x"],
)
def test_shapes_that_run_away_are_seen(pattern: str):
    assert faults(pattern)


@pytest.mark.parametrize(
    "pattern", [r"a.*", r"[^>]*>", r"a.{0,9}b", r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', r"\s*a\s*b", r".+$"]
)
def test_shapes_that_do_not_run_away_are_none(pattern: str):
    assert not faults(pattern)


def test_every_regular_expression_is_linear():
    assert len(patterns()) > 25
    assert {where: told for where, pattern in patterns() if (told := faults(pattern))} == {}
