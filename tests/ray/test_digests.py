"""Which chunks a request asks, and which a replica holds: fronts and replicas agree, and tenants are apart."""

from __future__ import annotations

import json

from ragfuse.ray.chunk_router import ChunkRouter, chunk_digest
from ragfuse.ray.digests import MAX_ROUTED_BYTES, HeldChunks, packed, routed_request, texts_of, unpacked
from ragfuse.types.keys import ChunkKey

BODY = {
    "model": "m",
    "documents": [{"text": " One text. ", "title": "a"}, {"text": "Two."}, "Three.", {"title": "b"}, 7],
    "messages": [
        {"role": "user", "content": [{"type": "text-plain", "text": "Four."}, {"type": "text", "text": "Who?"}]},
        {"role": "user", "content": "Who?"},
    ],
}


def digest(text: str, salt: str = "s") -> int:
    return chunk_digest(salt, "chunk", text)


def test_documents_of_a_request_are_its_chunks() -> None:
    assert texts_of(BODY) == ["One text.", "Two.", "Three.", "Four."]
    body = json.dumps(BODY).encode()
    found = routed_request("s", body)
    assert found.chunks == {digest("One text."): 9, digest("Two."): 4, digest("Three."): 6, digest("Four."): 5}
    assert found.cost == len(body)


def test_a_conversation_counts_as_a_chunk_that_outweighs_others() -> None:
    body = json.dumps({**BODY, "session_id": "talk"}).encode()
    found = routed_request("s", body)
    assert found.session == chunk_digest("s", "session", "talk")
    assert routed_request("s", json.dumps(BODY).encode()).session is None
    assert found.chunks[chunk_digest("s", "session", "talk")] > sum(
        routed_request("s", json.dumps(BODY).encode()).chunks.values()
    )


def test_what_is_no_request_has_no_chunks() -> None:
    for body in (b"", b"{", b"[1]", b"null", b"\xff", b'{"documents": {"text": "x"}, "messages": [3, {"content": 4}]}'):
        assert routed_request("s", body).chunks == {}
    assert routed_request("s", b"[" * 100_000).chunks == {}
    assert routed_request("s", b'{"documents": ["' + b"x" * MAX_ROUTED_BYTES + b'"]}').chunks == {}


def test_digests_survive_the_way_to_the_router() -> None:
    digests = [0, 1, 2**64 - 1, digest("x")]
    assert unpacked(packed(digests)) == set(digests)
    assert len(packed(digests)) == 32
    assert unpacked(b"") == frozenset()


def test_held_are_those_whose_entries_are_in_memory() -> None:
    held, keys = HeldChunks(), [ChunkKey("m", str(number), "~") for number in range(3)]
    for number, key in enumerate(keys):
        held.note(number, key)
    assert held.held(keys[1:]) == [1, 2]
    assert held.held([ChunkKey("m", "1", "of another context")]) == [1]
    assert held.held([ChunkKey("another model", "1", "~")]) == []
    assert held.key(2) == keys[2]
    assert held.key(9) is None


def test_only_the_last_chunks_are_remembered_and_conversations_among_them() -> None:
    held, key = HeldChunks(most=2), ChunkKey("m", "t")
    held.note(1, key)
    held.note(2, None)
    held.note(3, key)
    assert held.held([]) == [2]
    assert held.held([key]) == [2, 3]


def test_what_a_replica_holds_of_one_tenant_says_nothing_to_the_request_of_another() -> None:
    router, body = ChunkRouter(["a", "b"]), json.dumps(BODY).encode()
    router.report("b", [digest(text, "mine") for text in texts_of(BODY)])
    assert router.held_bytes("b", routed_request("mine", body)) == 24
    assert router.held_bytes("b", routed_request("theirs", body)) == 0
