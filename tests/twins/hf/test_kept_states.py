"""Beginnings of models with a state that is no KV per token: kept whole, found again, exact, each
tenant's own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from ragfuse import Answer, Ask, Engine, Settings
from ragfuse.hf.kept_states import MAX_KEPT, States, tensors
from tests.kits import hf as kit
from tests.kits.families import HYBRIDS, REFUSED
from tests.kits.tiny import adds_up

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    **{name: (kind, options, goes_on) for name, (kind, options, _, goes_on) in HYBRIDS.items()},
    "qwen3-next": (*REFUSED["qwen3-next"][:2], "run"),
    "mamba-alone": (*REFUSED["mamba"][:2], "whole"),
}
OTHER = "Something else, which is quite as long as that was."
SYSTEM = "You keep the book of a harbour. Say what stands in it, and nothing else, in a few words. "
WHO = f"{SYSTEM}Which ship came first?"


def engine_of(name: str, told: Settings) -> Engine:
    return Engine(told, kit.build(*MODELS[name][:2]), tokenizer=kit.tokenizer())


def asked(engine: Engine, question: str, **ask: Any) -> Answer:
    """An answer, which is what full prefill gives."""
    answer = engine.answer(question, Ask(**ask))
    assert adds_up(answer.trace)
    assert answer.token_ids == engine.answer(question, Ask(reuse=False, **ask)).token_ids
    return answer


@pytest.fixture
def on(tmp_path):
    return Settings(
        store=tmp_path / "store", max_tokens=8, learn="off", dtype="float32", memory_bytes=1 << 26
    )


@pytest.fixture
def engine(on):
    with engine_of("qwen3-next", on) as engine:
        yield engine


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_comes_again_or_shares_its_beginning_reuses_all_that_its_family_allows(
    name, on
):
    """Of the same prompt all but the last token; of what prompts share all, from the third on."""
    with engine_of(name, on) as engine:
        profile = engine.model.profile
        assert profile.refusal
        assert profile.state == MODELS[name][2]
        runs = profile.state == "run"
        first, again = asked(engine, WHO), asked(engine, WHO)
        assert first.trace.tokens_reused == 0
        wanted = again.trace.tokens - 1 if runs else 0
        assert again.trace.tokens_reused == again.trace.tokens_prefix == wanted
        assert again.token_ids == first.token_ids
        assert again.trace.fallback_reason == profile.refusal
        ends = ("And who saw it come?", "Are there any more ships in the harbour?")
        reused = [asked(engine, SYSTEM + end).trace.tokens_prefix for end in ends]
        assert reused == [0, len(SYSTEM) if runs else 0]


def test_a_prompt_is_computed_once(engine, monkeypatch):
    """Also where nothing is reused: `generate` goes on from the prefill."""
    rows, forward = [], engine.model.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        rows.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model.model, "forward", counted)
    for reuse, wanted in ((False, len(WHO)), (True, len(WHO)), (True, 1)):
        rows.clear()
        answer = engine.answer(WHO, Ask(reuse=reuse))
        assert sum(rows) == wanted + len(answer.token_ids) - 1


def test_no_tenant_finds_anothers_state(on):
    model, salted = kit.build(*MODELS["qwen3-next"][:2]), on.model_copy(update={"salt": "another"})
    with (
        Engine(on, model, tokenizer=kit.tokenizer()) as one,
        Engine(salted, model, tokenizer=kit.tokenizer()) as two,
    ):
        asked(one, WHO)
        assert asked(two, WHO).trace.tokens_reused == 0
        assert asked(one, WHO).trace.tokens_reused == len(WHO) - 1


@pytest.mark.parametrize("text", ["the book of a harbour.", "The book of a harbour!"])
def test_a_forgotten_text_is_in_no_kept_state(engine, text):
    """A prompt may have the first and the last letter in other tokens than the text alone."""
    asked(engine, WHO)
    asked(engine, OTHER)
    engine.forget([text])
    assert asked(engine, WHO).trace.tokens_reused == 0
    assert asked(engine, OTHER).trace.tokens_reused > 0


def test_memory_is_bounded_and_what_was_used_longest_ago_goes_first():
    one = torch.zeros(1, 1, 8, 32)
    cache = DynamicCache()
    cache.update(one, one, 0)
    size = 2 * one.nbytes
    assert sum(each.nbytes for each in tensors(cache)) == size
    states = States(3 * size)

    def known() -> list[bool]:
        return [states.longest_prefix([n, 5, 6, 7])[2] == 3 for n in range(4)]

    for first in range(3):
        states.keep([first, 5, 6], cache)
    assert states.longest_prefix([0, 5, 6, 7])[2] == 3
    states.keep([3, 5, 6], cache)
    assert known() == [True, False, True, True]
    assert states.nbytes == 3 * size
    for limit, wanted in ((size - 1, 0), (1 << 30, MAX_KEPT * size)):
        states = States(limit)
        for first in range(MAX_KEPT + 9):
            states.keep([first, 5, 6], cache)
        assert states.nbytes == wanted


words = st.sampled_from(
    ["A harbour in which forty ships lie. ", "The keeper counts them at night. ", "Who? ", "x"]
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompts=st.lists(st.lists(words, min_size=1, max_size=5).map("".join), min_size=2, max_size=6),
    nbytes=st.sampled_from([60_000, 200_000, 1 << 26]),
    name=st.sampled_from(["qwen3-next", "granite-hybrid"]),
    threads=st.sampled_from([1, 3]),
)
def test_prompts_that_share_any_beginnings_are_answered_as_by_full_prefill(
    tmp_path_factory,
    prompts,
    nbytes,
    name,
    threads,
):
    told = Settings(
        store=tmp_path_factory.mktemp("store"),
        max_tokens=4,
        learn="off",
        dtype="float32",
        memory_bytes=nbytes,
    )
    with engine_of(name, told) as engine:
        wanted = {prompt: engine.answer(prompt, Ask(reuse=False)).token_ids for prompt in prompts}
        with ThreadPoolExecutor(threads) as pool:
            again = [*prompts] * (2 * threads)
            said = zip(again, pool.map(engine.answer, again), strict=True)
            assert all(answer.token_ids == wanted[prompt] for prompt, answer in said)
