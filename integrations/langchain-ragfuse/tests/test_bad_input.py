"""What cannot be answered is refused with what was wanted, and what is cut short leaves nothing
behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_ragfuse import (
    ChatRagFuse,
    RagFuseLLM,
    RagFuseRetriever,
)

from ragfuse import Engine, InputError, ModelError, SettingsError

TEXT = "The lighthouse keeper counted forty ships that night and wrote all their names down."


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        (ChatRagFuse, {"stop_sequence": []}, "Did you mean stop_sequences?"),
        (ChatRagFuse, {"calbacks": []}, "Did you mean callbacks?"),
        (ChatRagFuse, {"dtype": "flot32"}, "found 'flot32'."),
        (RagFuseRetriever, {"retriver": None}, "Did you mean retriever?"),
    ],
)
def test_a_misspelt_argument_is_told_with_what_is_meant(
    kind: Any, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        kind(**given)
    assert str(refused.value).endswith(told)


def test_fields_of_the_framework_are_taken_by_name_and_alias(engine: Engine) -> None:
    llm = ChatRagFuse(
        engine=engine,
        callbacks=[],
        tags=["a"],
        metadata={"b": 1},
        stop_sequences=["."],
        cache=False,
    )
    assert (llm.tags, llm.metadata["b"], llm.stop) == (["a"], 1, ["."])
    found = RunnableLambda(lambda query: [Document(TEXT)])
    assert RagFuseRetriever(retriever=found, llm=llm, tags=["c"], name="d").tags == ["c"]


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
def test_an_unknown_model_is_named(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        kind(model="no-such-model", store=tmp_path).invoke("Hello?")


@pytest.mark.parametrize(
    "messages", [[], [SystemMessage(" "), HumanMessage("\n")], [AIMessage("")]]
)
async def test_empty_messages_are_refused(messages: list[Any], engine: Engine) -> None:
    llm = ChatRagFuse(engine=engine)
    with pytest.raises(InputError, match="messages are empty"):
        llm.invoke(messages)
    with pytest.raises(InputError, match="messages are empty"):
        await llm.ainvoke(messages)
