"""A callback handler that records retrieved documents, so that prompts reuse the documents' KV.

The documents need no indexing. Importing `ChatRagFuse` or `RagFuseLLM` registers the handler for
all LangChain callback runs in the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.messages import BaseMessage
from langchain_core.runnables import ensure_config
from langchain_core.tracers.context import register_configure_hook

from langchain_ragfuse.messages import DOCUMENTS
from ragfuse import RetrievalRuns

_BATCH_PARENTS: ContextVar[tuple[UUID | None, ...]] = ContextVar(
    "ragfuse_langchain_asking", default=()
)


class Listener(BaseCallbackHandler):
    """A callback handler that records the documents in results, and in the inputs of chains."""

    ignore_llm = ignore_chat_model = ignore_retry = ignore_custom_event = True

    def __init__(self) -> None:
        self.runs = RetrievalRuns("langchain")

    def __reduce__(self) -> str:
        """Let every copy be `LISTENER` itself, because LangChain copies configured handlers."""
        return "LISTENER"

    @property
    def run_inline(self) -> bool:  # type: ignore[override]
        """True if LangChain should call this handler in the task that reports the event.

        False inside LangChain's `on_llm_start`: with True, that method would skip all other
        handlers. This handler does not need that event.
        """
        caller = sys._getframe(1)
        # Before Python 3.12, a list comprehension has a frame of its own.
        callers = (caller, caller.f_back)
        return not any(
            frame is not None and frame.f_code.co_name == "on_llm_start" for frame in callers
        )

    def on_chain_start(
        self,
        serialized: Any,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the start of a chain and the documents in the chain's inputs."""
        self.runs.begin(run_id, parent_run_id, DOCUMENTS(inputs))

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the end of a run and the documents in the run's outputs.

        The inputs are searched, too, because a streamed chain's inputs are known only at the end.
        """
        self.runs.end(run_id, DOCUMENTS(outputs, kwargs.get("inputs")))

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the end of a failed run."""
        self.runs.end(run_id)

    def on_tool_start(
        self,
        serialized: Any,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the start of a tool run or retriever run."""
        self.runs.begin(run_id, parent_run_id)

    on_retriever_start = on_tool_start
    on_tool_end = on_chain_end
    on_retriever_end = on_chain_end  # type: ignore[assignment]
    on_tool_error = on_retriever_error = on_chain_error


LISTENER = Listener()
register_configure_hook(ContextVar("ragfuse_listener", default=LISTENER), inheritable=True)


def retrieved_for(
    run_manager: Any, prompts: Sequence[str | BaseMessage]
) -> tuple[tuple[str, str], ...]:
    """Return (text, source) of the retrieved documents that the prompts contain."""
    # A stream has no run manager. The enclosing run is then in LangChain's context.
    managers = run_manager, ensure_config().get("callbacks")
    parents = (*(getattr(each, "parent_run_id", None) for each in managers), *_BATCH_PARENTS.get())
    return LISTENER.runs.retrieved(
        parents, lambda: "\n".join(each if isinstance(each, str) else each.text for each in prompts)
    )


@contextmanager
def batch_parents(callbacks: Any) -> Iterator[None]:
    """Record the parent runs of all prompts in a batch until the block ends.

    LangChain passes only the parent run of the first prompt to the model.
    """
    managers = callbacks if isinstance(callbacks, list) else []
    parents = tuple(
        manager.parent_run_id for manager in managers if isinstance(manager, BaseCallbackManager)
    )
    token = _BATCH_PARENTS.set(parents)
    try:
        yield
    finally:
        _BATCH_PARENTS.reset(token)
