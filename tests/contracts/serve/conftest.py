"""The fixtures of tests/promises/serve."""

from tests.promises.serve.conftest import served

__all__ = ["served"]
