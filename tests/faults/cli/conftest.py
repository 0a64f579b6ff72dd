"""The fixtures of tests/promises/cli."""

from tests.promises.cli.conftest import environment, made_once, run, told

__all__ = ["environment", "made_once", "run", "told"]
