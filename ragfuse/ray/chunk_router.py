"""The choice of the replica that answers a request: the one that got most bytes of its chunks.

Pure Python: no Ray, no torch, no clock. Ray's router asks it, tests and simulations too.
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
"""Most work and queued requests of a replica, as a multiple of the mean over replicas."""
SLACK = 2.0
"""Requests beyond that, so that few requests in all may still follow their chunks."""
HORIZON = 32
"""Requests of each replica after which loads are halved: the bound is on recent work."""
MAX_SENT = 16_384
"""Chunks that a replica is believed to have; beyond that, those sent longest ago are forgotten."""


def chunk_digest(salt: str, kind: str, text: str | bytes) -> int:
    """Return the 64-bit digest of a chunk, a conversation's name ("session") or a "body".

    It depends on the tenant's salt, so it says nothing about another tenant's chunk.
    """
    return int(digest(salt, kind, text)[:16], 16)


@dataclass
class ReplicaView:
    """The work that was sent to a replica, older work counted less, and its chunks' digests."""

    load: float
    sent: LRU[int, None]


class ChunkRouter:
    """Ranks replicas for a request by the bytes of its chunks that they got before, with a bound on
    imbalance.

    What a replica drops from memory is in the shared tiers, and it still is the best place for that
    chunk: it keeps different chunks than the others do. A replica whose share of recent work, or
    whose queue, is above the bound comes after all others. Where no replica got anything, the one
    with the least recent work comes first. Not thread-safe: one for each event loop.

    Args:
        names: The replicas.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._replicas: dict[str, ReplicaView] = {}
        self._n_requests = 0.0  # halved as the loads are
        self.keep_only(names)

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget replicas that are gone; new ones begin with the others' mean work."""
        wanted = dict.fromkeys(names)
        known = {name: self._replicas[name] for name in wanted if name in self._replicas}
        mean = sum(view.load for view in known.values()) / len(known) if known else 0.0
        self._replicas = {
            name: known.get(name) or ReplicaView(mean, LRU(MAX_SENT)) for name in wanted
        }

    def rank(
        self, chunks: Mapping[int, int], queues: Mapping[str, int] = MappingProxyType({})
    ) -> list[str]:
        """Return all replicas, the one to ask first first.

        The bytes of a request's chunks (`routed_chunks`) are its work, too; queues have the
        requests that are not answered.
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
        """Note that a replica got a request: its chunks, and its work for the bound."""
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
"""A conversation counts as its request's text times this, so that it stays with one replica."""
MAX_ROUTED_BYTES = 16 << 20
"""Bytes of a body that is parsed for its chunks; a larger one is sent by load alone."""


def routed_chunks(salt: str, body: bytes) -> dict[int, int]:
    """Return the bytes of a request's documents and of its conversation, by digest.

    A conversation counts as several times the request, so that its turns stay with one replica; a
    request of none counts as itself, so that an equal one goes where its prefix is. A body that is
    no valid request has no documents.
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
    """Return the texts of a request's documents and "text-plain" parts, stripped."""
    documents = request.get("documents")
    found = [each.get("text") if isinstance(each, dict) else each for each in _items(documents)]
    for message in _items(request.get("messages")):
        for part in _items(message.get("content")) if isinstance(message, dict) else ():
            if isinstance(part, dict) and part.get("type") == "text-plain":
                found.append(part.get("text"))
    return [text.strip() for text in found if isinstance(text, str) and text.strip()]


def _items(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []
