"""Open an engine, a client of a server, or the store without a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ragfuse.cli.options import prepare_model
from ragfuse.cli.show import say
from ragfuse.errors import InputError
from ragfuse.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from ragfuse.cli.entries import OpenStore
    from ragfuse.engine.engine import Engine
    from ragfuse.remote.remote_engine import Answerer


@contextmanager
def loaded_engine(settings: Settings, console: Console) -> Iterator[Engine]:
    """Yield an engine with its model loaded; print the loading time on standard error."""
    prepare_model(settings)
    began = time.perf_counter()
    with console.status("loading the model"):
        from ragfuse.engine.engine import Engine

        engine = Engine(settings)
    with engine:
        with console.status("loading the model"):
            device = engine.model.device
        seconds = time.perf_counter() - began
        line = (
            f"Model loaded in {seconds:.1f} s: {settings.model}, {engine.settings.dtype} on"
            f" {device}."
        )
        say(Console(stderr=True), line)
        yield engine


@contextmanager
def open_answerer(
    settings: Settings, console: Console, server: str | None, model: str | None
) -> Iterator[Answerer]:
    """Yield an engine with its model loaded, or a client of a server.

    Args:
        settings: Settings of the engine; a client uses only the API key.
        console: Console that shows a status while waiting.
        server: The server's address. None means that the model is loaded in this process.
        model: Name of the model that the server must have. None means any model.

    Raises:
        ServerError: The address has no ragfuse server, or the server has another model.
    """
    if server is None:
        with loaded_engine(settings, console) as engine:
            yield engine
        return
    from ragfuse.remote import RemoteEngine

    remote = RemoteEngine(server, settings.api_key, model or "")
    with console.status(f"asking {remote.address.base_url}"):
        remote.card  # noqa: B018 - raises without a server
    yield remote


def given_for(settings: Settings, server: str | None) -> dict[str, Any]:
    """Return the explicit options that override the server's settings; {} without a server."""
    names = settings.model_fields_set & {"policy", "ratio", "max_tokens"} if server else ()
    return {name: getattr(settings, name) for name in names}


def is_local(answerer: Answerer) -> TypeIs[Engine]:
    """Return True for an engine in this process, False for a client of a server."""
    return hasattr(type(answerer), "flush")


def tokenizer_for(answerer: Answerer, settings: Settings) -> Any:
    """Return the tokenizer that measures chunks. For a server, this is the tokenizer of --model."""
    if is_local(answerer):
        return answerer.model.tokenizer
    from ragfuse.models.loader import load_tokenizer

    return load_tokenizer(settings.model, settings.home, settings.model_kwargs)


@contextmanager
def open_kv(settings: Settings, console: Console, may_be_new: bool = False) -> Iterator[OpenStore]:
    """Open the store. Raise InputError if the store is missing and `may_be_new` is False."""
    if (
        not may_be_new
        and not settings.tiers
        and settings.disk_bytes
        and not settings.store_path.exists()
    ):
        raise InputError(
            f"There is no store at '{settings.store_path}' yet. Fill the store with `ragfuse"
            " ingest PATH`, or choose another folder with --store."
        )
    with console.status("opening the store"):
        from ragfuse.cli.entries import OpenStore

        kept = OpenStore(settings)
    with kept:
        yield kept


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation unless `yes` is True. End the command if the answer is no or missing."""
    if not yes:
        typer.confirm(f"{question} (--yes skips this question)", abort=True, err=True)
