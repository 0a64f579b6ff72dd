"""Serving on a real cluster: two replicas, the one that got a request's chunks before answers,
tenants are apart.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from ray import serve

from ragfuse import Settings
from ragfuse.ray.application import APPLICATION, ReplicaOptions, application
from ragfuse.ray.cluster import shared_settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_ray_nodes")]
KEYS = ("first:a-key-of-the-first-tenant", "second:a-key-of-the-second-tenant")
PATIENCE_S = 600.0
ENCODED_S = 6.0
"""Seconds within which what was missed is encoded."""


def documents(topic: str) -> list[str]:
    return [
        f"The keeper of {topic} counted {number} ships in one night; the door is green."
        for number in range(3)
    ]


@dataclass(frozen=True)
class Replicas:
    """A server with two replicas."""

    root: str
    model: str

    def ask(self, topic: str, key: str = KEYS[0], **fields: Any) -> httpx.Response:
        texts = [{"text": text} for text in documents(topic)]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Who?"}],
            "documents": texts,
            **fields,
        }
        headers = {"authorization": f"Bearer {key.rpartition(':')[2]}"}
        return httpx.post(
            f"{self.root}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S
        )


@pytest.fixture(scope="module")
def replicas(tiny_path, tmp_path_factory, two_ray_nodes):
    home = tmp_path_factory.mktemp("served")
    settings = Settings(
        model=str(tiny_path),
        dtype="float32",
        store=home / "store",
        home=home,
        threads=1,
        max_tokens=4,
        prefix_cache=False,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(
        application(shared_settings(settings), KEYS, "127.0.0.1", (), ReplicaOptions(2, 2, 1)),
        name=APPLICATION,
    )
    yield Replicas(f"http://127.0.0.1:{port}", tiny_path.name)
    serve.shutdown()


def asked(answer: httpx.Response) -> tuple[str, list[str]]:
    """The replica that answered, and the tiers that it read the chunks from; "" for a miss."""
    assert answer.status_code == 200, answer.text
    tiers = [
        each["tier"] for each in answer.json()["ragfuse"]["segments"] if each["kind"] == "chunk"
    ]
    return answer.headers["x-ragfuse-replica"], tiers


def test_a_topic_stays_with_the_replica_that_has_it_and_topics_are_spread(
    replicas,
):
    first = {topic: asked(replicas.ask(topic)) for topic in ("the north", "the south")}
    assert {tier for _, tiers in first.values() for tier in tiers} == {""}
    assert len({name for name, _ in first.values()}) == 2
    time.sleep(ENCODED_S)
    for _ in range(2):
        for topic, (name, tiers) in first.items():
            assert asked(replicas.ask(topic)) == (name, ["memory"] * len(tiers))


def test_a_conversation_stays_with_its_replica(replicas):
    name, _ = asked(replicas.ask("the coast", session_id="talk"))
    for _ in range(2):
        assert asked(replicas.ask("", session_id="talk", documents=[]))[0] == name


def test_another_tenant_finds_nothing_of_the_first(replicas):
    asked(replicas.ask("the east"))
    time.sleep(ENCODED_S)
    _, tiers = asked(replicas.ask("the east", KEYS[1]))
    assert set(tiers) == {""}


def test_answers_errors_and_streams_are_those_of_the_server(replicas):
    whole = replicas.ask("the west", temperature=0)
    streamed = replicas.ask("the west", temperature=0, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.strip().endswith("[DONE]")
    assert whole.json()["choices"][0]["message"]["content"]
    assert replicas.ask("the west", key="x:not-a-key-of-anybody").status_code == 401
    assert replicas.ask("the west", max_tokens="many").status_code == 400
    assert httpx.get(f"{replicas.root}/health", timeout=PATIENCE_S).json()["status"] == "ok"
    assert httpx.get(f"{replicas.root}/no/such/path", timeout=PATIENCE_S).status_code == 401
