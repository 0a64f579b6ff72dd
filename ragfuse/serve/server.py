"""The server process: its socket, uvicorn, signals, and a shutdown that saves everything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from ragfuse.errors import SettingsError
from ragfuse.process.jobs import release_pool
from ragfuse.serve.app import make_app
from ragfuse.serve.keys import LOOPBACK
from ragfuse.serve.service import Service

BACKLOG = 2048
"""Connections that may wait to be accepted."""
SWITCH_S = 0.0001
"""Python's thread switch interval in seconds: short, so that health checks do not wait for busy
threads.
"""
TOKENIZER_WARMUP_WORDS = 8192
"""Words of a text that is long enough for the tokenizer to start its own threads."""
AFTER_S = 5
"""Seconds that connections may take to close once all answers have ended."""
POLL_S = 0.1
"""Seconds between two looks whether a server that stops was told to hurry."""


class Server(uvicorn.Server):
    """A uvicorn server that on SIGTERM or Ctrl-C refuses waiting requests, lets running answers
    end, and then ends.

    Answers that take longer than `serve_grace_s`, or are running at a second signal, are cut off.
    Then all pending KV is saved.

    Args:
        service: The service.
        origins: Origins of web pages that may call the server (CORS).
        host: Address to listen on.
        tell: Called with a line for people once the server begins to stop, and with another one
            once it has stopped.
    """

    def __init__(
        self,
        service: Service,
        origins: Sequence[str] = (),
        host: str = "127.0.0.1",
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        settings = service.settings
        self._service, self._tell, self._is_hasty = service, tell, False
        config = uvicorn.Config(
            make_app(service, origins, host in LOOPBACK),
            ws="none",
            limit_concurrency=4 * (settings.serve_together + settings.serve_waiting) + 256,
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(settings.serve_grace_s) + AFTER_S,
        )
        super().__init__(config)

    def stop(self) -> None:
        """Shut down as on SIGTERM. A second call aborts the requests that still run."""
        self._is_hasty = self.should_exit
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down on a signal."""
        self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running answers end, then close."""
        self._service.stop()
        grace_s = self._service.settings.serve_grace_s
        n = len(self._service.queue.running)
        self._tell(f"Stopping: {n:,} running, within {grace_s:g} s (a second signal cuts off).")
        cutting = asyncio.create_task(self._cut_off(grace_s))
        await super().shutdown(sockets)
        cutting.cancel()
        self._tell("Stopped.")

    async def _cut_off(self, grace_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while not self._is_hasty:
                    await asyncio.sleep(POLL_S)
        self._service.cancel()


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address; raise SettingsError where the system refuses
    it.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"The server cannot listen at {host}:{port}: {error}. Choose another --port or --host."
        ) from error


def serve(
    service: Service,
    host: str,
    port: int,
    origins: Sequence[str] = (),
    ready: Callable[[str], object] = lambda url: None,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Serve until a signal ends the server.

    Args:
        service: The service.
        host: Address to listen on.
        port: Port to listen on; 0: any free one.
        origins: Origins of web pages that may call the server (CORS).
        ready: Called with the server's URL once the model is loaded.
        tell: Called with a line about what the server waits for once it stops, and with one that it
            has stopped.

    Raises:
        SettingsError: The address is not available.
    """
    with contextlib.closing(bound(host, port)) as listener:
        engine = service.engine(service.keys.tenants[0])
        # The tokenizer's threads inherit the priority of the thread that starts them: that of
        # answers, below the event loop's.
        service.threads.turns.submit(engine.tokens, "a " * TOKENIZER_WARMUP_WORDS).result()
        release_pool()
        gc.collect()
        gc.freeze()  # loaded objects stay: scanning them for garbage would pause all requests
        sys.setswitchinterval(SWITCH_S)
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{listener.getsockname()[1]}/v1")
        Server(service, origins, host, tell).run([listener])
