"""`python -m ragfuse` is the command `ragfuse`."""

from ragfuse.cli import app

if __name__ == "__main__":
    app()
