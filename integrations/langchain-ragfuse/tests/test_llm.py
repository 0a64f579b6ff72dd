"""What RagFuseLLM has beside the contract of all frameworks: prompts that are answered together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langchain_ragfuse import ChatRagFuse, RagFuseLLM
from langchain_ragfuse.base import RagFuseModel

from integrations.tests.kit import FIRST, READ, SECOND, ends_when_cancelled
from integrations.tests.served import KEY
from ragfuse import Engine
from tests.kits.serve import Served

PROMPTS = [READ, f"{SECOND}\n\nWho planted them?", FIRST]


def test_a_batch_says_what_each_prompt_says_alone_here_and_at_a_server(
    engine: Engine, served: Served
) -> None:
    here = RagFuseLLM(engine=engine, reuse=False)
    alone = [here.invoke(prompt) for prompt in PROMPTS]
    there = RagFuseLLM(base_url=served.url, api_key=KEY, reuse=False)
    for llm in (here, there):
        result: Any = llm.generate(PROMPTS)
        assert [each[0].text for each in result.generations] == alone
        usages = [each[0].generation_info["usage_metadata"] for each in result.generations]
        total = result.llm_output["token_usage"]["total_tokens"]
        assert total == sum(usage["total_tokens"] for usage in usages) > 0
    assert here.batch(PROMPTS, {"max_concurrency": 2}) == alone
    assert here.batch([]) == []


async def test_cancelling_a_batch_ends_its_generation(engine: Engine) -> None:
    call = asyncio.create_task(RagFuseLLM(engine=engine, max_tokens=3000).abatch(PROMPTS))
    await ends_when_cancelled(call, engine)


class Heard(BaseCallbackHandler):
    """The tokens that a run said, and the text of its result."""

    def __init__(self) -> None:
        self.tokens, self.text = list[str](), ""

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.text = response.generations[0][0].text


@pytest.mark.parametrize("kind", [RagFuseLLM, ChatRagFuse])
async def test_callbacks_hear_every_token(kind: type[RagFuseModel], engine: Engine) -> None:
    llm: Any = kind(engine=engine, temperature=1.5, seed=3, max_tokens=40, reuse=False)
    streaming: Any = kind(
        engine=engine, temperature=1.5, seed=3, max_tokens=40, reuse=False, streaming=True
    )
    heard = [Heard() for _ in range(4)]
    list(llm.stream(READ, {"callbacks": [heard[0]]}))
    _ = [chunk async for chunk in llm.astream(READ, {"callbacks": [heard[1]]})]
    streaming.invoke(READ, {"callbacks": [heard[2]]})
    await streaming.ainvoke(READ, {"callbacks": [heard[3]]})
    assert len(heard[0].tokens) > 3
    for each in heard:
        assert (each.tokens, each.text) == (heard[0].tokens, "".join(heard[0].tokens))
