"""Which chunks a request asks, so that the router knows them again."""

from __future__ import annotations

import json

from ragfuse.ray.chunk_router import MAX_ROUTED_BYTES, chunk_digest, routed_chunks

BODY = {
    "model": "m",
    "documents": [
        {"text": " One text. ", "title": "a"},
        {"text": "Two."},
        "Three.",
        {"title": "b"},
        7,
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text-plain", "text": "Four."}, {"type": "text", "text": "Who?"}],
        },
        {"role": "user", "content": "Who?"},
    ],
}


def digest(text: str, salt: str = "s") -> int:
    return chunk_digest(salt, "chunk", text)


def test_documents_and_the_conversation_of_a_request_are_its_chunks():
    body = json.dumps({**BODY, "session_id": "talk"}).encode()
    found = routed_chunks("s", body)
    talk = chunk_digest("s", "session", "talk")
    chunks = {digest("One text."): 9, digest("Two."): 4, digest("Three."): 6, digest("Four."): 5}
    assert found == {**chunks, talk: found[talk]}
    assert found[talk] > len(body)
    assert not found.keys() & routed_chunks("another tenant", body).keys()


def test_a_request_without_a_conversation_counts_as_itself():
    body = json.dumps(BODY).encode()
    found = routed_chunks("s", body)
    assert found[chunk_digest("s", "body", body)] == len(body)
    assert len(found) == 5


def test_what_is_no_request_has_no_chunks_but_itself():
    bodies = [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000]
    bodies.append(b'{"documents": {"text": "x"}, "messages": [3, {"content": 4}]}')
    bodies.append(b'{"documents": ["' + b"x" * MAX_ROUTED_BYTES + b'"]}')
    for body in bodies:
        assert routed_chunks("s", body) == {chunk_digest("s", "body", body): len(body)}
