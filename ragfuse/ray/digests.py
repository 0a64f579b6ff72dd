"""The chunks of a request as digests, by which the router knows them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ragfuse.ray.chunk_router import RoutedRequest, chunk_digest

SESSION_SHARE = 4
"""A conversation counts as this many times the request's own text, so that its turns stay with one
replica.
"""
MAX_ROUTED_BYTES = 16 << 20
"""Bytes of a body that is parsed for its chunks; a larger one is sent by load alone."""


def routed_request(salt: str, body: bytes) -> RoutedRequest:
    """Return what a request's body asks of a replica: its documents and its conversation.

    Bytes are those of the documents' texts, to which the bytes of their KV are in proportion. A
    body that is no valid request has no chunks; the replica that gets it says what is wrong.

    Args:
        salt: The salt of the request's tenant.
        body: The body, JSON of OpenAI's API with ragfuse's fields.
    """
    try:
        request = json.loads(body) if len(body) <= MAX_ROUTED_BYTES else None
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        return RoutedRequest(cost=max(1, len(body)))
    chunks = {
        chunk_digest(salt, "chunk", text): len(text.encode("utf-8", "replace"))
        for text in texts_of(request)
    }
    session = request.get("session_id")
    if isinstance(session, str):
        chunks[chunk_digest(salt, "session", session)] = SESSION_SHARE * len(body)
    return RoutedRequest(chunks, max(1, len(body)))


def texts_of(request: Mapping[str, Any]) -> list[str]:
    """Return the texts of the documents in a request, without white space around them, as they are
    stored.

    They are the texts of `documents`, and of parts of messages of the type "text-plain".
    """
    documents = request.get("documents")
    found = [each.get("text") if isinstance(each, dict) else each for each in _items(documents)]
    for message in _items(request.get("messages")):
        for part in _items(message.get("content")) if isinstance(message, dict) else ():
            if isinstance(part, dict) and part.get("type") == "text-plain":
                found.append(part.get("text"))
    return [text.strip() for text in found if isinstance(text, str) and text.strip()]


def _items(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []
