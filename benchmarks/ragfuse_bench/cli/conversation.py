"""`ragfuse bench conversation` and `sessions`: what keeping the KV of conversations is worth."""

from __future__ import annotations

from typing import Annotated

import typer
from ragfuse_bench.options import ConversationOptions, SessionOptions

from ragfuse.cli.options import Json, console_for, write_json


def conversation(
    options: ConversationOptions,
    quick: Annotated[bool, typer.Option(help="Short trial run: three short turns, one short text.")] = False,
    json: Json = None,
) -> None:
    """Compare turns of a growing conversation with stored and with recomputed history; then truncate it."""
    from ragfuse_bench.conversation import run_conversation

    from ragfuse.calibration.plots import require_plotting
    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    if options.plot is not None:
        require_plotting()
    tune_malloc(console)
    write_json(run_conversation(options.quick() if quick else options, console), json)


def sessions(options: SessionOptions, json: Json = None) -> None:
    """Simulate one server over thousands of conversations, to compare the hit rates of eviction policies."""
    from ragfuse_bench.sessions.run import run_sessions

    write_json(run_sessions(options, console_for(json)), json)
