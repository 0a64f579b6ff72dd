"""Who answers the questions of `ask` and `chat`: a model that is loaded here, or a `ragfuse serve` at an address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

from rich.console import Console

from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.options import default_of, option
from ragfuse.errors import RagFuseError

if TYPE_CHECKING:
    from ragfuse.engine.ask import Ask
    from ragfuse.engine.engine import Engine
    from ragfuse.remote.answerer import Answerer
    from ragfuse.settings import Settings

Server = Annotated[
    str | None,
    option(
        "--server",
        "Ask the `ragfuse serve` at this address; no model is loaded here, but documents are searched here.",
        "none",
        metavar="URL",
    ),
]
APIKey = Annotated[str | None, option("--api-key", "API key for --server.", default_of("api_key", "none"))]


OPTIONS = MappingProxyType({"base_url": "--server", "api_key": "--api-key", "model": "--model"})
"""The option for each parameter of a framework's model that errors of a client name."""
_FIELDS = re.compile(rf"\b({'|'.join(OPTIONS)})(?:=|(?= (?:is|holds)\b))")


def in_options(message: str) -> str:
    """Return an error of a client, which names parameters of a framework's model, with the options for them."""
    return _FIELDS.sub(lambda found: OPTIONS[found[1]], message)


@contextmanager
def open_answerer(
    settings: Settings,
    console: Console,
    server: str | None = None,
    model: str | None = None,
) -> Iterator[Answerer]:
    """Yield what answers questions: an engine with its model loaded, or a client of a server.

    Args:
        settings: Those of the engine, and the API key of a client.
        console: Where the wait is shown.
        server: The server's address; None: the model is loaded here.
        model: Name of the model that the server must have; None: whichever it has.

    Raises:
        ServerError: No ragfuse server answers at the address, or it has another model.
    """
    if server is None:
        with loaded_engine(settings, console) as engine:
            yield engine
        return
    from ragfuse.remote import RemoteEngine

    try:
        remote = RemoteEngine(server, settings.api_key, model or "")
        with console.status(f"asking {remote.address.base_url}"):
            remote.card  # noqa: B018 - it raises where nothing answers
        yield remote
    except RagFuseError as error:
        error.args = (in_options(str(error)),)
        raise


def options_for_server(
    how: Ask,
    settings: Settings,
    policy: str | None,
    ratio: float | None,
    max_tokens: int | None,
    overflow: str | None,
) -> Ask:
    """Return the options of an answer with those of the command line; the server has its own for the others."""
    given = None if overflow is None else settings.overflow
    return replace(how, policy=policy, ratio=ratio, max_tokens=max_tokens, overflow=given)


def is_local(answerer: Answerer) -> TypeGuard[Engine]:
    """Return whether this is an engine in this process, not a client of a server."""
    return hasattr(type(answerer), "flush")


def tokenizer_for(answerer: Answerer, settings: Settings) -> Any:
    """Return the tokenizer by which documents are cut into chunks: the engine's, or at a server the one of --model."""
    if is_local(answerer):
        return answerer.model.tokenizer
    from ragfuse.models.loader import load_tokenizer

    return load_tokenizer(settings.model, settings.home, settings.model_kwargs)
