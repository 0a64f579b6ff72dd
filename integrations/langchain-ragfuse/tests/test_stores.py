"""The disk and Redis stores through LangChain's key-value interface: its own suites, and what such a store is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_core.embeddings import Embeddings
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_ragfuse import RagFuseByteStore
from langchain_tests.integration_tests import BaseStoreAsyncTests, BaseStoreSyncTests

from integrations.tests.kit import LETTERS
from ragfuse import Settings, StoreError
from tests.store.redis_server import fresh_url

VALUES = b"one", b"", bytes(range(256)) * 4000


class OnDisk:
    @pytest.fixture
    def kv_store(self, tmp_path: Path) -> Iterator[RagFuseByteStore]:
        store = RagFuseByteStore(tmp_path / "store")
        yield store
        store.close()

    @pytest.fixture
    def three_values(self) -> tuple[bytes, bytes, bytes]:
        return VALUES


class OnRedis(OnDisk):
    @pytest.fixture
    def kv_store(self) -> Iterator[RagFuseByteStore]:
        store = RagFuseByteStore(fresh_url())
        yield store
        store.close()


class TestDiskSync(OnDisk, BaseStoreSyncTests[bytes]):
    """A folder, synchronously."""


class TestDiskAsync(OnDisk, BaseStoreAsyncTests[bytes]):
    """A folder, asynchronously."""


class TestRedisSync(OnRedis, BaseStoreSyncTests[bytes]):
    """A redis-server, synchronously."""


class TestRedisAsync(OnRedis, BaseStoreAsyncTests[bytes]):
    """A redis-server, asynchronously."""


del BaseStoreSyncTests, BaseStoreAsyncTests


@pytest.fixture(params=["disk", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "disk" else fresh_url()


def test_what_was_set_is_there_for_the_next_process(where: str) -> None:
    one = RagFuseByteStore(where)
    one.mset([("a", VALUES[0]), ("b", VALUES[1]), ("c", VALUES[2])])
    one.close()
    two = RagFuseByteStore(where)
    assert two.mget(["c", "a", "b", "d"]) == [VALUES[2], VALUES[0], VALUES[1], None]
    two.close()


def test_namespaces_and_tenants_are_apart(tmp_path: Path) -> None:
    salted = Settings(store=tmp_path, salt="a tenant")
    stores = [
        RagFuseByteStore(settings=Settings(store=tmp_path)),
        RagFuseByteStore(settings=Settings(store=tmp_path), namespace="other"),
        RagFuseByteStore(settings=salted),
    ]
    for number, store in enumerate(stores):
        store.mset([("key", bytes([number]))])
    assert [store.mget(["key"]) for store in stores] == [[b"\0"], [b"\1"], [b"\2"]]
    assert [list(store.yield_keys()) for store in stores] == [["key"]] * 3
    for store in stores:
        store.close()


def test_a_damaged_value_is_none_and_never_wrong(tmp_path: Path) -> None:
    store = RagFuseByteStore(tmp_path)
    store.mset([("a", VALUES[2]), ("b", b"whole")])
    store.close()
    (file,) = [path for path in tmp_path.rglob("*.kv") if path.stat().st_size > 10_000]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    again = RagFuseByteStore(tmp_path)
    assert again.mget(["a", "b"]) == [None, b"whole"]
    again.close()


def test_a_full_store_drops_what_was_used_longest_ago_and_keeps_what_is_pinned(tmp_path: Path) -> None:
    small = Settings(store=tmp_path / "unused", tier_bytes=200_000)
    pinned = RagFuseByteStore(tmp_path / "s", namespace="documents", pinned=True, settings=small)
    cache = RagFuseByteStore(tmp_path / "s", settings=small)
    pinned.mset([("document", bytes(50_000))])
    for number in range(9):
        cache.mset([(f"{number}", bytes(40_000))])
    assert sorted(cache.yield_keys()) == ["6", "7", "8"]
    assert pinned.mget(["document"]) == [bytes(50_000)]
    with pytest.raises(StoreError, match=r"'large' \(300,000 bytes\) could not be stored"):
        cache.mset([("large", bytes(300_000))])
    cache.close()
    pinned.close()


class Counting(Embeddings):
    """An embedder, and what it was asked for."""

    def __init__(self, inner: Embeddings) -> None:
        self.inner, self.asked = inner, list[str]()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.asked += texts
        return self.inner.embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        return self.inner.embed_query(text)


def test_embeddings_are_computed_once(minilm: str, tmp_path: Path) -> None:
    embedder = Counting(HuggingFaceEmbeddings(model_name=minilm))
    texts = LETTERS.split("\n\n")
    vectors = []
    for _ in range(2):
        store = RagFuseByteStore(settings=Settings(store=tmp_path), namespace="embeddings")
        cached = CacheBackedEmbeddings.from_bytes_store(embedder, store, namespace="minilm", key_encoder="sha256")
        vectors.append(cached.embed_documents(texts))
        store.close()
    assert embedder.asked == texts
    assert vectors[0] == vectors[1]
