"""The four programs, ready to be asked: an answer comes with its chunks, usage and time to the
first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ragfuse.calibration.case import NEW_TOKENS, PROMPT_TEXTS
from ragfuse.calibration.runner import Sample
from ragfuse.engine.engine import Engine
from ragfuse.models import resolve_embedder, resolve_llm


@dataclass(frozen=True)
class Said:
    """One answer: its text, the chunks it was given, tokens reused and in all (0 where the model
    does not say), seconds to the first of it.
    """

    text: str
    documents: tuple[str, ...]
    reused: int
    tokens: int
    first: Sample


Ask = Callable[[str], Said]
Make = Callable[[Engine, Sequence[str]], Ask]


def _timed(
    stream: Callable[[], Iterable[Any]], text: Callable[[Any], Any]
) -> tuple[list[Any], Sample]:
    """All that a stream says, and how long the first text of it took; parts without any are not
    counted.

    Hugging Face's streamers say an empty part at the first token and hold a word back until it is
    whole.
    """
    cpu, wall = time.process_time(), time.perf_counter()
    parts, first = [], None
    for part in stream():
        if first is None and text(part):
            first = Sample(time.process_time() - cpu, time.perf_counter() - wall)
        parts.append(part)
    return parts, first or Sample(time.process_time() - cpu, time.perf_counter() - wall)


def joined(documents: Sequence[Any]) -> str:
    """Chunks as a chain writes them into a prompt."""
    return "\n\n".join(document.page_content for document in documents)


def _langchain_theirs(engine: Engine, splits: Sequence[str]) -> Ask:
    from ragfuse_bench.chains import langchain_before

    greedy = {"max_new_tokens": NEW_TOKENS["answer"], "do_sample": False}
    own = {"pipeline_kwargs": greedy, "model_kwargs": {"dtype": engine.settings.dtype}}
    return _langchain(langchain_before.build, _folder(engine), own, engine, splits)


def _langchain_ours(engine: Engine, splits: Sequence[str]) -> Ask:
    from ragfuse_bench.chains import langchain_after

    own = {"engine": engine, "max_tokens": NEW_TOKENS["answer"]}
    return _langchain(langchain_after.build, engine.settings.model, own, engine, splits)


def _langchain(
    build: Callable[..., Any],
    model: str,
    own: Mapping[str, Any],
    engine: Engine,
    splits: Sequence[str],
) -> Ask:
    """Ask a chain: its stream, and what the callbacks of its retriever say was found."""
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_core.documents import Document
    from langchain_huggingface import HuggingFaceEmbeddings

    class Seen(BaseCallbackHandler):
        """Keeps the chunks that were retrieved last."""

        texts: tuple[str, ...] = ()

        def on_retriever_end(self, documents: Any, **named: Any) -> None:
            """What the chain goes on with."""
            self.texts = tuple(document.page_content for document in documents)

    path = _embedder(engine)
    documents = [Document(page_content=text) for text in splits]
    template = "{context}".join(PROMPT_TEXTS["answer"])
    chain = build(model, documents, HuggingFaceEmbeddings(model_name=path), template, joined, own)

    def ask(question: str) -> Said:
        seen = Seen()
        parts, first = _timed(
            lambda: chain.stream(question, config={"callbacks": [seen]}), lambda part: part.content
        )
        whole = sum(parts[1:], parts[0])
        usage = whole.usage_metadata or {}
        reused = usage.get("input_token_details", {}).get("cache_read", 0)
        return Said(
            str(whole.content).strip(), seen.texts, reused, usage.get("input_tokens", 0), first
        )

    return ask


def _llama_index_theirs(engine: Engine, splits: Sequence[str]) -> Ask:
    from ragfuse_bench.chains import llama_index_before

    window = engine.model.max_context
    own = {
        "max_new_tokens": NEW_TOKENS["answer"],
        "context_window": window,
        "device_map": engine.settings.device,
        "model_kwargs": {"dtype": engine.settings.dtype},
        "generate_kwargs": {"do_sample": False},
        "tokenizer_outputs_to_remove": ["token_type_ids"],
    }
    return _llama_index(llama_index_before.build, _folder(engine), own, engine, splits)


def _llama_index_ours(engine: Engine, splits: Sequence[str]) -> Ask:
    from ragfuse_bench.chains import llama_index_after

    own = {"engine": engine, "max_tokens": NEW_TOKENS["answer"]}
    return _llama_index(llama_index_after.build, engine.settings.model, own, engine, splits)


def _llama_index(
    build: Callable[..., Any],
    model: str,
    own: Mapping[str, Any],
    engine: Engine,
    splits: Sequence[str],
) -> Ask:
    """Ask a query engine: its stream, its source nodes, and the usage that LlamaIndex's events
    carry.
    """
    from llama_index.core.instrumentation.event_handlers import BaseEventHandler
    from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
    from llama_index.core.schema import TextNode
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding
    from llama_index_instrumentation import get_dispatcher

    class Usage(BaseEventHandler):
        """Keeps the usage of the chat that ended last."""

        last: dict[str, Any]

        def handle(self, event: Any, **named: Any) -> None:
            """Other events are left alone."""
            raw = getattr(getattr(event, "response", None), "raw", None)
            if isinstance(event, LLMChatEndEvent) and isinstance(raw, dict) and "usage" in raw:
                self.last = raw["usage"]

    path = _embedder(engine)
    nodes = [TextNode(text=text) for text in splits]
    before, after = PROMPT_TEXTS["answer"]
    template = before + "{context_str}" + after.replace("{question}", "{query_str}")
    queries = build(
        model, nodes, HuggingFaceEmbedding(model_name=path, device="cpu"), template, own
    )

    def ask(question: str) -> Said:
        usage, dispatcher = Usage(last={}), get_dispatcher()
        held: list[Any] = []

        def stream() -> Iterator[str]:
            held.append(queries.query(question))
            yield from held[0].response_gen

        dispatcher.add_event_handler(usage)
        try:
            parts, first = _timed(stream, str)
        finally:
            dispatcher.event_handlers.remove(usage)
        found = tuple(str(each.node.get_content()) for each in held[0].source_nodes)
        reused, tokens = (
            usage.last.get("prompt_tokens_details", {}).get("cached_tokens", 0),
            usage.last.get("prompt_tokens", 0),
        )
        return Said("".join(parts).strip(), found, reused, tokens, first)

    return ask


def _folder(engine: Engine) -> str:
    """The weights' folder, or their id: an embedded model's name means nothing to others."""
    return str(resolve_llm(engine.settings.model, engine.settings.home))


def _embedder(engine: Engine) -> str:
    return str(resolve_embedder(engine.settings.embedder, engine.settings.home))


MAKERS: Mapping[str, tuple[Make, Make]] = MappingProxyType(
    {
        "langchain": (_langchain_theirs, _langchain_ours),
        "llama_index": (_llama_index_theirs, _llama_index_ours),
    }
)
"""Theirs and ours, by framework."""
