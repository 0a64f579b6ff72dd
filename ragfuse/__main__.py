"""Entry point of `python -m ragfuse`, the same as the command `ragfuse`."""

from ragfuse.cli import app

if __name__ == "__main__":
    app()
