"""uvicorn's HTTP/1.1 connections with stricter parsing, limits on their number, and a timeout for slow senders.

Ambiguous requests are refused: a proxy and this server must agree where a request ends, or part of one user's request
is read as the beginning of another's (request smuggling).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import sys
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragfuse.serve.refusals import APIError

_BARE = re.compile(rb"(?<!\r)\n")
"""LF without CR: some programs take it for the end of a line, others do not."""
_HEAD_END = b"\r\n\r\n"
_IPV6_NETWORK = 64
"""Prefix length in bits of the IPv6 network that one household or machine usually owns."""


class Connections:
    """All connections of a server, oldest first. Use it from one event loop only.

    At the limit, the oldest idle connection is closed. Where none is idle, requests over the new one are refused.

    Args:
        max_total: Most connections of all addresses together.
        max_each: Most connections of one address.
    """

    def __init__(self, max_total: int, max_each: int) -> None:
        self._max_total, self._max_each = max_total, max_each
        self._all: dict[Wire, str] = {}
        self._by_address: dict[str, dict[Wire, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, wire: Wire, address: str) -> bool:
        """Add a new connection; return whether its requests may be answered.

        At twice a limit the connection is aborted.
        """
        same_address = self._by_address.setdefault(address, {})
        is_crowded = False
        for group, limit in ((same_address, self._max_each), (self._all, self._max_total)):
            if len(group) >= limit and not self._close_idle(group):
                is_crowded = True
                if len(group) >= 2 * limit:
                    wire.transport.abort()
        self._all[wire] = address
        same_address[wire] = None
        return not is_crowded

    def leave(self, wire: Wire) -> None:
        """Remove a closed connection; further calls do nothing."""
        address = self._all.pop(wire, None)
        if address is not None:
            same_address = self._by_address[address]
            same_address.pop(wire, None)
            if not same_address:
                del self._by_address[address]

    def _close_idle(self, group: Iterable[Wire]) -> bool:
        """Close the oldest idle connection; return whether there was one."""
        oldest = next((wire for wire in group if wire.is_idle), None)
        if oldest is not None:
            self.leave(oldest)
            oldest.transport.close()
        return oldest is not None


class StrictLines(ReceiveBuffer):
    """h11's receive buffer, which also refuses lines of heads and trailers that do not end in CR LF."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines up to the first empty one; None where that has not come yet."""
        seen = max(0, self._multiple_lines_search - len(_HEAD_END))
        end = self._data.find(_HEAD_END, seen)
        if _BARE.search(self._data, seen, len(self._data) if end < 0 else end):
            raise h11.RemoteProtocolError("a line ends in LF alone")
        return super().maybe_extract_lines()


class Wire(H11Protocol):
    """One connection. It is closed after `patience_s` seconds in which no complete request head arrived."""

    patience_s = 20.0
    all_connections: Connections

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn._receive_buffer = StrictLines()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether none of its requests is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Add the connection to `all_connections`, and start its timer."""
        super().connection_made(transport)
        if not self.all_connections.enter(self, network_of(self.client[0] if self.client else "")):
            self.app_state = {**self.app_state, "is_crowded": True}
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Parse the data; stop the timer once a request head is complete."""
        super().data_received(data)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and remove the connection from `all_connections`."""
        self._stop_timer()
        self.all_connections.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP, or too long a head, unless a response has begun; close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = APIError(400, "This is not a valid request of HTTP/1.1. Check the client.", "http")
            if getattr(sys.exception(), "error_status_hint", 400) == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                error = APIError(431, "The path and headers are longer than this server reads. Send less.", "too_large")
            self.transport.write(_error_response(error, HTTPStatus(error.status).phrase))
        self.transport.close()

    def _start_timer(self) -> None:
        if not self.is_idle:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.patience_s, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        if not self.transport.is_closing():
            error = APIError(408, f"No request arrived within {self.patience_s:g} seconds. Send it faster.", "slow")
            self.transport.write(_error_response(error, "Request Timeout"))
            self.transport.close()


def network_of(host: str) -> str:
    """Return the unit that connections are limited by: an IPv4 address, an IPv6 /64 network, or a name as it is."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else found
    if mapped is not None:
        return str(mapped)
    return str(ipaddress.ip_network((found, _IPV6_NETWORK), strict=False))


def _error_response(error: APIError, reason: str) -> bytes:
    """Return the bytes of a whole error response, for a connection without a readable request."""
    body = json.dumps(error.as_dict()).encode()
    head = f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
