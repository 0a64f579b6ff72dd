"""`RagFuseLLM`, ragfuse's text model for LangChain, which continues prompts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from langchain_ragfuse.base import CONFIG, RagFuseModel, usage_of
from langchain_ragfuse.callbacks import batch_parents
from ragfuse import Answer, Ask, InputError
from ragfuse.adapters import ready
from ragfuse.types.arguments import checks_arguments

COUNTED = ("input_tokens", "output_tokens", "total_tokens")


@checks_arguments
class RagFuseLLM(RagFuseModel, BaseLLM):
    """A text model that reuses the stored KV of retrieved chunks and computes only the rest of the
    prompt.

    No chat template is used: the answer continues the prompt. Several prompts in one call are
    decoded as a batch. With `base_url`, a `ragfuse serve` server answers.
    """

    model_config = CONFIG

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer several prompts. Each prompt can reuse documents retrieved for any of them."""
        with batch_parents(callbacks):
            return super().generate(prompts, stop, callbacks, **kwargs)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer several prompts like `generate`, without blocking the event loop."""
        with batch_parents(callbacks):
            return await super().agenerate(prompts, stop, callbacks, **kwargs)

    @property
    def _llm_type(self) -> str:
        return "ragfuse"

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if kwargs.get("stream", self.streaming) and len(prompts) == 1:
            return _joined(list(self._stream(prompts[0], stop, run_manager, **kwargs)))
        return self._batch(
            prompts, self._asked(prompts, stop, run_manager, kwargs), kwargs.get("model")
        )

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        ask, model = self._asked(prompts, stop, run_manager, kwargs), kwargs.get("model")
        if len(prompts) == 1:
            manager = run_manager if kwargs.get("stream", self.streaming) else None
            return _joined(
                [chunk async for chunk in self._achunks(prompts[0], ask, model, manager)]
            )
        cancelled = threading.Event()
        try:
            return await asyncio.to_thread(self._batch, prompts, ask, model, cancelled)
        finally:
            cancelled.set()

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        ask, model = self._asked([prompt], stop, run_manager, kwargs), kwargs.get("model")
        with self._place.stream(prompt, ask, model) as stream:
            for text in stream:
                chunk = GenerationChunk(text=text)
                if run_manager:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
            yield self._last(stream.answer, ask, model)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        ask = self._asked([prompt], stop, run_manager, kwargs)
        async with aclosing(self._achunks(prompt, ask, kwargs.get("model"), run_manager)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _achunks(
        self,
        prompt: str,
        ask: Ask,
        model: str | None,
        run_manager: AsyncCallbackManagerForLLMRun | None,
    ) -> AsyncGenerator[GenerationChunk]:
        async with await self._place.astream(prompt, ask, model) as stream:
            async for text in stream:
                chunk = GenerationChunk(text=text)
                if run_manager:
                    await run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
            yield self._last(stream.answer, ask, model)

    def _batch(
        self,
        prompts: Sequence[str],
        ask: Ask,
        model: str | None,
        cancelled: threading.Event | None = None,
    ) -> LLMResult:
        engine = self.get_engine(model)
        answers = engine.batch([ready(prompt, engine) for prompt in prompts], ask, cancelled)
        return _result([self._last(answer, ask, model, answer.text) for answer in answers])

    def _asked(
        self,
        prompts: Sequence[str],
        stop: Sequence[str] | None,
        run_manager: Any,
        call: Mapping[str, Any],
    ) -> Ask:
        """Return the options of a call; InputError if a prompt is empty."""
        if not all(prompt.strip() for prompt in prompts):
            raise InputError("A prompt is empty. Each prompt needs at least one word.")
        return self._ask(stop, call, prompts, run_manager)

    def _last(self, answer: Answer, ask: Ask, model: str | None, text: str = "") -> GenerationChunk:
        """Return an answer's final chunk, with usage, trace, and `text` that was not streamed."""
        told = self._place.told(answer, ask, model)
        return GenerationChunk(
            text=text,
            generation_info={**self._metadata(told), "usage_metadata": dict(usage_of(told))},
        )


def _joined(chunks: Sequence[GenerationChunk]) -> LLMResult:
    """Return the chunks of one answer as a whole result."""
    text = "".join(chunk.text for chunk in chunks)
    return _result([Generation(text=text, generation_info=chunks[-1].generation_info)])


def _result(generations: Sequence[Generation]) -> LLMResult:
    infos = [each.generation_info or {} for each in generations]
    total = {name: sum(info["usage_metadata"][name] for info in infos) for name in COUNTED}
    return LLMResult(
        generations=[[each] for each in generations],
        llm_output={"model_name": infos[0]["model_name"], "token_usage": total},
    )
