"""Structured prediction, with decoding constrained to JSON that matches the schema."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import PydanticProgramMode


class Structured(LLM):
    """An LLM whose structured predictions are constrained to the schema by `response_format`.

    In program modes other than `LLM`, LlamaIndex's own method is used. Each LlamaIndex program gets
    a copy of the prompt, because programs modify their prompt.
    """

    pydantic_program_mode: PydanticProgramMode = Field(
        default=PydanticProgramMode.LLM,
        description=(
            "How structured objects are generated; LLM: as JSON that follows the object's schema."
        ),
    )

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Answer a prompt with an `output_cls` object; ValueError if the answer is truncated."""
        return super().structured_predict(
            output_cls, prompt.model_copy(), self._held(output_cls, llm_kwargs), **prompt_args
        )

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Answer like `structured_predict`, without blocking the event loop."""
        held = self._held(output_cls, llm_kwargs)
        return await super().astructured_predict(
            output_cls, prompt.model_copy(), held, **prompt_args
        )

    def _structured_stream_call(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Yield the object built so far, again and again while the answer is generated."""
        return super()._structured_stream_call(
            output_cls, prompt.model_copy(), self._held(output_cls, llm_kwargs), **prompt_args
        )

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """Stream like `_structured_stream_call`, without blocking the event loop."""
        held = self._held(output_cls, llm_kwargs)
        return await super()._structured_astream_call(
            output_cls, prompt.model_copy(), held, **prompt_args
        )

    def _held(self, output_cls: type[BaseModel], given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the keyword arguments of a call whose answer must be an `output_cls` object."""
        # LlamaIndex's programs add a `tool_choice`.
        plain = {name: value for name, value in (given or {}).items() if name != "tool_choice"}
        by_schema = self.pydantic_program_mode is PydanticProgramMode.LLM
        return {**plain, **({"response_format": output_cls} if by_schema else {})}
