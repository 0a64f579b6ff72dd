"""Results of `ragfuse doctor`'s checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Args:
        what: What was checked.
        state: "ok"; "note": it works, but could be better; "bad": it needs fixing.
        found: What was found.
        remedy: What to do about it; "" for nothing.
    """

    what: str
    state: State
    found: str
    remedy: str = ""


def guarded(what: str, check: Callable[[], Iterable[CheckResult]]) -> Iterator[CheckResult]:
    """Yield the results of a check; an exception becomes one more result."""
    try:
        yield from check()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        remedy = "what it says; if that does not help, report it with this line"
        yield CheckResult(what, "bad", found, remedy)
