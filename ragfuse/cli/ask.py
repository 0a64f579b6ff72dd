"""`ragfuse ask`: a question over the ingested documents, answered with the chunks' KV from the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    refuse_with_server,
    tokenizer_for,
)
from ragfuse.cli.files import FilesToIngest, find_files
from ragfuse.cli.gone import forget_absent
from ragfuse.cli.ingest import add_files, encode, print_skipped
from ragfuse.cli.notices import tell_late, tell_sources, warn_of_unfinished
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
    refuse_without,
    settings_of,
    write_json,
)
from ragfuse.errors import InputError

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.engine.answerer import Answerer
    from ragfuse.engine.engine import Ask
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
    no_kv: Annotated[
        bool, typer.Option("--no-kv", help="With --docs: only index; compute KV when a question needs it.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show what was reused and why.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also answer by full prefill, for comparison.")] = False,
    json: Json = None,
) -> None:
    """Answer a question over ingested documents; the answer is printed while it is generated."""
    _check_combination(question, docs, pml, blend, index, session, policy, ratio, top_k)
    refuse_without("--docs", docs is not None, no_kv=no_kv)
    refuse_without("--server", server is not None, api_key=api_key)
    refuse_with_server(server, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store, no_kv=no_kv)
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
    console, documents = console_for(json), find_files([docs]) if docs else None
    from ragfuse.engine.ask import Ask

    how = Ask(deadline_s=deadline, session=session, blend=blend)
    if server is not None:
        how = options_for_server(how, settings, policy, ratio, max_tokens, overflow)
    options = QuestionOptions(console, explain, compare, how)
    if pml is not None:
        asked = pml_prompt(pml, question)
        with open_answerer(settings, console, server, model, lambda engine: engine.schemas.check(asked)) as engine:
            write_json(_result(question, *_answers(engine, asked, options)), json)
        return
    from ragfuse.cli.library import Library, index_of

    library = Library(settings, index if docs is None else index_of(docs))
    if documents is None:
        warn_of_unfinished(library)
        library.require()
    with open_answerer(settings, console, server, model) as engine:
        if docs is not None and documents is not None:
            _ingest(library, engine, docs, documents, console, no_kv)
        prompt, retrieved = prompt_for(engine, library, question, console)
        answer, full = _answers(engine, prompt, options, retrieved)
    write_json(_result(question, answer, full), json)


def _check_combination(
    question: str,
    docs: Path | None,
    pml: Path | None,
    blend: bool,
    index: str,
    session: str | None,
    policy: str | None,
    ratio: float | None,
    top_k: int | None,
) -> None:
    """Raise InputError for options that have no meaning together."""
    if not question.strip() and pml is None:
        raise InputError('The question is empty. Ask something: ragfuse ask "Who built the bridge?"')
    if pml is not None and (docs is not None or index != "default" or session is not None):
        raise InputError(
            "--pml cannot be combined with --docs, --index or --session, as its text is in a schema: leave these out."
        )
    if blend and pml is None:
        raise InputError("--blend works only with --pml: add --pml, or leave out --blend.")
    if pml is not None and not blend and (policy is not None or ratio is not None):
        raise InputError("With --pml, --policy and --ratio have no effect alone: add --blend, or leave them out.")
    if pml is not None and top_k is not None:
        raise InputError("With --pml nothing is retrieved, so --top-k has no effect: leave it out.")
    if docs is not None and index != "default":
        raise InputError(
            "--docs builds its own index, so --index cannot be given too: leave out --index, or run `ragfuse ingest` "
            "into that index and leave out --docs."
        )


def _ingest(
    library: Library, engine: Answerer, docs: Path, documents: FilesToIngest, console: Console, no_kv: bool
) -> None:
    """Bring the index up to date with a folder, and encode its chunks, unless a server will after its answers."""
    print_skipped(console, documents)
    before = library.sources()
    chunks, _ = add_files(library, tokenizer_for(engine, library.settings), [docs], documents.files, console)
    forget_absent(library, engine, [docs], documents, console, before, whole=True)
    if not no_kv and is_local(engine):  # a server encodes what a question brings, after its answer
        encode(engine, chunks, console)


def pml_prompt(pml: Path, question: str) -> Any:
    """Return the prompt in a PML file, with a question appended if there is one."""
    from ragfuse.schemas.pml import read_prompt

    found = read_prompt(pml)
    return found.asking(question) if question.strip() else found


@dataclass(frozen=True)
class QuestionOptions:
    """The options of `ragfuse ask`: how to answer, and what to show."""

    console: Console
    explain: bool
    compare: bool
    ask: Ask


def _answers(
    engine: Answerer, prompt: Any, options: QuestionOptions, retrieved: Sequence[str] = ()
) -> tuple[Answer, Answer | None]:
    """Print the answer while it is generated; return it, with full prefill's answer for --compare.

    The names of the documents that passages were retrieved from are printed under it, on standard error.
    """
    console = options.console
    full = _full_prefill(engine, prompt, console, options.ask) if options.compare else None
    answer = _stream(engine, prompt, console, options.compare, options.ask)
    tell_sources(retrieved)
    tell_late(answer.trace)
    if options.explain or options.compare:
        from ragfuse.cli.show import show_trace

        show_trace(console, answer.trace)
    if full is not None:
        _print_which_was_faster(console, full, answer)
    return answer, full


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


def _stream(engine: Answerer, prompt: Any, console: Console, heading: bool, ask: Ask) -> Answer:
    from ragfuse.cli.show import WrappedOutput

    if heading:
        console.print("[bold]ragfuse:[/] ", end="")
    output = WrappedOutput(console, len("ragfuse: ") if heading else 0)
    with engine.stream(prompt, ask) as stream:
        for text in stream:
            output.write(text)
        if heading:
            output.write(_ttft_note(stream.answer))
        console.print()
        return stream.answer


def _ttft_note(answer: Answer) -> str:
    return f" (first token after {answer.trace.ttft_s:.2f} s)"


def _print_which_was_faster(console: Console, full: Answer, answer: Answer) -> None:
    speedup = full.trace.ttft_s / answer.trace.ttft_s
    if answer.trace.fallback_reason:
        console.print("Nothing was reused, so both did the same work.")
    elif speedup >= 1:
        warm = " Both in a warm process; its first question takes longer."
        console.print(f"First token [bold]{speedup:.1f} times faster[/] than full prefill.{warm}", highlight=False)
    else:
        console.print(f"First token {1 / speedup:.1f} times slower than full prefill: too little was reused.")


def _result(question: str, answer: Answer, full: Answer | None) -> dict[str, Any]:
    result: dict[str, Any] = {"question": question, "answer": answer.text, "trace": answer.trace.as_dict()}
    if full is not None:
        result |= {"answer_full": full.text, "ttft_full_s": full.trace.ttft_s, "ttft_fused_s": answer.trace.ttft_s}
    return result
