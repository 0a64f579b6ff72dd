"""Run the Python of every README as it is shown: `python -m docs.readme --check`.

The blocks of a page run in one fresh process, in order and in a folder of their own, over an empty
store; one behind `<!-- not run: REASON -->` is left out. A text block that stands behind `<!--
printed -->` says what the program above it prints; numbers may differ. `--write` writes these anew.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md", *sorted((ROOT / "integrations").glob("*/README.md")))
FENCE = re.compile(
    r"(<!-- (?:printed|not run:.*?) -->\s*)?^(?P<indent> *)```(python|text)\n(.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
BETWEEN = "---- next block ----"
NUMBER = re.compile(r"\d[\d.,]*")
NOISE = re.compile(
    r"Loading weights:|Failed to load \S+torchao|W\d{4} \d\d:"
    r"|.*Detected no triton|.*DeprecationWarning:|  warnings\.warn"
)
"""Lines that libraries write and that are no part of a program; warnings of ragfuse are not among
them.
"""
TIMEOUT_S = 600


@dataclass(frozen=True)
class Printed:
    """A block that says what the program above it prints: its place in the page, the lines, the
    program's number.
    """

    span: tuple[int, int]
    lines: tuple[str, ...]
    program: int


def programs(text: str) -> list[str]:
    """Return the Python blocks of a page, as they are shown."""
    return [dedent(match[4]) for match in FENCE.finditer(text) if _is_program(match)]


def _is_program(match: re.Match[str]) -> bool:
    return match[3] == "python" and "not run" not in (match[1] or "")


def printed(text: str) -> Iterator[Printed]:
    """Yield the blocks that say what a program prints."""
    program = -1
    for match in FENCE.finditer(text):
        if _is_program(match):
            program += 1
        elif match[1] and match[3] == "text":
            yield Printed(match.span(4), tuple(match[4].splitlines()), program)


def run(blocks: list[str]) -> list[list[str]]:
    """Run the blocks of a page in one process and return what each writes to both streams, without
    noise of libraries.

    Raises:
        SystemExit: A block fails; the message has its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        script = Path(folder) / "readme.py"
        between = f"import sys; sys.stderr.flush(); print({BETWEEN!r}, flush=True)\n"
        code = between.join(f"{block}\n" for block in blocks)
        # on a busy machine, what a program waits for takes longer
        code = re.sub(r"time\.sleep\((\d+)\)", r"time.sleep(6 * \1)", code)
        script.write_text(code, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=folder,
            env={
                **os.environ,
                "RAGFUSE_STORE": str(Path(folder) / "store"),
                "PYTHONUNBUFFERED": "1",
                # on a busy machine, ragfuse takes fewer threads and says so
                "RAGFUSE_THREADS": str(os.cpu_count()),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stdout)
    said: list[list[str]] = [[]]
    for line in done.stdout.splitlines():
        if line == BETWEEN:
            said.append([])
        elif line.strip() and not NOISE.match(line):
            said[-1].append(line)
    return said


def same(line: str, other: str) -> bool:
    """Whether two lines are the same but for their numbers."""
    return NUMBER.sub("#", line) == NUMBER.sub("#", other)


def check(path: Path, write: bool = False) -> str:
    """Run a page's programs and return what is wrong with what it says that they print; "" if
    nothing is.
    """
    text = path.read_text(encoding="utf-8")
    blocks = programs(text)
    if not blocks:
        return ""
    said, wrong = run(blocks), ""
    for told in reversed(list(printed(text))):
        found = said[told.program]
        if not (len(found) == len(told.lines) and all(map(same, found, told.lines))):
            wrong = (
                f"{path}: it says\n{chr(10).join(told.lines)}\nand the program"
                f" prints\n{chr(10).join(found)}\n{wrong}"
            )
        if write:
            lo, hi = told.span
            text = text[:lo] + "".join(f"{line}\n" for line in found) + text[hi:]
    if write:
        path.write_text(text, encoding="utf-8")
        return ""
    return wrong


def main() -> None:
    """Check or write all pages that are named, or all READMEs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, default=list(README))
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--check", action="store_true", help="run, and say where a page is wrong")
    how.add_argument(
        "--write", action="store_true", help="run, and write anew what the programs print"
    )
    given = parser.parse_args()
    wrong = ""
    for page in given.pages:
        print(f"{page} ...", file=sys.stderr, flush=True)
        wrong += check(page, given.write)
    if wrong:
        raise SystemExit(wrong)


if __name__ == "__main__":
    main()
