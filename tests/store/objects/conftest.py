"""A tier in files, and an S3 server of a test's own."""

from pathlib import Path

import pytest

from ragfuse.store.objects import ObjectTier
from tests.store.kit import encoded, kv, ticks
from tests.store.objects.kit import A, opened
from tests.store.s3_server import S3Server


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def tier(folder) -> ObjectTier:
    """A tier in files that holds A."""
    tier = opened(folder, clock=ticks())
    assert tier.write(A, *encoded(kv()))
    return tier


@pytest.fixture
def server() -> S3Server:
    """A server of the test's own, to be stopped."""
    server = S3Server()
    yield server
    server.stop()
