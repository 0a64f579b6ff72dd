"""The text model: it continues prompts without a chat template, by the same engine as the chat model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from langchain_ragfuse.base import CONFIG, RagFuseModel, cancelled_at_exit, metadata_of, usage_of
from langchain_ragfuse.callbacks import batch_parents
from langchain_ragfuse.prompts import ready
from ragfuse import Answer, Ask, InputError
from ragfuse.remote import Answerer
from ragfuse.types.arguments import checks_arguments

COUNTED = ("input_tokens", "output_tokens", "total_tokens")


@checks_arguments
class RagFuseLLM(RagFuseModel, BaseLLM):
    """A local text model that reuses the stored KV of retrieved chunks and computes only the rest of the prompt.

    It uses no chat template: the answer continues the prompt. Several prompts passed together are decoded as a batch.
    With `base_url` a `ragfuse serve` answers.
    """

    model_config = CONFIG

    def generate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """Answer several prompts; documents retrieved for one of them are recognised in all."""
        with batch_parents(callbacks):
            return super().generate(prompts, stop, callbacks, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """Answer several prompts without blocking the event loop."""
        with batch_parents(callbacks):
            return await super().agenerate(prompts, stop, callbacks, **kwargs)

    @property
    def _llm_type(self) -> str:
        return "ragfuse"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        return self._traced(super()._get_ls_params(stop=stop, **kwargs), kwargs)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self._streams_tokens(kwargs) and len(prompts) == 1:
            return _join_chunks(list(self._stream(prompts[0], stop, run_manager, **kwargs)))
        ask, engine = self._ask_with_documents(prompts, stop, kwargs, run_manager), self.get_engine(kwargs.get("model"))
        _check(prompts)
        return _result(engine.batch(_all_ready(prompts, engine), ask), engine, ask)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        ask, cancelled = self._ask_with_documents(prompts, stop, kwargs, run_manager), threading.Event()
        if len(prompts) == 1:
            token_callbacks = run_manager if self._streams_tokens(kwargs) else None
            return _join_chunks([chunk async for chunk in self._chunks(prompts[0], ask, token_callbacks, kwargs)])
        _check(prompts)
        engine = await asyncio.to_thread(self.get_engine, kwargs.get("model"))
        try:
            ready_prompts = await asyncio.to_thread(_all_ready, prompts, engine)
            return _result(await asyncio.to_thread(engine.batch, ready_prompts, ask, cancelled), engine, ask)
        finally:
            cancelled.set()

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        ask, engine, streamed = (
            self._ask_with_documents([prompt], stop, kwargs, run_manager),
            self.get_engine(kwargs.get("model")),
            "",
        )
        _check([prompt])
        with engine.stream(ready(prompt, engine), ask) as stream:
            for text in stream:
                streamed += text
                chunk = GenerationChunk(text=text)
                if run_manager:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
            last = _last(stream.answer, streamed, engine, ask)
            if run_manager:
                run_manager.on_llm_new_token(last.text, chunk=last)
            yield last

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        ask = self._ask_with_documents([prompt], stop, kwargs, run_manager)
        async with aclosing(self._chunks(prompt, ask, run_manager, kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _chunks(
        self, prompt: str, ask: Ask, run_manager: AsyncCallbackManagerForLLMRun | None, call: Mapping[str, Any]
    ) -> AsyncGenerator[GenerationChunk]:
        _check([prompt])
        streamed, engine = "", await asyncio.to_thread(self.get_engine, call.get("model"))
        ready_prompt = await asyncio.to_thread(ready, prompt, engine)
        async with cancelled_at_exit(engine.stream(ready_prompt, ask)) as stream:
            async for text in stream:
                streamed += text
                chunk = GenerationChunk(text=text)
                if run_manager:
                    await run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
            last = _last(stream.answer, streamed, engine, ask)
            if run_manager:
                await run_manager.on_llm_new_token(last.text, chunk=last)
            yield last

    def _ask_with_documents(
        self, prompts: Sequence[str], stop: Sequence[str] | None, call: Mapping[str, Any], run_manager: Any
    ) -> Ask:
        """Return the options of a call, with the documents retrieved for it."""
        return self._ask(stop, call, documents=self._retrieved(run_manager, prompts))

    def _streams_tokens(self, call: dict[str, Any]) -> bool:
        """Whether callbacks receive every token."""
        return bool(call.get("stream", self.streaming))


def _all_ready(prompts: Sequence[str], engine: Answerer) -> list[Any]:
    return [ready(prompt, engine) for prompt in prompts]


def _check(prompts: Sequence[str]) -> None:
    empty = next((number for number, prompt in enumerate(prompts, 1) if not prompt.strip()), None)
    if empty is not None:
        raise InputError(f"Prompt {empty} of {len(prompts)} is empty; wanted at least one word to continue.")


def _info(answer: Answer, engine: Answerer, ask: Ask) -> dict[str, Any]:
    return {**metadata_of(answer, engine), "usage_metadata": dict(usage_of(answer, engine, ask))}


def _last(answer: Answer, streamed: str, engine: Answerer, ask: Ask) -> GenerationChunk:
    """Return the last chunk: text not streamed yet (with beam search all of it), usage and trace."""
    return GenerationChunk(text=answer.text[len(streamed) :], generation_info=_info(answer, engine, ask))


def _result(answers: Sequence[Answer], engine: Answerer, ask: Ask) -> LLMResult:
    return _llm_result([Generation(text=each.text, generation_info=_info(each, engine, ask)) for each in answers])


def _join_chunks(chunks: Sequence[GenerationChunk]) -> LLMResult:
    """Join the chunks of one answer."""
    return _llm_result(
        [Generation(text="".join(chunk.text for chunk in chunks), generation_info=chunks[-1].generation_info)]
    )


def _llm_result(generations: Sequence[Generation]) -> LLMResult:
    usages = [(each.generation_info or {})["usage_metadata"] for each in generations]
    total = {name: sum(usage[name] for usage in usages) for name in COUNTED}
    model = (generations[0].generation_info or {})["model_name"]
    return LLMResult(
        generations=[[each] for each in generations], llm_output={"model_name": model, "token_usage": total}
    )
