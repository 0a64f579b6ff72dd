"""What tests of papers' figures share."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from ragfuse_bench.figure import Wanted
from ragfuse_bench.paper import run_paper


def drawn(name: str, title: str, wanted: Wanted, tmp_path: Path) -> dict[str, Any]:
    """A figure's result, once it is plain JSON, a picture, and a table under its title beside the paper's words."""
    result = run_paper(name, wanted, tmp_path / f"{name}.png")
    assert json.loads(json.dumps(result)) == result
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(wanted.console.file, io.StringIO)
    printed = wanted.console.file.getvalue()
    assert title in printed
    assert "The paper:" in printed
    return result
