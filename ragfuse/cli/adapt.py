"""`ragfuse adapt`: train a chunk adapter on the user's documents."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.calibrate import QUESTIONS, calibrate_engine, show_calibration
from ragfuse.cli.files import find_files
from ragfuse.cli.ingest import RESUMES, split_documents
from ragfuse.cli.options import (
    ENGINE,
    Documents,
    option,
    prepare_model,
    screen,
)
from ragfuse.cli.show import counted, progress_bar, say
from ragfuse.settings import Settings


@screen(*ENGINE)
def adapt_model(
    console: Console,
    settings: Settings,
    docs: Documents,
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Folder for the adapter: a new folder, or the folder of an earlier run."
        ),
    ],
    minutes: Annotated[
        float,
        typer.Option(
            min=0.01, help="Maximum minutes; training ends earlier if held-out KL stops falling."
        ),
    ] = 60,
    steps: Annotated[
        int | None,
        option(
            "--steps",
            "Maximum steps, including those of earlier runs.",
            "as many as --minutes allow",
            min=1,
        ),
    ] = None,
    rank: Annotated[
        int, typer.Option(min=1, help="Rank of the LoRA adapter: how much it can learn.")
    ] = 16,
) -> tuple[dict[str, Any], bool]:
    """Train a LoRA adapter for encoding chunks, so that reuse comes closer to full prefill.

    The adapter is only active while chunks are encoded; full prefill does not change. The adapter
    learns from the model's own answers by full prefill, so you write no questions or answers. Run
    the command again to resume. At the end the model is verified and calibrated with the adapter.
    From then on, pass the adapter's folder as --model. Exit status 1 if calibration finds no safe
    policy and ratio.
    """
    from ragfuse.calibration.runner import tune_malloc

    find_files(docs)
    tune_malloc(console)
    from ragfuse.adapt.folder import require_place

    folder = out.expanduser()
    require_place(folder)
    prepare_model(settings)
    with console.status("loading the model"):
        from ragfuse.adapt.run import Adaptation
        from ragfuse.engine.engine import Engine
        from ragfuse.models.shipped_profile import ShippedProfile, write_shipped

        adaptation = Adaptation(settings)
    with closing(adaptation):
        chunks, _ = split_documents(docs, settings, adaptation.plain.tokenizer, console)
        with console.status("preparing"):
            trainer = adaptation.prepare(chunks, folder, rank)
        if trainer.state.global_step:
            say(console, f"Resuming at step {trainer.state.global_step:,}.")
        with progress_bar(console, "measuring") as bar, _stopped_by_signal(console) as stop:

            def show(done: float) -> None:
                known = trainer.evaluations
                held = f"held-out KL {known[-1]['kl']:.3f} (was {known[0]['kl']:.3f})"
                bar(done, 1.0, f"step {trainer.state.global_step:,}, {held}")

            trainer.run(60 * minutes, steps, show, stop)
        # Ctrl-C during the last step or evaluation also ends the command
        if stop():
            raise KeyboardInterrupt(f"The adapter so far is in '{folder}'. {RESUMES}")
        step, found = trainer.state.global_step, trainer.evaluations
        best = min(found, key=itemgetter("kl"))
        fell = f"fell from {found[0]['kl']:.3f} to {best['kl']:.3f}, at step {best['step']:,}"
        made = counted(step, "step")
        say(console, f"{made}: on held-out documents, KL of plain reuse {fell}.")
        with Engine(settings.model_copy(update={"model": str(folder)})) as engine:
            calibrated = calibrate_engine(engine, adaptation.held, QUESTIONS, console, str(folder))
        chosen = (calibrated["policy"], calibrated["ratio"]) if calibrated["safe"] else ("", None)
        write_shipped(
            folder, ShippedProfile(adaptation.engine.runtime.encoder.filler_tokens, *chosen)
        )
    show_calibration(console, calibrated)
    say(console, f"Use the adapter: ragfuse ask --model {shlex.quote(str(folder))} ...")
    result = {
        "folder": str(folder),
        "steps": step,
        "evaluations": found,
        "calibration": calibrated,
    }
    return result, calibrated["safe"]


@contextmanager
def _stopped_by_signal(console: Console) -> Iterator[Any]:
    """Yield a function that returns True after Ctrl-C. A second Ctrl-C ends the command at once."""
    asked = threading.Event()

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)
        say(console, "\nFinishing this training step. Press Ctrl-C again to stop at once.")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
