"""A request router that asks replicas in turn, which `ragfuse.ray`'s router is compared with.

Ray Serve loads it by its name.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class RoundRobinRouter(RequestRouter):
    """Asks replicas in turn."""

    def initialize_state(self, **_: Any) -> None:
        """Begin with the first replica."""
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates in the order of their names, the one whose turn it is first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Ray asks again at once while all are full
        ordered = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id))
        self._turn += 1
        first = self._turn % max(1, len(ordered))
        return [[replica] for replica in (*ordered[first:], *ordered[:first])]
