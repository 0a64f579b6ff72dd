"""The request for one answer, made where a question comes in, and its prompt once it is
prefilled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from ragfuse.engine.ask import NO_LIMIT, Ask
from ragfuse.engine.question import Question, is_ids, mended_question, messages_of
from ragfuse.engine.runtime import Runtime
from ragfuse.engine.tools import TOOLS_AUTO, Tool, schemas_of, tools_of
from ragfuse.errors import InputError, about
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.process.jobs import EXITING
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.text.chat_messages import ChatMessage
from ragfuse.types.answer import StreamTrace, Thought
from ragfuse.types.plan import LoadPlan

Say = Callable[[str | Thought], None] | None
"""A callback for pieces of an answer as they are generated; None: the answer is not streamed."""
Prefilled = Callable[["PreparedPrompt"], object] | None
"""A callback for a prompt once it is prefilled, before its answer is generated; None: nobody asks.
"""


@dataclass(frozen=True)
class Request:
    """A checked question with its options, and the model that answers it.

    Args:
        question: A text, messages, token ids or a prompt in PML.
        ask: Options of the answer.
        runtime: The model and its tenant.
        tools: The tools that the prompt describes.
        ends: Events that end the generation once one of them is set.
        say: Callback for the answer's pieces as they are generated.
        prefilled: Callback for the prompt once it is prefilled.
        has_company: Whether other answers will be generated at the same time.
        came_s: `time.perf_counter()` when the request came.
    """

    question: Question
    ask: Ask
    runtime: Runtime
    tools: tuple[Tool, ...]
    ends: tuple[threading.Event, ...] = ()
    say: Say = None
    prefilled: Prefilled = None
    has_company: bool = False
    came_s: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(
        cls, question: Question, ask: Ask | None, runtime: Runtime, *ends: threading.Event
    ) -> Request:
        """Return the request for the answer to a question that came now; the end of the process
        ends it, too.

        Raises:
            InputError: The question, a tool or the grammar cannot be used.
        """
        ask = ask or Ask()
        with about("prompt"):
            return cls(mended_question(question), ask, runtime, tools_of(ask), (*ends, EXITING))

    @cached_property
    def messages(self) -> list[ChatMessage]:
        """The messages of the question; empty if it is token ids or a prompt in PML."""
        if isinstance(self.question, PMLPrompt) or is_ids(self.question):
            return []
        return messages_of(self.question)

    @cached_property
    def schemas(self) -> dict[str, str]:
        """The JSON schemas of the arguments of each tool that may be called, by the tool's name."""
        named, choice = schemas_of(self.tools), self.ask.tool_choice
        return {choice: named[choice]} if choice in named else named

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return bool(self.tools) and self.ask.tool_choice != TOOLS_AUTO

    @property
    def is_chat(self) -> bool:
        """Whether the prompt uses the chat template, rather than being a text or token ids to
        continue.
        """
        return bool(self.ask.tools) if isinstance(self.question, str) else not is_ids(self.question)

    @property
    def drops(self) -> bool:
        """Whether chunks may be left out of a prompt that is too long."""
        return (self.ask.overflow or self.runtime.settings.overflow) == "drop"

    def max_tokens(self, room: int | None = None) -> int | None:
        """Return the most tokens that the question itself gives its answer; None where it does not
        say.

        Args:
            room: What an answer without a limit gets.
        """
        asked = self.ask.options.get("max_new_tokens") or self.ask.max_tokens
        return room if asked == NO_LIMIT else asked

    def limit(self, window: int) -> int:
        """Return the most tokens of a prompt that is shortened to fit into so many with its answer.

        It leaves room for an answer of the requested length, but at most for a quarter of the
        window.
        """
        wanted = self.max_tokens() or self.runtime.settings.max_tokens
        return window - min(wanted, max(1, window // 4))

    @property
    def began_s(self) -> float:
        """`time.perf_counter()` when the request came, later by what it then waited for the model
        to be loaded.
        """
        return max(self.came_s, self.runtime.loaded_s)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left until the first token is wanted; None without a deadline."""
        deadline_s = self.ask.deadline_s
        return (
            None
            if deadline_s is None
            else max(0.0, self.began_s + deadline_s - time.perf_counter())
        )

    @property
    def is_abandoned(self) -> bool:
        """Whether it was ended as nobody reads the answer, rather than as it is long enough."""
        return any(end.is_set() and getattr(end, "is_abandoned", True) for end in self.ends)

    def check_open(self) -> None:
        """Raise InputError once one of `ends` is set."""
        if any(end.is_set() for end in self.ends):
            raise InputError(
                "The stream was closed or finished before the answer began. Ask again."
            )

    @property
    def model(self) -> HFModel:
        """The model that answers."""
        return self.runtime.model


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
