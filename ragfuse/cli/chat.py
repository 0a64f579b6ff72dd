"""`ragfuse chat`: a conversation over documents in the terminal, with a model here or at a server."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ragfuse.cli.answerer import (
    APIKey,
    Server,
    in_options,
    is_local,
    open_answerer,
    options_for_server,
    refuse_with_server,
    tokenizer_for,
)
from ragfuse.cli.document_chat import DocumentChat, common_sources, earlier_messages, new_session
from ragfuse.cli.entries import counted
from ragfuse.cli.files import find_files
from ragfuse.cli.gone import documents_named, forget_absent, forget_documents, found_for, say_forgotten, say_quoted
from ragfuse.cli.ingest import add_files, encode, print_skipped
from ragfuse.cli.notices import tell_sources, warn_of_unfinished
from ragfuse.cli.options import (
    Device,
    DocsFirst,
    Dtype,
    Index,
    MaxTokens,
    Model,
    ModelKwargs,
    Overflow,
    Policy,
    Ratio,
    Store,
    TopK,
    option,
    refuse_without,
    settings_of,
)
from ragfuse.cli.typed import typed_lines
from ragfuse.errors import InputError, RagFuseError

if TYPE_CHECKING:
    from ragfuse.engine.answerer import Answerer
    from ragfuse.types.answer import Answer

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "/docs": "list the first documents of the index; /docs all lists all, /docs add PATH adds a file or folder, "
        "/docs remove NAME forgets one",
        "/compare": "answer the last question by full prefill, too: is it the same, and how much later does it begin?",
        "/why": "show what the last answer reused, and why the rest was computed",
        "/ratio": "/ratio 0.2 recomputes 20% of the reused tokens from now on; /ratio auto leaves it to ragfuse",
        "/policy": "/policy NAME chooses how these tokens are found; /policy auto leaves it to ragfuse",
        "/help": "show this list",
        "/quit": "end; so does Ctrl-D. Ctrl-C stops an answer",
    }
)
"""What each command of a chat does."""


def chat(
    docs: DocsFirst = None,
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
    session: Annotated[
        str | None,
        option(
            "--session",
            "Continue the conversation of this name, or start it; it is kept for later.",
            "a new one that is deleted at the end",
        ),
    ] = None,
) -> None:
    """Talk with a model over ingested documents. Each turn computes only what is new: the KV of earlier ones is kept.

    Lines that begin with / are commands, /help lists them. Ctrl-C stops an answer, Ctrl-D ends. Where standard input
    is no terminal, each of its lines is a question or a command; exit status 1 if one of them failed.
    """
    if docs is not None and index != "default":
        raise InputError("--docs has an index of its own: leave out --index, or run `ragfuse ingest` into that index.")
    refuse_without("--server", server is not None, api_key=api_key)
    refuse_with_server(server, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store)
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
    console = Console()
    if docs is not None:
        find_files([docs])  # it raises for a wrong path before the model is loaded
    from ragfuse.cli.library import Library, index_of
    from ragfuse.engine.ask import Ask

    library, name = Library(settings, index if docs is None else index_of(docs)), session or new_session()
    how = Ask(session=name)
    if server is not None:
        how = options_for_server(how, settings, policy, ratio, max_tokens, overflow)
    with open_answerer(settings, console, server, model) as answerer:
        if not answerer.card.has_chat_template:
            how = Ask()  # a plain text has no turns
        talk = Talk(console, DocumentChat(answerer, library, how, earlier_messages(answerer, name)))
        if docs is not None:
            talk.add(docs, whole=True)
        try:
            talk.begin(session)
            with _ended_by_signals(), typed_lines("> ", settings.home / "chat_history", [*COMMANDS]) as lines:
                for line in lines:
                    if not talk.take(line.strip()):
                        break
        finally:
            if session is None:
                _forget(answerer, name)
    raise typer.Exit(1 if talk.failed and not console.is_terminal else 0)


def _forget(answerer: Answerer, session: str) -> None:
    """Delete a conversation that was not given a name; a server that is gone keeps it until it evicts it."""
    if is_local(answerer):
        answerer.flush()
        if session in {info.id for info in answerer.sessions.ls()}:
            answerer.sessions.delete(session)
        return
    from ragfuse.remote.remote_engine import RemoteEngine

    if isinstance(answerer, RemoteEngine):
        with suppress(RagFuseError):
            answerer.delete_session(session)


def _unquoted(named: str) -> str:
    """Return a name without the quotes around it, if it has some."""
    try:
        return shlex.split(named)[0] if named[0] in "'\"" else named
    except ValueError:
        raise InputError(f"Wanted a name in quotes, found {named}: the closing quote is missing.") from None


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let a terminal that is closed, or a SIGTERM, end the chat as Ctrl-D does, so that nothing of it stays behind."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name)]  # Windows has no SIGHUP
    before = {name: signal.signal(getattr(signal, name), end) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@dataclass
class Talk:
    """Takes the lines of a chat, one by one, and prints what comes of them.

    Args:
        console: Where it is printed.
        conversation: The conversation so far.
        failed: How many lines failed.
        truncated: Tokens of the oldest turns that the last prompt left out.
    """

    console: Console
    conversation: DocumentChat
    failed: int = 0
    truncated: int = 0

    def begin(self, session: str | None) -> None:
        """Say with what one talks, and how."""
        conversation = self.conversation
        sources = conversation.library.sources()
        conversation.has_documents = bool(sources)
        over = (
            f"{counted(sum(sources.values()), 'chunk')} of {counted(len(sources), 'document')} (/docs lists them)"
            if sources
            else "no documents yet (/docs add PATH adds some)"
        )
        going_on = f" Going on with '{session}'." if session and conversation.messages else ""
        self._say(f"{conversation.answerer.card.name}, over {over}.{going_on}")
        warn_of_unfinished(conversation.library)
        self._say("/help lists the commands, Ctrl-D ends.")

    def take(self, line: str) -> bool:
        """Answer a question or obey a command; return whether the chat goes on."""
        word, _, rest = line.partition(" ")
        if word in ("/quit", "/exit"):
            return False
        try:
            if line.startswith("/"):
                self._obey(word, rest.strip())
            elif line:
                self._ask(line)
        except KeyboardInterrupt:
            self.console.print()
            self._say("Stopped.")
        except (RagFuseError, ImportError) as error:
            self.failed += 1
            message = str(error) if is_local(self.conversation.answerer) else in_options(str(error))
            self.console.print(Text.assemble((f"{type(error).__name__}: ", "bold red"), message), soft_wrap=True)
        return True

    def add(self, path: Path, whole: bool = False) -> None:
        """Ingest a file or folder into the index; `whole`: the index has nothing else."""
        conversation = self.conversation
        library, answerer = conversation.library, conversation.answerer
        documents, before = found_for(library, [path]), library.sources()
        print_skipped(self.console, documents)
        if not documents.files:
            forget_absent(library, answerer, [path], documents, self.console, before, whole)
            conversation.has_documents = bool(library.sources())
            return
        chunks, _ = add_files(library, tokenizer_for(answerer, library.settings), [path], documents.files, self.console)
        forget_absent(library, answerer, [path], documents, self.console, before, whole)
        if is_local(answerer):
            encode(answerer, chunks, self.console)
        conversation.has_documents = True
        n_files = len({source for _, source in chunks})
        self._say(f"Added: {counted(len(chunks), 'chunk')} of {counted(n_files, 'document')}.")

    def _ask(self, question: str) -> None:
        from ragfuse.cli.show import WrappedOutput

        conversation = self.conversation
        with self.console.status("searching"):
            prompt = conversation.prompt(question)
        output = WrappedOutput(self.console)
        try:
            with conversation.asking(prompt) as stream:
                for text in stream:
                    output.write(text)
        except KeyboardInterrupt:
            self.console.print()
            self._say("Stopped: this question and its answer are not part of the conversation.")
            return
        self.console.print()
        tell_sources(conversation.retrieved)
        if conversation.answer is not None:
            self._say(conversation.answer.trace.summary)
            self._say_truncated(conversation.answer.trace.truncated)

    def _say_truncated(self, n_tokens: int) -> None:
        """Say how much of the conversation the last prompt left out, where that is more than was said before."""
        if n_tokens > self.truncated:
            left_out = counted(n_tokens, "token")
            self._say(
                f"The window is full: {left_out} of the oldest turns {'was' if n_tokens == 1 else 'were'} left "
                "out. A new chat begins anew: /quit ends this one."
            )
        self.truncated = n_tokens

    def _remove(self, name: str) -> None:
        """Forget a document of the index."""
        conversation = self.conversation
        library, before = conversation.library, conversation.library.sources()
        sources = documents_named(library, name)
        forgotten = forget_documents(library, sources, conversation.answerer)
        say_forgotten(self.console, sources, sum(before.get(source, 0) for source in sources), forgotten)
        say_quoted(self.console, library.settings, sources, conversation.answerer, conversation.how.session)
        if not is_local(conversation.answerer):
            self._say("What the server keeps of it stays there until it is deleted or evicted there.")
        conversation.has_documents = bool(library.sources())

    def _obey(self, word: str, rest: str) -> None:
        commands: dict[str, Callable[[str], None]] = {
            "/docs": self._docs,
            "/compare": self._compare,
            "/why": self._why,
            "/ratio": self._ratio,
            "/policy": self._policy,
            "/help": self._help,
        }
        if word not in commands:
            raise InputError(f"There is no command '{word}'; there are {', '.join(COMMANDS)}.")
        commands[word](rest)

    def _help(self, _: str) -> None:
        for word, meaning in COMMANDS.items():
            self.console.print(Text.assemble((f"{word:9}", "bold"), meaning), soft_wrap=True)
        self._say("Anything else is a question.")

    def _docs(self, rest: str) -> None:
        word, _, rest_of = rest.partition(" ")
        named = rest_of.strip()
        if named and word in ("add", "remove"):
            given = _unquoted(named)
            if word == "add":
                self.add(Path(given).expanduser())
            else:
                self._remove(given)
        elif rest not in ("", "all"):
            raise InputError(f"Wanted /docs, /docs all, /docs add PATH or /docs remove NAME; found '/docs {rest}'.")
        else:
            sources = self.conversation.library.sources()
            lines = common_sources(sources, len(sources)) if rest else common_sources(sources)
            for line in lines or ["No documents yet: /docs add PATH."]:
                self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            warn_of_unfinished(self.conversation.library)

    def _compare(self, _: str) -> None:
        with self.console.status("full prefill"):
            full = self.conversation.by_full_prefill()
        answer = self._answered()
        self.console.print(Text.assemble(("full prefill: ", "bold"), full.text.strip()), soft_wrap=True)
        self.console.print(Text.assemble(("ragfuse: ", "bold"), answer.text.strip()), soft_wrap=True)
        same = "The answers are the same" if full.text == answer.text else "The answers differ"
        times = f"full prefill {full.trace.ttft_s:.2f} s, ragfuse {answer.trace.ttft_s:.2f} s"
        is_first = len(self.conversation.messages) <= 2 and is_local(self.conversation.answerer)
        note = " A process's first question takes longer: compare a later one, too." if is_first else ""
        self._say(f"{same}. First token: {times}.{note}")

    def _why(self, _: str) -> None:
        from ragfuse.cli.show import show_trace

        show_trace(self.console, self._answered().trace)

    def _ratio(self, rest: str) -> None:
        self._change("ratio", rest, float)

    def _policy(self, rest: str) -> None:
        self._change("policy", rest, str)

    def _change(self, name: str, given: str, read: Callable[[str], Any]) -> None:
        if given:
            try:
                value = None if given == "auto" else read(given)
            except ValueError:
                raise InputError(f"Wanted a number from 0 to 1, or auto; found '/{name} {given}'.") from None
            self.conversation.change(**{name: value})
        value = getattr(self.conversation.how, name)
        self._say(f"{name}: {'auto' if value is None else value}")

    def _answered(self) -> Answer:
        if self.conversation.answer is None:
            raise InputError("There is no answer yet. Ask something first.")
        return self.conversation.answer

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
