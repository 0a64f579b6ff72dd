"""Prompts in PML as LlamaIndex's: a prompt template whose output `RagFuseLLM` answers over encoded modules.

What is handed on is a message, or a text, of a type of its own; a message or a text that only looks like PML is text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.prompts import BasePromptTemplate
from tqdm.auto import tqdm

from ragfuse import Engine, Ingested, InputError, PMLTemplate

T = TypeVar("T")
Filled = PMLTemplate.Filled
Syntax = Literal["f-string", "mustache", "jinja2"]
Progress = Callable[[Ingested], None]


class PMLMessage(ChatMessage):
    """A prompt in PML as a message: its content is for people, `RagFuseLLM` answers what it was made from."""

    _filled: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, filled: Filled) -> PMLMessage:
        """The message of a filled template."""
        made = cls(role=MessageRole.USER, content=str(filled))
        made._filled = filled
        return made

    @property
    def filled(self) -> Filled | None:
        """What it was made from."""
        return cast("Filled | None", self._filled)


class PMLPromptTemplate(BasePromptTemplate):
    """A prompt template whose texts were encoded once: `llm.predict(PMLPromptTemplate(schema, prompt), **values)`.

    schema: PML, a file, what `parse_schema` gives, or a prompt function. prompt: PML or a file, with `{variable}`
    wherever text stands (syntax: "mustache" or "jinja2" for `{{ variable }}`); None: the prompt function's parameters
    are the variables, or the schema's own. question: the text of one more message of a user's. Values are text,
    whatever they look like. The schema is registered with the LLM's engine at the first question, or by `register`.
    """

    template: PMLTemplate = Field(exclude=True, repr=False)
    show_progress: bool = Field(default=False, exclude=True, description="Show a bar while the schema is encoded.")

    def __init__(
        self,
        schema: Any = None,
        prompt: Any = None,
        question: str = "",
        syntax: Syntax = "f-string",
        template: PMLTemplate | None = None,
        metadata: dict[str, Any] | None = None,
        template_var_mappings: dict[str, Any] | None = None,
        function_mappings: dict[str, Callable[..., Any]] | None = None,
        show_progress: bool = False,
        **kwargs: Any,
    ) -> None:
        template = PMLTemplate(schema, prompt, question, syntax) if template is None else template
        super().__init__(
            template=template,
            template_vars=list(template.variables),
            kwargs=kwargs,
            metadata=metadata or {},
            output_parser=None,
            template_var_mappings=template_var_mappings,
            function_mappings=function_mappings,
            show_progress=show_progress,
        )

    @classmethod
    def from_template(
        cls,
        name: str,
        template: Any,
        max_tokens: int | Mapping[str, int],
        question: str = "",
        syntax: Syntax = "jinja2",
        **fields: Any,
    ) -> PMLPromptTemplate:
        """That of a `RichPromptTemplate`, `ChatPromptTemplate`, `PromptTemplate`, a text, or (role, text) pairs.

        name: of the schema. max_tokens: room for every variable, or for each. Values that the template holds, and its
        mappings, are kept. PMLError for what no schema can hold.
        """
        held = {"template_var_mappings", "function_mappings"}
        kept = {each: getattr(template, each, None) for each in held}
        values = getattr(template, "kwargs", None) or {}
        made = PMLTemplate.of(name, template, max_tokens, question, syntax)
        return cls(template=made, **{**kept, **values, **fields})

    def register(self, llm: Any, progress: Progress | None = None) -> Ingested:
        """Encode what is not kept yet of the schema's modules, ahead of the questions; `progress` hears of each."""
        if not hasattr(llm, "get_engine"):
            raise InputError(f"Wanted a RagFuseLLM for a schema, found a {type(llm).__name__}.")
        return _registered(llm.get_engine(), self.template.schema, self.show_progress, progress)

    def partial_format(self, **kwargs: Any) -> PMLPromptTemplate:
        """The same with some of its values."""
        return self.model_copy(update={"kwargs": {**self.kwargs, **kwargs}})

    def format(self, llm: BaseLLM | None = None, **kwargs: Any) -> str:
        """The prompt as a text that a `RagFuseLLM` knows for one in PML: `llm.complete(text, formatted=True)`."""
        return self._filled(kwargs)

    def format_messages(self, llm: BaseLLM | None = None, **kwargs: Any) -> list[ChatMessage]:
        """The prompt as one message, for `llm.chat`."""
        return [PMLMessage.of(self._filled(kwargs))]

    def get_template(self, llm: BaseLLM | None = None) -> str:
        """What it is, for events."""
        return repr(self.template)

    def _filled(self, given: Mapping[str, Any]) -> Filled:
        values = self._map_all_vars({**self.kwargs, **given})
        return self.template.fill(values, self.show_progress)


def pml_of(messages: Sequence[ChatMessage]) -> Filled | None:
    """The prompt in PML that messages are, None where they are others; InputError where some stand beside one."""
    return PMLTemplate.only([each.filled if isinstance(each, PMLMessage) else None for each in messages])


def ready(prompt: T | Filled, engine: Engine) -> Any:
    """What an engine answers; of a prompt in PML, whose schema it knows from now on."""
    if not isinstance(prompt, Filled):
        return prompt
    if not engine.schemas.has(prompt.schema):
        _registered(engine, prompt.schema, bool(prompt.progress), None, once=True)
    return prompt.request


def _registered(engine: Engine, schema: Any, shown: bool, progress: Progress | None, once: bool = False) -> Ingested:
    with tqdm(desc="Encoding modules", unit="module", disable=None if shown else True) as bar:

        def report(done: Ingested) -> None:
            bar.update(done.chunks - bar.n)
            if progress is not None:
                progress(done)

        if once:
            found = engine.schemas.ensure(schema, report)
            return Ingested() if found is None else found.done
        return engine.register(schema, report).done
