"""`ragfuse chat`: a conversation over documents, with a local model or a server."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from ragfuse.cli.ask import library_for, prompt_for
from ragfuse.cli.engine import given_for, is_local, open_answerer
from ragfuse.cli.ingest import add_documents
from ragfuse.cli.options import ENGINE, DocsFirst, Index, Server, Session, screen
from ragfuse.cli.show import counted, say, show_trace, tell_sources, write
from ragfuse.errors import InputError, RagFuseError
from ragfuse.settings import Settings

if TYPE_CHECKING:
    from ragfuse.cli.library import Library
    from ragfuse.engine.ask import Ask
    from ragfuse.remote.remote_engine import Answerer
    from ragfuse.types.answer import Answer

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "/docs": "list the documents of the index; /docs add PATH adds a file or folder",
        "/why": "show what the last answer reused, and why the rest was computed",
        "/help": "show this list",
        "/quit": "end the chat, like Ctrl-D; Ctrl-C stops an answer",
    }
)
"""Help text of each chat command."""
SHORT_WORDS = 4
"""A question of at most this many words is searched together with an earlier question."""


@screen(*ENGINE, "policy", "ratio", "top_k", "max_tokens", "api_key")
def chat(
    console: Console,
    settings: Settings,
    model: str | None,
    docs: DocsFirst = None,
    index: Index = "default",
    server: Server = None,
    session: Session = None,
) -> None:
    """Chat over ingested documents. Each turn computes only new tokens: earlier KV is kept.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat. If standard input is
    not a terminal, each line is a question or a command; exit status 1 if any line failed.
    """
    settings = settings.usable()
    from ragfuse.cli.library import Library
    from ragfuse.engine.ask import Ask

    library = Library(settings, index) if docs is None else library_for(settings, index, docs)
    name = session or f"chat-{secrets.token_hex(8)}"
    how = Ask(session=name, **given_for(settings, server))
    for ending in (signal.SIGHUP, signal.SIGTERM):  # so that the chat's session is deleted
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    with open_answerer(settings, console, server, model) as answerer:
        if not answerer.card.has_chat_template:
            how = Ask()  # without a chat template there are no sessions
        talk = Talk(console, answerer, library, how)
        try:
            if docs is not None:
                talk.add(docs)
            talk.begin()
            for line in typed_lines():
                if not talk.take(line.strip()):
                    break
        finally:
            if session is None:
                with suppress(RagFuseError):  # nothing was said, or the server is gone
                    talk.forget(name)
    if talk.failed and not console.is_terminal:
        raise typer.Exit(1)


def typed_lines() -> Iterator[str]:
    """Yield lines from a terminal or pipe; Ctrl-C at the prompt yields an empty line."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401 - gives `input` line editing

    try:
        while True:
            line = ""
            try:
                line = input("> ")
            except KeyboardInterrupt:
                print()
            yield line
    except EOFError:
        print()


@dataclass
class Talk:
    """A chat in a terminal: takes typed lines, prints answers, and counts failed lines."""

    console: Console
    answerer: Answerer
    library: Library
    how: Ask
    answer: Answer | None = None
    failed: int = 0
    _question: str = ""

    def begin(self) -> None:
        """Print the model's name, the index's size and a hint on the commands."""
        sources = self.library.sources()
        over = (
            f"{counted(sum(sources.values()), 'chunk')} of {counted(len(sources), 'document')}"
            " (/docs lists them)"
        )
        self._say(
            f"{self.answerer.card.name}, over"
            f" {over if sources else 'no documents yet: /docs add PATH'}."
        )
        self._say("/help lists the commands, Ctrl-D ends.")

    def take(self, line: str) -> bool:
        """Answer a question or execute a chat command; return False to end the chat."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        try:
            match word:
                case "/quit" | "/exit":
                    return False
                case "/docs":
                    self._docs(rest)
                case "/why":
                    if self.answer is None:
                        raise InputError("There is no answer yet. Ask a question first.")
                    show_trace(self.console, self.answer.trace)
                case "/help":
                    for name, meaning in COMMANDS.items():
                        self._say(f"{name:9}{meaning}")
                    self._say("Any other input is a question.")
                case _ if line.startswith("/"):
                    raise InputError(
                        f"There is no command '{word}'. Use one of: {', '.join(COMMANDS)}."
                    )
                case _ if line:
                    self._ask(line)
        except KeyboardInterrupt:
            self.console.print()
            self._say("Stopped.")
        except (RagFuseError, ImportError) as error:
            self.failed += 1
            say(self.console, f"{type(error).__name__}: {error}", "red")
        return True

    def add(self, path: Path) -> None:
        """Ingest a file or folder into the index."""
        add_documents(self.library, self.answerer, [path], self.console)

    def forget(self, session: str) -> None:
        """Delete a session from the local store or from the server."""
        if is_local(self.answerer):
            self.answerer.flush()
            self.answerer.sessions.delete(session)
        else:
            self.answerer.delete_session(session)

    def _ask(self, question: str) -> None:
        is_short = len(question.split()) <= SHORT_WORDS and bool(self._question)
        searched = f"{self._question} {question}" if is_short else question
        self._question = self._question if is_short else question
        prompt, sources = prompt_for(self.answerer, self.library, question, self.console, searched)
        try:
            with self.answerer.stream(prompt, self.how) as stream:
                for text in stream:
                    write(self.console, text)
                answer = stream.answer
        except KeyboardInterrupt:
            self.console.print()
            self._say("Stopped: this question and its answer are not part of the conversation.")
            return
        self.answer = answer
        self.console.print()
        tell_sources(sources)
        self._say(answer.trace.summary)

    def _docs(self, rest: str) -> None:
        word, _, named = rest.partition(" ")
        if word == "add" and named:
            self.add(Path(named.strip().strip("'\"")).expanduser())
            return
        for source, n in self.library.sources().items():
            say(self.console, f"{counted(n, 'chunk'):>12}  {source}")
        self._say("/docs add PATH adds a file or folder.")

    def _say(self, text: str) -> None:
        say(self.console, text, "dim")
