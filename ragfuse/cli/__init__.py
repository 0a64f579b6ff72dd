"""The command line. Each file holds commands of one kind; what they do is done below, in the engine and in `bench`."""

import sys


def app() -> None:
    """The `ragfuse` command: a sign of life, then everything else, so that Ctrl-C is clean from the first moment."""
    try:
        from rich.console import Console

        with Console(stderr=True).status("starting"):
            from ragfuse.cli.door import app
        app()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(130)
