"""RagFuseLLM on a tiny random model: calls, batches, streams, parameters, usage and trace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langchain_ragfuse import ChatRagFuse, RagFuseLLM
from langchain_ragfuse.base import RagFuseModel

from integrations.tests.kit import FIRST, READ, SECOND
from ragfuse import Engine

OTHER = f"{SECOND}\n\nWho planted them?"


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    engine.ingest([(FIRST, "first.txt"), (SECOND, "second.txt")])
    return RagFuseLLM(engine=engine)


def info(result: LLMResult, at: int = 0) -> dict[str, Any]:
    return result.generations[at][0].generation_info or {}


def test_usage_and_trace_come_with_every_generation(llm: RagFuseLLM, engine: Engine) -> None:
    result = llm.generate([READ, OTHER])
    for at, prompt in enumerate((READ, OTHER)):
        usage, trace = info(result, at)["usage_metadata"], info(result, at)["ragfuse"]
        assert usage["input_tokens"] == len(engine.prompt(prompt))
        assert (
            usage["input_token_details"]["cache_read"]
            == trace["tokens_reused"] + trace["tokens_recomputed"]
            > 0
        )
        assert info(result, at)["finish_reason"] == "length"
    assert result.llm_output is not None
    assert result.llm_output["model_name"] == llm.model_name
    total = result.llm_output["token_usage"]["total_tokens"]
    assert total == sum(info(result, at)["usage_metadata"]["total_tokens"] for at in (0, 1))


def test_a_batch_is_decoded_together_and_says_what_each_says_alone(engine: Engine) -> None:
    llm, batches = RagFuseLLM(engine=engine, reuse=False), []
    decode = engine.batch
    engine.batch = lambda prompts, *rest: batches.append(len(prompts)) or decode(prompts, *rest)  # type: ignore[method-assign]
    alone = [llm.invoke(prompt) for prompt in (READ, OTHER, FIRST)]
    batches.clear()
    assert llm.batch([READ, OTHER, FIRST]) == alone
    assert batches == [3]
    assert llm.batch([READ, OTHER, FIRST], {"max_concurrency": 2}) == alone
    assert batches == [3, 2, 1]
    assert llm.batch([]) == []


class Heard(BaseCallbackHandler):
    """The tokens that a run said, and its result."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.results: list[LLMResult] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.results.append(response)


@pytest.mark.parametrize("kind", [RagFuseLLM, ChatRagFuse])
async def test_callbacks_hear_every_token(kind: type[RagFuseModel], engine: Engine) -> None:
    sampled: dict[str, Any] = {"engine": engine, "temperature": 1.5, "seed": 3, "max_tokens": 40}
    sampled["reuse"] = False
    llm: Any = kind(**sampled)
    whole = llm.invoke(READ)
    text = whole if isinstance(whole, str) else whole.content
    heard, later, told = Heard(), Heard(), Heard()
    pieces = list(llm.stream(READ, {"callbacks": [heard]}))
    assert (
        "".join(heard.tokens) == text == "".join(getattr(each, "content", each) for each in pieces)
    )
    async for _ in llm.astream(READ, {"callbacks": [later]}):
        pass
    assert later.tokens == heard.tokens
    kind(**sampled, streaming=True).invoke(READ, {"callbacks": [told]})  # type: ignore[attr-defined]
    assert told.tokens == heard.tokens
    assert told.results[0].generations[0][0].text == text


async def test_cancelling_a_batch_ends_its_generation(llm: RagFuseLLM) -> None:
    call = asyncio.create_task(llm.abatch([READ, OTHER], max_tokens=3000, reuse=False))
    batcher = llm.get_engine().model.batcher
    while not batcher.active:
        await asyncio.sleep(0.005)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(batcher.wait_idle, 60.0)
