"""A LangChain prompt template over a PML schema (Prompt Cache), for `ChatRagFuse` and `RagFuseLLM`.

A filled template has a special type. An ordinary message or text that looks like PML stays text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate
from pydantic import ConfigDict, Field, PrivateAttr

from langchain_ragfuse.documents import unbound
from ragfuse import Ingested, PMLTemplate
from ragfuse.adapters import Progress, engine_of, shown
from ragfuse.types.arguments import checks_arguments

Filled = PMLTemplate.Filled


class PMLMessage(HumanMessage):
    """A message with a filled PML template for ragfuse's models. `content` is only for display."""

    _filled: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, filled: Filled) -> PMLMessage:
        """Return a message with a filled template."""
        message = cls(content=str(filled))
        message._filled = filled
        return message

    @property
    def filled(self) -> Filled:
        """The filled template."""
        return cast(Filled, self._filled)


class PMLPromptValue(PromptValue):
    """The output of a `PMLPromptTemplate`: a message for a chat model, a text for a text model."""

    _filled: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, filled: Filled) -> PMLPromptValue:
        """Return a prompt value with a filled template."""
        value = cls()
        value._filled = filled
        return value

    def to_string(self) -> str:
        """Return the text that `RagFuseLLM` recognises as a filled template."""
        return cast(Filled, self._filled)

    def to_messages(self) -> list[BaseMessage]:
        """Return one message with the filled template."""
        return [PMLMessage.of(self._filled)]


@checks_arguments
class PMLPromptTemplate(BasePromptTemplate[str]):
    """A prompt template whose fixed texts are encoded once. Every prompt reuses their KV.

    Use: `PMLPromptTemplate(schema, prompt) | llm`. A value is always text, even if the value looks
    like PML. The schema is registered at the first question, or by `register`.

    Args:
        schema: PML text, the path of a PML file, a parsed schema, or a function with `@program`.
        prompt: PML text or the path of a PML file, with `{variable}` anywhere in its texts. If
            None, the parameters of the schema (or function) are the variables.
        question: Text of a user message that is added at the end. The text may have variables.
        template: A `PMLTemplate` to use instead of the arguments above.
        partial_variables: Values of some of the variables.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    template: PMLTemplate = Field(exclude=True, repr=False)

    def __init__(
        self,
        schema: Any = None,
        prompt: Any = None,
        *,
        question: str = "",
        template: PMLTemplate | None = None,
        partial_variables: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        template = PMLTemplate(schema, prompt, question) if template is None else template
        partial = dict(partial_variables or {})
        fields["optional_variables"] = [name for name in template.optional if name not in partial]
        fields["input_variables"] = [
            n for n in template.variables if n not in (*partial, *template.optional)
        ]
        super().__init__(template=template, partial_variables=partial, **fields)

    def register(self, llm: Any, progress: Progress = True) -> Ingested:
        """Encode the schema's modules that are not stored yet, before the first question.

        Args:
            llm: A ChatRagFuse or RagFuseLLM, also with bound arguments.
            progress: True to show a progress bar if stderr is a terminal. A callable is called
                after every module.
        """
        with shown(progress, None, "Encoding modules") as report:
            return engine_of(unbound(llm)).schemas.register(self.template.schema, report).done

    def format_prompt(self, **kwargs: Any) -> PromptValue:
        """Return the template filled with these values, for `ChatRagFuse` or `RagFuseLLM`."""
        return PMLPromptValue.of(self._filled(kwargs))

    async def aformat_prompt(self, **kwargs: Any) -> PromptValue:
        """Return the template filled with these values, like `format_prompt`."""
        return self.format_prompt(**kwargs)

    def format(self, **kwargs: Any) -> str:
        """Return the filled template as a text, which `RagFuseLLM` recognises."""
        return self._filled(kwargs)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return False, because a parsed schema cannot be serialised."""
        return False

    @property
    def _prompt_type(self) -> str:
        return "ragfuse-pml"

    def _filled(self, values: Mapping[str, Any]) -> Filled:
        return self.template.fill(self._merge_partial_and_user_variables(**values))


def pml_of(messages: Sequence[BaseMessage]) -> Filled | None:
    """Return a `PMLMessage`'s template, or None for ordinary messages; InputError for a mixture."""
    return PMLTemplate.only(
        [each.filled if isinstance(each, PMLMessage) else None for each in messages]
    )
