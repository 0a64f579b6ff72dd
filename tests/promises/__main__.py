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
            f"{LANGCHAIN}/test_callbacks.py::test_what_a_chain_retrieved_reaches_the_engine",
            f"{LLAMA_INDEX}/test_zero_change.py",
            f"{HAYSTACK}/test_pipeline.py",
        ),
        "the same classes against a server": (
            "tests/contracts/remote/test_same_answers.py",
            f"{LANGCHAIN}/test_contract.py",
            f"{LLAMA_INDEX}/test_contract.py",
            f"{HAYSTACK}/test_contract.py",
        ),
        "ratio 1 is full prefill and ratio 0 is reuse, for all families": (
            "tests/contracts/hf/test_families.py",
            "tests/twins/fuse/test_attend.py",
            "tests/promises/trips/test_question.py",
            "tests/promises/trips/test_same_answer.py",
        ),
        "the model reads what its template writes, and contents are no control tokens": (
            "tests/contracts/engine/test_what_models_read.py",
        ),
        "shared prefixes are reused exactly": ("tests/promises/engine/test_prefix_cache.py",),
        "passages are learnt where they recur": ("tests/promises/engine/test_recurrence.py",),
        "what is missing or damaged is computed": (
            "tests/faults/trips/test_miss.py",
            "tests/faults/store/test_damage.py",
        ),
        "documents are ingested once": ("tests/promises/trips/test_ingest.py",),
        "sessions survive turns and restarts, with truncation and look-ahead": (
            "tests/promises/sessions/test_history.py",
            "tests/promises/sessions/test_truncation.py",
            "tests/promises/sessions/test_look_ahead.py",
        ),
        "PML: schemas, unions, parameters, scaffolds, prompt functions": (
            "tests/promises/schemas/test_pml.py",
            "tests/promises/schemas/test_bind.py",
            "tests/promises/schemas/test_python.py",
            "tests/promises/engine/test_schema_service.py",
        ),
        "the controller, pipelined loading and streaming under a deadline": (
            "tests/promises/plan/test_loading.py",
            "tests/twins/load/test_layers.py",
            "tests/twins/load/test_replay.py",
            "tests/promises/engine/test_streaming.py",
        ),
        "codecs": ("tests/contracts/codec/test_contract.py",),
        "tiers, and an entry is whole or absent after kill -9": (
            "tests/contracts/store/test_contract.py",
            "tests/faults/store/test_processes.py",
        ),
        "eviction policies": ("tests/contracts/plan/test_evict_names.py",),
        "the gate, calibrate, verify, measure and doctor": (
            "tests/promises/engine/test_model_profiles.py",
            "tests/promises/calibration/test_calibrate.py",
            "tests/contracts/hf/test_verify.py",
            "tests/promises/cli/test_measure.py",
            "tests/promises/cli/test_doctor.py",
        ),
        "tenants are apart": (
            "tests/promises/engine/test_engine.py::test_a_tenant_never_hits_an_entry_of_another",
            "tests/promises/serve/test_documents.py::test_no_tenant_sees_or_finds_another_ones_documents",
            "tests/promises/serve/test_keys.py",
        ),
        "the server: OpenAI's routes, a fair queue, cancelled streams": (
            "tests/promises/serve/test_queue.py",
            "tests/faults/serve/test_gone.py",
        ),
        "limits on body and time, and health under load": (
            "tests/faults/serve/test_bad_bodies.py",
            "tests/faults/serve/test_admission.py",
        ),
        "metrics, spans, and answers that explain themselves": (
            "tests/promises/telemetry/test_prometheus.py",
            "tests/promises/telemetry/test_otel.py",
            "tests/twins/plan/test_explanation.py",
        ),
    }
)


if __name__ == "__main__":
    print(*(test for tests in PROMISES.values() for test in tests))
