"""Draw pictures of measurements, without a display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragfuse.errors import SettingsError


def require_plotting() -> None:
    """Raise SettingsError where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise SettingsError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib"
        )


def model_in_title(model: str) -> str:
    """Return a model as a title names it: of a folder or GGUF file the name alone, as paths are
    long and private.
    """
    path = Path(model).expanduser()
    return path.name.removesuffix(".gguf") if path.exists() else model


@contextmanager
def saved(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yield a figure of `size` inches to draw on, and save it at `path` afterwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure
    figure.savefig(path, dpi=150)
