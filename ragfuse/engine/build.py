"""Stage 1, build: turn a question and the history of its conversation into a prompt that fits the model's context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ragfuse.engine.constraints import offered_tools
from ragfuse.engine.history import ConversationHistory
from ragfuse.engine.overflow import check_answer_fits, limit_of
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.question import is_ids, mended_question, messages_of
from ragfuse.engine.request import Request
from ragfuse.engine.schema_service import SchemaService
from ragfuse.errors import about
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.types.prompt import Prompt


@dataclass(frozen=True)
class BuildStage:
    """Builds the prompts of an engine from its known chunks, conversations and schemas."""

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
        limit = limit_of(ask, request.runtime.settings, request.model)
        may_shorten = self.history.may_shorten(question, ask)
        make = partial(self.prompts.prompt, digest=request.runtime.digest, tools=tools, ask=ask, check=not may_shorten)
        prompt = self.history.fitted(question, ask, lambda messages, n: make(messages, leave_out=n), limit)
        leaves_out = limit is not None or (may_shorten and self.history.has_earlier(prompt, question))
        check_answer_fits(prompt, ask, request.model, leaves_out)
        if not ask.documents or any(segment.kind == "chunk" for segment in prompt.segments):
            return prompt
        contents = "" if is_ids(question) else "\n".join(message.text for message in messages_of(question))
        return replace(prompt, altered=all(text.strip() not in contents for text, _ in ask.documents))
