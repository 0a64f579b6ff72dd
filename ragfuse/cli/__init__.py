"""The command line `ragfuse`. Each file defines the commands of one kind."""

import os
import sys
from contextlib import nullcontext


def app() -> None:
    """Execute the `ragfuse` command. Show a status during the slow imports, and handle Ctrl-C."""
    try:
        from rich.console import Console

        completes = any(name.endswith("_COMPLETE") for name in os.environ if name.startswith("_"))
        # a shell reads completions from the output
        with nullcontext() if completes else Console(stderr=True).status("starting"):
            from ragfuse.cli.main import app
        app()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(130)
