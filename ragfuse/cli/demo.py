"""`ragfuse demo`: what ragfuse is worth, seen on real questions."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.options import (
    Device,
    Dtype,
    Model,
    Policy,
    Ratio,
    require_writable,
    settings_of,
    write_json,
)
from ragfuse.errors import InputError

DEMO_NEEDS = (
    "faiss",
    "langchain_classic",
    "langchain_community",
    "langchain_huggingface",
    "langchain_ragfuse",
    "matplotlib",
)


DEMO_MEMORY = 3 << 30
"""Bytes of the demo's memory tier: it holds only part of the KV, so that the rest is read from disk."""


def demo(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    policy: Policy = None,
    ratio: Ratio = None,
    out: Annotated[Path, typer.Option("--out", help="JSON report to write, with a PNG beside it.")] = Path(
        "demo-report.json"
    ),
) -> None:
    """Ask real questions over real documents through a LangChain chain: full prefill and ragfuse side by side."""
    console = Console()
    console.print("This takes some minutes. Loading libraries and the model ...", highlight=False)
    missing = [name for name in DEMO_NEEDS if find_spec(name) is None]
    if missing:
        wanted = "pip install 'ragfuse-kv[demo]' langchain-ragfuse"
        raise InputError(f"The demo needs more packages ({', '.join(missing)}): {wanted}")
    from ragfuse.demo.picture import draw
    from ragfuse.demo.run import run
    from ragfuse.demo.show import show_summary

    base = settings_of(model=model, dtype=dtype, device=device, policy=policy, ratio=ratio)
    memory = base.memory_bytes if "memory_bytes" in base.model_fields_set else DEMO_MEMORY
    settings = base.model_copy(update={"store": base.home / "demo-store", "memory_bytes": memory})
    require_writable(out, out.with_suffix(".png"))
    with loaded_engine(settings, console) as engine:
        report = run(engine, console)
    write_json(report, out)
    draw(report, out.with_suffix(".png"))
    show_summary(console, report)
    console.print(f"Written: {out} and, as a picture, {out.with_suffix('.png')}.", highlight=False)
    console.print('Your own documents: ragfuse ingest PATH, then ragfuse ask "..." --compare', highlight=False)
