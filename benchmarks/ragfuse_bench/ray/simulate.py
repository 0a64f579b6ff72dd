"""Replicas of a server, simulated: each with a queue and a memory for chunks, chosen by
`ragfuse.ray`'s own router.

A replica prefills one prompt after the other; a chunk in its memory costs `REUSED_SHARE` of its
tokens, any other all of them. Memory drops what was used longest ago. Time is the simulation's own.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ragfuse_bench.ray.workload import TimedRequest

from ragfuse.ray.chunk_router import ChunkRouter

REUSED_SHARE = 0.15
"""Of a chunk's tokens, those that are computed although its KV is in memory."""
BUSY = 0.7
"""Of the replicas' time, what prefilling all tokens of a trace would take if nothing were reused.
"""
DECODE_S = 2.0
"""Seconds for which a request counts in its replica's queue after its prefill."""
POLICIES = ("round robin", "least queue", "chunks")


@dataclass
class SimulatedReplica:
    """One replica.

    Args:
        capacity: Tokens of chunks that its memory holds.
    """

    capacity: int
    memory: OrderedDict[int, int] = field(default_factory=OrderedDict)
    tokens: int = 0
    free_s: float = 0.0
    ends: list[float] = field(default_factory=list)
    n_requests: int = 0
    work: float = 0.0

    def queue(self, now_s: float) -> int:
        """How many requests it has accepted and not answered."""
        while self.ends and self.ends[0] <= now_s:
            heapq.heappop(self.ends)
        return len(self.ends)

    def answer(self, request: TimedRequest, prefill_s: float) -> tuple[int, float]:
        """Take a request; return the tokens of its chunks that were in memory, and the seconds to
        its first token.
        """
        found = 0
        for chunk, tokens in request.chunks.items():
            if chunk in self.memory:
                found += tokens
                self.memory.move_to_end(chunk)
            else:
                self.memory[chunk] = tokens
                self.tokens += tokens
        while self.tokens > self.capacity:
            self.tokens -= self.memory.popitem(last=False)[1]
        computed = request.tokens - (1 - REUSED_SHARE) * found
        self.free_s = max(request.at_s, self.free_s) + computed * prefill_s
        heapq.heappush(self.ends, self.free_s + DECODE_S)
        self.n_requests += 1
        self.work += request.tokens
        return found, self.free_s - request.at_s


def simulate(
    requests: Sequence[TimedRequest],
    n_replicas: int,
    capacity: int,
    policy: str,
    told: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """Send all requests to replicas by one policy.

    Args:
        requests: In the order of their times.
        n_replicas: How many replicas there are.
        capacity: Tokens of chunks that the memory of each holds.
        policy: One of `POLICIES`.
        told: Called now and then with the number of requests that were sent.

    Returns:
        hit_share: Of the tokens of all chunks, those found in the chosen replica's memory.
            requests_over_mean and
        work_over_mean: of the busiest replica, over the mean. first_token_s and decision_us:
            quantiles.
    """
    replicas = [SimulatedReplica(capacity) for _ in range(n_replicas)]
    names = [str(number) for number in range(n_replicas)]
    router = ChunkRouter(names)
    all_tokens = sum(request.tokens for request in requests)
    prefill_s = BUSY * n_replicas * max(requests[-1].at_s - requests[0].at_s, 1e-9) / all_tokens
    wanted = found = 0
    first_s, decision_us = list[float](), list[float]()
    for number, request in enumerate(requests):
        queues = {
            name: replica.queue(request.at_s) for name, replica in zip(names, replicas, strict=True)
        }
        if policy == "chunks":
            routed = {**request.chunks, -1 - number: request.tokens - sum(request.chunks.values())}
            began = time.perf_counter()
            name = router.rank(routed, queues)[0]
            decision_us.append(1e6 * (time.perf_counter() - began))
            router.send(name, routed)
            chosen = int(name)
        else:
            by_queue = min(
                range(n_replicas), key=lambda each: (queues[names[each]], replicas[each].n_requests)
            )
            chosen = by_queue if policy == "least queue" else number % n_replicas
        hit, waited_s = replicas[chosen].answer(request, prefill_s)
        wanted, found = wanted + sum(request.chunks.values()), found + hit
        first_s.append(waited_s)
        if number % 1000 == 0:
            told(number)
    return {
        "policy": policy,
        "hit_share": found / max(1, wanted),
        "requests_over_mean": _over_mean([replica.n_requests for replica in replicas]),
        "work_over_mean": _over_mean([replica.work for replica in replicas]),
        "first_token_s": _quantiles(first_s),
        "decision_us": _quantiles(decision_us) if decision_us else None,
        "known_chunks": sum(len(replica.memory) for replica in replicas),
        "distinct_chunks": len(set().union(*(replica.memory for replica in replicas))),
    }


def lookup_us(
    n_known: int, n_replicas: int, n_chunks: int, rounds: int, seed: int = 0
) -> Mapping[str, float]:
    """Microseconds of one decision for a prompt of `n_chunks`, over replicas that together know
    `n_known` chunks.
    """
    rng = np.random.default_rng(seed)
    known = rng.integers(2**63, size=n_known).tolist()
    names = [str(number) for number in range(n_replicas)]
    router = ChunkRouter(names)
    for at, name in enumerate(names):
        router.send(name, dict.fromkeys(known[at::n_replicas], 1))
    taken = []
    for picks in rng.integers(n_known, size=(rounds, n_chunks)).tolist():
        request = {known[pick]: 1 for pick in picks}
        began = time.perf_counter()
        router.rank(request)
        taken.append(1e6 * (time.perf_counter() - began))
    return _quantiles(taken)


def _over_mean(values: Sequence[float]) -> float:
    return max(values) / (sum(values) / len(values))


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.quantile(values, [0.5, 0.99]).tolist()
    return {"p50": p50, "p99": p99, "max": max(values)}
