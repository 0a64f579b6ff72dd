"""An environment to install wheels in, and an empty folder to run in, with nothing of the checkout
on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TextIO

HIDDEN = ("PYTHON", "RAGFUSE", "VIRTUAL", "MYPY", "PYTEST")
"""How variables begin that programs of the environment do not get from this process."""


@dataclass(frozen=True)
class Environment:
    """An environment and an empty folder.

    Args:
        python: Its interpreter.
        folder: Where its programs run.
        log: A file that gets every command and what it printed; None: no log.
    """

    python: Path
    folder: Path
    log: TextIO | None = None

    @classmethod
    def make(cls, root: Path, log: TextIO | None = None) -> Environment:
        """Make an environment without any package but pip, below a folder."""
        subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True)
        (root / "here").mkdir()
        return cls(root / "venv" / "bin" / "python", root / "here", log)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment in its folder, and return what it printed and its exit
        status.
        """
        program, *rest = command
        return logged(
            [str(self.python.with_name(program)), *rest], self.folder, self._variables(), self.log
        )

    def install(self, *what: str) -> subprocess.CompletedProcess[str]:
        """Install packages by pip, from where this machine's pip installs, and from TORCH_INDEX as
        `make venv` does.
        """
        index = (
            ("--extra-index-url", os.environ["TORCH_INDEX"])
            if os.environ.get("TORCH_INDEX")
            else ()
        )
        return self.run(
            "python",
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-compile",
            *index,
            *what,
        )

    def _variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
        own = {"PYTHONNOUSERSITE": "1", "RAGFUSE_HOME": str(self.folder / "home"), "COLUMNS": "100"}
        return {**kept, **own, "HAYSTACK_TELEMETRY_ENABLED": "False"}


def logged(
    command: Sequence[str],
    folder: Path,
    variables: dict[str, str] | None = None,
    log: TextIO | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command, write it and all that it printed to a log, and return both with its exit
    status.
    """
    log = log or StringIO()
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    log.write(f"{done.stdout}{done.stderr}[{done.returncode}]\n\n")
    log.flush()
    return done
