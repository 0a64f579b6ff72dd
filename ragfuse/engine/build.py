"""Stage 1, build: turn a question and the history of its conversation into a prompt that fits the model's context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ragfuse.engine.ask import Ask
from ragfuse.engine.constraints import offered_tools
from ragfuse.engine.context_window import check_messages, check_request
from ragfuse.engine.history import ConversationHistory
from ragfuse.engine.options import remaining_context
from ragfuse.engine.overflow import check_answer_fits, drops, limit_of
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.question import Question, is_bare_text, is_ids, mended_documents, mended_question, messages_of
from ragfuse.engine.request import Request
from ragfuse.engine.runtime import Runtime
from ragfuse.engine.schema_service import SchemaService
from ragfuse.errors import about
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.settings import Settings
from ragfuse.types.prompt import Prompt


@dataclass(frozen=True)
class BuildStage:
    """Builds the prompts of an engine from its known chunks, conversations and schemas."""

    settings: Settings
    runtime: Runtime
    prompts: PromptBuilder
    history: ConversationHistory
    schemas: SchemaService

    @about("prompt")
    def build(self, request: Request) -> Prompt:
        """Return the prompt of a question; where it is too long and overflow is "drop", without its last chunks.

        Raises:
            OverlongError: The prompt or the length of its answer does not fit the model's context, and nothing more
                may be left out.
            InputError: The question is invalid.
        """
        question, ask = request.question, request.ask
        if isinstance(question, PMLPrompt):
            bound = self.schemas.prompt(question, ask)
            check_answer_fits(bound, ask, request.model, False)
            return bound
        tools, question = offered_tools(ask), mended_question(question)
        self.check_length(question, ask)
        limit = limit_of(ask, self.settings, request.model)
        documents = list(mended_documents(ask.documents))
        may_shorten = self.history.may_shorten(question, ask)
        make = partial(self.prompts.prompt, digest=self.runtime.digest, tools=tools, ask=ask, check=not may_shorten)
        prompt = self.history.fitted(question, ask, lambda messages, n: make(messages, leave_out=n), limit)
        leaves_out = limit is not None or (may_shorten and self.history.has_earlier(prompt, question))
        check_answer_fits(prompt, ask, request.model, leaves_out)
        if documents and all(segment.kind != "chunk" for segment in prompt.segments):
            return replace(prompt, altered=self.prompts.altered(question, documents))
        return prompt

    def check_length(self, question: Question, ask: Ask) -> None:
        """Raise OverlongError for a question that cannot fit the model's context, without tokenising it.

        A question that passes may still turn out too long once it is tokenised. Chunks and earlier turns that may be
        left out do not count.
        """
        model = self.runtime.model
        if isinstance(question, PMLPrompt):
            check_request(question, model)
        elif is_ids(question):
            remaining_context(len(question), model)
        elif not drops(ask, self.settings):
            tools, may_shorten = offered_tools(ask), self.history.may_shorten(question, ask)
            is_text = is_bare_text(question, ask, tools) and ask.session is None
            has_documents = bool(ask.documents)
            check_messages(
                messages_of(question), model, tools, may_shorten, has_documents=has_documents, is_text=is_text
            )
