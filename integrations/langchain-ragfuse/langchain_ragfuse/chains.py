"""Chains that mark each document in the prompt as a chunk, so that chunks need not be found by their text."""

from __future__ import annotations

from typing import Any

from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from langchain_ragfuse.documents import PAGE, engine_of, text_of
from ragfuse import InputError


def create_fused_documents_chain(
    llm: Any,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | Runnable[Any, Any] | None = None,
    document_prompt: BasePromptTemplate[str] = PAGE,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
    source_key: str = "source",
) -> Runnable[dict[str, Any], Any]:
    """Return a chain from {"context": documents, ...} to the answer, like LangChain's create_stuff_documents_chain.

    Each document is marked as one chunk, so no indexing is needed: a chunk that is not stored yet is encoded after the
    answer and reused from then on.

    Args:
        llm: A ChatRagFuse or a RagFuseLLM, bound or not.
        prompt: A prompt template with the variable `document_variable_name`.
        output_parser: Parses the answer; None: a StrOutputParser.
        document_prompt: Formats each document.
        document_separator: Text between documents.
        document_variable_name: The variable that takes the documents, in the inputs and in the prompt.
        source_key: Metadata key with the source of a document, for people.

    Raises:
        InputError: The prompt lacks the variable, or `llm` is another model.
    """
    if document_variable_name not in prompt.input_variables:
        raise InputError(
            f"The prompt has no variable '{document_variable_name}', only {sorted(prompt.input_variables)}. Add it, or "
            "name the variable for the documents: document_variable_name='NAME'."
        )
    marker = engine_of(llm).marker

    def format_docs(inputs: dict[str, Any]) -> str:
        texts = (text_of(document, document_prompt, source_key) for document in inputs[document_variable_name])
        return document_separator.join(marker.mark(text, source) for text, source in texts)

    format_inputs = RunnablePassthrough.assign(**{document_variable_name: format_docs})
    chain: Runnable[dict[str, Any], Any] = (
        format_inputs.with_config(run_name="format_inputs") | prompt | llm | (output_parser or StrOutputParser())
    )
    return chain.with_config(run_name="fused_documents_chain")
