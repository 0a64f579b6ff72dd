"""The command line. Each file holds the commands of one kind; the work itself is done by the
packages below.
"""

import os
import sys
from contextlib import nullcontext


def app() -> None:
    """Run the `ragfuse` command. It shows a status before the slow imports, and handles Ctrl-C
    during them too.
    """
    try:
        from rich.console import Console

        completes = any(name.endswith("_COMPLETE") for name in os.environ if name.startswith("_"))
        # a shell reads a completion
        with nullcontext() if completes else Console(stderr=True).status("starting"):
            from ragfuse.cli.main import app
        app()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(130)
