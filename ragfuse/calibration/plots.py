"""Draw pictures of measurements, without a display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def model_in_title(model: str) -> str:
    """Return a model's name for a title, without the path of a folder or GGUF file."""
    path = Path(model).expanduser()
    return path.name.removesuffix(".gguf") if path.exists() else model


@contextmanager
def saved(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yield a figure of `size` inches to draw on, and save the figure at `path` on exit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure
    figure.savefig(path, dpi=150)
