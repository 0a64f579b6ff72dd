"""Reads a JSON file of a model's folder, and says what is wrong with one that is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

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
        return TypeAdapter(dict[str, Any]).validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"'{file}' cannot be read ({error}). {advice}") from error
