"""Connections to a Ray cluster, and which tiers of the store its nodes share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ragfuse.engine.store_opener import open_kept
from ragfuse.errors import RagFuseError, SettingsError
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.named import as_entry, value_of
from ragfuse.store.urls import shown
from ragfuse.types.keys import ChunkKey, digest

LOCAL_CLUSTER = "local"
"""The address that stands for a new cluster on this machine."""


@dataclass(frozen=True)
class Node:
    """A node of a cluster.

    Args:
        id: Ray's id of the node.
        cpus: CPUs that Ray schedules there.
        gpus: GPUs that Ray schedules there.
    """

    id: str
    cpus: float
    gpus: float


def require_ray() -> None:
    """Raise SettingsError where Ray is not installed."""
    if find_spec("ray") is None:
        raise SettingsError(
            "Wanted the package ray, found none in this environment. Install it: `make venv-ray` in"
            " a clone, or, once released, pip install 'ragfuse-kv[ray]'"
        )


def places_of(settings: Settings) -> tuple[str | None, ...]:
    """Return the places of the store that outlive a process: None for the disk tier, URLs for the
    tiers behind it.

    Raises:
        SettingsError: There is none, only memory.
    """
    disk = (None,) if settings.disk_bytes else ()
    places = (*disk, *settings.tiers)
    if not places:
        raise SettingsError(
            "Wanted a store that all workers of Ray share, found the memory tier alone, which ends"
            " with its process. Give a folder (--store, RAGFUSE_STORE) for workers on one machine,"
            " or RAGFUSE_TIERS='[\"redis://...\"]'."
        )
    return places


def check_cluster(settings: Settings) -> None:
    """Raise SettingsError where Ray is not installed or the store is memory alone, before a model
    is loaded.
    """
    require_ray()
    places_of(settings)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster for the duration of a block; one that this process is connected to
    already stays so.

    Args:
        address: "local" for a new cluster on this machine; "auto" for one that runs on it;
            HOST:PORT or ray://HOST:PORT.

    Raises:
        SettingsError: Ray is not installed.
    """
    require_ray()
    import ray

    if ray.is_initialized():
        yield
        return
    how: dict[str, Any] = (
        {"include_dashboard": False} if address == LOCAL_CLUSTER else {"address": address}
    )
    ray.init(**how, logging_level="error", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def nodes() -> list[Node]:
    """Return the nodes of the connected cluster that are alive."""
    import ray

    return [
        Node(node["NodeID"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def cpus_each(members: Sequence[Node], n: int) -> float:
    """Return the CPUs of each of `n` workers: all but one of the smallest node's, divided among
    those there.
    """
    sizes = [node.cpus for node in members if node.cpus >= 1] or [1.0]
    return max(1.0, (min(sizes) - 1) // -(-n // len(sizes)))


def shared_settings(settings: Settings) -> Settings:
    """Return the settings for workers on the connected cluster: of its store, the tiers that all
    nodes share.

    Each node looks for a value that is written to every place first. New chunks go to all tiers
    that are left.

    Raises:
        SettingsError: The nodes share no place that can be written.
    """
    settings, places, name = settings.placed(), places_of(settings), secrets.token_hex(16)
    members = nodes()
    key = _key(name)
    entry = as_entry(name.encode())
    written = [
        place
        for place in places
        if _did(settings, place, lambda store: store.tiers[0].put(key, *entry))
    ]
    try:
        views = _seen(settings, written, name, members)
    finally:
        for place in written:
            _did(settings, place, lambda store: bool(store.forget([key])))
    kept = [place for at, place in enumerate(written) if all(view[at] for view in views)]
    if not kept:
        names = ", ".join(
            shown(str(settings.store_path) if place is None else place) for place in places
        )
        raise SettingsError(
            f"Wanted a store that all {len(members)} nodes of the cluster share, found that not all"
            f" of them see what is written to {names}. Set RAGFUSE_TIERS to redis://, s3://, or"
            " file:// on a mount that all nodes have."
        )
    changes: dict[str, Any] = {
        "placement": "all",
        "tiers": tuple(place for place in kept if place is not None),
    }
    if None not in kept:
        changes["disk_bytes"] = 0
    return settings.model_copy(update=changes)


def see(settings: Settings, places: Sequence[str | None], name: str) -> list[bool]:
    """Return in which places this node reads the value that the caller has written: run by a task
    on each node.

    Args:
        settings: The caller's settings.
        places: Places of the store, as `places_of` returns them.
        name: The name, and the content, of the value.
    """
    wanted = name.encode()
    return [
        _did(settings, place, lambda store: value_of(store.tiers[0], _key(name)) == wanted)
        for place in places
    ]


def _key(name: str) -> ChunkKey:
    return ChunkKey(digest("ray"), digest("name", name))


def _did(settings: Settings, place: str | None, work: Callable[[KVStore], bool]) -> bool:
    """Return whether work on the store of one place succeeded."""
    alone = {
        "gpu_bytes": 0,
        "memory_bytes": 0,
        "disk_bytes": settings.disk_bytes if place is None else 0,
        "tiers": () if place is None else (place,),
    }
    try:
        with open_kept(settings.model_copy(update=alone)) as store:
            return work(store)
    except RagFuseError:
        return False


def _seen(
    settings: Settings, places: Sequence[str | None], name: str, members: Sequence[Node]
) -> list[list[bool]]:
    """Return what each node sees, in their order."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=2)(see)
    strategies = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in members]
    asked = [
        task.options(scheduling_strategy=each).remote(settings, places, name) for each in strategies
    ]
    found: list[list[bool]] = ray.get(asked)
    return found
