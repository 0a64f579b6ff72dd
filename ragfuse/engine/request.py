"""The request for one answer, which every stage receives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from ragfuse.engine.ask import Ask
from ragfuse.engine.constraints import OutputConstraints
from ragfuse.engine.question import Question, is_ids
from ragfuse.engine.runtime import Runtime
from ragfuse.engine.trace_builder import PreparedPrompt
from ragfuse.errors import InputError
from ragfuse.hf.model import HFModel
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.types.answer import Thought
from ragfuse.types.profiles import ModelProfile

Say = Callable[[str | Thought], None] | None
"""A callback for pieces of an answer as they are generated; None: the answer is not streamed."""
Prefilled = Callable[[PreparedPrompt], object] | None
"""A callback for a prompt once it is prefilled, before its answer is generated; None: nobody asks."""


@dataclass(frozen=True)
class Request:
    """A question with its options and the model that answers it.

    Args:
        question: A text, messages, token ids or a prompt in PML.
        ask: Options of the answer.
        runtime: The model and its tenant.
        began_s: `time.perf_counter()` when the request came.
        constraints: Tools, grammar and stop strings of the answer; None where only a prompt is wanted.
        say: Callback for the answer's pieces as they are generated.
        ends: Events that end the generation once one of them is set.
        has_company: Whether other answers will be generated at the same time.
        prefilled: Callback for the prompt once it is prefilled.
    """

    question: Question
    ask: Ask
    runtime: Runtime
    began_s: float
    constraints: OutputConstraints | None = None
    say: Say = None
    ends: tuple[threading.Event, ...] = ()
    has_company: bool = False
    prefilled: Prefilled = None

    def after(self, spent_s: float) -> Request:
        """Return the request with its deadline shortened by `spent_s` seconds, as its prompt is planned again."""
        if self.ask.deadline_s is None:
            return self
        return replace(self, ask=replace(self.ask, deadline_s=max(0.0, self.ask.deadline_s - spent_s)))

    def check_open(self) -> None:
        """Raise InputError once one of `ends` is set."""
        if any(end.is_set() for end in self.ends):
            raise InputError("The stream was closed or finished before the answer began. Ask again.")

    @property
    def profile(self) -> ModelProfile:
        """The model's profile."""
        return self.runtime.profile

    @property
    def model(self) -> HFModel:
        """The model that answers."""
        return self.runtime.model

    @property
    def is_chat(self) -> bool:
        """Whether the prompt uses the chat template, rather than being a text or token ids to continue."""
        if isinstance(self.question, PMLPrompt):
            return not self.question.ending
        return bool(self.ask.tools) if isinstance(self.question, str) else not is_ids(self.question)
