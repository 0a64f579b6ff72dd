"""Connections to a Ray cluster, and the checks before any work: does it answer, do its nodes share the store?"""

from __future__ import annotations

import platform
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from ragfuse.admin.byte_store import ByteStore
from ragfuse.errors import RagFuseError, SettingsError, StoreError
from ragfuse.settings import Settings
from ragfuse.store.urls import shown

LOCAL_CLUSTER = "local"
"""The address that stands for a new cluster on this machine."""
ANSWER_S = 5.0
"""Seconds within which a cluster's address must accept a connection."""
PROBE_S = 600.0
"""Seconds within which each node must say what it sees of the store; starting Python there takes some."""
DEFAULT_PORTS = MappingProxyType({"": 6379, "ray": 10001})
"""The ports of Ray: of a head node, and of its server for clients (ray://)."""
INSTALL = "`make venv-ray` in a clone, or, once released, pip install 'ragfuse-kv[ray]'"
NAMESPACE = "ray"
"""Of the values that nodes look for in the store, to see whether they share it."""


@dataclass(frozen=True)
class Node:
    """A node of a cluster.

    Args:
        id: Ray's id of the node.
        host: Its address.
        cpus: CPUs that Ray schedules there.
        gpus: GPUs that Ray schedules there.
    """

    id: str
    host: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class NodeView:
    """What a node answers.

    Args:
        version: The version of ragfuse there.
        seen: For each place of the store, whether the node reads there what the caller has written.
    """

    version: str
    seen: tuple[bool, ...]


def require_ray() -> None:
    """Raise SettingsError where Ray is not installed."""
    if find_spec("ray") is None:
        raise SettingsError(f"Wanted the package ray, found none in this environment. Install it: {INSTALL}")


def places_of(settings: Settings) -> tuple[str | None, ...]:
    """Return the places of the store that outlive a process: None for the disk tier, URLs for the tiers behind it.

    Raises:
        SettingsError: There is none, only memory.
    """
    disk = (None,) if settings.disk_bytes else ()
    places = (*disk, *settings.tiers)
    if not places:
        raise SettingsError(
            "Wanted a store that all workers of Ray share, found the memory tier alone, which ends with its process. "
            "Give a folder (--store, RAGFUSE_STORE) for workers on one machine, or RAGFUSE_TIERS='[\"redis://...\"]'."
        )
    return places


def check_address(address: str) -> None:
    """Raise SettingsError where nothing accepts connections at the address of a cluster."""
    if address in (LOCAL_CLUSTER, "auto"):
        return
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":") if ":" in rest else (rest, "", "")
    try:
        number = int(port) if port else DEFAULT_PORTS[scheme]
        with socket.create_connection((host.strip("[]"), number), ANSWER_S):
            return
    except (KeyError, ValueError):
        found = "something else"
    except OSError as error:
        found = f"nothing that answers there ({error.strerror or error})"
    raise SettingsError(
        f"Wanted the address of a Ray cluster such as 10.0.0.1:6379 or ray://10.0.0.1:10001, or '{LOCAL_CLUSTER}', "
        f"found {found} at '{address}'. Start one with `ray start --head`, or use --ray {LOCAL_CLUSTER}."
    )


def check_cluster(settings: Settings, address: str) -> None:
    """Check what can be checked before any work: Ray, the cluster's address, a store that outlives processes.

    Raises:
        SettingsError: Ray is not installed, nothing answers at the address, or the store is memory alone.
    """
    require_ray()
    places_of(settings)
    check_address(address)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster for the duration of a block; one that this process is connected to already stays so.

    Args:
        address: "local" for a new cluster on this machine; "auto" for one that runs on it; HOST:PORT or ray://HOST:PORT.

    Raises:
        SettingsError: Ray is not installed, or the cluster does not answer or has another version.
    """
    require_ray()
    import ray

    if ray.is_initialized():
        yield
        return
    check_address(address)
    try:
        if address == LOCAL_CLUSTER:
            ray.init(include_dashboard=False, logging_level="error", log_to_driver=False)
        else:
            ray.init(address, logging_level="error", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise SettingsError(
            f"Wanted to join the Ray cluster at '{address}' with Ray {ray.__version__}, found: {reason}. Both need the "
            "same versions of Ray and Python."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def nodes() -> list[Node]:
    """Return the nodes of the connected cluster that are alive."""
    import ray

    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def shared_settings(settings: Settings) -> Settings:
    """Return the settings for workers on the connected cluster: of its store, the tiers that all nodes share.

    Each node looks for a value that is written to every place first. New chunks go to all tiers that are left.

    Raises:
        SettingsError: The nodes share no place, or a node cannot run this version of ragfuse.
        StoreError: No place of the store can be written.
    """
    settings, places, members = settings.placed(), places_of(settings), nodes()
    name, written = secrets.token_hex(16), list[bool]()
    failure: StoreError | None = None
    for place in places:
        try:
            with ByteStore(place, NAMESPACE, settings=settings) as store:
                store.put([(name, name.encode())])
            written.append(True)
        except StoreError as error:
            failure = error
            written.append(False)
    if failure is not None and not any(written):
        raise failure
    try:
        views = _probed(settings, places, name, members)
    finally:
        for place in (place for place, is_there in zip(places, written, strict=True) if is_there):
            with ByteStore(place, NAMESPACE, settings=settings) as store:
                store.delete([name])
    mine = ragfuse_version()
    for node, view in zip(members, views, strict=True):
        if view.version != mine:
            raise SettingsError(
                f"Wanted ragfuse {mine} on every node of the cluster, found {view.version} on {node.host}. Install the "
                "same version there."
            )
    shared = [all(view.seen[at] for view in views) for at in range(len(places))]
    if not any(shared):
        blind = next(node.host for node, view in zip(members, views, strict=True) if not any(view.seen))
        names = ", ".join(shown(str(settings.store_path) if place is None else place) for place in places)
        raise SettingsError(
            f"Wanted a store that all {len(members)} nodes of the cluster share, found that {blind} does not see what "
            f"was written to {names}. Set RAGFUSE_TIERS to redis://, s3://, or file:// on a mount that all nodes have."
        )
    kept = [place for place, is_shared in zip(places, shared, strict=True) if is_shared]
    changes: dict[str, Any] = {"placement": "all", "tiers": tuple(place for place in kept if place is not None)}
    if None not in kept:
        changes["disk_bytes"] = 0
    return settings.model_copy(update=changes)


def see(settings: Settings, places: Sequence[str | None], name: str) -> NodeView:
    """Return what this node sees: run by a task on each node.

    Args:
        settings: The caller's settings.
        places: The places of the store, as `places_of` returns them.
        name: The name, and the content, of the value that the caller has written.
    """
    return NodeView(ragfuse_version(), tuple(_is_seen(settings, place, name) for place in places))


def ragfuse_version() -> str:
    """Return the version of ragfuse that is installed here, with that of Python."""
    try:
        return f"{version('ragfuse-kv')} on Python {platform.python_version()}"
    except PackageNotFoundError:
        return f"of a source tree on Python {platform.python_version()}"


def _is_seen(settings: Settings, place: str | None, name: str) -> bool:
    try:
        with ByteStore(place, NAMESPACE, settings=settings) as store:
            return store.get([name]) == [name.encode()]
    except RagFuseError:
        return False


def _probed(settings: Settings, places: Sequence[str | None], name: str, members: Sequence[Node]) -> list[NodeView]:
    """Return what each node sees, in their order."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=2)(see)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
            settings, places, name
        )
        for node in members
    ]
    views = []
    for node, reference in zip(members, asked, strict=True):
        try:
            views.append(ray.get(reference, timeout=PROBE_S))
        except GetTimeoutError as error:
            raise SettingsError(
                f"Wanted an answer from every node of the cluster within {PROBE_S:.0f} s, found none from {node.host}. "
                "Is it overloaded? Try again when it is not."
            ) from error
        except (RayError, ImportError, RuntimeError) as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise SettingsError(
                f"Wanted ragfuse to run on every node of the cluster, found that {node.host} cannot: "
                f"{said[-1] if said else type(error).__name__}. Install ragfuse there: {INSTALL}"
            ) from error
    return views
