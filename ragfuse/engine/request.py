"""One question on its way to an answer: what every stage of the road is handed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ragfuse.engine.constraints import OutputConstraints
from ragfuse.engine.options import Ask
from ragfuse.engine.question import Question, is_ids
from ragfuse.engine.runtime import Runtime
from ragfuse.hf.model import HFModel
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.types.answer import Thought
from ragfuse.types.profiles import ModelProfile

Say = Callable[[str | Thought], None] | None
"""Hears pieces of an answer as they are written; None: nobody does."""


@dataclass(frozen=True)
class Request:
    """A question, how it is to be answered, and by what.

    Args:
        question: As it was asked.
        ask: How it is to be answered.
        runtime: The model and its tenant.
        began_s: `time.perf_counter()` when it came.
        constraints: How the answer is held to a grammar or to tools, and read; None where only a prompt is wanted.
        say: Hears the answer while it is written.
        ends: Once one of these is set, the answer is written no further.
        has_company: Whether other answers are about to be written beside it.
    """

    question: Question
    ask: Ask
    runtime: Runtime
    began_s: float
    constraints: OutputConstraints | None = None
    say: Say = None
    ends: tuple[threading.Event, ...] = ()
    has_company: bool = False

    @property
    def profile(self) -> ModelProfile:
        """What is known of the model."""
        return self.runtime.profile

    @property
    def model(self) -> HFModel:
        """The model that answers."""
        return self.runtime.model

    @property
    def is_chat(self) -> bool:
        """Whether the model answers messages in its chat template, rather than continuing a text or token ids."""
        if isinstance(self.question, PMLPrompt):
            return not self.question.ending
        return bool(self.ask.tools) if isinstance(self.question, str) else not is_ids(self.question)
