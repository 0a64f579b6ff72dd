"""A LangChain chain whose model is ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def build(
    model: str,
    splits: list[Any],
    embeddings: Any,
    template: str,
    join: Callable[[Any], str],
    own: Mapping[str, Any],
) -> Any:
    """The chain: a question in, message chunks out. own: what this model's constructor takes
    besides its name.
    """
    from langchain_community.vectorstores import FAISS
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnablePassthrough
    from langchain_ragfuse import ChatRagFuse

    llm = ChatRagFuse(model=model, **own)
    index = FAISS.from_documents(splits, embeddings)
    retriever = index.as_retriever(search_kwargs={"k": 6})
    prompt = ChatPromptTemplate.from_template(template)
    return {"context": retriever | join, "question": RunnablePassthrough()} | prompt | llm
