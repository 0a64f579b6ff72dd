"""The command line. Each file holds commands of one kind; what they do is done below, in the engine and in `bench`."""

from ragfuse.cli.app import app

__all__ = ["app"]
