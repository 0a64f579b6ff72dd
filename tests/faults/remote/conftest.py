"""The server and client of tests/contracts/remote."""

from tests.contracts.remote.conftest import alone, local, remote, served

__all__ = ["alone", "local", "remote", "served"]
