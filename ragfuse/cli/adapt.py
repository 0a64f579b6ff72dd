"""`ragfuse adapt`: teach a model to read chunks apart, by an adapter that is trained on the user's documents."""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn

from ragfuse.cli.checks import calibrate_engine
from ragfuse.cli.engine import tell_loaded
from ragfuse.cli.files import find_files
from ragfuse.cli.ingest import split_documents
from ragfuse.cli.options import (
    Device,
    Documents,
    Dtype,
    Json,
    Model,
    ModelKwargs,
    Store,
    console_for,
    option,
    prepare_model,
    require_writable,
    settings_of,
    write_json,
)
from ragfuse.cli.show import counted
from ragfuse.errors import ModelError
from ragfuse.telemetry.progress import progress
from ragfuse.types.sizes import duration_text, size_text

if TYPE_CHECKING:
    from ragfuse.adapt.checkpoint import TrainingState


def adapt_model(
    docs: Documents,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Store = None,
    out: Annotated[
        Path | None,
        option("--out", "Folder of the adapter, which only this adapter has.", "a new one in RAGFUSE_HOME"),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes of training; more at a later call go on.")] = 60,
    steps: Annotated[
        int | None, option("--steps", "Train this many steps instead.", "as many as --minutes allow", min=1)
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA adapter: how much it can learn.")] = 16,
    questions: Annotated[int, typer.Option(min=12, help="Questions that calibration asks at the end.")] = 20,
    plot: Annotated[Path | None, option("--plot", "Draw held-out KL by step into this PNG.", "none is drawn")] = None,
    json: Json = None,
) -> None:
    """Train a LoRA adapter that encodes chunks, so that answers over reused chunks come closer to full prefill.

    Only the stored KV of chunks is computed with it; full prefill stays exactly what it was. The model teaches itself:
    what it answers by full prefill is what it learns to answer over reused chunks, so no questions or answers have to
    be written. A run that was stopped goes on when the same command is given again. At the end the model is verified
    and calibrated with its adapter; give its folder as --model from then on. Exit status 1 if no policy and ratio is
    safe with it.
    """
    from ragfuse.calibration.plots import require_plotting
    from ragfuse.calibration.runner import tune_malloc

    require_writable(plot)
    if plot is not None:
        require_plotting()
    settings = settings_of(model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store)
    console = console_for(json)
    find_files(docs)
    tune_malloc(console)
    if out is not None:
        from ragfuse.adapt.checkpoint import require_place

        require_place(out.expanduser())
    prepare_model(settings)
    began = time.perf_counter()
    with console.status("loading the model"):
        from ragfuse.adapt.picture import draw_training
        from ragfuse.adapt.run import Adaptation, default_folder, free_nbytes, training_nbytes
        from ragfuse.adapt.trainer import TrainingLimits
        from ragfuse.calibration.calibrate import show_calibration
        from ragfuse.engine.engine import Engine
        from ragfuse.models.shipped_profile import ShippedProfile, write_shipped

        adaptation = Adaptation(settings)
    try:
        tell_loaded(time.perf_counter() - began, settings.model)
        split = split_documents(docs, settings, adaptation.plain.tokenizer, console)
        texts = list(split.documents.items())
        folder = (out or default_folder(settings, texts)).expanduser()
        needed, free = training_nbytes(adaptation.plain, rank), free_nbytes(adaptation.plain.device)
        memory = f"about {size_text(needed)} of memory besides the model; {size_text(free)} are free"
        console.print(f"Training needs {memory}.", highlight=False)
        if needed > free:
            raise ModelError(
                f"Training needs {memory}. End other programs, take a smaller --rank or model, or another --device."
            )
        with console.status("preparing"):
            trainer = adaptation.prepare(texts, folder, rank)
        if trainer.state.step:
            console.print(f"Going on at step {trainer.state.step:,}.", highlight=False)
        with _shown(console, trainer.state) as show, _stopped_by_signal(console) as stop:
            state = trainer.run(TrainingLimits(60 * minutes, steps), show, stop)
        if stop() or not state.finished:  # pressed during the last step or measurement, it ends the command too
            raise KeyboardInterrupt(f"What was learnt is in '{folder}'. Run the same command again to continue.")
        made = f"{counted(state.step, 'step')} in {counted(round(state.seconds / 60), 'minute')}"
        console.print(
            f"{made} ({state.finished}): on held-out documents KL at ratio 0 fell from {state.evaluations[0].kl:.3f} "
            f"to {state.best.kl:.3f}, at step {state.best.step:,}.",
            highlight=False,
        )
        if plot is not None:
            draw_training(state.evaluations, plot)
            console.print(f"Written: {plot}", highlight=False)
        with Engine(settings.model_copy(update={"model": str(folder)})) as engine:
            calibrated = calibrate_engine(engine, adaptation.held, questions, console, str(folder))
        chosen = (calibrated["policy"], calibrated["ratio"]) if calibrated["safe"] else ("", None)
        write_shipped(folder, ShippedProfile(adaptation.engine.runtime.encoder.filler_tokens, *chosen))
    finally:
        adaptation.close()
    show_calibration(calibrated, console)
    use = f"Use it: ragfuse ask --model {shlex.quote(str(folder))} ..."
    console.print(use, highlight=False, markup=False, soft_wrap=True)
    result = {
        "folder": str(folder),
        "steps": state.step,
        "seconds": state.seconds,
        "evaluations": [vars(each) for each in state.evaluations],
        "calibration": calibrated,
    }
    write_json(result, json)
    raise typer.Exit(0 if calibrated["safe"] else 1)


@contextmanager
def _stopped_by_signal(console: Console) -> Iterator[Any]:
    """Yield a function that says whether Ctrl-C was pressed: the step is finished then; a second one stops at once."""
    asked = threading.Event()

    def ask(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt("Run the same command again to continue from what was last saved.")
        asked.set()
        console.print("\nFinishing this step; Ctrl-C again stops at once.", highlight=False)

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _shown(console: Console, state: TrainingState) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows a step: as a bar on a terminal, else as a line now and then."""
    columns = TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TextColumn("{task.fields[left]}")
    with progress(console, *columns) as bar:
        task = bar.add_task("measuring", total=1.0, left="")

        def show(done: float) -> None:
            known = state.evaluations
            held = f"held-out KL {known[-1].kl:.3f} (was {known[0].kl:.3f})"
            left = f"{duration_text(state.seconds * max(0, 1 - done) / done)} left" if done else ""
            bar.update(task, description=f"step {state.step:,}, {held}", completed=done, left=left)

        yield show
