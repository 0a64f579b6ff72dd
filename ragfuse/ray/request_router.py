"""Ray Serve's request router, based on `ChunkRouter`. Ray Serve imports this file by name."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ragfuse.ray.chunk_router import ChunkRouter

ROUTED = "routed"
"""The keyword argument with which the front passes the result of `routed_chunks`."""


class ChunkRequestRouter(RequestRouter):
    """Sends each request to the first replica in `ChunkRouter`'s ranking that has room.

    The class omits `FIFOMixin`. The mixin would give the chosen replica to the oldest request.
    """

    def initialize_state(self) -> None:
        """Start without replicas. Ray Serve calls this method once."""
        self._router = ChunkRouter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidate replicas in order of preference, one replica per rank."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = (
                True  # otherwise Ray retries at once while all replicas are full
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
        """Record which replica received a request."""
        self._router.send(str(replica_id), _chunks(pending_request))


def _chunks(pending_request: PendingRequest | None) -> dict[int, int]:
    return {} if pending_request is None else pending_request.kwargs[ROUTED]
