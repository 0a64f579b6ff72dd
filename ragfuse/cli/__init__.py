"""The command line. Each file holds the commands of one kind; the work itself is done by the packages below."""

import sys


def app() -> None:
    """Run the `ragfuse` command. It shows a status before the slow imports, and handles Ctrl-C during them too."""
    try:
        from rich.console import Console

        with Console(stderr=True).status("starting"):
            from ragfuse.cli.main import app
        app()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(130)
