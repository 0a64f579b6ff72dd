"""`ragfuse ask`: a question over the ingested documents, answered with the chunks' KV from the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ragfuse.cli.answerer import (
    APIKey,
    Server,
    is_local,
    open_answerer,
    options_for_server,
    tokenizer_for,
)
from ragfuse.cli.files import find_files
from ragfuse.cli.ingest import encode, forget_left, index_documents
from ragfuse.cli.options import (
    Deadline,
    Device,
    DocsFirst,
    Dtype,
    Index,
    Json,
    MaxTokens,
    Model,
    ModelKwargs,
    Overflow,
    Policy,
    Ratio,
    Store,
    TopK,
    console_for,
    option,
    settings_of,
    write_json,
)
from ragfuse.cli.show import WrappedOutput, show_trace, tell_sources
from ragfuse.errors import InputError

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.engine.engine import Ask
    from ragfuse.remote.answerer import Answerer
    from ragfuse.settings import Settings
    from ragfuse.types.answer import Answer


def ask(
    question: Annotated[str, typer.Argument(help="The question.", show_default="none: needs --pml")] = "",
    docs: DocsFirst = None,
    pml: Annotated[
        Path | None,
        option("--pml", "Ask the prompt in this PML file; QUESTION, if given, is appended to it.", "none"),
    ] = None,
    blend: Annotated[
        bool, typer.Option("--blend", help="With --pml: recompute some tokens of modules, by --policy and --ratio.")
    ] = False,
    index: Index = "default",
    server: Server = None,
    api_key: APIKey = None,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Store = None,
    policy: Policy = None,
    ratio: Ratio = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = None,
    overflow: Overflow = None,
    deadline: Deadline = None,
    session: Annotated[
        str | None,
        option("--session", "Continue the conversation of this name, or start it; see `ragfuse sessions`.", "none"),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show what was reused and why.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also answer by full prefill, for comparison.")] = False,
    json: Json = None,
) -> None:
    """Answer a question over ingested documents; the answer is printed while it is generated."""
    if not question.strip() and pml is None:
        raise InputError('The question is empty. Ask something: ragfuse ask "Who built the bridge?"')
    if pml is not None and (docs is not None or session is not None):
        raise InputError(
            "--pml cannot be combined with --docs or --session, as its text is in a schema: leave them out."
        )
    settings = settings_of(
        model=model,
        dtype=dtype,
        device=device,
        model_kwargs=model_kwargs,
        store=store,
        policy=policy,
        ratio=ratio,
        top_k=top_k,
        max_tokens=max_tokens,
        overflow=overflow,
        api_key=api_key,
    ).usable()
    console = console_for(json)
    from ragfuse.engine.ask import Ask
    from ragfuse.schemas.pml import read_prompt

    how = Ask(deadline_s=deadline, session=session, blend=blend)
    if server is not None:
        how = options_for_server(how, settings, policy, ratio, max_tokens, overflow)
    written, library = None, None
    if pml is not None:
        written = read_prompt(pml)
        written = written.asking(question) if question.strip() else written
    else:
        library = library_for(settings, index, docs)

    with open_answerer(settings, console, server, model) as engine:
        prompt: Any = written
        sources: list[str] = []
        if library is not None:
            if docs is not None:
                add_documents(library, engine, docs, console)
            prompt, sources = prompt_for(engine, library, question, console)
        full = _full_prefill(engine, prompt, console, how) if compare else None
        if compare:
            console.print("[bold]ragfuse:[/] ", end="")
        output = WrappedOutput(console, len("ragfuse: ") if compare else 0)
        with engine.stream(prompt, how) as stream:
            for text in stream:
                output.write(text)
            answer = stream.answer
        output.write(_ttft_note(answer) if compare else "")
        console.print()
    tell_sources(sources)
    trace = answer.trace
    if trace.is_late:
        late = f"Wanted the first token within {trace.deadline_s:g} s, got it after {trace.ttft_s:.3f} s."
        Console(stderr=True).print(late, style="yellow", highlight=False, soft_wrap=True)
    if explain or compare:
        show_trace(console, trace)
    result: dict[str, Any] = {"question": question, "answer": answer.text, "trace": trace.as_dict()}
    if full is not None:
        speedup = full.trace.ttft_s / trace.ttft_s
        faster = f"{speedup:.1f} times faster than" if speedup >= 1 else f"{1 / speedup:.1f} times slower than"
        why = "Nothing was reused, so both did the same work." if trace.fallback_reason else ""
        console.print(why or f"First token [bold]{faster}[/] full prefill, both in a warm process.", highlight=False)
        result |= {"answer_full": full.text, "ttft_full_s": full.trace.ttft_s, "ttft_fused_s": trace.ttft_s}
    write_json(result, json)


def library_for(settings: Settings, index: str, docs: Path | None) -> Library:
    """Return the index that questions are asked over.

    Raises:
        InputError: Nothing was ingested into it, or there are no documents at `docs`.
    """
    from ragfuse.cli.library import Library, index_of

    if docs is None:
        library = Library(settings, index)
        library.require()
        return library
    if index != "default":
        raise InputError("--docs builds its own index: leave out --index, or run `ragfuse ingest` into that index.")
    library = Library(settings, index_of(docs))
    find_files([docs], library.sources())
    return library


def add_documents(library: Library, answerer: Answerer, path: Path, console: Console) -> int:
    """Bring an index up to date with a file or folder, and encode its chunks; return how many these are.

    A server encodes what a question brings, after its answer.
    """
    split, left = index_documents(library, tokenizer_for(answerer, library.settings), [path], console)
    if is_local(answerer):
        encode(answerer, split.chunks, console)
    forget_left(answerer, library, left, console)
    return len(split.chunks)


def prompt_for(engine: Answerer, library: Library, question: str, console: Console) -> tuple[Any, list[str]]:
    """Return the prompt with the chunks retrieved for a question, and the documents that they are from."""
    from ragfuse.cli.prompts import rag_prompt

    with console.status("searching"):
        found = library.search(question)
    return rag_prompt(engine, question, found), [source for _, source in found]


def _full_prefill(engine: Answerer, prompt: Any, console: Console, ask: Ask) -> Answer:
    """Return the answer by full prefill, after warming up both ways here: the first call of a process is slower."""
    from ragfuse.engine.ask import Ask

    with console.status("full prefill, to compare"):
        if is_local(engine):
            engine.answer(prompt, Ask(reuse=False, max_tokens=1))  # no session: it must get the question only once
            engine.prepare(engine.prompt(prompt))  # does not save a prefix, which the measured question would reuse
            engine.flush()
        full = engine.answer(prompt, replace(ask, reuse=False, blend=False, deadline_s=None))
    console.print(Text.assemble(("full prefill: ", "bold"), full.text, _ttft_note(full)))
    return full


def _ttft_note(answer: Answer) -> str:
    return f" (first token after {answer.trace.ttft_s:.2f} s)"
