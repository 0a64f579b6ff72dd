"""The fixtures of tests/promises/serve."""

from tests.promises.serve.conftest import client, make_server, served

__all__ = ["client", "make_server", "served"]
