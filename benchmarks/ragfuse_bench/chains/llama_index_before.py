"""A LlamaIndex query engine whose LLM is Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def build(
    model: str, nodes: Sequence[Any], embeddings: Any, template: str, own: Mapping[str, Any]
) -> Any:
    """The engine: a question in, a streaming response out. own: what this LLM's constructor takes
    besides its name.
    """
    from llama_index.core import PromptTemplate, VectorStoreIndex
    from llama_index.llms.huggingface import HuggingFaceLLM

    llm = HuggingFaceLLM(model_name=model, tokenizer_name=model, is_chat_model=True, **own)
    index = VectorStoreIndex(list(nodes), embed_model=embeddings)
    prompt = PromptTemplate(template)
    return index.as_query_engine(
        llm=llm, streaming=True, similarity_top_k=6, text_qa_template=prompt
    )
