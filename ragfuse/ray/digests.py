"""The chunks of a request, and of a replica's memory, as digests that fronts and replicas both compute."""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from ragfuse.ray.chunk_router import RoutedRequest, chunk_digest
from ragfuse.types.keys import ChunkKey

MAX_REPORTED = 16_384
"""Digests in one report, 128 KiB; those used longest ago are left out."""
SESSION_SHARE = 4
"""A conversation counts as this many times the request's own text, so that its turns stay with one replica."""
MAX_ROUTED_BYTES = 16 << 20
"""Bytes of a body that is parsed for its chunks; a larger one is sent by load alone."""


def packed(digests: Iterable[int]) -> bytes:
    """Return digests as bytes, 8 each, least significant first."""
    return array("Q", digests).tobytes()


def unpacked(data: bytes) -> frozenset[int]:
    """Return the digests in bytes that `packed` made."""
    return frozenset(array("Q", data))


def routed_request(salt: str, body: bytes) -> RoutedRequest:
    """Return what a request's body asks of a replica: its documents and its conversation.

    Bytes are those of the documents' texts, to which the bytes of their KV are in proportion. A body that is no valid
    request has no chunks; the replica that gets it says what is wrong.

    Args:
        salt: The salt of the request's tenant.
        body: The body, JSON of OpenAI's API with ragfuse's fields.
    """
    try:
        request = json.loads(body) if len(body) <= MAX_ROUTED_BYTES else None
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        return RoutedRequest(cost=max(1, len(body)))
    chunks = {chunk_digest(salt, "chunk", text): len(text.encode("utf-8", "replace")) for text in texts_of(request)}
    named, session = request.get("session_id"), None
    if isinstance(named, str):
        session = chunk_digest(salt, "session", named)
        chunks[session] = SESSION_SHARE * len(body)
    return RoutedRequest(chunks, max(1, len(body)), session)


def texts_of(request: Mapping[str, Any]) -> list[str]:
    """Return the texts of the documents in a request, without white space around them, as they are stored.

    They are the texts of `documents`, and of parts of messages of the type "text-plain".
    """
    documents = request.get("documents")
    found = [each.get("text") if isinstance(each, dict) else each for each in _items(documents)]
    for message in _items(request.get("messages")):
        for part in _items(message.get("content")) if isinstance(message, dict) else ():
            if isinstance(part, dict) and part.get("type") == "text-plain":
                found.append(part.get("text"))
    return [text.strip() for text in found if isinstance(text, str) and text.strip()]


def _items(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


class HeldChunks:
    """Which of the chunks that one tenant's requests had are in memory. Thread-safe.

    Digests are of texts, entries are of token ids: what connects them is remembered for the last chunks asked.

    Args:
        most: Chunks that are remembered.
    """

    def __init__(self, most: int = MAX_REPORTED) -> None:
        self._keys: OrderedDict[int, ChunkKey | None] = OrderedDict()  # used longest ago first; None: a conversation
        self._most, self._lock = most, threading.Lock()

    def note(self, digest: int, key: ChunkKey | None) -> None:
        """Remember a chunk with the key of its entry; None: a conversation, which is held while it is remembered."""
        with self._lock:
            self._keys.pop(digest, None)
            self._keys[digest] = key
            while len(self._keys) > self._most:
                self._keys.popitem(last=False)

    def key(self, digest: int) -> ChunkKey | None:
        """Return the key of a chunk that was noted; None for another one."""
        with self._lock:
            return self._keys.get(digest)

    def held(self, in_memory: Iterable[ChunkKey]) -> list[int]:
        """Return the digests of remembered chunks that are in memory, used longest ago first."""
        held = {(key.model, key.tokens) for key in in_memory}
        with self._lock:
            noted = list(self._keys.items())
        return [digest for digest, key in noted if key is None or (key.model, key.tokens) in held]
