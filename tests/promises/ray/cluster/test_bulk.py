"""Bulk encoding on a real cluster: the same entries as one process, nothing lost, nothing done
twice.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import ray
from typer.testing import CliRunner

from ragfuse import Engine, Settings
from ragfuse.cli.main import app
from ragfuse.ray import encode
from ragfuse.ray.cluster import connected, nodes
from tests.promises.ray.cluster.entries import contents, texts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_ray_nodes")]
SIZE: dict[str, Any] = {"workers": 2, "cpus": 1, "batch": 4}
CHUNKS = texts(32)


@pytest.fixture(scope="module")
def settings(tiny_path, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return Settings(
        model=str(tiny_path), dtype="float32", store=home / "store", home=home, threads=1
    )


@pytest.fixture(scope="module")
def alone(settings):
    """What one process stores."""
    mine = settings.model_copy(update={"store": settings.home / "alone"})
    with Engine(mine) as engine:
        engine.ingest(CHUNKS)
    return contents(mine)


def is_worker(process: psutil.Process) -> bool:
    """Return whether a process is a worker of this run's bulk encode."""
    return "EncodeWorker" in " ".join(process.info["cmdline"] or ())


def test_a_worker_killed_in_the_middle_loses_nothing_and_a_second_run_encodes_nothing(
    settings, alone
):
    killed = list[int]()

    def kill() -> None:
        """Kill a worker as soon as something is stored."""
        while not list((settings.store_path / "chunks").rglob("*.kv")):
            time.sleep(0.05)
        workers = (each.pid for each in psutil.process_iter(["cmdline"]) if is_worker(each))
        killed.append(next(workers))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    done = encode(CHUNKS, settings, **SIZE)
    killer.join()
    assert len(alone) == len(CHUNKS)
    assert contents(settings) == alone
    assert (done.chunks, done.unsaved) == (len(CHUNKS), 0)

    again = encode(ray.data.from_items([{"text": text} for text, _ in CHUNKS]), settings, **SIZE)
    assert (again.chunks, again.encoded, again.nbytes) == (len(CHUNKS), 0, 0)
    assert contents(settings) == alone


def test_the_command_encodes_on_the_cluster(settings, two_ray_nodes, tmp_path, monkeypatch):
    (tmp_path / "notes.md").write_text("\n\n".join(text for text, _ in texts(6)))
    for name in ("model", "dtype", "home"):
        monkeypatch.setenv(f"RAGFUSE_{name.upper()}", str(getattr(settings, name)))
    words = [
        "ingest",
        str(tmp_path / "notes.md"),
        "--store",
        str(tmp_path / "store"),
        "--ray",
        two_ray_nodes,
    ]
    said = CliRunner().invoke(
        app, [*words, "--ray-workers", "1", "--ray-cpus", "1", "--json", str(tmp_path / "r.json")]
    )
    assert said.exit_code == 0, said.output
    assert contents(settings.model_copy(update={"store": tmp_path / "store"}))
    told = json.loads((tmp_path / "r.json").read_text())
    assert told["encoded"] > 0
    assert told["tokens_per_s"] > 0


def test_a_text_that_the_model_cannot_read_is_left_out(settings):
    done = encode([("word " * 5000, "long"), CHUNKS[0]], settings, **SIZE)
    assert (done.chunks, done.unsaved) == (1, 0)
    assert encode([], settings, **SIZE).chunks == 0


def test_a_connected_process_stays_connected(two_ray_nodes):
    with connected("local"):
        assert len(nodes()) == 2
    assert ray.is_initialized()
