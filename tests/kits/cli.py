"""What commands end with, and how they are started as processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from tests.kits.tiny import ROOT

COMMAND = [sys.executable, "-c", "from ragfuse.cli import app; app()"]


def refused(result: Any, kind: str, *words: str) -> None:
    """Assert that a command ended with one readable line of that kind."""
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == 1, result.output
    errors = [line for line in lines if "Error" in line and not line.startswith("warning: ")]
    assert errors == lines[-1:]
    assert lines[-1].startswith(f"{kind}: ")
    assert "Traceback" not in result.output
    assert [word for word in words if word not in lines[-1]] == []


def variables(environment: Mapping[str, str], **more: str) -> dict[str, str]:
    """The variables of a process of its own."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment, **more}
