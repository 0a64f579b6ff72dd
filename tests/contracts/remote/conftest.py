"""The fixtures of tests/promises/remote."""

from tests.promises.remote.conftest import local, remote, served

__all__ = ["local", "remote", "served"]
