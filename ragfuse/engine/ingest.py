"""Chunks of documents: encode them now, recognise them later, or delete them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ragfuse.engine.background import EncodeJob
from ragfuse.engine.overflow import may_fit
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.question import mended_documents, texts_of
from ragfuse.process.exit import at_work
from ragfuse.store.deletion import chunk_of, forget_chunks
from ragfuse.store.radix import holds
from ragfuse.types.ingested import Ingested
from ragfuse.types.whole_text import whole_text

log = logging.getLogger("ragfuse.engine")


def ingest(
    prompts: PromptBuilder,
    texts: Iterable[tuple[str, str]],
    prefix: Sequence[int],
    progress: Callable[[Ingested], None] | None,
) -> Ingested:
    """Encode and store chunks that are not stored yet; see `Engine.ingest`."""
    began, done, runtime = time.perf_counter(), Ingested(), prompts.runtime
    encoder = runtime.encoder
    with at_work():
        encoder.keep_prefix(prefix)
    for text, source, ids in _tokenised(prompts, texts):
        if ids is None:
            log.warning(
                "A text of '%s' is longer than %s reads. Left out: cut it.",
                source,
                encoder.model.name,
            )
            done = replace(done, left_out=(*done.left_out, source))
            continue
        with at_work():  # each chunk for itself: a process that ends waits for one, not for all
            nbytes = encoder.keep_chunk(ids)
            is_short = len(ids) < encoder.shortest
            if not is_short:
                prompts.note(runtime.digest, text, source, ids, must=True)
        done = done.plus(len(ids), nbytes, time.perf_counter() - began, is_short)
        if progress is not None:
            progress(done)
    return done


def know(prompts: PromptBuilder, texts: Iterable[tuple[str, str]]) -> None:
    """Recognise (text, source) chunks in prompts from now on, without encoding them now; see
    `Engine.know`.
    """
    runtime = prompts.runtime
    for text, source, ids in _tokenised(prompts, texts):
        if (
            ids is not None
            and len(ids) >= runtime.settings.min_chunk_tokens
            and not prompts.knows(runtime.digest, text, ids)
        ):
            prompts.note(runtime.digest, text, source, ids)


def forget(prompts: PromptBuilder, prefixes: PrefixCache, texts: Iterable[str]) -> int:
    """Delete the KV of chunks, and of passages learned from them, from every tier; return the
    bytes freed.
    """
    runtime = prompts.runtime
    texts = [whole_text(text).strip() for text in texts_of(texts, "texts")]
    runs = {tuple(runtime.model.tokens(text, False)) for text in texts}
    runtime.jobs.cancel(
        lambda job: isinstance(job, EncodeJob) and any(holds(job.tokens, run) for run in runs)
    )
    prefixes.forget(runs)
    runs |= prompts.forget(runtime.digest, texts)
    chunks = {chunk_of(runtime.encoder.key(run)) for run in runs}
    return forget_chunks(runtime.store, runtime.catalog.strict, chunks).nbytes


def _tokenised(
    prompts: PromptBuilder, texts: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, str, list[int] | None]]:
    """Yield text, source and token ids of each chunk; None for one that the model cannot read."""
    model = prompts.runtime.model
    for text, source in mended_documents(texts):
        text = text.strip()
        with at_work():
            ids = model.tokens(text, False) if may_fit(text, model) else None
        fits = ids is not None and (model.max_context is None or len(ids) <= model.max_context)
        yield text, source, ids if fits else None
