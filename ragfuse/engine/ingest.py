"""Chunks of documents: encode them now, recognise them later, or delete them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Documents:
    """The document chunks of an engine's tenant."""

    prompts: PromptBuilder
    prefixes: PrefixCache

    def ingest(
        self,
        texts: Iterable[tuple[str, str]],
        prefix: Sequence[int],
        progress: Callable[[Ingested], None] | None,
    ) -> Ingested:
        """Encode and store chunks that are not stored yet; see `Engine.ingest`."""
        began, done, runtime = time.perf_counter(), Ingested(), self.prompts.runtime
        encoder, model = runtime.encoder, runtime.model
        with at_work():
            encoder.keep_prefix(prefix)
        for text, source in mended_documents(texts):
            text = text.strip()
            with at_work():  # each chunk for itself: a process that ends waits for one, not for all
                ids = model.tokens(text, False) if may_fit(text, model) else []
                if (text and not ids) or (
                    model.max_context is not None and len(ids) > model.max_context
                ):
                    log.warning(
                        "A text of '%s' is longer than %s reads. Left out: cut it.",
                        source,
                        model.name,
                    )
                    done = replace(done, left_out=(*done.left_out, source))
                    continue
                nbytes = encoder.keep_chunk(ids)
                if len(ids) >= runtime.settings.min_chunk_tokens:
                    self.prompts.note(runtime.digest, text, source, ids, must=True)
            done = done.plus(
                len(ids), nbytes, time.perf_counter() - began, len(ids) < encoder.shortest
            )
            if progress is not None:
                progress(done)
        return done

    def know(self, texts: Iterable[tuple[str, str]]) -> None:
        """Recognise (text, source) chunks in prompts from now on, without encoding them now; see
        `Engine.know`.
        """
        prompts, runtime = self.prompts, self.prompts.runtime
        for text, source in mended_documents(texts):
            text = text.strip()
            if not may_fit(text, runtime.model):
                continue
            ids = runtime.model.tokens(text, False)
            if len(ids) >= runtime.settings.min_chunk_tokens and not prompts.knows(
                runtime.digest, text, ids
            ):
                prompts.note(runtime.digest, text, source, ids)

    def forget(self, texts: Iterable[str]) -> int:
        """Delete the KV of chunks, and of passages learned from them, from every tier; return the
        bytes freed.
        """
        runtime = self.prompts.runtime
        texts = [whole_text(text).strip() for text in texts_of(texts, "texts")]
        runs = {tuple(runtime.model.tokens(text, False)) for text in texts}
        runtime.jobs.cancel(
            lambda job: isinstance(job, EncodeJob) and any(holds(job.tokens, run) for run in runs)
        )
        self.prefixes.forget(runs)
        runs |= self.prompts.forget(runtime.digest, texts)
        chunks = {chunk_of(runtime.encoder.key(run)) for run in runs}
        return forget_chunks(runtime.store, runtime.catalog.strict, chunks).nbytes
