"""The request for one answer, which every stage receives, and its prompt once it is prefilled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ragfuse.engine.ask import Ask
from ragfuse.engine.question import Question, is_ids
from ragfuse.engine.runtime import Runtime
from ragfuse.errors import InputError
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.types.answer import StreamTrace, Thought
from ragfuse.types.plan import LoadPlan
from ragfuse.types.profiles import ModelProfile

Say = Callable[[str | Thought], None] | None
"""A callback for pieces of an answer as they are generated; None: the answer is not streamed."""
Prefilled = Callable[["PreparedPrompt"], object] | None
"""A callback for a prompt once it is prefilled, before its answer is generated; None: nobody asks.
"""


@dataclass(frozen=True)
class Request:
    """A question with its options and the model that answers it.

    Args:
        question: A text, messages, token ids or a prompt in PML.
        ask: Options of the answer.
        runtime: The model and its tenant.
        came_s: `time.perf_counter()` when the request came.
        ends: Events that end the generation once one of them is set.
        say: Callback for the answer's pieces as they are generated.
        prefilled: Callback for the prompt once it is prefilled.
        has_company: Whether other answers will be generated at the same time.
    """

    question: Question
    ask: Ask
    runtime: Runtime
    came_s: float
    ends: tuple[threading.Event, ...] = ()
    say: Say = None
    prefilled: Prefilled = None
    has_company: bool = False

    @property
    def began_s(self) -> float:
        """`time.perf_counter()` when the request came, later by what it then waited for the model
        to be loaded.
        """
        return self.runtime.without_loading(self.came_s)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left until the first token is wanted; None without a deadline."""
        deadline_s = self.ask.deadline_s
        return (
            None
            if deadline_s is None
            else max(0.0, self.began_s + deadline_s - time.perf_counter())
        )

    def check_open(self) -> None:
        """Raise InputError once one of `ends` is set."""
        if any(end.is_set() for end in self.ends):
            raise InputError(
                "The stream was closed or finished before the answer began. Ask again."
            )

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
        """Whether the prompt uses the chat template, rather than being a text or token ids to
        continue.
        """
        if isinstance(self.question, PMLPrompt):
            return not self.question.ending
        return bool(self.ask.tools) if isinstance(self.question, str) else not is_ids(self.question)


@dataclass(frozen=True)
class PreparedPrompt:
    """A prefilled prompt whose answer can be generated.

    Args:
        request: The question that it is.
        plan: The plan that was carried out.
        prefill: The result of the prefill.
        load_s: Seconds spent loading.
        wait_s: Seconds that computing waited for loading.
        compute_s: Seconds spent computing.
        stream: How KV was streamed for it; None where nothing was.
    """

    request: Request
    plan: LoadPlan
    prefill: Prefill
    load_s: float
    wait_s: float
    compute_s: float
    stream: StreamTrace | None = None

    def n_held(self, n_ids: int) -> int:
        """Return how many rows of the prompt and its answer of `n_ids` tokens are in the prompt's
        KV cache.

        The answer's last token never has a row. Where the model's own cache took the answer's, it
        has none.
        """
        cache, n_prompt = self.prefill.cache, len(self.plan.prompt)
        if cache is None or cache.length != n_prompt + n_ids - 1:
            return n_prompt
        return cache.length
