"""The fixtures of tests/promises/remote."""

from tests.promises.remote.conftest import remote, served

__all__ = ["remote", "served"]
