"""A response synthesizer that says where each node begins and ends, so that nothing has to be found in the text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_REFINE_PROMPT_SEL, DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.schema import NodeWithScore
from llama_index.core.types import RESPONSE_TEXT_TYPE

from llama_index.llms.ragfuse.base import RagFuseLLM
from llama_index.llms.ragfuse.convert import source_of
from ragfuse import InputError

TEMPLATE_TOKENS = 64
"""Room left for what a chat template writes around the messages."""


class RagFuseSynthesizer(BaseSynthesizer):
    """One prompt with as many whole nodes as fit, each marked as one chunk; what is left refines the answer.

    Nodes need no precomputing: what a question meets first is encoded after its answer and reused from then on.
    """

    def __init__(
        self,
        llm: RagFuseLLM,
        callback_manager: CallbackManager | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        separator: str = "\n\n",
    ) -> None:
        if not isinstance(llm, RagFuseLLM):
            raise InputError(f"A {type(llm).__name__} has no chunk store; wanted a RagFuseLLM.")
        super().__init__(llm=llm, callback_manager=callback_manager, streaming=streaming)
        self._fused, self._separator = llm, separator
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._refine_template = refine_template or DEFAULT_REFINE_PROMPT_SEL

    def synthesize(self, query: QueryTextType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any) -> Any:
        """The response to a query from nodes."""
        return super().synthesize(query, nodes, *args, sources=_sources(nodes), **kwargs)

    async def asynthesize(self, query: QueryTextType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any) -> Any:
        """The same, leaving the event loop free."""
        return await super().asynthesize(query, nodes, *args, sources=_sources(nodes), **kwargs)

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], sources: Sequence[str] = (), **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """The answer to a query from texts, each a chunk; `sources` name them."""
        answer = ""
        contexts = list(self._contexts(query_str, text_chunks, sources))
        for template, variables in self._steps(query_str, contexts[:-1]):
            answer = self._fused.predict(template, **self._with(variables, answer), **response_kwargs)
        template, variables = list(self._steps(query_str, contexts))[-1]
        answering = self._fused.stream if self._streaming else self._fused.predict
        return answering(template, **self._with(variables, answer), **response_kwargs)

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], sources: Sequence[str] = (), **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """The same, leaving the event loop free."""
        answer = ""
        contexts = await asyncio.to_thread(lambda: list(self._contexts(query_str, text_chunks, sources)))
        for template, variables in self._steps(query_str, contexts[:-1]):
            answer = await self._fused.apredict(template, **self._with(variables, answer), **response_kwargs)
        template, variables = list(self._steps(query_str, contexts))[-1]
        answering = self._fused.astream if self._streaming else self._fused.apredict
        return await answering(template, **self._with(variables, answer), **response_kwargs)

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template, "refine_template": self._refine_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)
        self._refine_template = prompts.get("refine_template", self._refine_template)
