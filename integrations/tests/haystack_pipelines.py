"""A real pipeline for the tests: documents in memory, BM25, a prompt, and the generator of the
test.
"""

from __future__ import annotations

from typing import Any

from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore

from integrations.tests.kit import LETTERS

DOCUMENTS = [
    Document(content=text.replace("\n", " "), meta={"source": f"letter-{number}"})
    for number, text in enumerate(LETTERS.split("\n\n"))
]
TEMPLATE = [
    ChatMessage.from_system("Be brief."),
    ChatMessage.from_user(
        "Use these letters:\n{% for document in documents %}{{ document.content }}\n\n{% endfor"
        " %}{{ question }}"
    ),
]


def rag(llm: Any, top_k: int = 4) -> Pipeline:
    """Return a pipeline that ends in `llm`, which is all that a user changes."""
    shelf = InMemoryDocumentStore()
    shelf.write_documents(DOCUMENTS)
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(shelf, top_k=top_k))
    pipeline.add_component(
        "prompt", ChatPromptBuilder(TEMPLATE, required_variables=["documents", "question"])
    )
    pipeline.add_component("llm", llm)
    pipeline.connect("retriever.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "llm.messages")
    return pipeline


def given(question: str) -> dict[str, Any]:
    """Return the inputs of the pipeline for a question."""
    return {"retriever": {"query": question}, "prompt": {"question": question}}


def asked(pipeline: Pipeline, question: str, **llm: Any) -> ChatMessage:
    """Return the reply to a question."""
    (reply,) = pipeline.run({**given(question), "llm": llm})["llm"]["replies"]
    return reply


def hits(reply: ChatMessage) -> list[bool]:
    """Return which of the documents of a prompt were reused."""
    return [each["hit"] for each in reply.meta["ragfuse"]["segments"] if each["kind"] == "chunk"]
