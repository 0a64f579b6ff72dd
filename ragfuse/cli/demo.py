"""`ragfuse demo`: compare full prefill and ragfuse on real questions."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.options import require_writable, screen, write_json
from ragfuse.cli.show import say
from ragfuse.errors import InputError
from ragfuse.settings import Settings

DEMO_NEEDS = (
    "faiss",
    "langchain_community",
    "langchain_huggingface",
    "langchain_ragfuse",
    "matplotlib",
)


@screen("model", "dtype", "device", "policy", "ratio")
def demo(
    console: Console,
    settings: Settings,
    out: Annotated[
        Path, typer.Option("--out", help="JSON report to write, with a PNG beside it.")
    ] = Path("demo-report.json"),
) -> None:
    """Compare full prefill and ragfuse on real questions, asked through a LangChain chain."""
    say(console, "This takes some minutes. Loading libraries and the model ...")
    missing = [name for name in DEMO_NEEDS if find_spec(name) is None]
    if missing:
        wanted = "pip install 'ragfuse-kv[demo]' langchain-ragfuse"
        raise InputError(f"The demo needs packages ({', '.join(missing)}). Run: {wanted}")
    from ragfuse.demo.run import run
    from ragfuse.demo.show import draw, summary_text

    settings = settings.model_copy(update={"store": settings.home / "demo-store"})
    picture = out.with_suffix(".png")
    require_writable(out, picture)
    with loaded_engine(settings, console) as engine:
        report = run(engine, console)
    write_json(report, out)
    draw(report, picture)
    say(console, summary_text(report))
    say(console, f"Written: {out} and, as a picture, {picture}.")
    say(console, 'Your own documents: ragfuse ingest PATH, then ragfuse ask "..." --compare')
