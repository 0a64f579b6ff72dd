"""`ragfuse bench ray`: bulk encoding and serving on a Ray cluster, and the choice of a replica."""

from __future__ import annotations

from ragfuse_bench.ray.options import RayOptions

from ragfuse.cli.options import Json, console_for, write_json


def ray(options: RayOptions, json: Json = None) -> None:
    """Simulate the router of replicas; encode in bulk and serve on a two-node Ray cluster of this machine."""
    from ragfuse_bench.ray.run import run_ray

    write_json(run_ray(options, console_for(json)), json)
