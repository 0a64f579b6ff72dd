"""`ragfuse bench sessions`: what look-ahead is worth over many people's conversations, simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragfuse.cli.options import Json, console_for, write_json
from ragfuse.errors import InputError


def sessions(
    data: Annotated[
        Path | None, typer.Option(help="Folder of data sets: lengths are counted anew, Mooncake's trace is replayed.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A sixth of the conversations on a sixth of the bytes.")] = False,
    seed: Annotated[int, typer.Option(help="Of what is drawn; the same gives the same.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the hit rates here (PNG).")] = None,
    json: Json = None,
) -> None:
    """Hit rates of look-ahead, LRU and FIFO eviction over thousands of conversations, by a simulation of one server."""
    from ragfuse_bench.sessions.run import SessionOptions, run_sessions

    if data is not None and not data.is_dir():
        raise InputError(f"--data is '{data}'; wanted a folder of data sets.")
    console = console_for(json)
    write_json(run_sessions(SessionOptions(data, quick, seed, plot), console), json)
