"""A slow link for tests, a TCP proxy that hands on so many bytes a second each way; and large entries to send."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from threading import Event, Thread

import torch

from ragfuse.codec import LayerMeta
from ragfuse.store import EntryMeta

_TICK_S = 0.01
_WINDOW_NBYTES = 1 << 16


class SlowLink:
    """To `port` by way of its own `port`, at `nbytes_per_s`. While it is `cut`, connections stay and nothing moves."""

    def __init__(self, port: int, nbytes_per_s: float) -> None:
        self._to, self._nbytes = port, int(nbytes_per_s * _TICK_S)
        self._sockets: list[socket.socket] = []
        self._going = Event()
        self._going.set()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW_NBYTES)  # a link holds little
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port = self._listener.getsockname()[1]
        Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Hand on nothing any more."""
        self._going.clear()

    def close(self) -> None:
        """End all connections."""
        self._going.set()
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW_NBYTES)
                far.connect(("127.0.0.1", self._to))
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [near, far]
                Thread(target=self._carry, args=(near, far), daemon=True).start()
                Thread(target=self._carry, args=(far, near), daemon=True).start()

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            due = time.monotonic()
            while data := here.recv(self._nbytes):
                self._going.wait()
                there.sendall(data)
                due = max(due, time.monotonic() - _TICK_S) + _TICK_S * len(data) / self._nbytes
                time.sleep(max(0.0, due - time.monotonic()))
        for each in (here, there):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def large(nbytes: int, n_layers: int = 2) -> tuple[EntryMeta, list[torch.Tensor]]:
    """An entry of layers of so many bytes, all different."""
    generator = torch.Generator().manual_seed(0)
    blobs = [torch.randint(256, (nbytes,), generator=generator, dtype=torch.uint8) for _ in range(n_layers)]
    shape = (1, nbytes // 64, 16)
    return EntryMeta(nbytes // 64, ("raw",), tuple(LayerMeta(shape, shape, "bfloat16", nbytes) for _ in blobs)), blobs
