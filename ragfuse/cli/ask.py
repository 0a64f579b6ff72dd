"""`ragfuse ask`: a question over the ingested documents, reusing the KV of their chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ragfuse.cli.engine import given_for, is_local, open_answerer
from ragfuse.cli.files import find_files
from ragfuse.cli.ingest import add_documents
from ragfuse.cli.options import ENGINE, DocsFirst, Index, Server, Session, option, screen
from ragfuse.cli.show import say, show_trace, tell_sources, write
from ragfuse.errors import InputError
from ragfuse.settings import Settings

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.engine.engine import Ask
    from ragfuse.remote.remote_engine import Answerer
    from ragfuse.types.answer import Answer


@screen(*ENGINE, "policy", "ratio", "top_k", "max_tokens", "api_key")
def ask(
    console: Console,
    settings: Settings,
    model: str | None,
    question: Annotated[
        str, typer.Argument(help="The question.", show_default="none: needs --pml")
    ] = "",
    docs: DocsFirst = None,
    pml: Annotated[
        Path | None,
        option(
            "--pml",
            "Take the prompt from this PML file. QUESTION, if given, is appended to the prompt.",
            "none",
        ),
    ] = None,
    blend: Annotated[
        bool,
        typer.Option(
            "--blend", help="With --pml: also recompute tokens of modules, by --policy and --ratio."
        ),
    ] = False,
    index: Index = "default",
    server: Server = None,
    deadline: Annotated[
        float | None,
        option(
            "--deadline",
            "Seconds until the first token is wanted; fewer tokens are recomputed to be in time.",
            "none",
            min=0.0,
        ),
    ] = None,
    session: Session = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what was reused and why.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also answer by full prefill. Both are warmed up first."),
    ] = False,
) -> dict[str, Any]:
    """Answer a question over ingested documents; the answer is streamed."""
    if not question.strip() and pml is None:
        raise InputError(
            'The question is empty. Ask a question: ragfuse ask "Who built the bridge?"'
        )
    if pml is not None and (docs is not None or session is not None):
        raise InputError(
            "--pml cannot be used with --docs or --session. Remove --docs and --session."
        )
    settings = settings.usable()
    from ragfuse.engine.ask import Ask
    from ragfuse.schemas.pml import read_prompt

    how = Ask(deadline_s=deadline, session=session, blend=blend, **given_for(settings, server))
    prompt: Any = read_prompt(pml) if pml is not None else None
    if prompt is not None and question.strip():
        prompt = prompt.asking(question)
    library = library_for(settings, index, docs) if prompt is None else None
    sources: list[str] = []
    with open_answerer(settings, console, server, model) as engine:
        if library is not None:
            if docs is not None:
                add_documents(library, engine, [docs], console)
            prompt, sources = prompt_for(engine, library, question, console)
        full = _full_prefill(engine, prompt, console, how) if compare else None
        if compare:
            console.print("[bold]ragfuse:[/] ", end="")
        with engine.stream(prompt, how) as stream:
            for text in stream:
                write(console, text)
            answer = stream.answer
        write(console, _ttft_note(answer) if compare else "")
        console.print()
    tell_sources(sources)
    trace = answer.trace
    if explain or compare:
        show_trace(console, trace)
    elif trace.is_late:
        say(Console(stderr=True), trace.summary, "yellow")
    result: dict[str, Any] = {"question": question, "answer": answer.text, "trace": trace.as_dict()}
    if full is not None:
        result |= {
            "answer_full": full.text,
            "ttft_full_s": full.trace.ttft_s,
            "ttft_fused_s": trace.ttft_s,
        }
    return result


def library_for(settings: Settings, index: str, docs: Path | None) -> Library:
    """Return the document index called `index`, or the index of `docs` if `docs` is given.

    Raises:
        InputError: The index is empty, `docs` has no document, or `docs` and an index are given.
    """
    from ragfuse.cli.library import Library, index_of

    if docs is None:
        library = Library(settings, index)
        library.require()
        return library
    if index != "default":
        raise InputError(
            "--docs uses an index of its own, so --index has no effect. Remove one of the two."
            " `ragfuse ingest --index NAME` adds documents to an index."
        )
    library = Library(settings, index_of(docs))
    find_files([docs], library.sources())
    return library


def prompt_for(
    engine: Answerer, library: Library, question: str, console: Console, searched: str = ""
) -> tuple[Any, list[str]]:
    """Return a prompt and its chunks' sources. The search uses `searched`, or else `question`."""
    from ragfuse.cli.prompts import rag_prompt

    with console.status("searching"):
        found = library.search(searched or question)
    return rag_prompt(engine, question, found), [source for _, source in found]


def _full_prefill(engine: Answerer, prompt: Any, console: Console, ask: Ask) -> Answer:
    """Return the answer by full prefill, after a warm-up of full prefill and of reuse."""
    from ragfuse.engine.ask import Ask

    with console.status("full prefill, to compare"):
        if is_local(engine):
            # warm up without the session: the session must get the question only once
            engine.answer(prompt, Ask(reuse=False, max_tokens=1))
            # unlike `answer`, `prepare` saves no prefix that would speed up the measured answer
            engine.prepare(engine.prompt(prompt))
            engine.flush()
        full = engine.answer(prompt, replace(ask, reuse=False, blend=False, deadline_s=None))
    console.print(Text.assemble(("full prefill: ", "bold"), full.text, _ttft_note(full)))
    return full


def _ttft_note(answer: Answer) -> str:
    return f" (first token after {answer.trace.ttft_s:.2f} s)"
