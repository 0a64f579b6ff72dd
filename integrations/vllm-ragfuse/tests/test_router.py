"""`ragfuse serve --decode-at`: clients ask one server, and vLLM decodes what it has fused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ragfuse import Settings
from tests.serve.kit import Served, said, serving, wait_for, with_documents

PATIENCE_S = 900.0


@pytest.fixture(scope="module")
def router(servers: Any) -> Iterator[Served]:
    """A server like the one that decodes itself, with its answers decoded by vLLM."""
    told = {"decode_at": servers.decodes.root, "decode_timeout_s": 120.0}
    with serving(Settings(**{**servers.prefills.service.settings.model_dump(), **told})) as made:
        made.service.connect()
        yield made


def counts(servers: Any) -> dict[str, float]:
    """What the connector has counted, and the requests that vLLM runs."""
    text = httpx.get(f"{servers.decodes.root}/metrics", timeout=PATIENCE_S).text
    lines = (line for line in text.splitlines() if line.startswith(("vllm:ragfuse", "vllm:num_requests_running")))
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines}


def outcomes(router: Served) -> dict[str, int]:
    """What became of answers since the last call."""
    assert router.service.decoder is not None
    found = dict(router.service.decoder.outcomes)
    router.service.decoder.outcomes.clear()
    return found


def streamed(served: Served, path: str, **body: Any) -> str:
    """The text of a stream."""
    body = {"model": served.service.model, "stream": True, **body}
    text = httpx.post(f"{served.root}{path}", json=body, timeout=PATIENCE_S).text
    pieces = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    choices = [each["choices"][0] for each in pieces]
    return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)


def asked(served: Served, **body: Any) -> dict[str, Any]:
    """The reply to a chat."""
    body = {"model": served.service.model, "messages": [said()], "max_tokens": 16, **body}
    answer = httpx.post(f"{served.url}/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_fused_answers_are_token_for_token_those_of_one_server(router: Served, servers: Any) -> None:
    alone, body = servers.prefills, {**with_documents(), "logprobs": True, "top_logprobs": 3}
    asked(alone, **body)
    alone.service.engine(alone.service.keys.tenants[0]).flush()
    before = counts(servers).get("vllm:ragfuse_prompts_loaded_total", 0)
    found, wanted = asked(router, **body), asked(alone, **body)
    assert found["ragfuse"]["tokens_reused"] > 0
    left, right = (each["choices"][0] for each in (found, wanted))
    assert left["message"] == right["message"]
    assert left["finish_reason"] == right["finish_reason"]
    for one, other in zip(left["logprobs"]["content"], right["logprobs"]["content"], strict=True):
        assert one["token"] == other["token"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert [each["token"] for each in one["top_logprobs"]] == [each["token"] for each in other["top_logprobs"]]
    assert found["usage"] == wanted["usage"]
    assert outcomes(router) == {"decoded": 1}
    wait_for(lambda: counts(servers)["vllm:ragfuse_prompts_loaded_total"] == before + 1)
    assert counts(servers).get("vllm:ragfuse_prompts_recomputed_total", 0) == 0


@pytest.mark.parametrize(
    "fields", [{}, {"min_tokens": 5}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0, "logit_bias": {"40": 3}}]
)
def test_streams_read_the_same(fields: dict[str, Any], router: Served, servers: Any) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [said()], **with_documents()}),
        ("/v1/completions", {"prompt": "A gardener planted nine roses beside a wall. " * 9}),
    ):
        body = {**body, "max_tokens": 20, **fields}
        assert streamed(router, path, **body) == streamed(servers.prefills, path, **body)
    assert outcomes(router) == {"decoded": 2}


def test_a_stop_string_is_found(router: Served, servers: Any) -> None:
    whole = asked(servers.prefills)["choices"][0]["message"]["content"]
    stop = whole[4:6]
    found, wanted = (asked(server, stop=[stop]) for server in (router, servers.prefills))
    assert found["choices"] == wanted["choices"]
    assert found["usage"] == wanted["usage"]
    assert outcomes(router) == {"decoded": 1}


def test_a_seed_draws_the_same_answer_again(router: Served) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 11}
    texts = [asked(router, **sampling)["choices"][0]["message"]["content"] for _ in range(2)]
    assert texts[0] == texts[1]
    assert outcomes(router) == {"decoded": 2}


def test_a_client_that_goes_leaves_nothing_behind(router: Served, servers: Any) -> None:
    body = {"model": router.service.model, "messages": [said()], "stream": True, "max_tokens": 1500, "min_tokens": 1500}
    with httpx.stream("POST", f"{router.url}/chat/completions", json=body, timeout=PATIENCE_S) as answer:
        next(answer.iter_lines())
    wait_for(lambda: router.service.admission.is_idle)
    wait_for(lambda: counts(servers)["vllm:num_requests_running"] == 0)
    wait_for(lambda: servers.place.n_waiting == 0)


def test_an_answer_goes_on_here_when_vllm_ends(router: Served, servers: Any) -> None:
    alone = servers.prefills
    asked(alone, **with_documents())
    alone.service.engine(alone.service.keys.tenants[0]).flush()  # both servers know the documents from here on
    outcomes(router)
    body = {"messages": [said()], **with_documents(), "max_tokens": 1400, "min_tokens": 1400}
    told = {"model": router.service.model, "stream": True, **body}
    pieces: list[str] = []
    with httpx.stream("POST", f"{router.url}/chat/completions", json=told, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
            if len(pieces) == 5:
                servers.decodes.kill()
    assert outcomes(router) == {"broken": 1}
    assert "".join(pieces) == streamed(alone, "/v1/chat/completions", **body)
    began_s = time.monotonic()
    assert asked(router)["choices"] == asked(alone)["choices"]
    assert time.monotonic() - began_s < PATIENCE_S / 10
    assert outcomes(router) == {"down": 1}
