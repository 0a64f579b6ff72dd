"""A LlamaIndex prompt template over a PML schema (Prompt Cache), for `RagFuseLLM`.

A filled template has a special type. An ordinary message that looks like PML stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.prompts import BasePromptTemplate

from ragfuse import Ingested, PMLTemplate
from ragfuse.adapters import Progress, engine_of, shown
from ragfuse.types.arguments import checks_arguments

Filled = PMLTemplate.Filled


class PMLMessage(ChatMessage):
    """A message with a filled PML template for `RagFuseLLM`. `content` is only for display."""

    _filled: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, filled: Filled) -> PMLMessage:
        """Return a message with a filled template."""
        message = cls(role=MessageRole.USER, content=str(filled))
        message._filled = filled
        return message

    @property
    def filled(self) -> Filled | None:
        """The filled template. None if the message was not made by `of`."""
        return cast("Filled | None", self._filled)


@checks_arguments
class PMLPromptTemplate(BasePromptTemplate):
    """A prompt template whose fixed texts are encoded once. Every prompt reuses their KV.

    Use: `llm.predict(PMLPromptTemplate(schema, prompt), **values)`. A value is always text, even if
    the value looks like PML. The schema is registered at the first question, or by `register`.

    Args:
        schema: PML text, the path of a PML file, a parsed schema, or a function with `@program`.
        prompt: PML text or the path of a PML file, with `{variable}` anywhere in its texts. If
            None, the parameters of the schema (or function) are the variables.
        question: Text of a user message that is added at the end. The text may have variables.
        template: A `PMLTemplate` to use instead of the arguments above.
    """

    template: PMLTemplate = Field(exclude=True, repr=False)

    def __init__(
        self,
        schema: Any = None,
        prompt: Any = None,
        question: str = "",
        template: PMLTemplate | None = None,
        metadata: dict[str, Any] | None = None,
        template_var_mappings: dict[str, Any] | None = None,
        function_mappings: dict[str, Callable[..., Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        template = PMLTemplate(schema, prompt, question) if template is None else template
        super().__init__(
            template=template,
            template_vars=list(template.variables),
            kwargs=kwargs,
            metadata=metadata or {},
            output_parser=None,
            template_var_mappings=template_var_mappings,
            function_mappings=function_mappings,
        )

    def register(self, llm: Any, progress: Progress = None) -> Ingested:
        """Encode the schema's modules that are not stored yet, before the first question.

        Args:
            llm: The LLM that will answer.
            progress: True to show a progress bar if stderr is a terminal. A callable is called
                after every module.
        """
        with shown(progress, None, "Encoding modules") as report:
            return engine_of(llm).schemas.register(self.template.schema, report).done

    def partial_format(self, **kwargs: Any) -> PMLPromptTemplate:
        """Return a copy of this template in which some variables have values."""
        return self.model_copy(update={"kwargs": {**self.kwargs, **kwargs}})

    def format(self, llm: BaseLLM | None = None, **kwargs: Any) -> str:
        """Return the prompt as a text for `llm.complete(text, formatted=True)` of `RagFuseLLM`."""
        return self._filled(kwargs)

    def format_messages(self, llm: BaseLLM | None = None, **kwargs: Any) -> list[ChatMessage]:
        """Return the prompt as one message for `llm.chat`."""
        return [PMLMessage.of(self._filled(kwargs))]

    def get_template(self, llm: BaseLLM | None = None) -> str:
        """Return a description of the template, for events."""
        return repr(self.template)

    def _filled(self, given: Mapping[str, Any]) -> Filled:
        values = self._map_all_vars({**self.kwargs, **given})
        filled = self.template.fill(values)
        parser = self.output_parser
        return (
            filled
            if parser is None
            else filled.asking(parser.get_format_string(escape_json=False).strip())
        )


def pml_of(messages: Sequence[ChatMessage]) -> Filled | None:
    """Return a `PMLMessage`'s template, or None for ordinary messages; InputError for a mixture."""
    return PMLTemplate.only(
        [each.filled if isinstance(each, PMLMessage) else None for each in messages]
    )
