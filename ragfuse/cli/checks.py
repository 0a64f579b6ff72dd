"""`ragfuse verify` and `calibrate`: is this model safe to fuse, and how best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.files import find_files
from ragfuse.cli.ingest import split_documents
from ragfuse.cli.options import ENGINE, Documents, Plot, require_writable, screen, setting
from ragfuse.cli.show import say, show_table
from ragfuse.settings import Settings

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine


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
    """Check with the model's real weights the cases in which reuse must be exact, such as when all
    tokens are recomputed.

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
        "can be fused"
        if verdict.passed
        else "is not fused: every prompt is answered by full prefill"
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
            help=(
                "Number of questions to make from the documents; if they do not decide, twice as"
                " many more are asked."
            ),
        ),
    ] = 20,
    plot: Plot = None,
) -> tuple[dict[str, Any], bool]:
    """Measure on your documents how close answers stay to full prefill's, and choose the policy and
    ratio to use.

    Exit status 1 if no choice is safe: then prompts are answered by full prefill.
    """
    from ragfuse.calibration.runner import tune_malloc

    require_writable(plot)
    find_files(docs)
    tune_malloc(console)
    with console.status("starting"):
        from ragfuse.calibration.calibrate import draw_calibration, show_calibration
        from ragfuse.calibration.plots import require_plotting
    if plot is not None:
        require_plotting()
    with loaded_engine(settings, console) as engine:
        texts = list(split_documents(docs, settings, engine.model.tokenizer, console)[0].items())
        result = calibrate_engine(engine, texts, questions, console, settings.model)
    show_calibration(result, console)
    if plot is not None:
        draw_calibration(result, plot)
        say(console, f"Written: {plot}")
    return result, result["safe"]


def calibrate_engine(
    engine: Engine,
    texts: Sequence[tuple[str, Sequence[str]]],
    questions: int,
    console: Console,
    name: str,
) -> dict[str, Any]:
    """Verify and calibrate an engine's model, and have its store keep the choice; return the
    calibration's report.

    Args:
        engine: The engine.
        texts: (name, chunks) of each document.
        questions: Number of questions to make first.
        console: Where progress is shown.
        name: Name of the model, for messages.
    """
    from ragfuse.calibration.calibrate import MORE_QUESTIONS, calibrate, make_cases

    cases, more_cases = (
        make_cases(texts, questions),
        make_cases(texts, MORE_QUESTIONS * questions, seed=1),
    )
    with console.status("verifying") as status:
        verified = engine.runtime.verify(lambda check: status.update(f"verifying: {check}")).passed
    result = calibrate(engine.model, cases, console, name, verified, more_cases)
    chosen = (result["policy"], result["ratio"]) if result["safe"] else ("", None)
    engine.runtime.learn(engine.runtime.profile.calibrated(result["safe"], *chosen))
    if not engine.catalog.strict.is_open:
        say(console, "Not saved: there is no disk tier to save it in (disk_bytes is 0).", "yellow")
    return result
