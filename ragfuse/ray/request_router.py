"""Ray Serve's request router, based on `ChunkRouter`. Ray Serve imports this file by name."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ragfuse.ray.chunk_router import ChunkRouter

ROUTED = "routed"
"""The keyword argument by which a front passes `routed_chunks` to this router."""


class ChunkRequestRouter(RequestRouter):
    """Sends a request to the replica that already received most bytes of its chunks, within a load
    bound (`ChunkRouter`).

    It is not a `FIFOMixin`: that would give the chosen replica to the oldest request.
    """

    def initialize_state(self) -> None:
        """Start without replicas; Ray Serve calls it once."""
        self._router = ChunkRouter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates in order of preference, one per rank."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = (
                True  # otherwise Ray retries at once while all are full
            )
        by_name = {str(replica.replica_id): replica for replica in candidate_replicas}
        self._router.keep_only(by_name)
        queues = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in by_name.items()
        }
        return [[by_name[name]] for name in self._router.rank(_chunks(pending_request), queues)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Record the replica that got a request."""
        self._router.send(str(replica_id), _chunks(pending_request))


def _chunks(pending_request: PendingRequest | None) -> dict[int, int]:
    return {} if pending_request is None else pending_request.kwargs[ROUTED]
