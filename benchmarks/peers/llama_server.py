"""llama.cpp's own server as a peer: prompts of token ids over HTTP on loopback, its caches on."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.process import PeerProcess

REUSE_TOKENS = 64
"""The shortest run that `--cache-reuse` moves to another place."""


def command(
    program: Path,
    gguf: Path,
    port: int,
    threads: int,
    max_tokens: int,
    memory_bytes: int,
    reuse: bool,
) -> list[str]:
    """Return the server's command line: one slot, prompts kept in memory.

    Args:
        program: llama-server.
        gguf: The weights.
        port: Where it listens, on loopback.
        threads: It computes with.
        max_tokens: Most tokens of a prompt and its answer.
        memory_bytes: Of prompts kept beside the slot's own.
        reuse: Whether runs of the prompt before are moved to where they stand now, as if they had
            been computed there.
    """
    n_threads = str(threads)
    return [
        *(str(program), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)),
        *(
            "--threads",
            n_threads,
            "--threads-batch",
            n_threads,
            "--parallel",
            "1",
            "--ctx-size",
            str(max_tokens),
        ),
        *(
            "--cache-ram",
            str(memory_bytes >> 20),
            "--cache-reuse",
            str(REUSE_TOKENS if reuse else 0),
        ),
    ]


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class LlamaServer:
    """A running llama-server.

    Args:
        process: Its process, just started.
        port: Where it listens.
        start_s: Seconds that it may take until it is ready.
        answer_s: Seconds that an answer may take.
    """

    def __init__(self, process: PeerProcess, port: int, start_s: float, answer_s: float) -> None:
        self._process, self._port, self._answer_s = process, port, answer_s
        self.disk_bytes = 0
        ends_s = time.monotonic() + start_s
        while not self._is_ready():
            if not process.is_running:
                raise process.failure("ended while it started")
            if time.monotonic() > ends_s:
                raise process.failure("was silent for too long while it started")
            time.sleep(0.2)
        self.version = f"llama.cpp {self._get('/props').get('build_info', '')}".strip()

    @property
    def process(self) -> PeerProcess:
        """Its process."""
        return self._process

    def hold(self, chunks: Sequence[str]) -> dict[str, Any]:
        """Nothing can be made ready."""
        return {}

    def answer(self, ids: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield the tokens of its stream."""
        body = {
            "prompt": list(ids),
            "n_predict": max_tokens,
            "samplers": ["top_k"],
            "top_k": 1,
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._answer_s)
        try:
            connection.request(
                "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise self._process.failure(
                    f"refused a prompt: {response.read(400).decode('utf-8', 'replace')}"
                )
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    event = json.loads(line[6:])
                    if event.get("stop"):
                        break
                    yield from event["tokens"]
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise self._process.failure(f"failed while it answered: {error!r}") from error
        finally:
            connection.close()

    def _is_ready(self) -> bool:
        try:
            return self._get("/health").get("status") == "ok"
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def _get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5.0)
        try:
            connection.request("GET", path)
            found = json.loads(connection.getresponse().read())
            return found if isinstance(found, dict) else {}
        finally:
            connection.close()
