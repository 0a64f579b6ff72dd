"""Choose the replica for a request: the one that already received most of the request's chunks.

The module needs no Ray, no torch and no clock, so that tests and simulations can use it, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ragfuse.process.shared import LRU
from ragfuse.types.keys import digest

MAX_OVER_MEAN = 1.25
"""Maximum work and queue length of a replica, as a multiple of the mean over replicas."""
SLACK = 2.0
"""Requests allowed beyond MAX_OVER_MEAN, so that under low load the ranking depends on chunks."""
HORIZON = 32
"""Requests per replica after which all loads are halved, so that recent work has more weight."""
MAX_SENT = 16_384
"""Maximum number of chunks remembered per replica. The oldest chunks are forgotten first."""


def chunk_digest(salt: str, kind: str, text: str | bytes) -> int:
    """Return a 64-bit digest of a text. The `kind` is "chunk", "session" (a name) or "body".

    The digest depends on the tenant's salt, and so reveals nothing about other tenants' chunks.
    """
    return int(digest(salt, kind, text)[:16], 16)


@dataclass
class ReplicaView:
    """A replica's recent work, in bytes, and the digests of the chunks sent to the replica."""

    load: float
    sent: LRU[int, None]


class ChunkRouter:
    """Ranks replicas by the bytes of a request's chunks that each replica already received.

    A replica that has evicted a chunk from memory is still preferred for the chunk. The replica can
    read the chunk from the shared tiers, and the replicas continue to have different chunks in
    memory. A replica whose recent work or queue exceeds a bound ranks after all replicas within the
    bound. If no replica received any of the chunks, the replica with the smallest amount of recent
    work is first. Not thread-safe: every event loop needs a router of its own.

    Args:
        names: Names of the replicas.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._replicas: dict[str, ReplicaView] = {}
        self._n_requests = 0.0  # halved with the loads
        self.keep_only(names)

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget replicas not in `names`. New replicas get the mean work of the kept replicas."""
        wanted = dict.fromkeys(names)
        known = {name: self._replicas[name] for name in wanted if name in self._replicas}
        mean = sum(view.load for view in known.values()) / len(known) if known else 0.0
        self._replicas = {
            name: known.get(name) or ReplicaView(mean, LRU(MAX_SENT)) for name in wanted
        }

    def rank(
        self, chunks: Mapping[int, int], queues: Mapping[str, int] = MappingProxyType({})
    ) -> list[str]:
        """Return all replicas, best first.

        Args:
            chunks: The result of `routed_chunks`. The sum of bytes is the request's work.
            queues: The number of unanswered requests of each replica.
        """
        views, cost = self._replicas, sum(chunks.values())
        if len(views) < 2:
            return list(views)
        work = sum(view.load for view in views.values()) + cost
        most_work = MAX_OVER_MEAN * work / len(views) + SLACK * work / (self._n_requests + 1)
        mean_queue = sum(queues.get(name, 0) for name in views) / len(views)
        most_queue = MAX_OVER_MEAN * mean_queue + SLACK

        def order(name: str) -> tuple[bool, int, float, int]:
            view, queue = views[name], queues.get(name, 0)
            is_over = view.load + cost > most_work or queue > most_queue
            sent = sum(nbytes for chunk, nbytes in chunks.items() if chunk in view.sent)
            return is_over, -sent, view.load, queue

        return sorted(views, key=order)

    def send(self, name: str, chunks: Mapping[int, int]) -> None:
        """Record that a replica received a request with `chunks`, the result of `routed_chunks`."""
        view = self._replicas.get(name)
        if view is None:
            return
        view.load += sum(chunks.values())
        for chunk in chunks:
            view.sent.add(chunk, None)
        self._n_requests += 1
        if self._n_requests >= 2 * HORIZON * len(self._replicas):
            self._n_requests /= 2
            for each in self._replicas.values():
                each.load /= 2


SESSION_SHARE = 4
"""Weight of a conversation, as a multiple of the body's bytes. Keeps turns on one replica."""
MAX_ROUTED_BYTES = 16 << 20
"""Maximum bytes of a body that is parsed for chunks. A larger body counts as a whole."""


def routed_chunks(salt: str, body: bytes) -> dict[int, int]:
    """Return the weight, in bytes, of each chunk and of the conversation or body, by digest.

    A conversation counts as `SESSION_SHARE` times the body's bytes, so that all turns stay on one
    replica. Without a conversation, the whole body counts, so that an equal request goes to the
    replica that has the prefix. An invalid or too large body has no chunks and no conversation.
    """
    try:
        found = json.loads(body) if len(body) <= MAX_ROUTED_BYTES else None
    except (ValueError, RecursionError):
        found = None
    request = found if isinstance(found, dict) else {}
    chunks = {
        chunk_digest(salt, "chunk", text): len(text.encode("utf-8", "replace"))
        for text in _texts_of(request)
    }
    session = request.get("session_id")
    if isinstance(session, str):
        chunks[chunk_digest(salt, "session", session)] = SESSION_SHARE * len(body)
    else:
        chunks[chunk_digest(salt, "body", body)] = len(body)
    return chunks


def _texts_of(request: Mapping[str, Any]) -> list[str]:
    """Return the stripped texts of a request's documents and "text-plain" parts."""
    documents = request.get("documents")
    found = [each.get("text") if isinstance(each, dict) else each for each in _items(documents)]
    for message in _items(request.get("messages")):
        for part in _items(message.get("content")) if isinstance(message, dict) else ():
            if isinstance(part, dict) and part.get("type") == "text-plain":
                found.append(part.get("text"))
    return [text.strip() for text in found if isinstance(text, str) and text.strip()]


def _items(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []
