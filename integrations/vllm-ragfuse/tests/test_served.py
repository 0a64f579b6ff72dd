"""Over HTTP, as a proxy does it: the prompt goes to ragfuse, its answer's parameters to vLLM."""

from __future__ import annotations

from typing import Any

import httpx

from tests.serve.kit import TEXT

PATIENCE_S = 900.0


def decoded(servers: Any, model: str = "tiny", **body: Any) -> httpx.Response:
    """vLLM's answer."""
    told = {"model": model, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    told |= {"return_token_ids": True, **body}
    return httpx.post(f"{servers.decodes.root}{TEXT}", json=told, timeout=PATIENCE_S)


def test_a_completion_is_decoded_from_its_prefill_also_after_a_rejection(servers: Any) -> None:
    before, prefills = servers.counts(), servers.prefills
    told = {"prompt": "The keeper counted ships. " * 9, "model": prefills.service.model}
    alone = {"max_tokens": 12, "temperature": 0, "ragfuse": {"token_ids": True}}
    (choice,) = prefills.post(TEXT, {**told, **alone}).json()["choices"]
    transfer = {"max_tokens": 2, "kv_transfer_params": {"do_remote_decode": True}}
    params = prefills.post(TEXT, {**told, **transfer}).json()["kv_transfer_params"]
    body = {"prompt": params.pop("prompt_token_ids"), "kv_transfer_params": params}
    assert decoded(servers, "other", **body).status_code == 404
    answer = decoded(servers, **body).json()
    assert answer["choices"][0]["token_ids"] == choice["token_ids"]
    assert answer["kv_transfer_params"] == {"ragfuse": {"loaded": True}}
    lie = {"ragfuse": {"secret": "?"}}
    assert decoded(servers, prompt=[9, 10, 11, 12], kv_transfer_params=lie).status_code == 200
    after = servers.counts()
    for name in ("loaded", "recomputed"):
        name = f"vllm:ragfuse_prompts_{name}_total"
        assert after[name] == before.get(name, 0) + 1
    assert after["vllm:ragfuse_loaded_bytes_total"] > 0
