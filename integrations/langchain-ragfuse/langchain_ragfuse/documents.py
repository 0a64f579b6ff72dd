"""Encodes documents into the chunk store, formatted as they will be in a prompt."""

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
"""A document that stands in for the others to find out what a prompt has before them."""


@checks_arguments
class RagFuseIndexer(BaseDocumentTransformer):
    """Encodes documents ahead of questions: an indexed document is found in any prompt and its KV
    is reused.

    Args:
        llm: A ChatRagFuse or RagFuseLLM, bound or not, or its engine.
        document_prompt: The prompt by which the chain formats each document.
        document_variable_name: The variable of the chain's prompt that takes the documents.
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
        """Encode the documents that are not stored yet.

        Args:
            documents: The splits that also go into the vector store.
            prompt: The chain's prompt; the text that it puts before the documents is then stored
                too, unless it depends on the question, so that the first question need not compute
                it.
            progress: True shows a bar on stderr if that is a terminal, False shows nothing; a
                callable is called after every document.
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
        """Run `index` in a thread."""
        return await asyncio.to_thread(self.index, documents, prompt, progress)

    def transform_documents(
        self, documents: Sequence[Document], **kwargs: Any
    ) -> Sequence[Document]:
        """Index the documents and return them unchanged, as a step of a pipeline of document
        transformers.
        """
        self.index(documents, **kwargs)
        return documents

    def _prefix(self, prompt: BasePromptTemplate[Any]) -> tuple[int, ...]:
        """Return the token ids before the documents; () if they depend on the question."""
        trial = Ask(documents=[(SAMPLE_DOCUMENT, "trial")])
        first, second = (
            self._engine.prefix(messages, trial) for messages in self._sample_prompts(prompt)
        )
        return first if first == second else ()

    def _sample_prompts(self, prompt: BasePromptTemplate[Any]) -> Iterator[str | list[ChatMessage]]:
        """Yield the prompt with one document twice: with all other variables empty, and with some
        text in them.
        """
        if self._variable not in prompt.input_variables:
            raise InputError(
                f"The prompt has no variable '{self._variable}', only"
                f" {sorted(prompt.input_variables)}. Name the one that takes the documents:"
                " document_variable_name='NAME'."
            )
        for word, history in (("", []), ("Another", [HumanMessage("Another")])):
            values = {name: _value(prompt, name, word, history) for name in prompt.input_variables}
            value = prompt.invoke({**values, self._variable: SAMPLE_DOCUMENT})
            yield to_ragfuse_messages(value.to_messages()) if self._is_chat else value.to_string()


def text_of(document: Document, page: BasePromptTemplate[str] = PAGE) -> tuple[str, str]:
    """Return (text, source) of a document, formatted as a chain puts it into a prompt."""
    return format_document(document, page), source(document)


def unbound(llm: Any) -> Any:
    """Return the model inside a runnable that binds arguments or tools to it."""
    while isinstance(llm, RunnableBinding):
        llm = llm.bound
    return llm


def _value(
    prompt: BasePromptTemplate[Any], name: str, word: str, history: Sequence[BaseMessage]
) -> Any:
    """Return `history` if a variable of the prompt takes messages, else `word`."""
    takes_messages = getattr(prompt.input_types.get(name), "__origin__", None) is list
    return history if takes_messages else word
