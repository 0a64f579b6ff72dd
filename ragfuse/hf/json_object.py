"""Reads a JSON file of a model's folder, and says what is wrong with one that is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ragfuse.errors import ModelError

COPY_ANEW = "Copy the file anew from where it came from."


def read_json_object(file: Path, advice: str = COPY_ANEW) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        file: The file.
        advice: What to do where it cannot be read.

    Raises:
        ModelError: It cannot be read, or has something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"'{file}' cannot be read ({error}). {advice}") from error
    if not isinstance(found, dict):
        raise ModelError(
            f"Wanted a JSON object in '{file}', found {type(found).__name__}. {advice}"
        )
    return found
