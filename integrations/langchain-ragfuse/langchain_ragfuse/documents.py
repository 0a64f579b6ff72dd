"""Documents into the store, as the texts that they will be in a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import RunnableBinding

from langchain_ragfuse.base import RagFuseModel
from langchain_ragfuse.llms import RagFuseLLM
from langchain_ragfuse.messages import source_of, turns_of
from langchain_ragfuse.progress import Progress, shown
from ragfuse import ChatMessage, Engine, Ingested, InputError

PAGE = PromptTemplate.from_template("{page_content}")
TRIAL = "A document stands here, long enough to count as a chunk of its own among the others, whatever it says."


class RagFuseIndexer(BaseDocumentTransformer):
    """Encodes documents ahead of the questions: what was indexed is found in any prompt and comes from the store.

    Give `index` the splits that go into the vector store. `document_prompt` is the one that the chain formats each
    document with; `document_variable_name` the variable of the prompt that takes them.
    """

    def __init__(
        self,
        llm: Any,
        document_prompt: BasePromptTemplate[str] = PAGE,
        document_variable_name: str = "context",
        source_key: str = "source",
    ) -> None:
        self._engine, self._page = engine_of(llm), document_prompt
        self._is_chat = not isinstance(unbound(llm), RagFuseLLM)
        self._variable, self._source_key = document_variable_name, source_key

    def index(
        self,
        documents: Sequence[Document],
        prompt: BasePromptTemplate[Any] | None = None,
        progress: Progress = True,
    ) -> Ingested:
        """Encode and keep what is not kept yet.

        progress: True shows a bar on stderr if that is a terminal, False nothing; a callable hears of every document.

        With the chain's `prompt`, the text that it puts before the documents is kept beside them, so that the first
        question need not compute it. It is left out if that text depends on the question.
        """
        texts = (text_of(document, self._page, self._source_key) for document in documents)
        prefix = self._prefix(prompt) if prompt is not None else ()
        with shown(progress, len(documents)) as report:
            return self._engine.ingest(texts, prefix, report)

    async def aindex(
        self,
        documents: Sequence[Document],
        prompt: BasePromptTemplate[Any] | None = None,
        progress: Progress = True,
    ) -> Ingested:
        """`index` in a thread of its own."""
        return await asyncio.to_thread(self.index, documents, prompt, progress)

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """The same documents, indexed: a step of any pipeline of document transformers."""
        self.index(documents, **kwargs)
        return documents

    def _prefix(self, prompt: BasePromptTemplate[Any]) -> tuple[int, ...]:
        """Ids before the documents, () if they are not the same for every question."""
        first, second = (self._engine.prefix(turns) for turns in self._trials(prompt))
        return first if first == second else ()

    def _trials(self, prompt: BasePromptTemplate[Any]) -> Iterator[str | list[ChatMessage]]:
        """The prompt around one document, twice: with everything else empty, and not."""
        if self._variable not in prompt.input_variables:
            raise InputError(
                f"The prompt takes {sorted(prompt.input_variables)}, not '{self._variable}'; "
                "name the variable that takes the documents: document_variable_name=... ."
            )
        document = self._engine.marker.mark(TRIAL, "trial")
        for word, history in (("", []), ("Another", [HumanMessage("Another")])):
            values = {name: _value(prompt, name, word, history) for name in prompt.input_variables}
            value = prompt.invoke({**values, self._variable: document})
            yield turns_of(value.to_messages()) if self._is_chat else value.to_string()


def text_of(document: Document, page: BasePromptTemplate[str] = PAGE, source_key: str = "source") -> tuple[str, str]:
    """(text, source) of a document, as a chain puts it into a prompt."""
    return format_document(document, page), source_of(document, source_key)


def unbound(llm: Any) -> Any:
    """The model itself, of one that is bound to arguments or tools."""
    while isinstance(llm, RunnableBinding):
        llm = llm.bound
    return llm


def engine_of(llm: Any) -> Engine:
    """The engine of a ChatRagFuse or RagFuseLLM, also of a bound one, or the engine itself."""
    llm = unbound(llm)
    if isinstance(llm, Engine):
        return llm
    if isinstance(llm, RagFuseModel):
        return llm.get_engine()
    raise InputError(f"A {type(llm).__name__} has no chunk store; wanted a ChatRagFuse or a RagFuseLLM.")


def _value(prompt: BasePromptTemplate[Any], name: str, word: str, history: Sequence[BaseMessage]) -> Any:
    """A value for a variable of the prompt: messages where it wants messages, else the word."""
    takes_messages = getattr(prompt.input_types.get(name), "__origin__", None) is list
    return history if takes_messages else word
