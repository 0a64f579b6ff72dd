"""Encode documents in the form that later prompts contain, and store the KV."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.language_models import BaseLLM
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import RunnableBinding

from langchain_ragfuse.messages import source, to_ragfuse_messages
from ragfuse import Ask, ChatMessage, Ingested, InputError
from ragfuse.adapters import Progress, engine_of, shown
from ragfuse.types.arguments import checks_arguments

PAGE = PromptTemplate.from_template("{page_content}")
SAMPLE_DOCUMENT = (
    "A document stands here, long enough to count as a chunk of its own among the others, whatever"
    " it says."
)
"""A sample document, put into a prompt to find the text that precedes the documents."""


@checks_arguments
class RagFuseIndexer(BaseDocumentTransformer):
    """Encodes documents before questions are asked. Any prompt can reuse the KV of the documents.

    Args:
        llm: A ChatRagFuse or RagFuseLLM, also with bound arguments, or an engine.
        document_prompt: The chain's prompt template for a single document.
        document_variable_name: The variable in the chain's prompt for the joined documents.
    """

    def __init__(
        self,
        llm: Any,
        document_prompt: BasePromptTemplate[str] = PAGE,
        document_variable_name: str = "context",
    ) -> None:
        self._engine, self._page = engine_of(unbound(llm)), document_prompt
        self._is_chat = not isinstance(unbound(llm), BaseLLM)
        self._variable = document_variable_name

    def index(
        self,
        documents: Sequence[Document],
        prompt: BasePromptTemplate[Any] | None = None,
        progress: Progress = True,
    ) -> Ingested:
        """Encode the documents whose KV is not stored yet.

        Args:
            documents: The split documents, as in the vector store.
            prompt: The chain's prompt. The KV of the text before the documents is stored, too,
                unless the question changes that text.
            progress: True to show a progress bar if stderr is a terminal. A callable is called
                after every document.
        """
        texts = (text_of(document, self._page) for document in documents)
        prefix = self._prefix(prompt) if prompt is not None else ()
        with shown(progress, len(documents)) as report:
            return self._engine.ingest(texts, prefix, report)

    async def aindex(
        self,
        documents: Sequence[Document],
        prompt: BasePromptTemplate[Any] | None = None,
        progress: Progress = True,
    ) -> Ingested:
        """Index the documents like `index`, in a thread."""
        return await asyncio.to_thread(self.index, documents, prompt, progress)

    def transform_documents(
        self, documents: Sequence[Document], **kwargs: Any
    ) -> Sequence[Document]:
        """Index documents as a step in a document pipeline, and return the same documents."""
        self.index(documents, **kwargs)
        return documents

    def _prefix(self, prompt: BasePromptTemplate[Any]) -> tuple[int, ...]:
        """Return the token ids before the documents, or () if the tokens depend on the question."""
        trial = Ask(documents=[(SAMPLE_DOCUMENT, "trial")])
        first, second = (
            self._engine.prefix(messages, trial) for messages in self._sample_prompts(prompt)
        )
        return first if first == second else ()

    def _sample_prompts(self, prompt: BasePromptTemplate[Any]) -> Iterator[str | list[ChatMessage]]:
        """Yield two prompts with `SAMPLE_DOCUMENT` as the documents.

        All other variables are empty in the first prompt, and have texts in the second prompt.
        """
        if self._variable not in prompt.input_variables:
            raise InputError(
                f"The prompt has no variable '{self._variable}', only"
                f" {sorted(prompt.input_variables)}. Set document_variable_name='NAME' to the"
                " variable that takes the documents."
            )
        for word, history in (("", []), ("Another", [HumanMessage("Another")])):
            values = {name: _value(prompt, name, word, history) for name in prompt.input_variables}
            value = prompt.invoke({**values, self._variable: SAMPLE_DOCUMENT})
            yield to_ragfuse_messages(value.to_messages()) if self._is_chat else value.to_string()


def text_of(document: Document, page: BasePromptTemplate[str] = PAGE) -> tuple[str, str]:
    """Return (text, source) of a document. `page` formats the text as in the chain's prompt."""
    return format_document(document, page), source(document)


def unbound(llm: Any) -> Any:
    """Return a model without its bound arguments or tools."""
    while isinstance(llm, RunnableBinding):
        llm = llm.bound
    return llm


def _value(
    prompt: BasePromptTemplate[Any], name: str, word: str, history: Sequence[BaseMessage]
) -> Any:
    """Return `history` as the value of a prompt variable for messages, else `word`."""
    takes_messages = getattr(prompt.input_types.get(name), "__origin__", None) is list
    return history if takes_messages else word
