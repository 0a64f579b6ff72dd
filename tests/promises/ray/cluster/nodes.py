"""A Ray cluster of two nodes on this machine,.

It is patient: on a busy machine Ray's processes start late.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from ragfuse.errors import SettingsError

PATIENCE = MappingProxyType(
    {
        "RAY_agent_register_timeout_ms": "600000",
        "RAY_raylet_start_wait_time_s": "600",
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_health_check_timeout_ms": "120000",
        "RAY_health_check_initial_delay_ms": "120000",
        "RAY_gcs_server_request_timeout_seconds": "300",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
        "RAY_worker_niceness": "0",
        "RAY_enable_metrics_collection": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "OMP_NUM_THREADS": "1",
    }
)
"""Variables of Ray for a cluster that nobody else uses. They must be set before `ray` is imported.
"""
CPUS = 4
"""CPUs that each node is said to have: how many processes fit, whatever the machine has."""
STORE_BYTES = 150_000_000
"""Bytes of each node's object store; only counts pass through it."""
START_S = 600.0
ATTEMPTS = 2


def be_patient() -> None:
    """Set `PATIENCE`, where it is not set otherwise: call it before anything imports `ray`, which
    reads it then.
    """
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)


@contextmanager
def two_nodes(folder: Path) -> Iterator[str]:
    """Start a cluster of two nodes and connect to it; yield its address. Call `be_patient` first.

    Args:
        folder: Where Ray keeps its files. The path must be short, as sockets lie there.

    Raises:
        SettingsError: The nodes do not start.
    """
    be_patient()
    os.environ["RAY_TMPDIR"] = str(folder)
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": CPUS, "node_ip_address": "127.0.0.1", "object_store_memory": STORE_BYTES}
    cluster = None
    for attempt in range(ATTEMPTS):
        try:
            cluster = Cluster(
                initialize_head=True, head_node_args={**options, "include_dashboard": False}
            )
            cluster.add_node(**options)
            cluster.wait_for_nodes(timeout=START_S)
            break
        except Exception as error:  # Ray raises plain exceptions here
            if cluster is not None:
                cluster.shutdown()
            if attempt + 1 == ATTEMPTS:
                raise SettingsError(
                    f"Wanted a Ray cluster of two nodes on this machine, found: {error}. Is the"
                    " machine very busy?"
                ) from error
    assert cluster is not None
    try:
        ray.init(cluster.address, logging_level="warning", log_to_driver=False)
        yield str(cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()
