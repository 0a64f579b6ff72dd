"""The server as a Ray Serve application: a front, a request router and replicas."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ragfuse.errors import SettingsError
from ragfuse.ray.cluster import (
    connected,
    cpus_each,
    nodes,
    shared_settings,
)
from ragfuse.serve.keys import LOOPBACK
from ragfuse.settings import Settings

APPLICATION = "ragfuse"
"""The name of the application in Ray Serve."""
ROUTER = "ragfuse.ray.request_router:ChunkRequestRouter"
QUEUE_FACTOR = 2
"""Maximum requests in a replica, as a multiple of the requests that it answers at once."""


@dataclass(frozen=True)
class ReplicaOptions:
    """The number of replicas, and the CPUs of each replica.

    Args:
        least: Minimum number of replicas.
        most: Maximum number of replicas. Ray starts more replicas if queues are long.
        cpus: CPUs per replica. If None, the smallest node's CPUs, minus one, are divided among the
            replicas of a node. Each replica gets at least 1 CPU.
    """

    least: int
    most: int
    cpus: float | None = None

    @classmethod
    def parse(cls, text: str, cpus: float | None = None) -> ReplicaOptions:
        """Parse "N" or "LEAST:MOST"; raise SettingsError for any other text."""
        first, _, last = text.partition(":")
        least, most = (int(each) if each.isdecimal() else 0 for each in (first, last or first))
        if not 1 <= least <= most or text.endswith(":"):
            raise SettingsError(
                f"--replicas must be a number such as 2, or a range such as 1:4; found '{text}'."
            )
        return cls(least, most, cpus)


def serve(
    settings: Settings,
    api_keys: Sequence[str],
    host: str,
    port: int,
    origins: Sequence[str],
    options: ReplicaOptions,
    address: str,
    ready: Callable[[str], object],
    tell: Callable[[str], object],
) -> None:
    """Serve on a Ray cluster until SIGTERM or Ctrl-C.

    Args:
        settings: All settings.
        api_keys: The accepted API keys, in the form that `Keys` expects.
        host: Address on which every node with a replica listens.
        port: Port to listen on.
        origins: Origins of web pages that may call the server (CORS).
        options: The number and size of replicas.
        address: The cluster. "local" starts a new cluster on this machine, and "auto" finds a
            running cluster. HOST:PORT and ray://HOST:PORT are also accepted.
        ready: Called with the server's URL once all replicas have loaded the model.
        tell: Called with a message when the shutdown begins, and when all replicas are gone.

    Raises:
        SettingsError: No cluster is at HOST:PORT, or the nodes do not share the store.
    """
    stop = threading.Event()
    with connected(address):
        from ray import serve as ray_serve

        settings = shared_settings(settings)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        ray_serve.start(http_options={"host": host, "port": port})
        ray_serve.run(
            application(settings, api_keys, host, origins, options),
            name=APPLICATION,
            route_prefix="/",
        )
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, lambda *_: stop.set())
        try:
            ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            while not stop.wait(1.0):
                pass
            tell("Stopping: replicas finish their answers, then pending KV is saved.")
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            ray_serve.delete(APPLICATION)
    tell("Stopped.")


def application(
    settings: Settings,
    api_keys: Sequence[str],
    host: str,
    origins: Sequence[str],
    options: ReplicaOptions,
) -> Any:
    """Return the Ray Serve application for `ray.serve.run`.

    This process must be connected to the cluster. `settings` must come from `shared_settings`.
    """
    from ray import serve as ray_serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from ragfuse.ray.deployment import ChunkFront, EngineReplica

    together, most = settings.serve_together, options.most
    on_gpu = settings.device.startswith("cuda")
    replicas = ray_serve.deployment(
        EngineReplica,
        name="replicas",
        max_ongoing_requests=QUEUE_FACTOR * together,
        max_queued_requests=settings.serve_waiting,
        graceful_shutdown_timeout_s=settings.serve_grace_s,
        ray_actor_options={
            "num_cpus": options.cpus or cpus_each(nodes(), most),
            **({"num_gpus": 1} if on_gpu else {}),
        },
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.least, max_replicas=most, target_ongoing_requests=together
        ),
    )
    front = ray_serve.deployment(
        ChunkFront,
        name="front",
        num_replicas=1,
        max_ongoing_requests=QUEUE_FACTOR * together * most + settings.serve_waiting + 1,
        ray_actor_options={"num_cpus": 0},
    )
    bound = replicas.bind(settings, tuple(api_keys), tuple(origins), host in LOOPBACK)
    return front.bind(bound, tuple(api_keys), settings.salt)
