"""Lines that a person types at a prompt, with a history that outlives the process, or the lines of a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

MAX_HISTORY = 1000
"""Most lines of the history."""


@contextlib.contextmanager
def typed_lines(prompt: str, history: Path, words: Sequence[str]) -> Iterator[Iterator[str]]:
    """Yield an iterator over the lines of standard input, which ends at Ctrl-D or at the end of the pipe.

    On a terminal, arrow keys bring back earlier lines, and Tab completes words.

    Args:
        prompt: What is shown before each line, on a terminal.
        history: The file of earlier lines, readable by its owner alone.
        words: What Tab completes at the beginning of a line.
    """
    from ragfuse.store.access import make_root, open_file

    readline = _readline() if sys.stdin.isatty() else None
    if readline is None:
        yield _lines(prompt)
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(MAX_HISTORY)
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, state: _completion(words, text, state))
    bind = "bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete"
    readline.parse_and_bind(bind)
    try:
        yield _lines(prompt)
    finally:
        readline.set_completer(None)
        with contextlib.suppress(OSError):
            make_root(history.parent)
            os.close(open_file(history, os.O_WRONLY))
            readline.write_history_file(history)


def _lines(prompt: str) -> Iterator[str]:
    """Yield lines without their ends; Ctrl-C at the prompt gives an empty line."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            if is_terminal:
                yield input(prompt)
            else:
                line = sys.stdin.readline()
                if not line:
                    return
                yield line.rstrip("\r\n")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print()
            yield ""


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # Python without it
        return None
    return readline


def _completion(words: Sequence[str], text: str, state: int) -> str | None:
    found = [word for word in words if text.startswith("/") and word.startswith(text)]
    return found[state] if state < len(found) else None
