"""HTTP/1.1 as uvicorn reads it, but stricter, and with an end: nobody holds a connection by sending slowly.

A request that two programs may read in two ways is refused: a proxy before this server and the server itself have to
agree where a request ends, or one user's request becomes the beginning of another's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Iterable
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragfuse.serve.refusals import APIError

_BARE = re.compile(rb"(?<!\r)\n")
"""The end of a line as some programs take one, and others do not."""
_HEAD_END = b"\r\n\r\n"
_IPV6_NETWORK = 64
"""Bits of an IPv6 address that one household or machine has: it has all addresses that begin so."""


class Connections:
    """All connections of a server, the oldest first. All of it runs on one event loop.

    most, most_each: of all addresses, and of one. Where there are more, the oldest that asks nothing is let go; where
    each asks something, the new one is told to come later.
    """

    def __init__(self, most: int, most_each: int) -> None:
        self._most, self._most_each = most, most_each
        self._all: dict[Wire, str] = {}
        self._by_address: dict[str, dict[Wire, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, wire: Wire, address: str) -> bool:
        """Count a new one; whether there is room for what it will ask. False twice over, and it is cut off."""
        mine = self._by_address.setdefault(address, {})
        is_crowded = False
        for those, most in ((mine, self._most_each), (self._all, self._most)):
            if len(those) >= most and not self._let_go(those):
                is_crowded = True
                if len(those) >= 2 * most:
                    wire.transport.abort()
        self._all[wire] = address
        mine[wire] = None
        return not is_crowded

    def leave(self, wire: Wire) -> None:
        """It is closed; once is enough."""
        address = self._all.pop(wire, None)
        if address is not None:
            mine = self._by_address[address]
            mine.pop(wire, None)
            if not mine:
                del self._by_address[address]

    def _let_go(self, those: Iterable[Wire]) -> bool:
        """Close the oldest that asks nothing; whether there was one."""
        oldest = next((wire for wire in those if wire.is_idle), None)
        if oldest is not None:
            self.leave(oldest)
            oldest.transport.close()
        return oldest is not None


class StrictLines(ReceiveBuffer):
    """What came over a connection, as h11 reads it; lines of heads and trailers end in CR and LF, both of them."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines up to the first empty one, None where that has not come yet."""
        seen = max(0, self._multiple_lines_search - len(_HEAD_END))
        end = self._data.find(_HEAD_END, seen)
        if _BARE.search(self._data, seen, len(self._data) if end < 0 else end):
            raise h11.RemoteProtocolError("a line ends in LF alone")
        return super().maybe_extract_lines()


class Wire(H11Protocol):
    """One connection. Who has begun nothing, or begun a head and not ended it, is let go after `patience_s`."""

    patience_s = 20.0
    among: Connections

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn._receive_buffer = StrictLines()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The time begins."""
        super().connection_made(transport)
        if not self.among.enter(self, network_of(self.client[0] if self.client else "")):
            self.app_state = {**self.app_state, "is_crowded": True}
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A head is whole, or its time goes on."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """No time matters any more."""
        self._unwatch()
        self.among.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Tell what is no HTTP so, unless an answer is on its way; nothing more is read either way."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            told = APIError(400, "Wanted a request of HTTP/1.1, found something else. Mend the client.", "http")
            self.transport.write(_whole(told, "Bad Request"))
        self.transport.close()

    def _watch(self) -> None:
        if not self.is_idle:
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.patience_s, self._late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if not self.transport.is_closing():
            told = APIError(408, f"Wanted a request within {self.patience_s:g} seconds. Send it faster.", "slow")
            self.transport.write(_whole(told, "Request Timeout"))
            self.transport.close()


def network_of(host: str) -> str:
    """Who is counted as one: an IPv4 address, the network of an IPv6 address; a name as it is."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else found
    if mapped is not None:
        return str(mapped)
    return str(ipaddress.ip_network((found, _IPV6_NETWORK), strict=False))


def _whole(refusal: APIError, reason: str) -> bytes:
    """A response without a request."""
    body = json.dumps(refusal.as_dict()).encode()
    head = f"HTTP/1.1 {refusal.status} {reason}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
