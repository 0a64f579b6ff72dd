"""Pictures of measurements, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragfuse.errors import SettingsError


def require_plotting() -> None:
    """SettingsError when pictures cannot be drawn here."""
    if find_spec("matplotlib") is None:
        raise SettingsError("--plot needs matplotlib, which is not installed: pip install matplotlib")


@contextmanager
def saved(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A figure of so many inches to draw on; whole at `path` afterwards, or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    partial = path.with_name(f".{path.name}.partial.png")
    try:
        figure.savefig(partial, dpi=150)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def plot_by_chunks(result: Mapping[str, Any], path: Path) -> None:
    """Speedup against prompt tokens, with the ideal, plain reuse and prefix caching, as a picture at `path`."""
    from matplotlib.ticker import ScalarFormatter

    rows = sorted(result["by_chunks"], key=lambda row: int(row["tokens"]))
    tokens = [row["tokens"] for row in rows]
    lines = (
        ("reuse_x", "plain reuse (nothing recomputed)", "tab:grey", "o:"),
        ("ideal_speedup", "ragfuse at best (every row as dear as in full prefill)", "tab:orange", "--"),
        ("speedup", f"ragfuse, {result['policy']} at {result['mean_ratio']:.0%}", "tab:orange", "o-"),
        ("prefix_x", "prefix caching (first chunk only)", "tab:blue", "s-."),
    )
    with saved(path, (7, 5)) as figure:
        axes = figure.add_subplot()
        for key, label, color, style in lines:
            axes.plot(tokens, [row[key] for row in rows], style, label=label, color=color)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.set_yticks([1, 2, 3, 5, 10, 20, 50], [f"{tick}x" for tick in (1, 2, 3, 5, 10, 20, 50)], minor=False)
        axes.minorticks_off()
        factors = [row[key] for row in rows for key, *_ in lines]
        axes.set_ylim(min(0.9, 0.9 * min(factors)), max(10.0, 1.2 * max(factors)))
        axes.set_xticks(tokens)
        axes.set_xlabel("prompt tokens (chunks and question)")
        axes.set_ylabel("first token sooner than full prefill")
        clock = "CPU time" if result["clock"] == "cpu" else "wall time"
        asked = result["options"]
        axes.set_title(f"{asked['model']}, {asked['dtype']}, threads: {result['threads']}, {clock}")
        axes.grid(True, alpha=0.3)
        figure.legend(fontsize=8, loc="outside lower center", ncols=2)
