"""Stage 1, build: from a question to its prompt, with what is known of its conversation, as long as the model takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ragfuse.engine.constraints import offered_tools
from ragfuse.engine.context_window import check_request, check_turns
from ragfuse.engine.history import ConversationHistory
from ragfuse.engine.options import Ask, remaining_context
from ragfuse.engine.overflow import drops, limit_of
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.question import Question, is_bare_text, is_ids, mended_documents, mended_question, turns_of
from ragfuse.engine.request import Request
from ragfuse.engine.runtime import Runtime
from ragfuse.engine.schema_service import SchemaService
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.settings import Settings
from ragfuse.types.prompt import Prompt


@dataclass(frozen=True)
class BuildStage:
    """Builds an engine's prompts, over its known texts, conversations and schemas."""

    settings: Settings
    runtime: Runtime
    prompts: PromptBuilder
    history: ConversationHistory
    schemas: SchemaService

    def build(self, request: Request) -> Prompt:
        """Return the prompt of a question; without its last chunks where it is too long and they may be left out.

        Raises:
            OverlongError: It is longer than the model takes, and nothing of it may be left out.
            InputError: The question is none.
        """
        question, ask = request.question, request.ask
        if isinstance(question, PMLPrompt):
            return self.schemas.prompt(question, ask)
        tools, question = offered_tools(ask), mended_question(question)
        self.check_length(question, ask)
        limit = limit_of(ask, self.settings, request.model)
        documents = list(mended_documents(ask.documents))
        if self.settings.learn != "off":
            self.prompts.hear(self.runtime.digest, documents, question)
        may_shorten = self.history.may_shorten(question, ask)
        make = partial(self.prompts.prompt, digest=self.runtime.digest, tools=tools, ask=ask, check=not may_shorten)
        prompt = self.history.fitted(question, ask, lambda said, n: make(said, leave_out=n), limit)
        if documents and all(segment.kind != "chunk" for segment in prompt.segments):
            return replace(prompt, altered=self.prompts.altered(question, documents))
        return prompt

    def check_length(self, question: Question, ask: Ask) -> None:
        """Raise OverlongError for a question that can never fit the model, before it is searched or tokenised.

        One that passes may still be too long: that is known when it is tokenised. Where chunks may be left out, or
        earlier turns of a conversation, only what has to stay counts.
        """
        model = self.runtime.model
        if isinstance(question, PMLPrompt):
            check_request(question, model)
        elif is_ids(question):
            remaining_context(len(question), model)
        elif not drops(ask, self.settings):
            tools, may_shorten = offered_tools(ask), self.history.may_shorten(question, ask)
            is_text = is_bare_text(question, ask, tools) and ask.session is None
            marker = self.prompts.marker
            check_turns(turns_of(question), model, tools, may_shorten, marker=marker, is_text=is_text)
