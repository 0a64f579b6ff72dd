"""The process's side: a socket, uvicorn, signals, and an end at which nothing is lost."""

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
from ragfuse.serve.wire import Connections, Wire

BACKLOG = 2048
"""Connections that wait to be taken."""
SWITCH_S = 0.0001
"""Seconds that one thread computes in Python before another one that waits may: who only asks whether the server lives
waits for each of them."""
TOKENIZER_WARMUP_WORDS = 8192
"""Words of a text for which the tokenizer begins threads of its own."""
AFTER_S = 5
"""How long connections may take to close once no answer is written any more."""


class Server(uvicorn.Server):
    """uvicorn, which on SIGTERM or Ctrl-C lets nobody in, waits for the answers that are written, and then ends.

    Answers that take longer than `serve_grace_s`, or until a second signal, are given up. Then all is saved.
    """

    def __init__(self, service: Service, origins: Sequence[str] = (), host: str = "127.0.0.1") -> None:
        settings = service.settings
        self._service, self._until_s = service, 0.0

        most = 4 * (settings.serve_together + settings.serve_waiting) + 256

        class Patient(Wire):
            patience_s = settings.serve_patience_s
            among = Connections(most, settings.serve_connections_each)

        config = uvicorn.Config(
            make_app(service, origins, host in LOOPBACK),
            http=Patient,
            ws="none",
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
        """End as if a signal had come; called again, at once."""
        self.force_exit = self.should_exit
        if not self.should_exit:
            self._until_s = time.monotonic() + self._service.settings.serve_grace_s
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self.stop()

    async def on_tick(self, counter: int) -> bool:
        """Whether all is done; called ten times a second."""
        ends = await super().on_tick(counter)
        if not ends:
            return False
        self._service.stop()
        return self._service.turnstile.is_idle or self.force_exit or time.monotonic() > self._until_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give up what is still written, then close."""
        self._service.cancel()
        self.force_exit = False  # or uvicorn would not let the store be saved
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server and nothing else: uvicorn would raise them again behind it."""
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


def bound(host: str, port: int) -> socket.socket:
    """A socket at this place; SettingsError where there can be none."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, number)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"Wanted to listen at {host}:{port}, but the system says: {error}. Name another --port or --host."
        ) from error
    return made


def serve(
    service: Service,
    host: str,
    port: int,
    origins: Sequence[str] = (),
    ready: Callable[[str], object] = lambda url: None,
) -> None:
    """Serve until a signal ends it; `ready` is told the address once the model is loaded. SettingsError for a place
    that cannot be had, or that others reach without a key."""
    check_host(host, service.keys)
    with contextlib.closing(bound(host, port)) as made:
        engine = service.engine(service.keys.tenants[0])
        # The tokenizer's own threads begin in one that writes answers, and run like that: right behind the event loop.
        service.threads.turns.submit(engine.tokens, "a " * TOKENIZER_WARMUP_WORDS).result()
        gc.collect()
        gc.freeze()  # what is loaded stays: looking through all of it for garbage would stop everybody
        sys.setswitchinterval(SWITCH_S)
        made.listen(BACKLOG)  # who comes from now on waits and is not refused
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{made.getsockname()[1]}/v1")
        Server(service, origins, host).run([made])
