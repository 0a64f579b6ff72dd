"""Connect to a Ray cluster, and select the store's tiers that all nodes of the cluster share."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ragfuse.errors import SettingsError
from ragfuse.settings import Settings

LOCAL_CLUSTER = "local"
"""The value of `address` that means a new cluster on this machine."""


@dataclass(frozen=True)
class Node:
    """A node of a cluster.

    Args:
        machine: Address of the node's machine.
        cpus: Number of CPUs that Ray schedules on the node.
        gpus: Number of GPUs that Ray schedules on the node.
    """

    machine: str
    cpus: float
    gpus: float


def check_cluster(settings: Settings) -> None:
    """Raise SettingsError if Ray is not installed or the store is only in memory."""
    if find_spec("ray") is None:
        raise SettingsError(
            "The package ray is not installed. In a clone, run `make venv-ray`; once ragfuse is"
            " released, run pip install 'ragfuse-kv[ray]'."
        )
    if not settings.disk_bytes and not settings.tiers:
        raise SettingsError(
            "Ray workers need a shared store, but only the memory tier is configured. On one"
            " machine, set --store or RAGFUSE_STORE to a folder. On several machines, set"
            " RAGFUSE_TIERS='[\"redis://...\"]'."
        )


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a Ray cluster for the `with` block, unless this process is already connected.

    The address "local" starts a new cluster on this machine, and "auto" finds a running cluster.
    HOST:PORT and ray://HOST:PORT are also accepted.

    Raises:
        SettingsError: Nothing listens at HOST:PORT. Ray itself would try for 14 minutes.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), 10.0).close()
        except OSError as error:
            raise SettingsError(
                f"No Ray cluster answers at {address} ({error}). `ray start --head` prints the"
                " address of a cluster."
            ) from error
    how: dict[str, Any] = (
        {"include_dashboard": False} if address == LOCAL_CLUSTER else {"address": address}
    )
    ray.init(**how, logging_level="error", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def nodes() -> list[Node]:
    """Return the live nodes of the connected cluster."""
    import ray

    return [
        Node(
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def cpus_each(members: Sequence[Node], n: int) -> float:
    """Return the CPUs per worker if `n` workers are spread over the nodes.

    The smallest node's CPUs, minus one, are divided among the workers on a node, at least 1 each.
    """
    sizes = [node.cpus for node in members if node.cpus >= 1] or [1.0]
    return max(1.0, (min(sizes) - 1) // -(-n // len(sizes)))


def shared_settings(settings: Settings) -> Settings:
    """Return settings for workers, with only those persistent tiers that all nodes share.

    Every tier gets all new chunks. The disk tier is included only if all nodes are on one machine.
    Raises SettingsError if no tier is left.
    """
    settings = settings.placed()
    n_machines = len({node.machine for node in nodes()})
    if n_machines == 1:
        return settings.model_copy(update={"placement": "all"})
    if not settings.tiers:
        raise SettingsError(
            f"All {n_machines} machines of the cluster need a shared store, but the store is a"
            " local folder. Set RAGFUSE_TIERS to a redis:// or s3:// URL, or to file:// on a"
            " mount that all machines have."
        )
    return settings.model_copy(update={"placement": "all", "disk_bytes": 0})
