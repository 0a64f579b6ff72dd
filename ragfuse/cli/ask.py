"""`ragfuse ask`: a question over the ingested documents, answered with the chunks' KV from the store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.ingest import add_files, encode
from ragfuse.cli.library import Library, find_files
from ragfuse.cli.options import (
    Device,
    Dtype,
    Index,
    Json,
    Model,
    Policy,
    Ratio,
    Store,
    console_for,
    settings_of,
    write_json,
)
from ragfuse.cli.prompts import rag_messages
from ragfuse.cli.show import show_trace
from ragfuse.core import Answer, digest
from ragfuse.engine import Ask, Engine
from ragfuse.errors import InputError


def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    docs: Annotated[
        Path | None, typer.Option(help="Ingest this file or folder first, into an index of its own.")
    ] = None,
    index: Index = "default",
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    store: Store = None,
    policy: Policy = None,
    ratio: Ratio = None,
    top_k: Annotated[int | None, typer.Option(help="Chunks retrieved.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="New tokens at most.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show what was reused and why.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run the model's own full prefill beside it.")] = False,
    json: Json = None,
) -> None:
    """Answer a question over ingested documents; the answer is printed as it is written."""
    if not question.strip():
        raise InputError('The question is empty. Ask something: ragfuse ask "Who built the bridge?"')
    settings = settings_of(
        model=model,
        dtype=dtype,
        device=device,
        store=store,
        policy=policy,
        ratio=ratio,
        top_k=top_k,
        max_tokens=max_tokens,
    )
    console = console_for(json)
    index = index if docs is None else f"docs-{digest('docs', str(docs.resolve()))[:12]}"
    with Engine(settings) as engine:
        library = Library(settings, index)
        if docs is not None:
            chunks, _ = add_files(library, engine, find_files([docs]).files, console)
            if chunks:
                encode(engine, chunks, console)
        found = library.vectors().similarity_search(question, k=settings.top_k)
        messages = rag_messages(question, [(d.page_content, d.metadata["source"]) for d in found])
        full = engine.answer(messages, Ask(reuse=False)) if compare else None
        if full is not None:
            console.print("[bold]full prefill[/]", full.text, f"[dim]({full.trace.ttft_s:.2f} s)[/]", highlight=False)
        answer = _stream(engine, messages, console, heading=compare)
        if explain or compare:
            show_trace(console, answer.trace)
        if full is not None:
            faster = full.trace.ttft_s / answer.trace.ttft_s
            console.print(f"First token [bold]{faster:.1f} times sooner[/] than full prefill.", highlight=False)
    write_json(_result(question, answer, full), json)


def _stream(engine: Engine, messages: Any, console: Console, heading: bool) -> Answer:
    if heading:
        console.print("[bold]ragfuse[/] ", end="")
    with engine.stream(messages) as stream:
        for text in stream:
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        console.print()
        return stream.answer


def _result(question: str, answer: Answer, full: Answer | None) -> dict[str, Any]:
    result: dict[str, Any] = {"question": question, "answer": answer.text, "trace": answer.trace.as_dict()}
    if full is not None:
        result |= {"answer_full": full.text, "ttft_full_s": full.trace.ttft_s, "ttft_fused_s": answer.trace.ttft_s}
    return result
