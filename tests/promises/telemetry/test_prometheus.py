"""What Prometheus is told of engines: by the real client, through the text that a scrape gets."""

import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ragfuse import Ask, Engine, InputError, metrics
from ragfuse.telemetry.metrics import FALLBACK_KINDS, TTFT_S, fallback_kind
from ragfuse.types.plan import FULL_PREFILL_ASKED, PROMPT_TOO_SHORT
from tests.kits.redis_server import RedisServer
from tests.kits.store import key, kv
from tests.promises.telemetry.conftest import SECRET, asking


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def scraped(registry):
    """scraped(): {(name, label values but the engine's): value} of one engine, as a scrape reads
    it.
    """

    def scraped(engine=None):
        found = {}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                if engine in (None, sample.labels["engine"]):
                    labels = [
                        value for label, value in sorted(sample.labels.items()) if label != "engine"
                    ]
                    found[sample.name, *labels] = sample.value
        return found

    return scraped


def test_answers_tokens_and_times_are_those_of_the_traces(engine, registry, scraped):
    metrics(engine, registry, "mine")
    missed = engine.answer(asking("Who?"))
    engine.flush()
    fused, full = engine.answer(asking("Who?")), engine.answer(asking("Who?"), Ask(reuse=False))
    batch = engine.batch([asking("When?"), asking("Where?")])
    with pytest.raises(InputError):
        engine.answer("much " * 5000)
    answers, found = [missed, fused, full, *batch], scraped("mine")
    assert fused.trace.tokens_reused > 0
    assert found["ragfuse_answers_total", "fused"] == 3
    assert found["ragfuse_answers_total", "full"] == 2
    assert found["ragfuse_answers_refused_total", "nothing_stored"] == 1
    assert found["ragfuse_answers_refused_total", "asked"] == 1
    assert found["ragfuse_answers_failed_total",] == 1
    for kind in ("reused", "recomputed", "fresh"):
        wanted = sum(getattr(answer.trace, f"tokens_{kind}") for answer in answers)
        assert found["ragfuse_prompt_tokens_total", kind] == wanted
    assert found["ragfuse_answer_tokens_total",] == sum(len(answer.token_ids) for answer in answers)
    assert found["ragfuse_ttft_seconds_count",] == found["ragfuse_ttft_seconds_bucket", "+Inf"] == 5
    assert found["ragfuse_ttft_seconds_sum",] == pytest.approx(
        sum(answer.trace.ttft_s for answer in answers)
    )
    for end in TTFT_S:
        wanted = sum(answer.trace.ttft_s <= end for answer in answers)
        assert found["ragfuse_ttft_seconds_bucket", str(end)] == wanted


def test_what_waits_to_be_encoded_is_counted_until_it_is(engine, registry, scraped):
    metrics(engine, registry)
    with engine.model.lock:  # which the background needs
        engine.answer(asking("Who?"))
        assert scraped()["ragfuse_waiting",] > 0
    engine.flush()
    assert scraped()["ragfuse_waiting",] == 0


def test_a_tier_hits_what_it_gave_and_misses_what_slower_ones_or_none_gave(
    engine, registry, scraped
):
    metrics(engine, registry)
    prompt, memory = asking("Who?"), engine.store.tier("memory")
    segments = len(engine.answer(prompt).trace.segments)
    engine.flush()
    memory.delete([entry.key for entry in memory.list()])
    second = engine.answer(prompt)
    assert {segment.tier for segment in second.trace.segments} == {"disk"}
    engine.flush()
    engine.answer(prompt, Ask(reuse=False))  # asks no tier
    found = scraped()
    told = [
        found[f"ragfuse_tier_{kind}_total", tier]
        for kind in ("hits", "misses")
        for tier in ("disk", "memory")
    ]
    assert told == [segments, 0, segments, 2 * segments]


def test_evictions_and_corrupt_entries_are_counted_by_tier(tiny_settings, registry, scraped):
    settings = tiny_settings.model_copy(update={"disk_bytes": 20_000, "memory_bytes": 0})
    with Engine(settings) as engine:
        metrics(engine, registry)
        for i in range(20):
            engine.store.put(key(i), kv(i), wait=True)
        kept = [entry.key for entry in engine.store.entries()]
        for file in (settings.store_path / "chunks").rglob("*.kv"):
            data = bytearray(file.read_bytes())
            data[-65] ^= 255
            file.write_bytes(data)
        lost = [each for each in kept if engine.store.read_layers(each, 0, 3) is None]
        found, disk = scraped(), engine.store.tier("disk")
        assert found["ragfuse_tier_bytes", "disk"] == disk.nbytes
        assert found["ragfuse_tier_capacity_bytes", "disk"] == disk.capacity
        assert found["ragfuse_tier_evictions_total", "disk"] == 20 - len(kept) > 0
        assert found["ragfuse_tier_corrupt_total", "disk"] == len(lost) == len(kept)
        assert found["ragfuse_tier_entries", "disk"] == 0


def test_a_redis_that_goes_away_is_an_open_breaker_and_the_scrape_goes_on(
    tiny_settings, registry, scraped, tmp_path
):
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    try:
        update = {"tiers": (server.url(),)}
        with Engine(tiny_settings.model_copy(update=update)) as engine:
            metrics(engine, registry)
            for i in range(3):
                engine.store.put(key(i), kv(i), wait=True)
            found = scraped()
            assert found["ragfuse_tier_breaker_open", "redis"] == 0
            server.kill()
            engine.store.lookup([key("elsewhere")])
            found = scraped()
            assert found["ragfuse_tier_breaker_open", "redis"] == 1
            assert found["ragfuse_tier_failures_total", "redis"] >= 0
            assert found["ragfuse_tier_entries", "disk"] == 3
    finally:
        server.kill()


def test_several_engines_share_a_registry_until_each_is_closed(
    tiny_settings, registry, scraped, tmp_path
):
    names = [Path(tiny_settings.model).name, f"{Path(tiny_settings.model).name}-2"]
    for _ in range(2):
        one, two = (
            Engine(tiny_settings.model_copy(update={"store": tmp_path / name})) for name in names
        )
        for engine in (one, one, two):  # the second time changes nothing
            metrics(engine, registry)
        two.answer("Who?")
        assert [scraped(name)["ragfuse_ttft_seconds_count",] for name in names] == [0, 1]
        one.close()
        assert not scraped(names[0])
        assert scraped(names[1])
        two.close()
        assert generate_latest(registry) == b""


def test_no_text_and_no_source_is_in_a_scrape(ingested, registry):
    metrics(ingested, registry)
    answer = ingested.answer(asking("A secret question?"))
    said = generate_latest(registry).decode()
    for text in (SECRET[:5], "secret", "letters-", answer.text, ingested.settings.model):
        assert text not in said


def test_without_prometheus_client_the_error_names_the_package(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InputError, match=r"pip install 'ragfuse-kv\[telemetry\]'"):
        metrics(engine)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("", ""),
        (PROMPT_TOO_SHORT, "too_short"),
        (FULL_PREFILL_ASKED, "asked"),
        ("full prefill is predicted to be faster: 0.1 s, fusing 2 s", "faster"),
        ("The model's rope scaling 'dynamic' depends on the length of the whole prompt.", "model"),
    ],
)
def test_a_full_prefill_has_a_kind(reason, kind):
    assert fallback_kind(reason) == kind
    assert not kind or kind in FALLBACK_KINDS
