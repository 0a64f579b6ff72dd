"""What LangSmith's tracer is told of cached tokens."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from langchain_core.tracers import LangChainTracer
from langchain_ragfuse import ChatRagFuse

from integrations.tests.kit import READ, read_and_stored
from ragfuse import Engine


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_langsmith_is_sent_cached_tokens_and_the_model_s_name(engine: Engine, way: str) -> None:
    llm, tracer = ChatRagFuse(engine=engine), LangChainTracer(client=Mock())
    read_and_stored(engine, lambda: llm.invoke(READ))
    found: Any = getattr(llm, way)(READ, config={"callbacks": [tracer]})
    chunks = [found] if way == "invoke" else list(found)
    usage: Any = sum(chunks[1:], chunks[0]).usage_metadata
    sent = tracer.client.update_run.call_args.kwargs  # type: ignore[attr-defined]
    metadata = sent["extra"]["metadata"]
    assert metadata["usage_metadata"] == usage
    assert usage["input_token_details"]["cache_read"] > 0
    assert usage["input_tokens"] >= sum(usage["input_token_details"].values())
    assert (metadata["ls_provider"], metadata["ls_model_name"]) == ("ragfuse", llm.model_name)
