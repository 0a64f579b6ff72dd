"""A response synthesizer that puts as many whole nodes into a prompt as fit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.llms.llm import astream_chat_response_to_tokens, stream_chat_response_to_tokens
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_REFINE_PROMPT_SEL, DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index.llms.ragfuse.base import RagFuseLLM
from llama_index.llms.ragfuse.structured import grammar_of

from ragfuse import InputError
from ragfuse.types.arguments import checks_arguments

TEMPLATE_TOKENS = 64
"""Tokens reserved for the text that a chat template adds around messages."""
MIN_CONTEXT_TOKENS = 64
"""The least tokens of a context; below it there is an error."""


@checks_arguments
class RagFuseSynthesizer(BaseSynthesizer):
    """A synthesizer that puts as many whole nodes as fit into one prompt and refines the answer with the others.

    Nodes need no precomputing: one that is not stored yet is encoded after the answer and reused from then on. With
    `output_cls`, or over `llm.as_structured_llm(...)`, the last answer is an object of that class; a stream yields its
    JSON.
    """

    def __init__(
        self,
        llm: RagFuseLLM | StructuredLLM,
        callback_manager: CallbackManager | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        separator: str = "\n\n",
        output_cls: type[BaseModel] | None = None,
        empty_response: str | None = None,
    ) -> None:
        if isinstance(llm, StructuredLLM):
            llm, output_cls = llm.llm, output_cls or llm.output_cls
        if not isinstance(llm, RagFuseLLM):
            raise InputError(f"A {type(llm).__name__} has no chunk store; wanted a RagFuseLLM.")
        super().__init__(
            llm=llm,
            callback_manager=callback_manager,
            streaming=streaming,
            output_cls=output_cls,
            empty_response=empty_response,
        )
        self._ragfuse_llm, self._separator = llm, separator
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._refine_template = refine_template or DEFAULT_REFINE_PROMPT_SEL

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: str | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer a query from texts, each of which becomes a chunk.

        Args:
            query_str: The query.
            text_chunks: The texts; one that is longer than a prompt is split.
            prev_response: An answer to refine.
            **response_kwargs: Values of further variables of the templates.
        """
        if not any(text.strip() for text in text_chunks):
            return self._empty_response_generator() if self._streaming else self._empty_response
        *first, last = self._contexts(query_str, text_chunks)
        answer = prev_response
        for context in first:
            template, values = self._step(query_str, context, answer)
            answer = self._ragfuse_llm.predict(template, **values, **response_kwargs)
        template, values = self._step(query_str, last, answer)
        return self._final_answer(template, {**values, **response_kwargs})

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: str | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Run `get_response` without blocking the event loop."""
        if not any(text.strip() for text in text_chunks):
            return self._empty_response_agenerator() if self._streaming else self._empty_response
        *first, last = await asyncio.to_thread(self._contexts, query_str, text_chunks)
        answer = prev_response
        for context in first:
            template, values = self._step(query_str, context, answer)
            answer = await self._ragfuse_llm.apredict(template, **values, **response_kwargs)
        template, values = self._step(query_str, last, answer)
        return await self._afinal_answer(template, {**values, **response_kwargs})

    def _final_answer(self, template: BasePromptTemplate, values: dict[str, Any]) -> Any:
        """Return the last answer: whole or as a stream, as text or as an object of `output_cls`."""
        llm, output_cls = self._ragfuse_llm, self._output_cls
        if output_cls is None:
            return llm.stream(template, **values) if self._streaming else llm.predict(template, **values)
        if not self._streaming:
            return llm.structured_predict(output_cls, template, **values)
        messages = llm.messages_for(output_cls, template, values)
        return stream_chat_response_to_tokens(llm.stream_chat(messages, grammar=grammar_of(output_cls)))

    async def _afinal_answer(self, template: BasePromptTemplate, values: dict[str, Any]) -> Any:
        """Return the last answer without blocking the event loop."""
        llm, output_cls = self._ragfuse_llm, self._output_cls
        if output_cls is None:
            return await (llm.astream(template, **values) if self._streaming else llm.apredict(template, **values))
        if not self._streaming:
            return await llm.astructured_predict(output_cls, template, **values)
        messages = llm.messages_for(output_cls, template, values)
        return await astream_chat_response_to_tokens(await llm.astream_chat(messages, grammar=grammar_of(output_cls)))

    def _step(self, query: str, context: str, answer: str | None) -> tuple[BasePromptTemplate, dict[str, str]]:
        """Return the template and its values, for a first answer or to refine `answer`."""
        if answer is None:
            return self._text_qa_template, {"query_str": query, "context_str": context}
        return self._refine_template, {"query_str": query, "context_msg": context, "existing_answer": answer}

    def _contexts(self, query: str, texts: Sequence[str]) -> list[str]:
        """Join texts to contexts, as many in each as fit into a prompt; at least one context."""
        engine, room = self._ragfuse_llm.get_engine(), self._room(query)
        separator_tokens = len(engine.tokens(self._separator))
        contexts: list[list[str]] = [[]]
        free_tokens = room
        for text in self._fitting(texts, room):
            size = len(engine.tokens(text)) + separator_tokens
            if size > free_tokens and contexts[-1]:
                contexts.append([])
                free_tokens = room
            contexts[-1].append(text)
            free_tokens -= size
        return [self._separator.join(context) for context in contexts]

    def _fitting(self, texts: Sequence[str], room: int) -> Iterator[str]:
        """Yield the texts, split where they do not fit into a prompt."""
        count = self._ragfuse_llm.get_engine().tokens
        splitter = TokenTextSplitter(chunk_size=room - 16, chunk_overlap=0, tokenizer=count)
        for text in (text.strip() for text in texts):
            parts = [text] if len(count(text)) < room - 16 else splitter.split_text(text)
            yield from filter(None, parts)

    def _room(self, query: str) -> int:
        """Return the tokens that a prompt has left for its context; raises InputError if they are too few."""
        metadata, engine = self._ragfuse_llm.metadata, self._ragfuse_llm.get_engine()
        steps = [self._step(query, "", answer) for answer in (None, "")]
        messages = [template.format_messages(llm=self._ragfuse_llm, **values) for template, values in steps]
        fixed_tokens = max(sum(len(engine.tokens(each.content or "")) for each in formatted) for formatted in messages)
        fixed_tokens += len(engine.tokens(self._ragfuse_llm.system_prompt or "")) + TEMPLATE_TOKENS
        room = metadata.context_window - 2 * metadata.num_output - fixed_tokens
        if room < MIN_CONTEXT_TOKENS:
            raise InputError(
                f"Too few tokens are left for the context: {room}, at least {MIN_CONTEXT_TOKENS} are needed. "
                f"Of the window of {metadata.context_window}, the templates take {fixed_tokens} and two answers "
                f"{metadata.num_output} each. Lower max_tokens."
            )
        return room

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template, "refine_template": self._refine_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)
        self._refine_template = prompts.get("refine_template", self._refine_template)
