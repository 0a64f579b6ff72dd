"""The `ragfuse` command: its subcommands, and errors as one line without a traceback."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from importlib.metadata import version as installed
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from ragfuse.cli import (
    adapt,
    ask,
    calibrate,
    chat,
    demo,
    doctor,
    ingest,
    measure,
    models,
    schema,
    serve,
    sessions,
    store,
)
from ragfuse.cli.show import say
from ragfuse.errors import RagFuseError


class CommandGroup(TyperGroup):
    """Prints errors of ragfuse as one line on standard error; exits with status 130 on Ctrl-C.

    The arguments of a KeyboardInterrupt, which say what was saved, are printed, too.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RagFuseError as error:
            self._fail(type(error).__name__, str(error))
        except BrokenPipeError:  # the reader has closed the output: typer exits quietly
            raise
        except ImportError as error:
            extras = "pip install 'ragfuse-kv[demo,serve]'"
            self._fail("ImportError", f"{error.msg}. A package is missing. Run: {extras}")
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            self._fail("InputError", f"The system reported: {error.strerror or error}{where}.")
        except KeyboardInterrupt as stop:
            say(Console(stderr=True), f"\nStopped. {' '.join(map(str, stop.args))}".rstrip())
            raise typer.Exit(130) from stop

    @staticmethod
    def _fail(kind: str, message: str) -> None:
        line = f"[bold red]{kind}[/]: {escape(message)}"
        Console(stderr=True).print(line, highlight=False, soft_wrap=True)
        raise typer.Exit(1)


class _OneLine(logging.Formatter):
    """A log formatter: one line per record, without tracebacks."""

    def formatException(self, *_: Any) -> str:
        return ""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record).strip()}"


app = typer.Typer(
    rich_markup_mode="markdown",
    cls=CommandGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help=(
        "Answer questions over your documents with a lower time to first token. The KV cache of"
        " each passage is computed once and reused by every question that retrieves the passage."
    ),
)
app.command("ingest")(ingest.ingest)
app.command("ask")(ask.ask)
app.command("chat")(chat.chat)
app.command("measure")(measure.measure)
app.command("verify")(calibrate.verify_model)
app.command("calibrate")(calibrate.calibrate_model)
app.command("adapt")(adapt.adapt_model)
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.add_typer(models.models, name="models")
app.add_typer(store.store, name="store")
app.add_typer(sessions.sessions, name="sessions")
app.add_typer(schema.schema, name="schema")
# commands of other packages, such as ragfuse-bench
for plugin in entry_points(group="ragfuse.commands"):
    app.add_typer(plugin.load(), name=plugin.name)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Reuse the KV caches of chunks instead of prefilling them again."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    log = logging.getLogger("ragfuse")
    log.handlers = [handler]
    # the import warnings of these libraries are irrelevant to users
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    context.call_on_close(lambda: log.removeHandler(handler))
    if version:
        print(f"ragfuse-kv {installed('ragfuse-kv')}")
        sys.exit(0)
