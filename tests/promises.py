"""What ragfuse promises, and the tests that hold each promise: `make test-promises` runs them.

A name is a file, or a test of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LANGCHAIN = "integrations/langchain-ragfuse/tests"
LLAMA_INDEX = "integrations/llama-index-llms-ragfuse/tests"
HAYSTACK = "integrations/haystack-ragfuse/tests"

PROMISES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "one changed line in LangChain, LlamaIndex and Haystack": (
            f"{LANGCHAIN}/test_rag_chain.py",
            f"{LLAMA_INDEX}/test_zero_change.py",
            f"{HAYSTACK}/test_pipeline.py",
        ),
        "the same classes against a server": (
            "tests/remote/test_same_answers.py",
            f"{LANGCHAIN}/test_contract.py",
            f"{LLAMA_INDEX}/test_contract.py",
            f"{HAYSTACK}/test_contract.py",
        ),
        "ratio 1 is full prefill and ratio 0 is reuse, for all families": (
            "tests/hf/test_families.py",
            "tests/fuse/test_attend.py",
            "tests/trips/test_question.py",
            "tests/trips/test_same_answer.py",
        ),
        "the model reads what its template writes, and contents are no control tokens": (
            "tests/engine/test_what_models_read.py",
        ),
        "shared prefixes are reused exactly": ("tests/engine/test_prefix_cache.py",),
        "passages are learnt where they recur": ("tests/engine/test_recurrence.py",),
        "what is missing or damaged is computed": ("tests/trips/test_miss.py",),
        "documents are ingested once": ("tests/trips/test_ingest.py",),
        "sessions survive turns and restarts, with truncation and look-ahead": (
            "tests/sessions/test_history.py",
            "tests/sessions/test_truncation.py",
            "tests/sessions/test_look_ahead.py",
        ),
        "PML: schemas, unions, parameters, scaffolds, prompt functions": (
            "tests/schemas/test_pml.py",
            "tests/schemas/test_bind.py",
            "tests/schemas/test_python.py",
            "tests/engine/test_schema_service.py",
        ),
        "the controller, pipelined loading and streaming under a deadline": (
            "tests/plan/test_loading.py",
            "tests/load/test_layers.py",
            "tests/load/test_replay.py",
            "tests/engine/test_streaming.py",
        ),
        "codecs": ("tests/codec/test_contract.py",),
        "tiers, and an entry is whole or absent after kill -9": (
            "tests/store/test_contract.py",
            "tests/store/test_processes.py",
        ),
        "tenants are apart": (
            "tests/engine/test_engine.py::test_a_tenant_never_hits_an_entry_of_another",
            "tests/serve/test_documents.py::test_no_tenant_sees_or_finds_another_ones_documents",
            "tests/serve/test_keys.py",
        ),
        "the server: OpenAI's routes, a fair queue, cancelled streams": (
            "tests/serve/test_queue.py",
            "tests/serve/test_gone.py",
        ),
    }
)


if __name__ == "__main__":
    print(*(test for tests in PROMISES.values() for test in tests))
