"""vLLM's own router before both: clients ask it, ragfuse fuses, vLLM decodes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.peers.llama_server import free_port
from tests.kits.serve import CHAT, TEXT, events, said, wait_for, with_documents

PATIENCE_S = 900.0
ROUTER = os.environ.get(
    "TEST_VLLM_ROUTER", str(Path(os.environ.get("TEST_VLLM_PYTHON", "")).parent / "vllm-router")
)


@pytest.fixture(scope="module")
def router(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a router that prefills at ragfuse and decodes at vLLM."""
    port, metrics = free_port(), free_port()
    told = {
        "prefill": servers.prefills.root,
        "decode": servers.decodes.root,
        "port": port,
        "prometheus-port": metrics,
        "worker-startup-check-interval": 1,
    }
    options = [each for name, value in told.items() for each in (f"--{name}", str(value))]
    with (tmp_path_factory.mktemp("router") / "log").open("wb") as log:
        running = subprocess.Popen(
            [ROUTER, "--vllm-pd-disaggregation", *options], stdout=log, stderr=log
        )
    root = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: is_healthy(root), PATIENCE_S)
        yield root
    finally:
        running.terminate()
        running.wait(60)


def is_healthy(root: str) -> bool:
    try:
        return httpx.get(f"{root}/health").status_code == 200
    except httpx.TransportError:
        return False


def streamed(root: str, path: str, **body: Any) -> list[int]:
    """The token ids of a stream."""
    pieces = events(httpx.post(f"{root}{path}", json={"stream": True, **body}, timeout=PATIENCE_S))
    choices = [each["choices"][0] for each in pieces if each["choices"]]
    return [id for each in choices for id in each.get("token_ids") or ()]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [said()], **with_documents()}),
        (TEXT, {"prompt": "A gardener planted nine roses beside a wall. " * 9}),
    ],
)
def test_answers_read_as_those_of_ragfuse_alone(
    path: str, body: dict[str, Any], router: str, servers: Any
) -> None:
    alone = servers.prefills
    told = {"model": alone.service.model, "max_tokens": 20, "temperature": 0, **body}
    alone.post(path, told)
    # the documents are known from here on
    alone.engine().flush()
    (choice,) = alone.post(path, {**told, "ragfuse": {"token_ids": True}}).json()["choices"]
    before = servers.counts()
    told["return_token_ids"] = True
    answer = httpx.post(f"{router}{path}", json=told, timeout=PATIENCE_S).json()
    assert answer["kv_transfer_params"] == {"ragfuse": {"loaded": True}}
    assert answer["choices"][0]["token_ids"] == streamed(router, path, **told)
    assert answer["choices"][0]["token_ids"] == choice["token_ids"]
    loaded = "vllm:ragfuse_prompts_loaded_total"
    wait_for(lambda: servers.counts()[loaded] == before.get(loaded, 0) + 2)
    assert servers.counts().get("vllm:ragfuse_prompts_recomputed_total", 0) == 0


def test_a_client_that_goes_leaves_nothing_behind(router: str, servers: Any) -> None:
    told = {"model": servers.prefills.service.model, "messages": [said()], "max_tokens": 1500}
    told |= {"stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{router}{CHAT}", json=told, timeout=PATIENCE_S) as answer:
        next(answer.iter_lines())
    wait_for(servers.prefills.is_idle)
    wait_for(lambda: servers.counts()["vllm:num_requests_running"] == 0)
    wait_for(lambda: servers.place.n_waiting == 0)
