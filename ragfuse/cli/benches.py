"""`ragfuse demo` and `ragfuse bench`: what ragfuse is worth, measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ragfuse.cli.options import Device, Dtype, Model, Policy, Ratio, settings_of, write_json
from ragfuse.engine import Engine
from ragfuse.errors import InputError

bench = typer.Typer(no_args_is_help=True, help="Measure. All subcommands share one runner: interleaved rounds.")


def demo(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    policy: Policy = None,
    ratio: Ratio = None,
    out: Annotated[Path, typer.Option(help="Report as JSON; the picture lies beside it.")] = Path("demo-report.json"),
) -> None:
    """Ask real questions over real documents through a LangChain chain: full prefill and ragfuse side by side."""
    try:
        from ragfuse.demo.picture import draw
        from ragfuse.demo.run import run
    except ImportError as error:
        raise InputError(f"The demo needs more packages ({error.name}): pip install 'ragfuse-kv[demo]'") from error
    base = settings_of(model=model, dtype=dtype, device=device, policy=policy, ratio=ratio)
    settings = base.model_copy(update={"store": base.home / "demo-store"})
    console = Console()
    with Engine(settings) as engine:
        report = run(engine, console)
    write_json(report, out)
    draw(report, out.with_suffix(".png"))
    n = len(report["questions"])
    for line in (
        f"First token [bold]{report['mean_speedup']:.1f}x[/] sooner on {n} questions, "
        f"[bold]{report['long_speedup']:.1f}x[/] on the long prompt.",
        f"Right answers: full prefill {report['right_full']}, ragfuse {report['right_fused']} of {n}.",
        f"KL to full prefill: {report['kl_over_reuse']:.2f} of plain reuse's.",
        f"Written: {out}, {out.with_suffix('.png')}",
    ):
        console.print(line, highlight=False)
