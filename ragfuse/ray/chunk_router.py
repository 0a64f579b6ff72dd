"""The choice of the replica that answers a request: the one with most bytes of its chunks in memory, within a bound.

Pure Python: no Ray, no torch, no clock. Ray's router asks it, tests and simulations too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from blake3 import blake3

MAX_OVER_MEAN = 1.25
"""Most work of a replica, and most requests in its queue, as a multiple of the mean over replicas."""
SLACK = 2.0
"""Requests beyond that, so that few requests in all may still follow their chunks."""
HORIZON = 32
"""Requests of each replica after which all loads are halved, so that the bound is on recent work."""
SURE_REPORTS = 2
"""Reports of a replica after which chunks that were sent to it count only if it reports them."""
MAX_SENT = 16_384
"""Chunks that are believed to be in a replica without a report; beyond that, those sent longest ago are forgotten."""


def chunk_digest(salt: str, kind: str, text: str) -> int:
    """Return the digest by which fronts and replicas name a chunk: an int of 64 bits.

    It depends on the tenant's salt, so that the digest of one tenant's chunk says nothing about another's.

    Args:
        salt: The tenant's salt.
        kind: What `text` is: "chunk", or "session" for the name of a conversation.
        text: The chunk's text, without white space around it.
    """
    hasher = blake3()
    for part in (salt, kind, text):
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return int.from_bytes(hasher.digest(length=8), "little")


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a request asks of a replica.

    Args:
        chunks: Bytes of each of its chunks, by digest. Their proportions matter, so bytes of text do as bytes of KV.
        cost: Work of the whole request, in the same unit; at least 1 is counted.
        session: The digest of its conversation, which is among `chunks` but no text; None: it has none.
    """

    chunks: Mapping[int, int] = field(default_factory=dict)
    cost: int = 1
    session: int | None = None


class ReplicaView:
    """What is known of one replica: the chunks in its memory, and its share of recent work.

    Attributes:
        load: Work sent to it, older work counted less.
    """

    __slots__ = ("_held", "_reports", "_sent", "load")

    def __init__(self, load: float = 0.0) -> None:
        self.load = load
        self._held: frozenset[int] = frozenset()
        self._sent: dict[int, int] = {}  # digest -> number of reports when it was sent; sent longest ago first
        self._reports = 0

    def report(self, held: Iterable[int]) -> None:
        """Take the digests of all chunks that are in its memory now, in place of those reported before."""
        self._held = held if isinstance(held, frozenset) else frozenset(held)
        self._reports += 1
        first_sure, sent = self._reports - SURE_REPORTS, self._sent
        while sent and sent[first := next(iter(sent))] <= first_sure:
            del sent[first]

    def send(self, request: RoutedRequest) -> None:
        """Expect the chunks of a request in its memory, and count the work."""
        self.load += max(1, request.cost)
        for digest in request.chunks:
            self._sent.pop(digest, None)
            self._sent[digest] = self._reports
        while len(self._sent) > MAX_SENT:
            del self._sent[next(iter(self._sent))]

    def held_bytes(self, request: RoutedRequest) -> int:
        """Return how many bytes of a request's chunks are in its memory, as far as is known."""
        held, sent = self._held, self._sent
        return sum(nbytes for digest, nbytes in request.chunks.items() if digest in held or digest in sent)


class ChunkRouter:
    """Ranks replicas for a request by the bytes of its chunks that they hold in memory, with a bound on imbalance.

    A replica whose share of recent work, or whose queue, is above the bound comes after all others. Where no replica
    holds anything, the one with the least recent work comes first. Not thread-safe: one for each event loop.

    Args:
        names: The replicas.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._replicas: dict[str, ReplicaView] = {}
        self._n_requests = 0
        self._recent_requests = self._recent_cost = 0.0  # halved as the loads are
        self.keep_only(names)

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget replicas that are gone, and take in new ones, with the mean of the others' recent work."""
        wanted = dict.fromkeys(names)
        known = {name: self._replicas[name] for name in wanted if name in self._replicas}
        mean = sum(view.load for view in known.values()) / len(known) if known else 0.0
        self._replicas = {name: known[name] if name in known else ReplicaView(mean) for name in wanted}

    def report(self, name: str, held: Iterable[int]) -> None:
        """Take the digests of all chunks in a replica's memory; a report of a replica that is gone is ignored."""
        view = self._replicas.get(name)
        if view is not None:
            view.report(held)

    def loads(self) -> dict[str, float]:
        """Return the recent work of each replica."""
        return {name: view.load for name, view in self._replicas.items()}

    def rank(self, request: RoutedRequest, queues: Mapping[str, int] = MappingProxyType({})) -> list[str]:
        """Return all replicas, the one to ask first first.

        Args:
            request: The request.
            queues: Requests that each replica has accepted and not answered; 0 where it is not named.
        """
        views, cost = self._replicas, max(1, request.cost)
        if len(views) < 2:
            return list(views)
        mean = (sum(view.load for view in views.values()) + cost) / len(views)
        usual_cost = (self._recent_cost + cost) / (self._recent_requests + 1)
        most_work = MAX_OVER_MEAN * mean + SLACK * usual_cost
        mean_queue = sum(queues.get(name, 0) for name in views) / len(views)
        most_queue = MAX_OVER_MEAN * mean_queue + SLACK

        def order(name: str) -> tuple[bool, int, float, int]:
            view, queue = views[name], queues.get(name, 0)
            is_over = view.load + cost > most_work or queue > most_queue
            return is_over, -view.held_bytes(request), view.load, queue

        return sorted(views, key=order)

    def send(self, name: str, request: RoutedRequest) -> None:
        """Note that a replica got a request: it will have its chunks, and its work counts against the bound."""
        view = self._replicas.get(name)
        if view is None:
            return
        view.send(request)
        self._n_requests += 1
        self._recent_requests += 1
        self._recent_cost += max(1, request.cost)
        if self._n_requests >= HORIZON * len(self._replicas):
            self._n_requests = 0
            self._recent_requests, self._recent_cost = self._recent_requests / 2, self._recent_cost / 2
            for each in self._replicas.values():
                each.load /= 2

    def held_bytes(self, name: str, request: RoutedRequest) -> int:
        """Return how many bytes of a request's chunks a replica holds, as far as is known; 0 for an unknown one."""
        view = self._replicas.get(name)
        return 0 if view is None else view.held_bytes(request)
