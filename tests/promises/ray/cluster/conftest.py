"""A Ray cluster of two nodes on this machine, which all tests here share; without Ray nothing here
is collected.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.promises.ray.cluster.nodes import be_patient, two_nodes

be_patient()  # the test modules import ray
collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]


@pytest.fixture(scope="session")
def two_ray_nodes():
    """The address of the cluster, which this process is connected to."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        two_nodes(Path(folder)) as url,
    ):
        yield url
