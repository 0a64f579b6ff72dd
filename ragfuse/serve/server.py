"""The server process: its socket, uvicorn, signals, and a shutdown that saves everything."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import uvicorn

from ragfuse.errors import SettingsError
from ragfuse.serve.app import make_app
from ragfuse.serve.keys import LOOPBACK, check_host
from ragfuse.serve.service import Service

BACKLOG = 2048
"""Connections that may wait to be accepted."""
SWITCH_S = 0.0001
"""Python's thread switch interval in seconds: short, so that health checks do not wait for busy threads."""
TOKENIZER_WARMUP_WORDS = 8192
"""Words of a text that is long enough for the tokenizer to start its own threads."""
AFTER_S = 5
"""Seconds that connections may take to close once all answers have ended."""


class Server(uvicorn.Server):
    """A uvicorn server that on SIGTERM or Ctrl-C refuses new requests, waits for running answers, and then ends.

    Answers that take longer than `serve_grace_s`, or are running at a second signal, are cut off. Then all pending KV
    is saved.

    Args:
        service: The service.
        origins: Origins of web pages that may call the server (CORS).
        host: Address to listen on.
        tell: Called with a line for people once the server begins to stop, and with another one once it has stopped.
    """

    def __init__(
        self,
        service: Service,
        origins: Sequence[str] = (),
        host: str = "127.0.0.1",
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        settings = service.settings
        self._service, self._until_s, self._tell = service, 0.0, tell

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
            timeout_graceful_shutdown=AFTER_S,
        )
        super().__init__(config)

    def stop(self) -> None:
        """Shut down as on a signal; a second call shuts down at once."""
        self.force_exit = self.should_exit
        if not self.should_exit:
            self._until_s = time.monotonic() + self._service.settings.serve_grace_s
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down on a signal."""
        self.stop()

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server may end now; uvicorn calls it ten times a second."""
        ends = await super().on_tick(counter)
        if not ends:
            return False
        if not self._service.stopping:
            running = self._service.admission.jobs.running
            self._service.stop()
            self._tell(_stopping_in_words(running, self._service.settings.serve_grace_s))
        return self._service.admission.is_idle or self.force_exit or time.monotonic() > self._until_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancel answers that are still running, then close."""
        n_cut = self._service.admission.jobs.running
        self._service.cancel()
        self.force_exit = False  # or uvicorn would not let the store be saved
        await super().shutdown(sockets)
        self._tell(f"Stopped; cut off: {n_cut:,} request{'s' if n_cut > 1 else ''}." if n_cut else "Stopped.")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without raising them again after the server ended, as uvicorn would."""
        try:
            before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread
            yield
            return
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def _stopping_in_words(running: int, grace_s: float) -> str:
    """Return what a server that stops waits for."""
    if not running:
        return "Stopping: what is left is saved."
    requests = f"{running:,} request{'s' if running > 1 else ''}"
    return f"Stopping: {requests} may end, within {grace_s:g} s (a second signal cuts off), then what is left is saved."


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address; raise SettingsError where the system refuses it."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound_socket = socket.socket(family, kind, number)
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.bind(address)
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"The server cannot listen at {host}:{port}: {error}. Choose another --port or --host."
        ) from error
    return bound_socket


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
        tell: Called with a line about what the server waits for once it stops, and with one that it has stopped.

    Raises:
        SettingsError: The address is not available, or others could reach it without an API key.
    """
    check_host(host, service.keys)
    with contextlib.closing(bound(host, port)) as listener:
        engine = service.engine(service.keys.tenants[0])
        # The tokenizer's threads inherit the priority of the thread that starts them: that of answers, below the event
        # loop's.
        service.threads.turns.submit(engine.tokens, "a " * TOKENIZER_WARMUP_WORDS).result()
        gc.collect()
        gc.freeze()  # loaded objects stay: scanning them for garbage would pause all requests
        sys.setswitchinterval(SWITCH_S)
        listener.listen(BACKLOG)  # from now on connections wait instead of being refused
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{listener.getsockname()[1]}/v1")
        Server(service, origins, host, tell).run([listener])
