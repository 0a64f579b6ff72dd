"""Over HTTP, as a proxy does it: the prompt goes to ragfuse, its answer's parameters to vLLM."""

from __future__ import annotations

from typing import Any

import httpx

from ragfuse.transfer import TransferHandle
from ragfuse.types.kv import ChunkKV
from tests.serve.kit import with_documents

PATIENCE_S = 900.0
N_TOKENS = 12
QUESTION = [{"role": "user", "content": "Who kept the northern lighthouse?"}]


def decoded(servers: Any, path: str, **body: Any) -> dict[str, Any]:
    """vLLM's answer."""
    said = {
        "model": "tiny",
        "max_tokens": N_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{servers.decodes.root}{path}", json={**said, **body}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def wanted(servers: Any, params: dict[str, Any], greedy: Any) -> list[int]:
    """What transformers writes over the KV that waits."""
    kv = ChunkKV(tuple(servers.place.read(TransferHandle.from_dict(params["ragfuse"]))))
    found: list[int] = greedy(servers.model, params["prompt_token_ids"], kv)
    return found[:N_TOKENS]


def test_a_chat_with_documents_is_fused_here_and_decoded_there(servers: Any, greedily: Any) -> None:
    documents, prefill = with_documents(), {"do_remote_decode": True, "do_remote_prefill": False}
    servers.prefills.chat(**documents)
    servers.prefills.service.engine(servers.prefills.service.keys.tenants[0]).flush()
    said = servers.prefills.chat(**documents, max_tokens=1, kv_transfer_params=prefill).json()
    params = said["kv_transfer_params"]
    assert said["ragfuse"]["tokens_reused"] > 0
    written = wanted(servers, params, greedily)
    answer = decoded(servers, "/v1/chat/completions", messages=QUESTION, kv_transfer_params=params)
    assert answer["choices"][0]["token_ids"] == written
    assert answer["usage"]["prompt_tokens"] == said["usage"]["prompt_tokens"]
    assert answer["kv_transfer_params"] == {"ragfuse": {"loaded": True}}


def test_a_completion_is_decoded_from_the_ids_of_its_prefill(servers: Any, greedily: Any) -> None:
    body = {
        "model": servers.prefills.service.model,
        "prompt": "The keeper of the lighthouse counted ships. " * 9,
    }
    said = servers.prefills.post(
        "/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}}
    ).json()
    params = said["kv_transfer_params"]
    written = wanted(servers, params, greedily)
    ids = params.pop("prompt_token_ids")
    answer = decoded(servers, "/v1/completions", prompt=ids, kv_transfer_params=params)
    assert answer["choices"][0]["token_ids"] == written
    assert answer["kv_transfer_params"] == {"ragfuse": {"loaded": True}}


def test_a_request_that_vllm_rejects_keeps_its_handle_and_counts_as_nothing(servers: Any) -> None:
    body = {
        "model": servers.prefills.service.model,
        "prompt": "The keeper of the lighthouse counted ships. " * 9,
    }
    said = servers.prefills.post(
        "/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}}
    ).json()
    params = said["kv_transfer_params"]
    ids = params.pop("prompt_token_ids")
    body = {"model": "other", "prompt": ids, "max_tokens": 2, "kv_transfer_params": params}
    assert (
        httpx.post(
            f"{servers.decodes.root}/v1/completions", json=body, timeout=PATIENCE_S
        ).status_code
        == 404
    )
    answer = decoded(servers, "/v1/completions", prompt=ids, kv_transfer_params=params)
    assert answer["kv_transfer_params"] == {"ragfuse": {"loaded": True}}


def test_metrics_count_what_was_loaded_and_what_was_computed(servers: Any) -> None:
    decoded(
        servers,
        "/v1/completions",
        prompt=[9, 10, 11, 12],
        kv_transfer_params={"ragfuse": {"secret": "?"}},
    )
    text = httpx.get(f"{servers.decodes.root}/metrics", timeout=PATIENCE_S).text
    counts = {
        line.split("{")[0]: float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("vllm:ragfuse")
    }
    assert counts["vllm:ragfuse_prompts_loaded_total"] == 3
    assert counts["vllm:ragfuse_prompts_recomputed_total"] == 1
    assert counts["vllm:ragfuse_loaded_bytes_total"] > 0
