"""`ragfuse verify` and `ragfuse calibrate`: check a model, and choose policy and ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.files import find_files
from ragfuse.cli.ingest import split_documents
from ragfuse.cli.options import ENGINE, Documents, Plot, require_writable, screen, setting
from ragfuse.cli.show import say, show_table
from ragfuse.settings import Settings

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine

QUESTIONS = 20
"""Default number of questions for calibration."""


@screen("dtype", "device", "model_kwargs", "policy", "ratio")
def verify_model(
    console: Console,
    settings: Settings,
    model: Annotated[
        str | None,
        typer.Argument(
            help="The model, as --model takes it.", show_default=setting("model").show_default
        ),
    ] = None,
) -> tuple[dict[str, Any], bool]:
    """Check fused prefill with this model. At ratio 1, for example, it must equal full prefill.

    Exit status 1 if a check fails: then the model's prompts are answered by full prefill.
    """
    if model is not None:
        settings = settings.model_copy(update={"model": model})
    with loaded_engine(settings, console) as engine, console.status("verifying") as status:
        verdict = engine.runtime.verify(lambda check: status.update(f"verifying: {check}"))
    rows = [
        {
            "check": each.name,
            "error": each.error,
            "bound": each.bound,
            "": "passed" if each.passed else "failed",
        }
        for each in verdict.checks
    ]
    show_table(console, rows)
    says = (
        "passed all checks: its chunks can be reused"
        if verdict.passed
        else "failed the checks: every prompt is answered by full prefill"
    )
    say(console, f"{verdict.model} {says}.", "bold")
    return verdict.as_dict(), verdict.passed


@screen(*ENGINE)
def calibrate_model(
    console: Console,
    settings: Settings,
    docs: Documents,
    questions: Annotated[
        int,
        typer.Option(
            min=12,
            help="Number of questions generated from the documents; more give a surer result.",
        ),
    ] = QUESTIONS,
    plot: Plot = None,
) -> tuple[dict[str, Any], bool]:
    """Measure how close answers stay to full prefill on your documents; choose policy and ratio.

    Exit status 1 if no choice is close enough: then prompts are answered by full prefill.
    """
    from ragfuse.calibration.runner import tune_malloc

    require_writable(plot)
    find_files(docs)
    tune_malloc(console)
    with console.status("starting"):
        from ragfuse.calibration.calibrate import draw_calibration
    if plot is not None:
        import matplotlib  # noqa: F401 - fails early if missing
    with loaded_engine(settings, console) as engine:
        chunks, _ = split_documents(docs, settings, engine.model.tokenizer, console)
        result = calibrate_engine(engine, chunks, questions, console, settings.model)
    show_calibration(console, result)
    if plot is not None:
        draw_calibration(result, plot)
        say(console, f"Written: {plot}")
    return result, result["safe"]


def show_calibration(console: Console, result: Mapping[str, Any]) -> None:
    """Print the measurements of a calibration as a table, and the advice."""
    rows = []
    for each in result["tried"]:
        is_chosen = (each["policy"], each["ratio"]) == (result["policy"], result["ratio"])
        rows.append(
            {
                "policy": each["policy"],
                "ratio": f"{each['ratio']:.0%}",
                "TTFT": f"{each['ttft_x']:.1f}x",
                "KL / reuse's": each["kl_over_reuse"],
                "95%": f"{each['low']:.2f}..{each['high']:.2f}",
                "top-1": f"{each['top1']:.1%}",
                "n": each["questions"],
                "outcome": Text("chosen", "bold green") if is_chosen else each["outcome"],
            }
        )
    show_table(console, rows)
    say(
        console,
        f"{result['questions']} questions, {result['tokens']:,.0f} prompt tokens on average. TTFT:"
        " times faster than full prefill. KL: as a share of plain reuse's. Safe: its 95% interval"
        " ends at .25 or below, and top-1 agreement is at least 90%. n: questions asked.",
        "dim",
    )
    say(console, result["advice"], "bold")


def calibrate_engine(
    engine: Engine,
    chunks: Sequence[tuple[str, str]],
    questions: int,
    console: Console,
    name: str,
) -> dict[str, Any]:
    """Verify and calibrate an engine's model on (text, source) chunks; save the result."""
    from ragfuse.calibration.calibrate import calibrate, make_cases

    cases = make_cases(chunks, questions)
    with console.status("verifying") as status:
        verified = engine.runtime.verify(lambda check: status.update(f"verifying: {check}")).passed
    result = calibrate(engine.model, cases, console, name, verified)
    chosen = (result["policy"], result["ratio"]) if result["safe"] else ("", None)
    engine.runtime.learn(engine.runtime.profile.calibrated(result["safe"], *chosen))
    if not engine.catalog.strict.is_open:
        say(console, "Not saved: there is no disk tier (disk_bytes is 0).", "yellow")
    return result
