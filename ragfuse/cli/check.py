"""One row of a check-up: what was looked at, its state, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class CheckResult:
    """One line: what was looked at, how it is, what was found, and what to do about it.

    note: works, but there is more to be had. bad: needs mending.
    """

    what: str
    state: State
    found: str
    remedy: str = ""


Checked = tuple[str, Callable[[], Iterable[CheckResult]]]


def guarded(what: str, check: Callable[[], Iterable[CheckResult]], remedy: str = "") -> Iterator[CheckResult]:
    """The rows of a check, and one more for what it stumbles over."""
    try:
        yield from check()
    except Exception as error:
        said = str(error) or type(error).__name__
        named = said if type(error).__module__.startswith("ragfuse") else f"{type(error).__name__}: {said}"
        yield CheckResult(what, "bad", named, remedy or "what it says; if that does not help, report it with this line")
