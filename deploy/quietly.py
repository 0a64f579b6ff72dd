"""Runs one step of a set-up: a line as it begins, with a bar on a terminal, and how it ended.

Everything that the step itself prints goes into a log.

    python deploy/quietly.py "Installing packages" LOG [--of N] -- COMMAND...

Where the step fails, the end of the log is shown with its name. Nothing but the standard library is
needed: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

BAR = 30
LAST_LINES = 15
"""Lines of the log that are shown after a failure."""
LINE_EVERY_S = 10.0
"""Seconds between two lines where the output is no terminal."""
COUNTED = re.compile(r"^\s*(Collecting|Requirement already satisfied:|Obtaining) ")
"""Lines of pip that each stand for a package; more than one of a package are counted once."""


def main() -> int:
    """Run the step; return its exit status, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("title")
    parser.add_argument("log", type=Path)
    parser.add_argument("--of", type=int, default=0, help="about how many packages pip looks at")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    given.log.parent.mkdir(parents=True, exist_ok=True)
    began, shown = time.monotonic(), Line(given.title, given.of)
    try:
        with given.log.open("a", encoding="utf-8") as log:
            log.write(f"\n# {given.title}: {' '.join(given.command)}\n")
            run = subprocess.Popen(
                given.command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for line in run.stdout or ():
                log.write(line)
                log.flush()
                shown.see(line)
            status = run.wait()
    except KeyboardInterrupt:
        run.wait()
        shown.end("stopped")
        return 130
    if status == 0:
        shown.end(f"done in {time.monotonic() - began:.0f} s")
        return 0
    shown.end("failed")
    print(
        *given.log.read_text(encoding="utf-8").splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr
    )
    print(f"{given.title}: exit status {status}. All of it: {given.log}", file=sys.stderr)
    return status


class Line:
    """The line of a step: a bar on a terminal, else a word now and then.

    Args:
        title: What the step does.
        of: About how many packages it looks at; 0: unknown.
    """

    def __init__(self, title: str, of: int) -> None:
        self._title, self._of, self._seen = title, of, set[str]()
        self._is_terminal, self._told = sys.stdout.isatty(), time.monotonic()
        self._what = ""
        if self._is_terminal:
            self._show()
        else:
            print(f"{title} ...", flush=True)

    def see(self, line: str) -> None:
        """Take a line of the step's output."""
        if COUNTED.match(line):
            named = line.split()[
                -1 if line.startswith("Obtaining") else 1 if "Collecting" in line else 3
            ]
            self._what = re.split(r"[<>=!~\[;(]", named)[0].rpartition("/")[2].lower()
            self._seen.add(self._what)
        elif line.startswith("Installing collected packages"):
            self._what = "writing files"
        self._show()

    def end(self, how: str) -> None:
        """Finish the line."""
        clear = "\r\033[K" if self._is_terminal else ""
        print(f"{clear}{self._title}: {how}", flush=True)

    def _show(self) -> None:
        n = min(len(self._seen), self._of) if self._of else len(self._seen)
        if self._is_terminal:
            full = BAR * n // self._of if self._of else 0
            bar = f"[{'#' * full}{'.' * (BAR - full)}] " if self._of else ""
            print(f"\r\033[K{self._title}: {bar}{self._what[:30]}", end="", flush=True)
        elif time.monotonic() - self._told >= LINE_EVERY_S:
            self._told = time.monotonic()
            count = f"{n} of about {self._of} packages, " if self._of else ""
            print(f"{self._title}: {count}{self._what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
