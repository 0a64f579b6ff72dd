"""Prompts in PML as LangChain's: a template whose output `ChatRagFuse` and `RagFuseLLM` answer over encoded modules.

What is handed on is a message, or a text, of a type of its own; a message or a text that only looks like PML is text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import RunnableBinding
from pydantic import ConfigDict, Field, PrivateAttr

from langchain_ragfuse.base import RagFuseModel
from langchain_ragfuse.progress import Progress, shown
from ragfuse import Engine, Ingested, InputError, PMLTemplate

T = TypeVar("T")
Filled = PMLTemplate.Filled
Syntax = Literal["f-string", "mustache", "jinja2"]


class PMLMessage(HumanMessage):
    """A prompt in PML as a message: its content is for people, models of ragfuse answer what it was made from."""

    _filled: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, filled: Filled) -> PMLMessage:
        """The message of a filled template."""
        made = cls(content=str(filled))
        made._filled = filled
        return made

    @property
    def filled(self) -> Filled:
        """What it was made from."""
        return cast(Filled, self._filled)


class PMLPromptValue(PromptValue):
    """What a `PMLPromptTemplate` gives: a message for chat models, a text for others."""

    _filled: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, filled: Filled) -> PMLPromptValue:
        """The value of a filled template."""
        made = cls()
        made._filled = filled
        return made

    def to_string(self) -> str:
        """A text that models of ragfuse know for a prompt in PML."""
        return cast(Filled, self._filled)

    def to_messages(self) -> list[BaseMessage]:
        """One message."""
        return [PMLMessage.of(self._filled)]


class PMLPromptTemplate(BasePromptTemplate[str]):
    """A prompt template whose texts were encoded once: `PMLPromptTemplate(schema, prompt) | llm`.

    schema: PML, a file, what `parse_schema` gives, or a prompt function. prompt: PML or a file, with `{variable}`
    wherever text stands (syntax: "mustache" or "jinja2" for `{{ variable }}`); None: the prompt function's parameters
    are the variables, or the schema's own. question: the text of one more message of a user's. Values are text,
    whatever they look like. The schema is registered with the model's engine at the first question, or by `register`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    template: PMLTemplate = Field(exclude=True, repr=False)
    progress: Any = Field(default=True, exclude=True, repr=False)
    """True: a bar on stderr if that is a terminal, while the schema is encoded; a callable hears of every module."""

    def __init__(
        self,
        schema: Any = None,
        prompt: Any = None,
        *,
        question: str = "",
        syntax: Syntax = "f-string",
        template: PMLTemplate | None = None,
        partial_variables: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        template = PMLTemplate(schema, prompt, question, syntax) if template is None else template
        partial = dict(partial_variables or {})
        fields["optional_variables"] = [name for name in template.optional if name not in partial]
        fields["input_variables"] = [n for n in template.variables if n not in (*partial, *template.optional)]
        super().__init__(template=template, partial_variables=partial, **fields)

    @classmethod
    def from_template(
        cls,
        name: str,
        template: Any,
        max_tokens: int | Mapping[str, int],
        question: str = "",
        syntax: Syntax = "f-string",
        **fields: Any,
    ) -> PMLPromptTemplate:
        """That of a `ChatPromptTemplate`, a `PromptTemplate`, a text, or (role, text) pairs, by its variables.

        name: of the schema. max_tokens: room for every variable, or for each. PMLError for what no schema can hold.
        """
        partial = {**(getattr(template, "partial_variables", None) or {}), **fields.pop("partial_variables", {})}
        made = PMLTemplate.of(name, template, max_tokens, question, syntax)
        return cls(template=made, partial_variables=partial, **fields)

    def register(self, llm: Any, progress: Progress = True) -> Ingested:
        """Encode what is not kept yet of the schema's modules, ahead of the questions. llm: a model, bound or not."""
        while isinstance(llm, RunnableBinding):
            llm = llm.bound
        if not isinstance(llm, RagFuseModel):
            raise InputError(f"Wanted a ChatRagFuse or RagFuseLLM for a schema, found a {type(llm).__name__}.")
        with shown(progress, None, "Encoding modules") as report:
            return llm.get_engine().register(self.template.schema, report).done

    def format_prompt(self, **kwargs: Any) -> PromptValue:
        """The prompt with these values, for any model of ragfuse."""
        return PMLPromptValue.of(self._filled(kwargs))

    async def aformat_prompt(self, **kwargs: Any) -> PromptValue:
        """The same."""
        return self.format_prompt(**kwargs)

    def format(self, **kwargs: Any) -> str:
        """The same as a text that a `RagFuseLLM` knows for a prompt in PML."""
        return self._filled(kwargs)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """No: it holds a schema that was read."""
        return False

    @property
    def _prompt_type(self) -> str:
        return "ragfuse-pml"

    def _filled(self, values: Mapping[str, Any]) -> Filled:
        return self.template.fill(self._merge_partial_and_user_variables(**values), self.progress)


def pml_of(messages: Sequence[BaseMessage]) -> Filled | None:
    """The prompt in PML that messages are, None where they are others; InputError where some stand beside one."""
    return PMLTemplate.only([each.filled if isinstance(each, PMLMessage) else None for each in messages])


def ready(prompt: T | Filled, engine: Engine) -> Any:
    """What an engine answers; of a prompt in PML, whose schema it knows from now on."""
    if not isinstance(prompt, Filled):
        return prompt
    if not engine.schemas.has(prompt.schema):
        with shown(prompt.progress, None, "Encoding modules") as report:
            engine.schemas.ensure(prompt.schema, report)
    return prompt.request
