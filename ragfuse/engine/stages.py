"""The six stages of an engine and the parts that they share, made once per engine."""

from __future__ import annotations

from dataclasses import dataclass

from ragfuse.engine.build import BuildStage
from ragfuse.engine.constraints import ConstraintCompiler
from ragfuse.engine.fetch import FetchStage
from ragfuse.engine.generate import GenerateStage
from ragfuse.engine.history import ConversationHistory
from ragfuse.engine.kv_streamer import KVStreamer
from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.engine.pending_saves import PendingSaves
from ragfuse.engine.planner import Planner
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.prefill import PrefillStage
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.remember import RememberStage
from ragfuse.engine.runtime import Runtime
from ragfuse.engine.schema_service import SchemaService
from ragfuse.load.link import Links
from ragfuse.sessions.conversation_index import ConversationIndex
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.catalog import Catalog


@dataclass(frozen=True)
class Stages:
    """The parts of an engine; the last six fields are the stages of an answer, in their order."""

    prompts: PromptBuilder
    history: ConversationHistory
    schemas: SchemaService
    prefixes: PrefixCache
    pending: PendingSaves
    prefetcher: Prefetcher
    constraints: ConstraintCompiler
    links: Links
    build: BuildStage
    planner: Planner
    fetch: FetchStage
    prefill: PrefillStage
    generate: GenerateStage
    remember: RememberStage

    @classmethod
    def of(
        cls,
        settings: Settings,
        catalog: Catalog,
        store: KVStore,
        runtime: Runtime,
        timings: MachineTimings,
        conversations: ConversationIndex,
    ) -> Stages:
        """Build the stages over a store and its catalog, for the model and tenant of `runtime`."""
        prompts = PromptBuilder(settings, catalog, runtime)
        pending = PendingSaves(settings.writer_queue, settings.history_buffer_bytes)
        prefixes = PrefixCache(settings, runtime, store, pending)
        history = ConversationHistory(settings, catalog, prompts, runtime, store, conversations, prefixes, pending)
        schemas = SchemaService(settings, store, catalog, prompts, runtime)
        prefetcher = Prefetcher(store, runtime, history.keys_of, settings.memory_free)
        links = Links(settings.streams)
        streamer = KVStreamer(settings, store, timings, links, prefetcher)
        remember = RememberStage(settings, runtime, store, prompts, history, prefixes, prefetcher)
        return cls(
            prompts=prompts,
            history=history,
            schemas=schemas,
            prefixes=prefixes,
            pending=pending,
            prefetcher=prefetcher,
            constraints=ConstraintCompiler(),
            links=links,
            build=BuildStage(settings, runtime, prompts, history, schemas),
            planner=Planner(settings, store, catalog, timings, prefixes, remember.jobs),
            fetch=FetchStage(store, streamer, prefetcher),
            prefill=PrefillStage(timings, prefixes),
            generate=GenerateStage(settings),
            remember=remember,
        )
