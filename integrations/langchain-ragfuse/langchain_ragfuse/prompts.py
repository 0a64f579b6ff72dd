"""A LangChain prompt template over a PML schema (Prompt Cache), for `ChatRagFuse` and `RagFuseLLM`.

Its output has a special type; ordinary messages or texts that look like PML stay text.
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
    """A message with a filled PML template for ragfuse's models; its content is for display."""

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
    """The output of a `PMLPromptTemplate`: a message for chat models, a text for text models."""

    _filled: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, filled: Filled) -> PMLPromptValue:
        """Wrap a filled template, so that it reaches the model without becoming plain text."""
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
    """A prompt template whose fixed texts are encoded once: `PMLPromptTemplate(schema, prompt) |
    llm`.

    Values are always text, even if they look like PML. The schema is registered with the model's
    engine at the first question, or by `register`.

    Args:
        schema: PML text, the path of a PML file, a parsed schema, or a prompt function.
        prompt: PML text or the path of a PML file, with `{variable}` anywhere in its texts; None:
            the variables are the parameters of the prompt function or of the schema.
        question: Text of another user message, which may have variables.
        template: A `PMLTemplate`, instead of the arguments above.
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
            llm: A ChatRagFuse or RagFuseLLM, possibly bound.
            progress: True: a bar on a terminal's stderr. A callable is called after every module.
        """
        with shown(progress, None, "Encoding modules") as report:
            return engine_of(unbound(llm)).schemas.register(self.template.schema, report).done

    def format_prompt(self, **kwargs: Any) -> PromptValue:
        """Return the prompt with these values, for `ChatRagFuse` or `RagFuseLLM`."""
        return PMLPromptValue.of(self._filled(kwargs))

    async def aformat_prompt(self, **kwargs: Any) -> PromptValue:
        """Return the prompt with these values, like `format_prompt`."""
        return self.format_prompt(**kwargs)

    def format(self, **kwargs: Any) -> str:
        """Return the prompt as a text that `RagFuseLLM` recognises as a filled template."""
        return self._filled(kwargs)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return False: a parsed schema cannot be serialised."""
        return False

    @property
    def _prompt_type(self) -> str:
        return "ragfuse-pml"

    def _filled(self, values: Mapping[str, Any]) -> Filled:
        return self.template.fill(self._merge_partial_and_user_variables(**values))


def pml_of(messages: Sequence[BaseMessage]) -> Filled | None:
    """Return the filled template of a single `PMLMessage`; None for ordinary messages. InputError
    if a PMLMessage is not the only message.
    """
    return PMLTemplate.only(
        [each.filled if isinstance(each, PMLMessage) else None for each in messages]
    )
