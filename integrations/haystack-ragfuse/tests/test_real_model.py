"""The embedded model in a pipeline: what its second question reuses, and that the answer is still
the right one.
"""

from __future__ import annotations

import pytest
from haystack_integrations.components.generators.ragfuse import RagfuseChatGenerator

from integrations.tests.haystack_pipelines import asked, hits, rag
from ragfuse import Engine

pytestmark = pytest.mark.slow


def test_a_second_question_is_answered_from_reused_documents(real_engine: Engine) -> None:
    pipeline = rag(RagfuseChatGenerator(engine=real_engine, generation_kwargs={"ratio": 0.3}))
    first = asked(pipeline, "Which colour is the lighthouse painted?")
    assert hits(first) == [False] * 4
    real_engine.flush()
    second = asked(pipeline, "In which year was the harbour of Port Elling dug?")
    assert hits(second) == [True] * 4
    assert second.meta["ragfuse"]["tokens_reused"] > second.meta["ragfuse"]["tokens"] // 2
    assert "1847" in (second.text or "")
