"""`ragfuse bench conversation`: what keeping the KV of a conversation is worth."""

from __future__ import annotations

from typing import Annotated

import typer
from ragfuse_bench.cli.report import Report
from ragfuse_bench.options import ConversationOptions

from ragfuse.cli.options import Json


def conversation(
    options: ConversationOptions,
    quick: Annotated[bool, typer.Option(help="Short trial run: three short turns, one short text.")] = False,
    json: Json = None,
) -> None:
    """Compare turns of a growing conversation with stored and with recomputed history; then truncate it."""
    from ragfuse_bench.conversation import run_conversation

    from ragfuse.calibration.plots import require_plotting
    from ragfuse.calibration.runner import tune_malloc

    report = Report("conversation", json)
    if options.plot is not None:
        require_plotting()
    tune_malloc(report)
    report.write(run_conversation(options.quick() if quick else options, report))
