"""What cannot work on a cluster is said in one sentence before any work: Ray, the address, the
store, the numbers.
"""

import socket
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from ragfuse import Settings, SettingsError
from ragfuse.cli.main import app
from ragfuse.ray import bulk, cluster
from ragfuse.ray.application import ReplicaOptions
from ragfuse.ray.cluster import Node, check_cluster


@pytest.fixture
def settings(tmp_path):
    return Settings(store=tmp_path / "store", home=tmp_path, model="nothing-is-loaded")


@pytest.fixture
def without_ray(monkeypatch):
    monkeypatch.setattr(
        cluster, "find_spec", lambda name: None if name == "ray" else find_spec(name)
    )


@pytest.mark.parametrize(
    "command", [["ingest", "FILE", "--ray", "local"], ["serve", "--ray", "local"]]
)
def test_without_ray_the_commands_name_the_package_before_a_model_is_loaded(
    command, without_ray, tmp_path, monkeypatch
):
    (tmp_path / "notes.md").write_text("A text.")
    monkeypatch.setenv("RAGFUSE_HOME", str(tmp_path))
    monkeypatch.setenv("RAGFUSE_MODEL", "nothing-is-loaded")
    notes = str(tmp_path / "notes.md")
    said = CliRunner().invoke(app, [notes if word == "FILE" else word for word in command])
    assert said.exit_code == 1
    assert "pip install 'ragfuse-kv[ray]'" in said.output


def test_a_store_that_not_all_machines_share_is_refused(settings, monkeypatch):
    monkeypatch.setattr(cluster, "find_spec", lambda name: object())
    alone = settings.model_copy(update={"disk_bytes": 0})
    far = settings.model_copy(update={"tiers": ("redis://cache",)})
    with pytest.raises(SettingsError, match="only the memory tier"):
        check_cluster(alone)
    for machines, kept in ((["a", "a"], settings.disk_bytes), (["a", "b"], 0)):
        found = [Node(each, 4.0, 0.0) for each in machines]
        monkeypatch.setattr(cluster, "nodes", lambda found=found: found)
        shared = cluster.shared_settings(far)
        assert (shared.disk_bytes, shared.tiers, shared.placement) == (kept, far.tiers, "all")
    with pytest.raises(SettingsError, match="All 2 machines"):
        cluster.shared_settings(settings)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_an_error_at_once(scheme, monkeypatch):
    pytest.importorskip("ray")
    # other tests of this process stay connected
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SettingsError, match=address), cluster.connected(address):
            pass


def test_numbers_of_replicas_are_read_and_refused_where_they_make_no_sense():
    assert ReplicaOptions.parse("2") == ReplicaOptions(2, 2)
    assert ReplicaOptions.parse("1:4", 2.0) == ReplicaOptions(1, 4, 2.0)
    for text in ("0", "3:2", "1:", "1:x"):
        with pytest.raises(SettingsError, match="--replicas"):
            ReplicaOptions.parse(text)


@pytest.mark.parametrize(
    ("members", "on_gpu", "workers", "cpus", "wanted"),
    [
        ([4.0, 4.0], False, None, None, (2, 3.0)),
        ([1.0, 1.0], False, None, None, (2, 1.0)),
        ([8.0, 0.0], False, None, None, (1, 7.0)),
        ([8.0], False, 4, 2.0, (4, 2.0)),
        ([4.0, 4.0], True, None, None, (2, 1.0)),
    ],
)
def test_workers_are_sized_by_the_nodes(members, on_gpu, workers, cpus, wanted):
    found = [Node(str(at), each, float(on_gpu)) for at, each in enumerate(members)]
    assert bulk.worker_size(found, on_gpu, workers, cpus) == wanted
