"""The engine of a command, loaded once everything else that the command was given is known to be there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from ragfuse.cli.options import prepare_model

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine
    from ragfuse.settings import Settings


@contextmanager
def loaded_engine(
    settings: Settings, console: Console, check: Callable[[Engine], object] = lambda engine: None
) -> Iterator[Engine]:
    """Yield an engine with its model loaded, and close it at the end.

    Args:
        settings: Those of the engine.
        console: Where the wait is shown. How long it took is told on standard error.
        check: Called before the model is loaded; it raises for what makes loading useless.
    """
    prepare_model(settings)
    began = time.perf_counter()
    with console.status("loading the model"):
        from ragfuse.engine.engine import Engine

        engine = Engine(settings)
    with engine:
        check(engine)
        with console.status("loading the model"):
            device = engine.model.device
        seconds = time.perf_counter() - began
        tell_loaded(seconds, f"{settings.model}, {engine.settings.dtype} on {device}")
        yield engine


def tell_loaded(seconds: float, what: str) -> None:
    """Say on standard error how long a model took to load, and which one it is."""
    line = f"Model loaded in {seconds:.1f} s: {what}."
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
