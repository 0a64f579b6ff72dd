"""Over HTTP, as a proxy does it: the prompt goes to ragfuse, its answer's parameters to vLLM."""

from __future__ import annotations

from typing import Any

import httpx

from ragfuse.transfer import TransferHandle
from ragfuse.types.kv import ChunkKV
from tests.serve.kit import CHAT, TEXT, with_documents
from tests.serve.kit import said as said_to

PATIENCE_S = 900.0
N_TOKENS = 12


def decoded(servers: Any, path: str, **body: Any) -> dict[str, Any]:
    """vLLM's answer."""
    said = {"model": "tiny", "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}
    said["return_token_ids"] = True
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
    servers.prefills.engine().flush()
    said = servers.prefills.chat(**documents, max_tokens=1, kv_transfer_params=prefill).json()
    params = said["kv_transfer_params"]
    assert said["ragfuse"]["tokens_reused"] > 0
    written = wanted(servers, params, greedily)
    answer = decoded(servers, CHAT, messages=[said_to()], kv_transfer_params=params)
    assert answer["choices"][0]["token_ids"] == written
    assert answer["usage"]["prompt_tokens"] == said["usage"]["prompt_tokens"]
    assert answer["kv_transfer_params"] == {"ragfuse": {"loaded": True}}


def test_a_completion_is_decoded_from_the_ids_of_its_prefill_also_after_a_rejection(
    servers: Any, greedily: Any
) -> None:
    before = servers.counts()
    prefills, transfer = servers.prefills, {"do_remote_decode": True}
    body = {"prompt": "The keeper of the lighthouse counted ships. " * 9, "max_tokens": 2}
    told = {**body, "model": prefills.service.model, "kv_transfer_params": transfer}
    params = prefills.post(TEXT, told).json()["kv_transfer_params"]
    written = wanted(servers, params, greedily)
    body = {"prompt": params.pop("prompt_token_ids"), "kv_transfer_params": params}
    url = f"{servers.decodes.root}{TEXT}"
    rejected = httpx.post(url, json={"model": "other", **body}, timeout=PATIENCE_S)
    assert rejected.status_code == 404
    answer = decoded(servers, TEXT, **body)
    assert answer["choices"][0]["token_ids"] == written
    assert answer["kv_transfer_params"] == {"ragfuse": {"loaded": True}}
    lie = {"ragfuse": {"secret": "?"}}
    decoded(servers, TEXT, prompt=[9, 10, 11, 12], kv_transfer_params=lie)
    after = servers.counts()
    for name in ("loaded", "recomputed"):
        name = f"vllm:ragfuse_prompts_{name}_total"
        assert after[name] == before.get(name, 0) + 1
    assert after["vllm:ragfuse_loaded_bytes_total"] > 0
