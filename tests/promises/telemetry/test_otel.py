"""Spans of answers, by the real SDK: what they are called, under whom they stand, what they say,
and what they cost.
"""

import asyncio
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from ragfuse import Ask, SettingsError
from tests.kits.plan import timings
from tests.kits.tiny import ROOT
from tests.promises.telemetry.conftest import SECRET, asking


@pytest.fixture(scope="module")
def exporter():
    """Every span that ends, of the process's one provider."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def spans(exporter):
    """spans(): those that ended since it was asked last."""

    def taken():
        found = exporter.get_finished_spans()
        exporter.clear()
        return found

    taken()
    return taken


def named(found):
    return {span.name: span for span in found}


def test_an_answer_has_the_spans_of_its_parts_under_one(warm, spans):
    answer = warm.answer(asking("Who?"), Ask(max_tokens=4, seed=7))
    found = spans()
    assert sorted(span.name for span in found) == [
        "ragfuse.answer",
        "ragfuse.decode",
        "ragfuse.fuse",
        "ragfuse.load",
        "ragfuse.plan",
    ]
    root = named(found)["ragfuse.answer"]
    assert root.parent is None
    assert {span.parent.span_id for span in found if span is not root} == {root.context.span_id}
    told = answer.trace
    assert told.tokens_reused > 0
    assert told.nbytes > 0
    of_trace = ("tokens", "tokens_reused", "tokens_recomputed", "tokens_fresh", "nbytes")
    of_trace += ("policy", "ratio", "mean_ratio", "ttft_s", "fallback_reason")
    assert dict(root.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ragfuse",
        "gen_ai.request.model": warm.settings.model,
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": (answer.finish_reason,),
        "gen_ai.usage.input_tokens": told.tokens,
        "gen_ai.usage.output_tokens": len(answer.token_ids),
        "gen_ai.usage.cache_read.input_tokens": told.tokens_found,
        "ragfuse.reuse": True,
        "ragfuse.answers": 1,
        "ragfuse.tiers": ("disk",),
        **{f"ragfuse.{name}": getattr(told, name) for name in of_trace},
    }


def test_names_of_generative_ai_are_those_of_the_semantic_conventions(warm, spans):
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as conventions

    list(warm.stream(asking("Who?"), Ask(seed=1)))
    used = {name for span in spans() for name in span.attributes if name.startswith("gen_ai.")}
    assert "gen_ai.response.time_to_first_chunk" in used
    named = vars(conventions).items()
    assert used <= {value for name, value in named if name.startswith("GEN_AI_")}


def test_loading_stands_beside_fusing_and_a_measured_machine_tells_what_was_foreseen(warm, spans):
    warm.timings.learn(timings(warm, memory=0.0, disk=1e-9))
    answer = warm.answer(asking("Who?"))
    found = named(spans())
    load, fuse, plan = (found[f"ragfuse.{name}"] for name in ("load", "fuse", "plan"))
    assert load.parent.span_id == fuse.parent.span_id
    assert plan.end_time <= load.start_time <= fuse.start_time
    assert load.start_time < load.end_time <= fuse.end_time
    assert load.attributes["ragfuse.tiers"] == ("disk",)
    assert load.attributes["ragfuse.load_s"] > 0
    assert answer.trace.predicted_ttft_s is not None
    root = found["ragfuse.answer"]
    assert root.attributes["ragfuse.predicted_ttft_s"] == answer.trace.predicted_ttft_s


def test_full_prefill_says_why_and_loads_nothing(warm, spans):
    answer = warm.answer(asking("Who?"), Ask(reuse=False))
    found = named(spans())
    assert "ragfuse.load" not in found
    told = found["ragfuse.answer"].attributes
    assert told["ragfuse.fallback_reason"] == answer.trace.fallback_reason != ""
    assert told["gen_ai.usage.cache_read.input_tokens"] == 0


async def test_streams_of_several_tasks_keep_to_their_own_requests(warm, spans):
    async def one(name):
        with trace.get_tracer("caller").start_as_current_span(name) as request:
            stream = warm.stream(asking(name))
            async for _ in stream:
                pass
            return request.get_span_context().span_id

    asked = await asyncio.gather(*(one(f"Who, {number}?") for number in range(4)))
    roots = [span for span in spans() if span.name == "ragfuse.answer"]
    assert sorted(root.parent.span_id for root in roots) == sorted(asked)
    assert all(root.attributes["gen_ai.request.stream"] is True for root in roots)


def test_a_batch_has_one_span_with_all_its_tokens(warm, spans):
    answers = warm.batch([asking("Who?"), asking("When?")])
    found = spans()
    root = named(found)["ragfuse.batch"]
    assert [span.name for span in found].count("ragfuse.fuse") == 2
    assert [span.name for span in found].count("ragfuse.decode") == 2
    assert root.attributes["gen_ai.usage.input_tokens"] == sum(
        answer.trace.tokens for answer in answers
    )
    assert root.attributes["ragfuse.answers"] == 2


def test_what_fails_is_recorded_where_it_failed_and_above(warm, spans):
    with pytest.raises(SettingsError):
        warm.answer("Who?", Ask(options={"num_beams": 2}))
    found = named(spans())
    failed = {name for name, span in found.items() if span.status.status_code is StatusCode.ERROR}
    assert failed == {"ragfuse.decode", "ragfuse.answer"}
    for name in failed:
        assert found[name].events[0].attributes["exception.type"] == "ragfuse.errors.SettingsError"


def test_no_text_is_ever_in_a_span(warm, spans):
    answer = warm.answer(asking("A secret question?"))
    said = str([(span.name, dict(span.attributes), span.events) for span in spans()])
    for text in (SECRET[:20], "secret", "letters-", answer.text):
        assert text not in said


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from ragfuse import Engine, Settings
with Engine(Settings(model={model!r}, dtype="float32", disk_bytes=0, home={home!r}, max_tokens=3)) as engine:
    print(len(engine.answer("Who?").token_ids))
"""


@pytest.mark.slow
def test_answers_come_without_the_api(tiny_settings, tmp_path):
    code = WITHOUT.format(model=tiny_settings.model, home=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]
    # what these say as they are imported, where they are installed
    others = ("torchao", "_pytree.py")
    assert [
        line for line in done.stderr.splitlines() if not any(name in line for name in others)
    ] == []
